"""`ddpz bench`: the time of a step beside PyTorch's own, and what launch, wire and checks take."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from tqdm import tqdm

from ddpz_lite import bench, targets
from ddpz_lite.cli.shared import UserError, folder

GROWTH_MILLIONS = (1, 3, 10, 30, 100)
GROWTH_RANKS = (2, 4, 8)


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns 0."""
    _check(options)
    if options.growth:
        return _growth(options)
    if options.targets:
        return _targets(options)
    workload = bench.Workload(
        bench.about(1e6 * options.millions, options.context),
        options.batch,
        options.rounds,
        model=bench.TorchGPT if options.torch_gpt else bench.GPT,
    )
    names = list(bench.OURS)
    if options.peers:
        names += [
            bench.ALONE,
            *bench.PEERS.values(),
            *(bench.DEEPSPEED if bench.deepspeed_here() else ()),
        ]
    kind = "GPT of torch's layers" if options.torch_gpt else "GPT"
    print(
        f"{kind} of {workload.num_params / 1e6:.1f} M parameters, batch {options.batch} x "
        f"{options.context} per rank, median of {options.rounds} interleaved rounds, "
        "one thread a rank"
    )
    for ranks in options.ranks:
        times = bench.measure(names, workload, ranks)
        heading = f"{ranks} ranks"
        print(f"\n{heading:<30} ms per step  CPU ms, all ranks  ratio (ours / theirs)")
        for name in names:
            print(_row(name, times, options.peers))
    if options.peers and not bench.deepspeed_here():
        print("\nDeepSpeed is not installed, so it is not beside them.")
    return 0


def _check(options: argparse.Namespace) -> None:
    if min(options.ranks) < 1 or options.rounds < 1 or options.batch < 1 or options.millions <= 0:
        raise UserError("--ranks, --rounds, --batch and --millions must be positive.")
    if options.figure and not options.growth:
        raise UserError("--figure draws what --growth measures: give both.")
    if options.figure and not Path(options.figure).resolve().parent.is_dir():
        raise UserError(f"there is no folder for {options.figure}; make it first.")
    if options.figure:
        importlib.import_module("matplotlib")  # missing: said now, not after the measurement


def _row(name: str, times: dict[str, bench.Times], peers: bool) -> str:
    wall, cpu = (1e3 * bench.median(t) for t in (times[name].seconds, times[name].cpu_seconds))
    row = f"  {name:<28} {wall:>11.1f}  {cpu:>17.1f}"
    if peers and name in bench.PEERS:
        peer = bench.PEERS[name]
        ratio, floor = (bench.median(bench.ratios(times, n, peer)) for n in (name, bench.ALONE))
        added, target = bench.added(times, name, peer), bench.ADDED_TARGETS[name]
        row += f"  {ratio:.2f} of {peer} ({floor:.2f} without communication)"
        row += f"; adds {added:.2f} of what it adds (target {target:.2f})"
    return row


def _targets(options: argparse.Namespace) -> int:
    """A line per measurement, beside its target; 0 whether it is met or not."""
    try:
        solutions = folder("solutions")
    except UserError:
        solutions = None
        print("no solutions/ here, so no check is measured")
    workload = bench.Workload(
        bench.about(1e6 * options.millions, options.context), options.batch, options.rounds
    )
    missed = 0
    for row in targets.rows(solutions, workload):
        mark = "" if row.met else "  above"
        missed += not row.met
        print(f"{row.what:<48} {row.measured:>8.2f} {row.unit:<5}  target {row.target:g}{mark}")
    print(f"{missed} above their targets" if missed else "all within their targets")
    return 0


def _growth(options: argparse.Namespace) -> int:
    rows = [["parameters, M", "ranks", *(f"{name}, ms" for name in bench.OURS)]]
    cases = [(m, 2) for m in GROWTH_MILLIONS] + [(10, ranks) for ranks in GROWTH_RANKS[1:]]
    for millions, ranks in tqdm(cases, unit="case", leave=False):
        workload = bench.Workload(
            bench.about(1e6 * millions, options.context), options.batch, options.rounds, warmup=2
        )
        times = bench.measure(list(bench.OURS), workload, ranks)
        walls = [round(1e3 * bench.median(times[name].seconds), 1) for name in bench.OURS]
        rows.append([round(workload.num_params / 1e6, 1), ranks, *walls])
    for row in rows:
        print("".join(f"{cell!s:>15}" for cell in row))
    if options.figure:
        Path(options.figure).write_bytes(_figure(rows))
        print(f"figure: {options.figure}")
    return 0


def _figure(rows: list[list]) -> bytes:
    """Step time against parameters (2 ranks) and against ranks (10 M), both axes logarithmic."""
    from matplotlib.ticker import LogFormatter

    from ddpz_lite import show
    from ddpz_lite.show.page import png

    names = list(bench.OURS)
    sizes, worlds = rows[1 : 1 + len(GROWTH_MILLIONS)], [rows[3], *rows[1 + len(GROWTH_MILLIONS) :]]
    fig, left = show.figure(height=3.2)
    with show.house_style():
        left.set_position((0.09, 0.17, 0.39, 0.68))
        right = fig.add_axes((0.58, 0.17, 0.39, 0.68))
        for index, name in enumerate(names):
            style = {"color": show.SERIES[index].color, "marker": show.SERIES[index].marker}
            left.plot([r[0] for r in sizes], [r[2 + index] for r in sizes], label=name, **style)
            right.plot([r[1] for r in worlds], [r[2 + index] for r in worlds], **style)
        left.set(xscale="log", yscale="log", xlabel="million parameters", ylabel="ms per step")
        left.set_title("2 ranks")
        right.set(yscale="log", xlabel="ranks", xticks=[row[1] for row in worlds])
        right.set_title(f"{worlds[0][0]:g} M parameters")
        for axis in (left.xaxis, left.yaxis, right.yaxis):
            axis.set_major_formatter(LogFormatter())  # 100, not a power of ten
            axis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
        left.legend()
    return png(fig)
