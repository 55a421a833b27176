"""The grader's hold on a sandbox: what its keeper says, what is printed inside, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Sequence

from ..arena.peer import Peer

LEAVE = 5.0  # seconds for killed processes to be gone


class NoRanks(RuntimeError):
    """A sandbox could not be started: the machine's trouble, not the answer's."""


def news(peer: Peer) -> bool:
    """Hear the keeper: the process, or why it could not be made. True once it says how that ended.

    Raises NoRanks.
    """
    try:
        raw = peer.leash.recv(1 << 16)
    except ConnectionError:
        raw = b""
    peer.leashed = bool(raw)
    ended = False
    for line in raw.splitlines():
        told = json.loads(line)  # a keeper is ours
        peer.pid, peer.keeper = told.get("pid", peer.pid), told.get("keeper", peer.keeper)
        if "error" in told:
            raise NoRanks(f"a rank could not be shut in: {told['error']}")
        if "status" in told:
            peer.status, ended = told["status"], True
    return ended


def printed(peer: Peer, most: int) -> bool:
    """Take what was printed, and keep the first `most` bytes of all; False at its end."""
    try:
        raw = peer.output.recv(1 << 16)
    except ConnectionError:
        raw = b""
    peer.printed += raw[: max(0, most - len(peer.printed))]
    return bool(raw)


def let_go(peers: Sequence[Peer]) -> None:
    """Let go of the leashes, and wait until the keepers have buried what was on them."""
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.leash.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LEAVE
    for peer in peers:
        _await_keeper(peer, deadline)
    for peer in peers:
        for sock in (peer.inbox.sock, peer.leash, peer.output):
            sock.close()


def _await_keeper(peer: Peer, deadline: float) -> None:
    """Until it has closed its end; one that was stopped by its own rank is ended from here."""
    while peer.leashed:
        peer.leash.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer.leashed = bool(peer.leash.recv(1 << 16))
        except ConnectionError:
            peer.leashed = False
        except TimeoutError:
            for pid in filter(None, (peer.pid, peer.keeper)):
                with contextlib.suppress(ProcessLookupError):  # buried by a keeper that is slow
                    os.kill(pid, signal.SIGKILL)
            peer.leashed = False
