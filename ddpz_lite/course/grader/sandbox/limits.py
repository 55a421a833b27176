"""How much an answer may use, and the one place where these numbers stand."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one rank of one case may use, if nothing else is said. Bytes are bytes, times seconds.

    An honest answer of this course needs a few percent of each.
    """

    memory: int = 1536 * MIB  # beyond what a rank has before the first cell runs
    processes: int = 32  # threads count too
    files: int = 128  # open at once
    file_bytes: int = 32 * MIB  # the largest file
    scratch: int = 32 * MIB  # each of /tmp and /dev/shm
    message: int = 64 * MIB  # one tensor, or one result
    waiting: int = 128 * MIB  # sent and not yet taken, and results: all ranks of a case together
    calls: int = 2_000  # collectives and messages
    spans: int = 200
    frames: int = 20_000  # all that a rank may tell, the calls included
    output: int = 16 << 10  # what is kept of stdout and stderr; the rest is dropped
    threads: int = 1  # that torch computes with
    timeout_factor: float = 1.0  # times the case's own timeout: more, on a busy machine
    start: float = 60.0  # until all ranks of a case are there
    cell: float = 5.0  # an earlier cell's top level, which is not what is judged
    cpu: int = 10  # seconds of processor time beyond the case's timeout


# A learner's notebook under nbval: pytest, a kernel, a fork server, up to four ranks, and a report.
NOTEBOOK = Limits(
    memory=4096 * MIB,
    processes=512,
    files=1024,
    file_bytes=64 * MIB,
    scratch=128 * MIB,
    message=MIB,
    cell=60.0,
)
NOTEBOOK_SECONDS = 300.0  # for all of it


@dataclass(frozen=True)
class Probe:
    """Whether this machine can make the sandbox; where it cannot, why not."""

    ok: bool
    why: str = ""
