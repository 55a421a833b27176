"""Make a fork of a large process cheap: move its memory to huge pages. For the two fork servers.

A fork copies one entry per page of memory, and the end of the child frees each. torch and its
dependencies take 230 MB, 58,000 pages of 4 kB, which was most of the time to start a rank.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

MADV_COLLAPSE = 25  # Linux 6.1
HUGE = 2 << 20  # bytes of a huge page; a normal one has 4 kB
STEP = 4 * HUGE  # bytes per step: short, because a request may be waiting


def compact() -> Iterator[None]:
    """Move this process's private memory to huge pages, one step per `next()`.

    A later fork then copies one entry per 512 pages. A write still copies only 4 kB. Call it while
    no fork is alive, because shared pages would be copied and held twice. Where the system cannot
    do it, or has no huge page left, the memory stays as it is.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for start, end in _private_memory():
        for at in range(start, end, STEP):
            libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(STEP, end - at)), MADV_COLLAPSE)
            yield


def _private_memory() -> list[tuple[int, int]]:
    """The writable memory that maps no file, as address ranges of full huge pages."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, rights, _, _, inode = line.split()[:5]
            if rights == "rw-p" and inode == "0":
                start, end = (int(address, 16) for address in addresses.split("-"))
                start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
                if start < end:
                    found.append((start, end))
    return found
