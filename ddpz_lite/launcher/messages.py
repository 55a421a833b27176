"""Messages over a socket, between the launcher and its ranks.

A message is a kind (one short word), a length and a body of bytes; the sender decides how the body
is pickled. The launcher reads without blocking, so a slow rank never delays the others.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

HEADER = struct.Struct("!8sQ")  # kind, padded with zeros; length of the body in bytes
CHUNK = 1 << 20


class MessageSocket:
    """The rank's end: blocking, and safe to use from several threads."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, kind: str, body: bytes = b"") -> None:
        with self._lock:
            self.sock.sendall(HEADER.pack(kind.encode(), len(body)))
            self.sock.sendall(body)

    def receive(self) -> tuple[str, bytes] | None:
        """The next message, or None once the other side has closed."""
        header = self._exactly(HEADER.size)
        if header is None:
            return None
        kind, length = HEADER.unpack(header)
        body = self._exactly(length)
        return None if body is None else (kind.rstrip(b"\0").decode(), bytes(body))

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self.sock.recv(min(CHUNK, size - len(data)))
            except ConnectionError:
                return None
            if not chunk:
                return None
            data += chunk
        return data


class MessageReader:
    """The launcher's end: reads what has arrived and returns complete messages."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self._data = bytearray()

    def messages(self) -> Iterator[tuple[str, bytes]]:
        """(kind, body) of each complete message; EOFError after the last of a closed socket."""
        closed = False
        while not closed:
            try:
                chunk = self.sock.recv(CHUNK)
            except BlockingIOError:
                break
            except ConnectionError:
                chunk = b""
            closed = not chunk
            self._data += chunk
        while len(self._data) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._data)
            end = HEADER.size + length
            if len(self._data) < end:
                break
            body = bytes(self._data[HEADER.size : end])
            del self._data[:end]
            yield kind.rstrip(b"\0").decode(), body
        if closed:
            raise EOFError
