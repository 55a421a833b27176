"""An answer's cases on sandboxed ranks, and what was seen of them."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ddpz_lite.course.check import data
from ddpz_lite.course.check.task import Case, Observed, Task
from ddpz_lite.course.grader.arena.broker import Broker, Ending
from ddpz_lite.course.grader.sandbox import frames
from ddpz_lite.course.grader.sandbox.handle import NoRanks
from ddpz_lite.course.grader.sandbox.limits import Limits
from ddpz_lite.course.grader.sandbox.pool import SandboxPool, probe

LOST = 60.0  # seconds that runs may take in which earlier cells hang or end the process

__all__ = ["SandboxPool", "observe_in_sandbox", "probe", "run_case", "turn"]


def observe_in_sandbox(
    task: Task,
    cells: Sequence[tuple[str, str]],
    cases: Sequence[Case],
    limits: Limits | None = None,
    sandboxed: bool = True,
) -> list[Observed]:
    """Run the answer that `cells` define in each case. The stub is run once.

    cells: (cell id, source) in order; the last one is the task's own answer cell. An exception in
    an earlier one is ignored; those that hang or end the process are left out, while there is time.
    sandboxed: False runs with limits alone. Raises NoRanks where the machine does not let ranks
    start. May be called from several threads.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise NoRanks(f"answers are graded on Linux alone, and this is {sys.platform}")
    if SandboxPool.current is None:
        with SandboxPool():
            return observe_in_sandbox(task, cells, cases, limits, sandboxed)
    cells, lost, seen = list(cells), 0.0, []
    for case in cases:
        while True:
            began = time.monotonic()
            with turn(case):
                ending = run_case(SandboxPool.current, task, cells, case, limits, sandboxed)
                observed = _observed(case, ending)
            if ending.cell is None or lost >= LOST:
                break
            del cells[ending.cell]
            lost += time.monotonic() - began
        seen.append(observed)
        if ending.outcome == "unsolved":
            break
    return seen


def turn(case: Case | None = None) -> AbstractContextManager[None]:
    """Held while a case runs, or (without a case) while judging.

    A case on a slower network is judged by its timeline, which must not depend on another thread
    that holds the interpreter or the cores. So it runs when nothing else of this grader runs.
    """
    if SandboxPool.current is None:
        return contextlib.nullcontext()
    turns = SandboxPool.current.turns
    return turns.shared() if case is None or case.network is None else turns.alone()


def run_case(
    pool: SandboxPool,
    task: Task,
    cells: Sequence[tuple[str, str]],
    case: Case,
    limits: Limits,
    sandboxed: bool,
) -> Ending:
    """One case, from the fork of its ranks to their end."""
    common = {
        "cells": [list(cell) for cell in cells],
        "answer": task.answer,
        "job": task.job,
        "guarded": task.uses_own,
        "world": case.world,
        "threads": limits.threads,
        "cell": limits.cell,
    }
    with _folder(sandboxed) as folder:
        orders = [
            (
                {
                    **common,
                    "rank": rank,
                    "environ": _rank_environment(rank, case.world, folder),
                },
                data.pack(inputs),
            )
            for rank, inputs in enumerate(case.inputs)
        ]
        seconds = case.timeout * limits.timeout_factor
        profile = "builder" if task.uses_own else "rank"
        order = frames.order(case.world, seconds, limits, sandboxed, profile, folder)
        broker = Broker(
            pool.start(case.world, order),
            orders,
            timeout=case.timeout,
            limits=limits,
            network=case.network,
            cells=len(cells),
        )
        return broker.run()


def _observed(case: Case, ending: Ending) -> Observed:
    """What the judges see."""
    seen = Observed(case, ending.outcome, ending.sentence, ledger=ending.ledger, spans=ending.spans)
    if ending.outcome != "ok":
        return seen
    try:
        return replace(seen, data=[_clean(data.unpack(raw)) for raw in ending.results])
    except data.NotData as error:
        return replace(seen, outcome="refused", sentence=f"what a rank sent is not data: {error}")


def _clean(value: Any) -> Any:
    """Data without paths: sentences quote it."""
    if isinstance(value, str):
        return frames.without_paths(value)
    if isinstance(value, list):
        return [_clean(part) for part in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(part) for key, part in value.items()}
    return value


def _rank_environment(rank: int, world: int, folder: str) -> dict[str, str]:
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "USER": "rank",
        "LANG": "C.UTF-8",
        "PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }


@contextlib.contextmanager
def _folder(sandboxed: bool) -> Iterator[str]:
    """Where ranks may write: in a sandbox its own /tmp, elsewhere a folder that is removed."""
    if sandboxed:
        yield "/tmp"
        return
    path = tempfile.mkdtemp(prefix="ddpz-grade-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
