"""`ddpz bench`: the time of a step beside PyTorch's own, what users wait for, and how it grows."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from ddpz_lite.course.bench import felt, growth, steps
from ddpz_lite.course.cli import machine
from ddpz_lite.course.cli.shared import UserError, folder


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns 0."""
    _check(options)
    if options.growth is not None:
        return _growth(options)
    if options.targets is not None:
        return _targets(options)
    return _steps(options)


def _check(options: argparse.Namespace) -> None:
    if min(options.ranks) < 1 or options.rounds < 1 or options.batch < 1 or options.millions <= 0:
        raise UserError("--ranks, --rounds, --batch and --millions must be positive.")
    if options.figures and options.growth is None:
        raise UserError("--figures draws what --growth measures: give both.")
    if options.figures and not Path(options.figures).is_dir():
        raise UserError(f"there is no folder {options.figures}; make it first.")
    if options.figures:
        importlib.import_module("matplotlib")  # missing: said now, not after the measurement
    for given, known in ((options.growth, growth.MEASURES), (options.targets, felt.GROUPS)):
        if unknown := set(given or ()) - set(known):
            raise UserError(
                f"nothing is called {min(unknown)!r} here. There are: {', '.join(known)}."
            )


def _workload(options: argparse.Namespace) -> steps.Workload:
    config = steps.about(1e6 * options.millions, options.context)
    model = steps.TorchGPT if options.torch_gpt else steps.GPT
    return steps.Workload(config, options.batch, options.rounds, model=model)


def _steps(options: argparse.Namespace) -> int:
    workload = _workload(options)
    names = list(steps.OURS)
    if options.peers:
        names += [
            steps.ALONE,
            *steps.PEERS.values(),
            *(steps.DEEPSPEED if steps.deepspeed_here() else ()),
        ]
    kind = "GPT of torch's layers" if options.torch_gpt else "GPT"
    print(
        f"{kind} of {workload.num_params / 1e6:.1f} M parameters, batch {options.batch} x "
        f"{options.context} per rank, median of {options.rounds} interleaved rounds, "
        "one thread a rank"
    )
    for ranks in options.ranks:
        times = steps.measure(names, workload, ranks)
        heading = f"{ranks} ranks"
        print(f"\n{heading:<30} ms per step  CPU ms, all ranks  ratio (ours / theirs)")
        for name in names:
            print(_row(name, times, options.peers))
    if options.peers and not steps.deepspeed_here():
        print("\nDeepSpeed is not installed, so it is not beside them.")
    return 0


def _row(name: str, times: dict[str, steps.Times], peers: bool) -> str:
    wall, cpu = (1e3 * steps.median(t) for t in (times[name].seconds, times[name].cpu_seconds))
    row = f"  {name:<28} {wall:>11.1f}  {cpu:>17.1f}"
    if peers and name in steps.PEERS:
        peer = steps.PEERS[name]
        ratio, floor = (steps.median(steps.ratios(times, n, peer)) for n in (name, steps.ALONE))
        added, target = steps.added(times, name, peer), steps.ADDED_TARGETS[name]
        row += f"  {ratio:.2f} of {peer} ({floor:.2f} without communication)"
        row += f"; adds {added:.2f} of what it adds (target {target:.2f})"
    return row


def _targets(options: argparse.Namespace) -> int:
    """A line per measurement, beside its target; 0 whether it is met or not."""
    asked = felt.Asked(folder("solutions").parent, _workload(options), machine.browser())
    missed = 0
    for row in felt.rows(options.targets or list(felt.GROUPS), asked):
        mark = "" if row.met else "  above"
        missed += not row.met
        line = f"{row.what:<52} {row.measured:>8.2f} {row.unit:<5}  target {row.target:g}{mark}"
        print(line, flush=True)
    print(f"{missed} above their targets" if missed else "all within their targets")
    return 0


def _growth(options: argparse.Namespace) -> int:
    """A table for each of what was asked for, and its figure."""
    for of in options.growth or growth.MEASURES:
        make, head = growth.MEASURES[of]
        print("  ".join(head))
        args = [next(folder("solutions").glob("08_*.ipynb"))] if of == "submissions" else []
        rows = []
        for row in make(*args):
            cells = (f"{cell:>{len(name)}.4g}" for cell, name in zip(row, head, strict=True))
            print("  ".join(cells), flush=True)
            rows.append(row)
        if options.figures:
            path = Path(options.figures, f"growth-{of}.png")
            path.write_bytes(growth.figure(of, rows))
            print(f"figure: {path}")
        print()
    return 0
