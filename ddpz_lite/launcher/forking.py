"""What makes it cheap to fork a process that has imported much: for the two fork servers.

A fork copies an entry for each page of memory, and its end gives each back. torch and what comes
with it are 230 MB, 58,000 pages of 4 kB, and that was most of what the start of a rank cost.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

MADV_COLLAPSE = 25  # Linux 6.1
HUGE = 2 << 20  # bytes of a huge page, where a small one has 4 kB
STEP = 4 * HUGE  # bytes at once, for somebody may be waiting


def compact() -> Iterator[None]:
    """Move this process's own memory to huge pages, a step for each `next()`.

    A fork copies one entry for 512 pages then. One that writes still gets its own copy of 4 kB, and
    no more. Without any fork alive: what is shared with one would be copied, and held twice.

    Where the system cannot, or has no huge page left, the memory stays as it is.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for start, end in _own():
        for at in range(start, end, STEP):
            libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(STEP, end - at)), MADV_COLLAPSE)
            yield


def _own() -> list[tuple[int, int]]:
    """The stretches of memory that hold no file and can be written, in whole huge pages."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            stretch, rights, _, _, inode = line.split()[:5]
            if rights == "rw-p" and inode == "0":
                start, end = (int(address, 16) for address in stretch.split("-"))
                start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
                if start < end:
                    found.append((start, end))
    return found
