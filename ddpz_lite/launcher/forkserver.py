"""The kernel's side of the zygote: start it, ask it for ranks."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading

from .ranks import EngineGone, Output, Ranks, environment
from .zygote import REQUEST

PATIENCE = 0.5  # seconds for the zygote to end its jobs and itself


class ForkServer:
    """Ranks forked from a process that has imported torch: the engine of Linux and macOS."""

    note = ""  # what the learner should know about this engine

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The process that started the zygote: a fork of it must not use the same socket.
        self._owner: int | None = None

    def warm(self) -> None:
        """Start the zygote; returns at once, torch is imported over there."""
        with self._lock:
            if self._owner == os.getpid() and self._process.poll() is None:
                return
            self._requests, theirs = socket.socketpair()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read if the zygote fails to start)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ddpz_lite.launcher.zygote", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    start_new_session=True,
                    env=environment(),
                )
            self._owner = os.getpid()
            atexit.register(self.close)

    def start(self, world_size: int, folder: str) -> Ranks:
        self.warm()
        events, their_events = socket.socketpair()
        ranks, theirs = Ranks([], [], events), [their_events.detach()]
        name = os.fsencode(folder)
        try:
            for _ in range(world_size):
                control, their_control = socket.socketpair()
                ranks.controls.append(control)
                theirs.append(their_control.detach())
                read, write = os.pipe()
                ranks.outputs.append(Output(read))
                theirs.append(write)
            with self._lock:
                socket.send_fds(self._requests, [REQUEST.pack(world_size, len(name))], theirs)
                self._requests.sendall(name)
        except OSError as error:
            ranks.close()
            if error.errno == errno.EMFILE:
                raise OSError(
                    errno.EMFILE,
                    f"launch: {world_size} ranks need {4 * world_size} open files here for a "
                    "moment, more than this process may have; raise the limit (`ulimit -n`)",
                ) from None
            raise EngineGone(
                f"launch: the fork server is gone ({error}).\n{self.last_words()}"
            ) from None
        finally:
            for fd in theirs:
                os.close(fd)
        return ranks

    def close(self) -> None:
        """End the zygote; the next job starts another."""
        atexit.unregister(self.close)
        with self._lock:
            if self._owner == os.getpid():
                self._requests.close()
                try:
                    self._process.wait(PATIENCE)
                except subprocess.TimeoutExpired:  # still importing torch: it has no job to end
                    self._process.kill()
                    self._process.wait()
                self._errors.close()
            self._owner = None

    def last_words(self) -> str:
        """What the zygote printed, if it failed."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()
