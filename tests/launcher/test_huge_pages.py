"""Memory on huge pages: what is in it stays, and a fork has fewer pages to copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time

import pytest

import ddpz_lite as dz
from ddpz_lite.launcher import huge_pages
from ddpz_lite.launcher.forkserver import SERVER

MIB = 1 << 20


def can() -> bool:
    """Whether this system has a huge page to give."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 2 * huge_pages.HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(len(memory)))
        view = ctypes.c_char.from_buffer(memory)
        at = -(-ctypes.addressof(view) // huge_pages.HUGE) * huge_pages.HUGE
        done = ctypes.CDLL(None).madvise(
            ctypes.c_void_p(at), ctypes.c_size_t(huge_pages.HUGE), huge_pages.MADV_COLLAPSE
        )
        del view
    return done == 0


needs_huge_pages = pytest.mark.skipif(not can(), reason="no huge pages here (Linux 6.1 has them)")


def huge(pid: int | str) -> int:
    """Bytes of a process that lie on huge pages."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("AnonHuge"))


COMPACTED = """
import hashlib, mmap, sys
from ddpz_lite.launcher import huge_pages
sys.path.insert(0, sys.argv[1])
from test_huge_pages import huge
memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"".join(number.to_bytes(8) for number in range(8 << 20)))
digests, sizes = [], []
for _ in range(2):
    digests.append(hashlib.sha256(memory).hexdigest())
    sizes.append(huge("self"))
    steps = sum(1 for _ in huge_pages.compact())
print(digests[0] == digests[1], sizes[1] - sizes[0], steps)
"""


@needs_huge_pages
def test_memory_is_on_huge_pages_and_holds_what_it_held():
    command = [sys.executable, "-c", COMPACTED, os.path.dirname(__file__)]
    same, more, steps = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert same == "True" and int(more) >= 32 * MIB
    assert int(steps) >= 64 * MIB // huge_pages.STEP - 1  # steps are short: a launch may be waiting


def test_only_private_memory_in_full_huge_pages_is_touched():
    if sys.platform != "linux":
        assert list(huge_pages.compact()) == []
        return
    with open("/proc/self/maps") as file:
        files = [line.split() for line in file if line.split()[4] != "0"]
    for start, end in huge_pages._private_memory():
        assert start % huge_pages.HUGE == end % huge_pages.HUGE == 0 < end - start
        for interval, *_ in files:
            first, last = (int(address, 16) for address in interval.split("-"))
            assert end <= first or last <= start


@needs_huge_pages
def test_the_fork_server_compacts_itself_while_idle():
    dz.launch(os.getpid, 1)
    deadline = time.monotonic() + 300
    server = SERVER._process.pid
    while huge(server) < 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.1)
    assert huge(server) >= 64 * MIB
    assert len(dz.launch(os.getpid, 2)) == 2
