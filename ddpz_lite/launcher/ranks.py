"""The processes of one job as the kernel holds them, whichever engine started them."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from .zygote import SIGNAL_KILL, SIGNAL_STACKS

START_DEADLINE = 120.0  # seconds for a new process to import torch, on the slowest disk


class EngineGone(RuntimeError):
    """The process that starts the ranks has died before it could."""


class Output:
    """What a rank prints: a pipe or a socket, read without waiting."""

    def __init__(self, source: int | socket.socket):
        self._source = source
        if isinstance(source, int):
            os.set_blocking(source, False)
        else:
            source.setblocking(False)

    def fileno(self) -> int:
        return self._source if isinstance(self._source, int) else self._source.fileno()

    def read(self, size: int) -> bytes:
        """The next bytes; b"" at the end. Raises BlockingIOError when there is nothing yet."""
        if isinstance(self._source, int):
            return os.read(self._source, size)
        return self._source.recv(size)

    def close(self) -> None:
        if isinstance(self._source, int):
            os.close(self._source)
        else:
            self._source.close()


@dataclass
class Ranks:
    """The processes of one job, as the kernel holds them."""

    controls: list[socket.socket]
    outputs: list[Output]
    events: socket.socket  # JSON lines: {"pids": [...]}, {"rank": r, "status": n}, {"over": true}

    def ask_for_stacks(self) -> None:
        self._say(SIGNAL_STACKS)

    def kill(self) -> None:
        self._say(SIGNAL_KILL)

    def close(self) -> None:
        """Give up the job: whatever still lives is killed by the other side."""
        for item in (*self.controls, *self.outputs, self.events):
            item.close()

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the engine is gone, and the ranks with it
            self.events.sendall(word)


def environment() -> dict[str, str]:
    """The environment of a new process: the caller's, able to import this package, quiet about
    sockets.
    """
    package_parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "DDPZ_WARM": "0",
    }
