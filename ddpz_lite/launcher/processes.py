"""The processes of one job as the kernel holds them."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from ddpz_lite.launcher.zygote import SIGNAL_KILL, SIGNAL_STACKS


class Output:
    """What a rank prints: a pipe, read without waiting."""

    def __init__(self, fd: int):
        self._fd = fd
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fd

    def read(self, size: int) -> bytes:
        """The next bytes; b"" at the end. Raises BlockingIOError when there is nothing yet."""
        return os.read(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Processes:
    """The ranks of one job: what they are told on, what they print, and the means to end them."""

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
        with contextlib.suppress(OSError):  # the fork server is gone, and the ranks with it
            self.events.sendall(word)
