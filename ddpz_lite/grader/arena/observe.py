"""An answer's cases on sandboxed ranks, and what was seen of them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...grade import data
from ...grade.task import Case, Observed, Task
from ..sandbox.leash import NoRanks
from ..sandbox.limits import Limits, Probe
from .broker import Broker, Ending
from .frames import REQUEST, SOCKETS, order

PATIENCE = 2.0  # seconds for the fork server to end by itself
LOST = 60.0  # seconds that runs may take in which earlier cells hang or end the process
PROBE = 20.0  # seconds to try a sandbox out
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")

_current: Grounds | None = None


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
    if _current is None:
        with Grounds():
            return observe_in_sandbox(task, cells, cases, limits, sandboxed)
    cells, lost, seen = list(cells), 0.0, []
    for case in cases:
        while True:
            began = time.monotonic()
            ending = _current.run(task, cells, case, limits, sandboxed)
            if ending.cell is None or lost >= LOST:
                break
            del cells[ending.cell]
            lost += time.monotonic() - began
        seen.append(_observed(case, ending))
        if ending.outcome == "unsolved":
            break
    return seen


@functools.cache
def probe() -> Probe:
    """Whether the sandbox can be had here: one is made, entered and left."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ddpz_lite.grader.sandbox.walls"],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(False, f"trying it out failed: {error}")
    if done.returncode == 0:
        return Probe(True)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return Probe(False, lines[-1])


class Grounds:
    """What is kept warm between submissions: a fork server that has imported torch.

    `with Grounds():` around a batch; afterwards nothing of it is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Grounds:
        global _current
        self._before, _current = _current, self
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before
        with self._lock:
            self._close()

    def run(
        self,
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
            "patience": limits.cell,
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
            seconds = case.timeout * limits.patience
            place = "builder" if task.uses_own else "rank"
            raw = order(case.world, seconds, limits, sandboxed, place, folder)
            broker = Broker(
                self.start(case.world, raw),
                orders,
                timeout=case.timeout,
                limits=limits,
                network=case.network,
                cells=len(cells),
            )
            return broker.run()

    # -- the fork server ---------------------------------------------------------------------------

    def start(self, world: int, raw: bytes) -> list[tuple[socket.socket, ...]]:
        """Ask for ranks, or for a notebook; our ends of their sockets. Raises NoRanks."""
        ours, theirs = [], []
        for _ in range(world):
            pairs = [socket.socketpair() for _ in range(SOCKETS)]
            ours.append(tuple(pair[0] for pair in pairs))
            theirs += [pair[1] for pair in pairs]
        try:
            with self._lock:
                requests = self._requests()
                fds = [sock.fileno() for sock in theirs]
                socket.send_fds(requests, [REQUEST.pack(len(raw))], fds)
                requests.sendall(raw)
        except OSError as error:
            for line in ours:
                for sock in line:
                    sock.close()
            raise NoRanks(f"the fork server of the grader is gone ({error})") from None
        finally:
            for sock in theirs:
                sock.close()
        return ours

    def _requests(self) -> socket.socket:
        """The line to the fork server, which is started if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._line
        self._close()
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddpz_lite.grader.arena.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        return self._line

    def _close(self) -> None:
        if self._process is None:
            return
        self._line.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # still importing torch: it has no ranks
            self._process.kill()
            self._process.wait()
        self._process = None


def _observed(case: Case, ending: Ending) -> Observed:
    """What the judges get to see."""
    seen = Observed(case, ending.outcome, ending.sentence, ledger=ending.ledger, spans=ending.spans)
    if ending.outcome != "ok":
        return seen
    try:
        return replace(seen, data=[data.unpack(raw) for raw in ending.results])
    except data.NotData as error:
        return replace(seen, outcome="refused", sentence=f"what a rank sent is not data: {error}")


def _environment() -> dict[str, str]:
    """The fork server's environment: nothing that is secret."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # One thread and no GPU: a process with threads of a library cannot be forked safely.
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ours = {"DDPZ_WARM": "0", "HOME": "/nowhere", "RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **single, **ours}


def _rank_environment(rank: int, world: int, folder: str) -> dict[str, str]:
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "USER": "rank",
        "LANG": "C.UTF-8",
        "PATH": "",
        "DDPZ_WARM": "0",
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
