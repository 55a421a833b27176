"""How much memory a sandbox holds, all its processes together."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

COUNTED = ("RssAnon:", "RssShmem:")  # a process's own, and what it shares and is no file's


def memory(pid: int, enough: int) -> int:
    """Bytes that process `pid` and its descendants hold.

    Memory that processes share counts too, and what lies in sockets; that of files does not, which
    the system can take back. Pages that a fork shares count once for each process in the quick
    reading, so that is only trusted up to `enough`; beyond it, every page is divided by the
    number of processes that share it.
    """
    processes, queued = list(family(pid)), _queued(pid)
    quick = queued + sum(map(_resident, processes))
    return quick if quick <= enough else queued + sum(map(_proportional, processes))


def family(pid: int) -> Iterator[int]:
    """Process `pid` and its descendants."""
    yield pid
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in file.read().split():
                    yield from family(int(child))
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
    except (OSError, StopIteration):  # a process may forbid that it is looked at
        return _resident(pid)


def _queued(pid: int) -> int:
    """Bytes that can lie in sockets, if `pid` has a separate network namespace.

    They are in the system's memory, in no process. A socket counts as full until what it sent has
    been read, also after it was closed.
    """
    try:
        remote, local = (f"/proc/{one}/net/sockstat" for one in (pid, "self"))
        if os.stat(remote).st_ino == os.stat(local).st_ino:
            return 0
        with open(remote) as file:
            return int(file.readline().removeprefix("sockets: used")) * _buffer()
    except OSError:
        return 0  # it has ended


@functools.cache
def _buffer() -> int:
    """Bytes that a socket holds before the sender must wait; `syscalls` prevents a larger one."""
    return int(Path("/proc/sys/net/core/wmem_default").read_text())
