"""What a rank did: its collectives and messages, and the spans that user code named.

While a job runs the wire only appends small objects. Records are built once, at `detach`, with
times of the clock that all processes of a machine share (time.monotonic), minus the job's origin.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from ddpz_lite.wire.callsite import uncollected
from ddpz_lite.wire.network import Network

TIMEOUT_S = 0.1  # for the ends of the last operations to be recorded


@dataclass(frozen=True, slots=True)
class Record:
    """One collective, send or receive, as one rank saw it.

    elements counts the full tensor: the output of an all_gather, the input of a reduce_scatter, all
    parts of a scatter. bytes_sent is what the backend's algorithm makes this rank send (see
    `wire.cost`), not the size of the tensor.
    """

    rank: int  # global
    seq: int  # index in this rank's ledger, from 0
    op: str  # "all_reduce" "all_gather" "reduce_scatter" "broadcast" ... "send" "recv"
    dtype: str  # "float32"
    elements: int
    bytes_sent: int
    started: float  # seconds since the job's origin: when the rank issued it
    finished: float | None  # when it was complete here; None if it never was (a job that failed)
    where: str  # the line of user code: "cell 12:3" or "train.py:40"
    group: tuple[int, ...]  # global ranks
    peer: int | None  # global: the other end of a send or recv, the root of a rooted collective
    group_seq: int | None  # index among the collectives of this group; None for a send or recv
    waited: tuple[float, float] | None = None  # begin and end of the main thread's wait()
    bytes_far: int = 0  # of bytes_sent, the inter-node ones: to other nodes of the `Network`

    def __reduce__(self) -> tuple[type[Record], tuple[Any, ...]]:
        """Pickle as plain fields, several times faster than a frozen dataclass does."""
        return Record, _FIELDS(self)


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of a rank's time, in seconds since the job's origin."""

    rank: int
    name: str
    started: float
    finished: float


_FIELDS = attrgetter(*(one.name for one in fields(Record)))


class Entry:
    """A mutable record, filled on the hot path."""

    __slots__ = (
        "call",
        "events",
        "finished",
        "group",
        "group_seq",
        "peer",
        "started",
        "waited",
        "where",
    )

    def __init__(
        self, call: Any, group: tuple[int, ...], group_seq: int | None, peer: int | None, where: str
    ) -> None:
        self.call, self.where = call, where
        self.group, self.group_seq, self.peer = group, group_seq, peer
        self.started = time.monotonic()
        self.finished: float | None = None
        self.waited: tuple[float, float] | None = None
        self.events: tuple[Any, Any] | None = None  # CUDA events at both ends, with NCCL


class Ledger:
    """All entries and spans of one rank."""

    def __init__(self, rank: int, origin: float, network: Network | None, world_size: int) -> None:
        self.rank, self.origin, self.network, self.world_size = rank, origin, network, world_size
        self.entries: list[Entry] = []
        self.spans: list[Span] = []

    def records(self) -> list[Record]:
        """All records so far.

        The backend's thread wakes a waiting caller before it records the end, so the last ends may
        be missing for a moment. What never finished keeps None.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while any(e.finished is None for e in self.entries) and time.monotonic() < deadline:
            time.sleep(0.001)
        with uncollected():  # the collector would walk over all of them repeatedly
            return [self._record(seq, entry) for seq, entry in enumerate(self.entries)]

    def _record(self, seq: int, entry: Entry) -> Record:
        call, network = entry.call, self.network
        to = {} if network is None else call.cost.to
        far = network.inter_node_bytes(to, self.rank, entry.group, self.world_size) if to else 0
        origin, waited = self.origin, entry.waited
        return Record(
            rank=self.rank,
            seq=seq,
            op=call.op,
            dtype=call.dtype,
            elements=call.elements,
            bytes_sent=call.cost.sent,
            started=entry.started - origin,
            finished=None if entry.finished is None else entry.finished - origin,
            where=entry.where,
            group=entry.group,
            peer=None if entry.peer == -1 else entry.peer,
            group_seq=entry.group_seq,
            waited=waited and (waited[0] - origin, waited[1] - origin),
            bytes_far=far,
        )

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time of the block."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic() - self.origin
            self.spans.append(Span(self.rank, name, started - self.origin, ended))


current: Ledger | None = None  # of this process, between attach and detach


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Name a block of this rank's work, for the timeline: `with dz.span("forward"): ...`.

    Outside a recorded job it does nothing.
    """
    if current is None:
        yield
        return
    with current.span(name):
        yield
