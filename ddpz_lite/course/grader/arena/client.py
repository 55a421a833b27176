"""What the broker knows of a rank, of a process group and of calls in flight."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpz_lite.course.grader.arena.perform import Gathering
from ddpz_lite.course.grader.sandbox.frames import Inbox, frame
from ddpz_lite.course.grader.sandbox.handle import SandboxHandle
from ddpz_lite.wire import Record, Span
from ddpz_lite.wire.shaping import Link

WHERE = re.compile(r"(?:cell )?[\w.-]{1,60}:\d{1,6}|\?")


@dataclass
class Entry:
    """A record in the making."""

    op: str
    dtype: str
    elements: int
    sent: int
    far: int
    started: float
    where: str
    group: tuple[int, ...]
    peer: int | None
    number: int | None
    finished: float | None = None


@dataclass
class Message:
    """One end of a send or recv, waiting for the other."""

    rank: int
    number: int  # the rank's own, for the answer
    nbytes: int
    body: bytes | bytearray
    peer: int  # global; -1: anyone
    arrival: float
    where: str
    entry: Entry
    booked: float = 0.0


@dataclass
class Group:
    """A process group: its members as global ranks, and its calls in flight."""

    index: int  # in the watch
    ranks: tuple[int, ...]
    gatherings: dict[int, Gathering] = field(default_factory=lambda: defaultdict(Gathering))
    sends: dict[tuple, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    receives: dict[tuple, deque[Message]] = field(default_factory=lambda: defaultdict(deque))


@dataclass
class Client:
    """One rank, as the broker knows it."""

    rank: int
    handle: SandboxHandle
    inbox: Inbox
    link: Link = field(default_factory=Link)
    phase: str = "starting"  # "running", "returned", "raised", "ended"
    cell: int | None = None
    where: str = "?"
    result: bytes | bytearray | None = None
    entries: list[Entry] = field(default_factory=list)
    open: dict[int, dict[str, Any]] = field(default_factory=dict)  # calls by number: where it is
    waits: int | None = None  # for which of them
    spans: list[Span] = field(default_factory=list)
    begun: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    out: deque[memoryview] = field(default_factory=deque)
    coming: int = 0  # bytes of answers to it: in `out`, or kept back by a slower network
    unread: int = 0  # bytes sent by it that others have not taken, and its result
    frames: int = 0
    asked: bool = False
    here: bool = True  # its socket is open

    @property
    def done(self) -> bool:
        return self.phase in ("returned", "raised", "ended")

    def send(self, head: dict[str, Any], pieces: Sequence[Any] = ()) -> None:
        """Send a frame; pieces: the parts of its body."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        size = sum(view.nbytes for view in views)
        start = memoryview(frame(head, size))
        self.out.extend((start, *views))
        self.coming += start.nbytes + size
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now; the rest when it takes more."""
        try:
            while self.out and self.here:
                view = self.out[0]
                sent = self.handle.line.send(view)
                self.coming -= sent
                if sent == view.nbytes:
                    self.out.popleft()
                else:
                    self.out[0] = view[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the rank is gone; its supervisor will report it
            self.coming -= sum(view.nbytes for view in self.out)
            self.out.clear()


def records(client: Client) -> list[Record]:
    """This rank's part of the ledger."""
    return [
        Record(
            rank=client.rank,
            seq=seq,
            op=e.op,
            dtype=e.dtype,
            elements=e.elements,
            bytes_sent=e.sent,
            started=e.started,
            finished=e.finished,
            where=e.where,
            group=e.group,
            peer=e.peer,
            group_seq=e.number,
            bytes_far=e.far,
        )
        for seq, e in enumerate(client.entries)
    ]


def line_of_code(where: Any) -> str:
    """A rank's word for a line of code ("file:line"), if it looks like one."""
    return where if isinstance(where, str) and WHERE.fullmatch(where) else "?"
