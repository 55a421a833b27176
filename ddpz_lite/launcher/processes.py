"""The processes of one job, as the launcher holds them."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from ddpz_lite.launcher.server import SIGNAL_KILL, SIGNAL_STACKS


@dataclass
class Processes:
    """The ranks of one job: a message socket and an output pipe for each, and the job's socket."""

    controls: list[socket.socket]
    outputs: list[int]  # pipes, non-blocking
    events: socket.socket  # JSON lines: {"started": true}, {"rank": r, "status": n}, {"over": true}

    def ask_for_stacks(self) -> None:
        self._signal(SIGNAL_STACKS)

    def kill(self) -> None:
        self._signal(SIGNAL_KILL)

    def close(self) -> None:
        """Close the job; the fork server kills what still lives."""
        for sock in (*self.controls, self.events):
            sock.close()
        for fd in self.outputs:
            os.close(fd)

    def _signal(self, signal: bytes) -> None:
        with contextlib.suppress(OSError):  # the fork server is gone, and the ranks with it
            self.events.sendall(signal)
