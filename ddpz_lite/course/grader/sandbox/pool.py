"""Starts sandboxes through a fork server that has imported torch and lives for a batch."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from ddpz_lite.course.grader.sandbox.frames import REQUEST, SOCKETS
from ddpz_lite.course.grader.sandbox.handle import NoRanks, SandboxHandle
from ddpz_lite.course.grader.sandbox.limits import Probe

EXIT_TIMEOUT_S = 2.0  # seconds for the fork server to end without a signal
PROBE_TIMEOUT_S = 20.0  # seconds to try a sandbox out
SERVER, ISOLATION = (f"{__package__}.{name}" for name in ("server", "isolation"))
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")


@functools.cache
def probe() -> Probe:
    """Whether this machine can make a sandbox: one is made, entered and left."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", ISOLATION],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(False, f"trying it out failed: {error}")
    if done.returncode == 0:
        return Probe(True)
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return Probe(False, lines[-1])


class Turns:
    """A lock: many threads may run at the same time, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0  # at the same time
        self._waiting = 0  # waiting to run alone, or running alone: no other thread starts
        self._taken = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Run at the same time as others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run alone: wait until all others have ended, and hold back new ones."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._running and not self._taken)
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._taken = False
                self._changed.notify_all()


class SandboxPool:
    """Keeps the fork server between submissions.

    `with SandboxPool():` around a batch; afterwards nothing of it is left.
    """

    current: SandboxPool | None = None  # the innermost one that is entered

    def __init__(self) -> None:
        self.turns = Turns()
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> SandboxPool:
        self._before, SandboxPool.current = SandboxPool.current, self
        return self

    def __exit__(self, *_: object) -> None:
        SandboxPool.current = self._before
        with self._lock:
            self._close()

    def start(self, world: int, order: bytes) -> list[SandboxHandle]:
        """Ask for `world` sandboxes; order: see `frames.order`. Raises NoRanks."""
        local, remote = [], []
        for _ in range(world):
            pairs = [socket.socketpair() for _ in range(SOCKETS)]
            local.append(SandboxHandle(*(pair[0] for pair in pairs)))
            remote += [pair[1] for pair in pairs]
        try:
            with self._lock:
                requests = self._requests()
                fds = [sock.fileno() for sock in remote]
                socket.send_fds(requests, [REQUEST.pack(len(order))], fds)
                requests.sendall(order)
        except OSError as error:
            for handle in local:
                for sock in (handle.line, handle.control, handle.output):
                    sock.close()
            raise NoRanks(f"the fork server of the grader is gone ({error})") from None
        finally:
            for sock in remote:
                sock.close()
        return local

    def _requests(self) -> socket.socket:
        """The line to the fork server, which is started if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._line
        self._close()
        self._line, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", SERVER, str(remote.fileno())],
                pass_fds=[remote.fileno()],
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
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # still importing torch: it has no ranks
            self._process.kill()
            self._process.wait()
        self._process = None


def _environment() -> dict[str, str]:
    """The fork server's environment: nothing that is secret."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # One thread and no GPU: a process with threads of a library cannot be forked safely.
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    local = {"HOME": "/nowhere", "RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **single, **local}
