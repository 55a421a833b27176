"""The grader's hold on a sandbox: what its keeper says, what is printed inside, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence

LEAVE = 5.0  # seconds for killed processes to be gone
CHUNK = 1 << 16  # bytes taken at a time


class NoRanks(RuntimeError):
    """A sandbox could not be started: the machine's trouble, not the answer's."""


class Leash:
    """One sandbox, as the grader holds it.

    line: the socket to what runs inside; control: to its keeper, who ends all of it when this end
    is closed; output: what is printed inside. See `server`.
    """

    def __init__(self, line: socket.socket, control: socket.socket, output: socket.socket) -> None:
        self.line, self.control, self.output = line, control, output
        for sock in (line, control, output):
            sock.setblocking(False)
            # a byte sent out of band is one like any other, and not one that recv passes over
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        self.held = True  # its keeper has not said the last word
        self.pid: int | None = None  # of the first process inside, as seen from here
        self.keeper: int | None = None
        self.status: int | None = None  # how that process ended
        self.printed = b""

    def hear(self) -> bool:
        """Hear the keeper: the process, or why it could not be made. True once it says how that
        ended. Raises NoRanks.
        """
        if (raw := _take(self.control)) is None:
            return False
        self.held = bool(raw)
        ended = False
        for line in raw.splitlines():
            told = json.loads(line)  # a keeper is ours
            self.pid, self.keeper = told.get("pid", self.pid), told.get("keeper", self.keeper)
            if "error" in told:
                raise NoRanks(f"a rank could not be shut in: {told['error']}")
            if "status" in told:
                self.status, ended = told["status"], True
        return ended

    def drain(self, most: int) -> bool:
        """Take what was printed, and keep the first `most` bytes of all; False at its end."""
        if (raw := _take(self.output)) is None:
            return True
        self.printed += raw[: max(0, most - len(self.printed))]
        return bool(raw)

    def await_keeper(self, deadline: float) -> None:
        """Until it has closed its end; one that was stopped by its own rank is ended from here."""
        while self.held:
            self.control.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self.held = bool(_take(self.control))
            except TimeoutError:
                for pid in filter(None, (self.pid, self.keeper)):
                    with contextlib.suppress(ProcessLookupError):  # buried by a keeper that is slow
                        os.kill(pid, signal.SIGKILL)
                self.held = False


def let_go(leashes: Sequence[Leash]) -> None:
    """Let go of them, and wait until the keepers have buried what was on them."""
    for leash in leashes:
        with contextlib.suppress(OSError):
            leash.control.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LEAVE
    for leash in leashes:
        leash.await_keeper(deadline)
        for sock in (leash.line, leash.control, leash.output):
            sock.close()


def _take(sock: socket.socket) -> bytes | None:
    """What is there; b"" where the other end is gone, None where nothing had come after all."""
    try:
        return sock.recv(CHUNK)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
