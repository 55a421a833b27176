"""`ddpz bench`: the time of a training step, next to that of PyTorch's own strategies."""

from __future__ import annotations

import argparse

from ddpz_lite.course.bench import steps
from ddpz_lite.course.cli.shared import UserError


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns 0."""
    if min(options.ranks) < 1 or options.rounds < 1 or options.batch < 1 or options.millions <= 0:
        raise UserError("--ranks, --rounds, --batch and --millions must be positive.")
    config = steps.about(1e6 * options.millions, options.context)
    workload = steps.Workload(config, options.batch, options.rounds)
    names = list(steps.OURS)
    if options.peers:
        names += [
            steps.ALONE,
            *steps.PEERS.values(),
            *(steps.DEEPSPEED if steps.deepspeed_here() else ()),
        ]
    print(
        f"GPT of {workload.num_params / 1e6:.1f} M parameters, batch {options.batch} x "
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
        print("\nDeepSpeed is not installed, so it was not measured.")
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
