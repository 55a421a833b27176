"""How much memory a sandbox holds, all its processes together."""

from __future__ import annotations

import os
from collections.abc import Iterator

COUNTED = ("RssAnon:", "RssShmem:")  # a process's own, and what it shares and is no file's


def memory(pid: int, enough: int) -> int:
    """Bytes that process `pid` and its descendants hold.

    Memory that processes share counts too; that of files does not, which the system can take back.
    Pages that a fork shares count once for each process in the quick reading, so that is only
    trusted up to `enough`; beyond it, every page is divided by those who share it.
    """
    processes = list(_family(pid))
    quick = sum(_resident(process) for process in processes)
    return quick if quick <= enough else sum(_proportional(process) for process in processes)


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in file.read().split():
                    yield from _family(int(child))
    except OSError:
        return  # it has ended


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(COUNTED))
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
