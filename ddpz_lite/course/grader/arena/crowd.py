"""How long other programs on this machine kept the ranks of a job from running.

A time limit is meant for the job, not for its neighbours. So what the ranks spent ready to run,
while others had the cores, does not count. Linux keeps that figure for every thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NANO = 1e-9


def kept_waiting(pids: Iterable[int], elapsed: float) -> float:
    """Seconds of the last `elapsed` that others took from these processes; 0 where none can tell.

    It is the longest that one of them stood in the queue for a core, less the share of the machine
    that they took themselves: four endless loops on two cores wait for each other, not for others.
    """
    used = longest = 0.0
    for pid in pids:
        for thread, ran, queued in _threads(pid):
            used += ran
            if thread == pid:  # the one that runs the learner's function
                longest = max(longest, queued)
    own = min(1.0, used / (cores() * elapsed)) if elapsed > 0 else 1.0
    return min(longest, elapsed) * (1.0 - own)


def _threads(pid: int) -> Iterable[tuple[int, float, float]]:
    """(thread, seconds that it ran, seconds that it was ready and had no core) of a process.

    Source: Documentation/scheduler/sched-stats.rst of Linux, "/proc/<pid>/schedstat".
    """
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            ran, queued, _ = (folder / "schedstat").read_text().split()
            yield int(folder.name), int(ran) * NANO, int(queued) * NANO
    except (OSError, ValueError):  # it has ended, or this is not Linux
        return


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
