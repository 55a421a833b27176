"""The grader's connection to a sandbox: its supervisor's messages, its output, and its end."""

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
    """A sandbox could not be started: a problem of the machine, not of the answer."""


class SandboxHandle:
    """The grader's connection to one sandbox.

    line: socket to the process inside. control: socket to the supervisor, which ends the sandbox
    when it closes. output: what is printed inside. See `server`.
    """

    def __init__(self, line: socket.socket, control: socket.socket, output: socket.socket) -> None:
        self.line, self.control, self.output = line, control, output
        for sock in (line, control, output):
            sock.setblocking(False)
            # a byte sent out of band is one like any other, and not one that recv passes over
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        self.supervised = True  # the supervisor has not closed its end
        self.pid: int | None = None  # of the first process inside, as seen from here
        self.supervisor: int | None = None
        self.status: int | None = None  # how that process ended
        self.printed = b""

    def receive(self) -> bool:
        """Receive from the supervisor: the pid, or why there is none. True once it reports the exit
        status. Raises NoRanks.
        """
        if (raw := _take(self.control)) is None:
            return False
        self.supervised = bool(raw)
        ended = False
        for line in raw.splitlines():
            message = json.loads(line)  # supervisors are trusted
            self.pid, self.supervisor = (
                message.get("pid", self.pid),
                message.get("supervisor", self.supervisor),
            )
            if "error" in message:
                raise NoRanks(f"could not start a rank's sandbox: {message['error']}")
            if "status" in message:
                self.status, ended = message["status"], True
        return ended

    def drain(self, most: int) -> bool:
        """Read what was printed, and keep the first `most` bytes of all; False at its end."""
        if (raw := _take(self.output)) is None:
            return True
        self.printed += raw[: max(0, most - len(self.printed))]
        return bool(raw)

    def await_supervisor(self, deadline: float) -> None:
        """Wait until it has closed its end; one that its rank has stopped is killed."""
        while self.supervised:
            self.control.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                self.supervised = bool(_take(self.control))
            except TimeoutError:
                for pid in filter(None, (self.pid, self.supervisor)):
                    with contextlib.suppress(ProcessLookupError):  # reaped by a slow supervisor
                        os.kill(pid, signal.SIGKILL)
                self.supervised = False


def release(handles: Sequence[SandboxHandle]) -> None:
    """End the sandboxes, and wait until the supervisors have reaped their processes."""
    for handle in handles:
        with contextlib.suppress(OSError):
            handle.control.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LEAVE
    for handle in handles:
        handle.await_supervisor(deadline)
        for sock in (handle.line, handle.control, handle.output):
            sock.close()


def _take(sock: socket.socket) -> bytes | None:
    """The bytes that have arrived; b"" if the other end is closed, None if nothing has arrived."""
    try:
        return sock.recv(CHUNK)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
