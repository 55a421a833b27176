"""How time and memory grow: with ranks, parameters, submissions, and records of the ledger.

A table has a row for each size. What should not grow faster than its size is drawn as a factor of
its first value, next to the line of proportional growth: what is steeper stands out.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bench import targets
from ddpz_lite.course.bench import steps
from ddpz_lite.launcher import RankFailed, device, launch
from ddpz_lite.model import GPT, next_token_loss
from ddpz_lite.strategies.parallelize import parallelize

RANKS = (2, 4, 8, 16, 32)
MILLIONS = (1, 3, 10, 30, 100, 300)
SUBMISSIONS = (10, 30, 100, 300, 1000)
RECORDS = (100, 1_000, 10_000, 100_000, 1_000_000)  # of two ranks together
TASK = "08.state_bytes"  # its check starts no ranks: what is left is the class
LONG = 1800.0  # seconds for the calls of a large ledger
TURNS = 3  # steps of which the median is taken, after one that does not count


Rows = Iterator[tuple[float, ...]]


def ranks(sizes: Sequence[int] = RANKS) -> Rows:
    """Starting ranks, what they hold, and a step of a GPT of a million parameters."""
    config = steps.about(1e6)
    for world in sizes:
        started = targets.start(world)
        walls = [max(launch(_steps, world, args=(config, s), record=False)) for s in (0, 3)]
        yield world, started.first, started.later, started.memory / 1e6, *(1e3 * w for w in walls)


def parameters(sizes: Sequence[float] = MILLIONS) -> Rows:
    """A step on 2 ranks, and the most that a rank holds for each parameter."""
    for millions in sizes:
        config = steps.about(1e6 * millions)
        took = [launch(_peak, 2, args=(config, stage), record=False) for stage in range(4)]
        size = steps.Workload(config, 1, 1).num_params
        walls = [1e3 * max(seconds for seconds, _ in run) for run in took]
        held = [max(peak for _, peak in run) / size for run in took]
        yield round(size / 1e6, 1), *walls, *held


def submissions(sizes: Sequence[int] = SUBMISSIONS) -> Rows:
    """A class of which one task is graded that starts no ranks."""
    (solution,) = (targets.ROOT / "solutions").glob(f"{TASK[:2]}_*.ipynb")
    for number in sizes:
        took = targets.graded(solution, number, "--only", TASK)
        yield number, took.seconds, took.memory / 1e6


def records(sizes: Sequence[int] = RECORDS) -> Rows:
    """A job of 2 ranks that make so many records, and what its reader waits for."""
    from ddpz_lite.course.show import timeline, traffic

    launch(_calls, 2, args=(1,))  # the first also starts what starts all others
    for number in sizes:
        began = time.perf_counter()
        run = launch(_calls, 2, args=(number // 2,), timeout=LONG)
        job = time.perf_counter() - began
        summed = targets.timed(run.bytes_sent)
        with contextlib.redirect_stdout(io.StringIO()):
            drawn = targets.timed(lambda run=run: (timeline(run), traffic(run)))
        with tempfile.NamedTemporaryFile(suffix=".json") as trace:
            traced = targets.timed(lambda run=run, trace=trace: run.trace(trace.name))
        del run
        yield number, job, 1e3 * summed, drawn, traced, hang_report(number // 2)


def hang_report(calls: int) -> float:
    """Seconds from a mistake after so many calls to the report that names it."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "noted")
        try:
            launch(_hangs, 2, args=(calls, str(note)), timeout=LONG)
        except RankFailed:
            return time.time() - float(note.read_text())
    raise RuntimeError("bench: a job that hangs ended well")


MEASURES: dict[str, tuple[Callable[[], Rows], tuple[str, ...]]] = {
    "ranks": (
        ranks,
        ("ranks", "first launch, s", "later launch, s", "memory, MB", "DDP, ms", "ZeRO-3, ms"),
    ),
    "parameters": (
        parameters,
        (
            "million parameters",
            *(f"{name}, ms" for name in steps.OURS),
            *(f"{name}, B each" for name in steps.OURS),
        ),
    ),
    "submissions": (submissions, ("submissions", "grading, s", "largest process, MB")),
    "records": (
        records,
        ("records", "job, s", "bytes_sent, ms", "figures, s", "trace, s", "hang report, s"),
    ),
}


def figure(of: str, rows: Sequence[tuple[float, ...]]) -> bytes:
    """A PNG of rows of the table `of`: each column over its first value; dashed: in proportion."""
    from ddpz_lite.course.show import canvas, house_style, style_of
    from ddpz_lite.course.show.page import png
    from ddpz_lite.course.show.style import SERIES

    head = MEASURES[of][1]
    sizes = [row[0] for row in rows]
    fig, axes = canvas.figure(height=3.2)
    with house_style():
        for index, name in enumerate(head[1:]):
            values = [row[1 + index] for row in rows]
            style = SERIES[index % len(SERIES)]
            factors = [value / values[0] for value in values]
            axes.plot(sizes, factors, label=name, color=style.color, marker=style.marker)
        proportional = [size / sizes[0] for size in sizes]
        axes.plot(sizes, proportional, "--", color=style_of("idle").edge, label="in proportion")
        axes.set(xscale="log", yscale="log", xlabel=head[0], ylabel="times the first")
        axes.set_xticks(sizes, [f"{size:,}".removesuffix(".0") for size in sizes])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.legend(fontsize=8)
    return png(fig)


# ---- on a rank ----


def _peak(config: object, stage: int) -> tuple[float, int]:
    """(seconds of a step, bytes that this process holds at its peak beyond what it began with)."""
    before = _resident()
    seconds = _steps(config, stage)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _steps(config: object, stage: int) -> float:
    """Median seconds of a step, from a barrier to the end of this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer = parallelize(
        GPT(config).to(device()), torch.optim.AdamW, stage=stage, lr=1e-3, fused=True
    )
    tokens = torch.randint(0, config.vocab_size, (1, config.context + 1)).to(device())
    took = []
    for _ in range(1 + TURNS):
        dist.barrier()
        began = time.perf_counter()
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _calls(calls: int) -> None:
    x = torch.ones(1)
    for _ in range(calls):
        dist.all_reduce(x)


def _hangs(calls: int, note: str) -> None:
    _calls(calls)
    if dist.get_rank() == 0:
        Path(note).write_text(str(time.time()))
        dist.broadcast(torch.ones(1), 0)
    else:
        dist.barrier()
