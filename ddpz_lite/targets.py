"""What launch, wire, checks and steps take on this machine, each beside what it should take.

These are measurements, not tests: a neighbour on the machine raises them, and nobody's tests fail.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import bench
from .launcher import launch

RANKS = 4
LAUNCHES, SPAWNS, CALLS = 10, 2, 500
# Most that our step may take, in steps of what PyTorch brings.
STEP_TARGETS = {"DDP": 1.10, "ZeRO-1": 1.10, "ZeRO-2": 0.85, "ZeRO-3": 0.85}
CHECK_TARGET = 5.0  # seconds for a task that is solved


@dataclass(frozen=True)
class Row:
    """One measurement: a smaller number is better, and `target` is the most it should be."""

    what: str
    measured: float
    target: float
    unit: str = "s"

    @property
    def met(self) -> bool:
        return self.measured <= self.target


def rows(solutions: Path | None, workload: bench.Workload) -> Iterator[Row]:
    """All measurements, one after the other. solutions: the masters' folder, if there is one."""
    yield from launches()
    yield from imports()
    yield Row("a small all_reduce on the wire, of plain gloo's", wire_cost(), 1.3, "times")
    yield from checks(solutions) if solutions else ()
    yield from steps(workload)


def launches() -> Iterator[Row]:
    """The first launch of this process, later ones, and these in torch's `spawn`."""
    yield Row(f"the first launch of {RANKS} ranks", _timed(_launch), 2.0)
    later = statistics.median(_timed(_launch) for _ in range(LAUNCHES))
    yield Row("a later launch", later, 0.3)
    spawned = statistics.median(_timed(_spawn) for _ in range(SPAWNS))
    yield Row("a later launch, of torch's spawn", later / spawned, 0.25, "times")


def imports() -> Iterator[Row]:
    """A program that imports the library and ends, beside one that imports torch."""
    ours, torch_alone = (
        _timed(
            lambda name=name: subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
        )
        for name in ("ddpz_lite", "torch")
    )
    yield Row("import ddpz_lite, of import torch", ours / torch_alone, 1.0, "times")


def wire_cost() -> float:
    """Median time of a small all_reduce on the wire over that of plain gloo, on 2 ranks."""
    return max(launch(_wire_cost, 2))


def checks(solutions: Path) -> Iterator[Row]:
    """The check of each task, on its solution: seconds until the verdict."""
    from .grade import notebooks
    from .grade.run import draw, observe
    from .grade.score import score
    from .grade.task import tasks

    for path in sorted(solutions.glob("*.ipynb")):
        notebook = notebooks.read(path)
        for task in tasks(notebook.metadata["ddpz"]["exercise"]):
            space = {"__name__": "__main__"}
            for name, source in notebooks.program(notebook, task.id):
                exec(compile(source, f"<{name}>", "exec"), space)
            answer = space[task.answer]
            began = time.perf_counter()
            score(task, observe(task, answer, draw(task)))
            yield Row(f"check {task.id}", time.perf_counter() - began, CHECK_TARGET)


def steps(workload: bench.Workload) -> Iterator[Row]:
    """Our strategies' steps in those that PyTorch brings, on 2 ranks."""
    times = bench.measure([*bench.OURS, *bench.PEERS.values()], workload, 2)
    for name, peer in bench.PEERS.items():
        ratio = bench.median(bench.ratios(times, name, peer))
        yield Row(f"a step of {name}, of {peer}", ratio, STEP_TARGETS[name], "times")


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _launch() -> None:
    launch(_nothing, RANKS)


def _nothing() -> None:
    dist.barrier()


def _spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_spawned, (f"{folder}/store", RANKS), RANKS, start_method="spawn")


def _spawned(rank: int, store: str, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    _nothing()


def _wire_cost() -> float:
    from .wire import backend

    ours = dist.group.WORLD
    make = dist.distributed_c10d._new_process_group_helper
    dist.distributed_c10d._new_process_group_helper = backend._make_group  # torch's own
    try:
        plain = dist.new_group(backend="gloo")
    finally:
        dist.distributed_c10d._new_process_group_helper = make
    x, times = torch.ones(4), {ours: [], plain: []}
    for turn in range(CALLS):
        for group in (ours, plain) if turn % 2 else (plain, ours):
            times[group].append(_timed(lambda group=group: dist.all_reduce(x, group=group)))
    return statistics.median(times[ours]) / statistics.median(times[plain])
