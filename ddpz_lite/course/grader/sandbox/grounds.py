"""Where sandboxes come from: a fork server that has imported torch, kept warm for a batch."""

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
from ddpz_lite.course.grader.sandbox.leash import Leash, NoRanks
from ddpz_lite.course.grader.sandbox.limits import Probe

PATIENCE = 2.0  # seconds for the fork server to end by itself
PROBE = 20.0  # seconds to try a sandbox out
SERVER, WALLS = (f"{__package__}.{name}" for name in ("server", "walls"))
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")


@functools.cache
def probe() -> Probe:
    """Whether the sandbox can be had here: one is made, entered and left."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", WALLS],
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


class Turns:
    """Who may run at a time: many beside each other, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0  # beside each other
        self._waiting = 0  # to be alone, or alone: nobody new begins
        self._taken = False

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Beside others who do the same."""
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
        """When all who run have ended; whoever comes meanwhile waits."""
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


class Grounds:
    """What is kept warm between submissions: the fork server.

    `with Grounds():` around a batch; afterwards nothing of it is left.
    """

    current: Grounds | None = None  # the innermost one that is entered

    def __init__(self) -> None:
        self.turns = Turns()
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Grounds:
        self._before, Grounds.current = Grounds.current, self
        return self

    def __exit__(self, *_: object) -> None:
        Grounds.current = self._before
        with self._lock:
            self._close()

    def start(self, world: int, order: bytes) -> list[Leash]:
        """Ask for `world` sandboxes; order: see `frames.order`. Raises NoRanks."""
        ours, theirs = [], []
        for _ in range(world):
            pairs = [socket.socketpair() for _ in range(SOCKETS)]
            ours.append(Leash(*(pair[0] for pair in pairs)))
            theirs += [pair[1] for pair in pairs]
        try:
            with self._lock:
                requests = self._requests()
                fds = [sock.fileno() for sock in theirs]
                socket.send_fds(requests, [REQUEST.pack(len(order))], fds)
                requests.sendall(order)
        except OSError as error:
            for leash in ours:
                for sock in (leash.line, leash.control, leash.output):
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
                [sys.executable, "-P", "-m", SERVER, str(theirs.fileno())],
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


def _environment() -> dict[str, str]:
    """The fork server's environment: nothing that is secret."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # One thread and no GPU: a process with threads of a library cannot be forked safely.
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ours = {"HOME": "/nowhere", "RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **single, **ours}
