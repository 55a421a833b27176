"""The launcher's side of the fork server: start it, and request ranks from it."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading

from ddpz_lite.launcher.processes import Processes
from ddpz_lite.launcher.server import REQUEST

TIMEOUT_S = 0.5  # for the fork server to end its jobs and exit
PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

MODULE = "ddpz_lite.launcher.server"
# The package imports this module before it is run, and runpy warns, which must not be an error.
QUIET = ["-W", "ignore::RuntimeWarning:runpy"]


class ForkServerGone(RuntimeError):
    """The process that starts the ranks has died before it could."""


class ForkServer:
    """Ranks forked from a process that has imported torch.

    preload: modules that it imports, too, before the first fork.
    """

    def __init__(self) -> None:
        self.preload: tuple[str, ...] = ()
        self._lock = threading.Lock()
        # The process that started the fork server: a fork of it must not use the same socket.
        self._owner: int | None = None

    def warm(self) -> None:
        """Start the fork server; returns at once, while the fork server imports torch."""
        with self._lock:
            if self._owner == os.getpid() and self._process.poll() is None:
                return
            self._requests, theirs = socket.socketpair()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read if the fork server fails to start)
            with theirs:
                fd = str(theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", *QUIET, "-m", MODULE, fd, *self.preload],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    start_new_session=True,
                    env=_environment(),
                )
            self._owner = os.getpid()
            atexit.register(self.close)

    def start(self, world_size: int, folder: str) -> Processes:
        """The processes of a new job, which wait for its specification. Raises ForkServerGone."""
        self.warm()
        events, their_events = socket.socketpair()
        processes, theirs = Processes([], [], events), [their_events.detach()]
        try:
            for _ in range(world_size):
                theirs += _connect(processes)
            self._request(world_size, os.fsencode(folder), theirs)
        except OSError as error:
            processes.close()
            if error.errno == errno.EMFILE:
                raise OSError(
                    errno.EMFILE,
                    f"launch: {world_size} ranks need {4 * world_size} open files here for a "
                    "moment, more than this process may have. Fix: raise the limit (`ulimit -n`)",
                ) from None
            raise ForkServerGone(
                f"launch: the fork server is gone ({error}).\n{self.errors()}"
            ) from None
        finally:
            for fd in theirs:
                os.close(fd)
        return processes

    def _request(self, world_size: int, folder: bytes, fds: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._requests, [REQUEST.pack(world_size, len(folder))], fds)
            self._requests.sendall(folder)

    def close(self) -> None:
        """End the fork server; the next job starts another."""
        atexit.unregister(self.close)
        with self._lock:
            if self._owner == os.getpid():
                self._requests.close()
                try:
                    self._process.wait(TIMEOUT_S)
                except subprocess.TimeoutExpired:  # still importing torch, without a job
                    self._process.kill()
                    self._process.wait()
                self._errors.close()
            self._owner = None

    def errors(self) -> str:
        """What the fork server printed, if it failed."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()


def _connect(processes: Processes) -> tuple[int, int]:
    """One rank's socket and output pipe: our ends go to `processes`, the rank's are returned."""
    control, their_control = socket.socketpair()
    processes.controls.append(control)
    with their_control:
        read, write = os.pipe()
        os.set_blocking(read, False)
        processes.outputs.append(read)
        return their_control.detach(), write


def _environment() -> dict[str, str]:
    """The environment of the fork server: the caller's, able to import this package."""
    paths = [PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_CPP_LOG_LEVEL": os.environ.get(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        ),  # no notes about sockets
    }


SERVER = ForkServer()  # this process's; it starts nothing until `warm` or `start`
