"""Messages between a sandbox and the trusted side: a small JSON head and raw bytes.

No bytes can run code on either side. The trusted side bounds both parts before it reads them.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpz_lite.course.grader.sandbox.limits import Limits

SIZES = struct.Struct("<IQ")  # bytes of the head, bytes of the body
HEAD_LIMIT = 32 << 10
# To the fork server: bytes of the order that follows; descriptors travel next to it.
REQUEST = struct.Struct("!I")
SOCKETS = 3  # for each sandbox: its line to the trusted side, its control socket, its output
CHUNK = 1 << 20
DTYPES = {  # what gloo can move -> bytes of one element
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}


def order(
    world: int, seconds: float, limits: Limits, sandboxed: bool, profile: str, folder: str
) -> bytes:
    """The request to the fork server for a case: nothing of the submission, nothing of the task.

    profile: one of `isolation.PROFILES`.
    """
    message = {
        "world": world,
        "seconds": seconds,
        "limits": asdict(limits),
        "sandboxed": sandboxed,
        "profile": profile,
        "folder": folder,
    }
    return json.dumps(message).encode()


class Refused(Exception):
    """A frame that no honest rank sends: the message says what is wrong with it."""


def frame(head: dict[str, Any], size: int = 0) -> bytes:
    """The beginning of a frame whose body has `size` bytes."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return SIZES.pack(len(text), size) + text


class FrameSocket:
    """The sandbox's end: blocking, several threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()

    def send(self, head: dict[str, Any], *bodies: Any) -> None:
        """bodies: buffers of bytes, sent one after the other as one body."""
        views = [memoryview(body).cast("B") for body in bodies if len(body)]
        start = frame(head, sum(view.nbytes for view in views))
        with self._lock:
            self._sock.sendall(start)
            for view in views:
                self._sock.sendall(view)

    def receive(self) -> tuple[dict[str, Any], bytearray]:
        """The next frame. Raises EOFError when the other side is gone."""
        head, body = SIZES.unpack(self._exactly(SIZES.size))
        return json.loads(self._exactly(head)), self._exactly(body)

    def _exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, at = memoryview(buffer), 0
        while at < count:
            got = self._sock.recv_into(view[at:])
            if not got:
                raise EOFError("the trusted side is gone")
            at += got
        return buffer


class Inbox:
    """The trusted end of a sandbox's line: reads without waiting, and bounds everything."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        self.sock, self._limit = sock, limit
        self._begin(bytearray(SIZES.size))
        self._head: dict[str, Any] | None = None
        self._sizes: tuple[int, int] | None = None

    def _begin(self, buffer: bytearray) -> None:
        self._buffer, self._view, self._at = buffer, memoryview(buffer), 0

    def take(self) -> tuple[dict[str, Any], bytearray] | None:
        """The next complete frame, None if it is not there yet. Raises EOFError, Refused."""
        while True:
            while self._at < len(self._buffer):
                try:
                    got = self.sock.recv_into(self._view[self._at : self._at + CHUNK])
                except BlockingIOError:
                    return None
                except OSError:
                    got = 0
                if not got:
                    raise EOFError
                self._at += got
            done = self._part()
            if done is not None:
                return done

    def _part(self) -> tuple[dict[str, Any], bytearray] | None:
        """One of the three parts of a frame is complete."""
        part = self._buffer
        if self._sizes is None:
            head, body = SIZES.unpack(part)
            if head > HEAD_LIMIT or body > self._limit:
                raise Refused(
                    f"sent a frame of {head} and {body} bytes, which is more than allowed"
                )
            self._sizes = (head, body)
            self._begin(bytearray(head))
        elif self._head is None:
            self._head = _parsed(part)
            self._begin(bytearray(self._sizes[1]))
        else:
            done = self._head, part
            self._head = self._sizes = None
            self._begin(bytearray(SIZES.size))
            return done
        return None


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        head = json.loads(raw)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise Refused("sent a frame that cannot be read")
    return head


# an absolute path, but for a file right in /tmp or /dev, which a sandbox has too; its last name
NAME = r"[^\s/'\":,;()<>]"
OWN = rf"(?:tmp|dev)/{NAME}*(?!{NAME}|/)"
HERE = re.escape(str(Path(__file__).absolute().parents[4]))  # where this package lies
PATH = re.compile(rf"{HERE}(?!{NAME}|/)|(?<![\w./])/(?!/|{OWN})(?:{NAME}+/)+(?={NAME})")


def without_paths(text: str) -> str:
    """The same text with file names instead of paths: students need not know where files are."""
    return PATH.sub(".../", text)


def clean(text: Any, length: int) -> str:
    """Text of a rank for a report: printable characters only, on one line, no path, cut."""
    if not isinstance(text, str):
        return "?"
    text = without_paths(text[: 4 * length].replace("\n", " "))
    return "".join(letter for letter in text if letter.isprintable())[:length] or "?"
