"""A file that all ranks map: each writes what it has called and what it waits for.

It answers three questions without messages and without locks. Do the ranks of a group make the same
calls (`wire.mismatch`)? What does each rank wait for, and can that still arrive (`wire.stall`)?
When did the last participant of an operation arrive (`wire.shaping`)? The layout is in
`wire.status_format`: one region of fixed size per rank, and only that rank writes to it.

[Note: memory ordering]
Writers never wait and readers never lock, so a reader may see a half-written slot. A slot's call
number is cleared before its contents change and written after them; a head carries a version that
is odd while it changes. x86 keeps stores in order; ARM may not. So before a reader reports a
difference it reads again RECHECK seconds later (no store stays invisible that long) and believes
only what did not change. A rank publishes its call before it reads the others', with a full barrier
(a lock acquired and released) in between: of two ranks that disagree, at least one sees the other.
A stale read can only miss a difference once, and the next call will differ too.
"""

from __future__ import annotations

import os
import struct
import threading
import time

from ddpz_lite.wire.stall import Stall, explain
from ddpz_lite.wire.status_format import (
    CHANNELS,
    COUNT_AT,
    GROUPS,
    HEAD,
    KEY,
    MEMBERS_AT,
    NOTHING,
    PHASES,
    QUAD,
    SLOT,
    SPLITS_AT,
    TEXT,
    TIME,
    TIMES,
    Offsets,
    Position,
    digest,
)
from ddpz_lite.wire.status_reader import StatusReader

__all__ = ["RECHECK", "Position", "StatusFile"]

RECHECK = 0.002  # seconds
_TWO = struct.Struct("=qq")


class StatusFile(StatusReader):
    """The file as one rank writes it; its phase is then "starting". Without `rank`, in the
    launcher, it is only read.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        super().__init__(path)
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"StatusFile: rank must lie in 0..{self.world_size - 1}, got {rank}")
        self.rank = rank
        self._head = self._offsets.head(rank or 0)
        self._version = 0
        self._helper_threads = threading.active_count()
        self._channels: dict[bytes, int] = {}
        self._joined: list[tuple[str, tuple[int, ...]]] = []
        self._barrier = threading.Lock()

    @classmethod
    def create(cls, path: str | os.PathLike[str], world_size: int) -> StatusFile:
        """Make the file (sparse where the file system can) and open it for reading."""
        with open(path, "xb") as file:
            file.write(QUAD.pack(world_size))
            file.truncate(Offsets(world_size).size)
        return cls(path)

    def stall(self, gone: set[int]) -> Stall | None:
        """Ranks that can never continue, or None; gone: ranks that have ended. See `wire.stall`."""
        return explain(self, gone)

    # -- the head ----------------------------------------------------------------------------------

    def mark(self, phase: str) -> None:
        """Publish that this rank is "running", has "returned" or has "raised"."""
        if phase not in PHASES:
            raise ValueError(f"StatusFile.mark: expected one of {', '.join(PHASES)}, got {phase!r}")
        self._write_head(_TWO, 0, (self._unsure(), NOTHING))
        QUAD.pack_into(self._map, self._head, PHASES.index(phase))

    def set_helper_threads(self, threads: int) -> None:
        """Set how many Python threads of this process never call a collective."""
        self._helper_threads = threads

    def enter(
        self,
        kind: int,
        op: bytes,
        where: str,
        *,
        index: int = 0,
        number: int = 0,
        peer: int = -1,
        tag: int = 0,
        bounded: bool = False,
    ) -> None:
        """The main thread begins to wait; a `bounded` wait has a time limit and is never stuck."""
        unsure = bounded or self._unsure()
        place = where.encode()[:TEXT]
        since = time.monotonic()
        self._write_head(HEAD, 0, (unsure, kind, index, number, peer, tag, since, op, place))

    def leave(self) -> None:
        """The main thread continues."""
        self._write_head(QUAD, 8, (NOTHING,))

    def _unsure(self) -> bool:
        """Whether the program has started threads, which might call collectives too."""
        return threading.active_count() > self._helper_threads

    def _write_head(self, what: struct.Struct, at: int, fields: tuple) -> None:
        """Write part of the head, `at` bytes after phase and version."""
        self._version += 2
        QUAD.pack_into(self._map, self._head + 8, self._version - 1)
        what.pack_into(self._map, self._head + 16 + at, *fields)
        QUAD.pack_into(self._map, self._head + 8, self._version)

    # -- calls -------------------------------------------------------------------------------------

    def join(self, name: str, ranks: tuple[int, ...]) -> int:
        """Add a process group to this rank's table; returns its index there.

        A destroyed group keeps its entry, because peers may still read it. A group made again under
        the same name is another group; the number of times a rank has joined distinguishes them.
        """
        generation = sum(1 for known in self._joined if known == (name, ranks))
        index = len(self._joined)
        if index == GROUPS:
            raise RuntimeError(
                f"the wire follows at most {GROUPS} process groups per rank, and this is one "
                "more. Fix: make groups once and reuse them, or launch with record=False."
            )
        self._joined.append((name, ranks))
        offset = self._offsets.group(self.rank, index)
        members = struct.pack(f"={len(ranks)}h", *(rank + 1 for rank in ranks))
        self._map[offset + MEMBERS_AT : offset + MEMBERS_AT + len(members)] = members
        self._map[offset : offset + KEY] = digest(name, ranks, generation)
        return index

    def publish(
        self,
        index: int,
        number: int,
        arrival: float,
        signature: bytes,
        description: bytes,
        where: str,
        parts: tuple[int, ...] = (),
    ) -> None:
        """Publish collective `number` of group `index`, before it is issued."""
        slot = self._offsets.slot(self.rank, index, number)
        QUAD.pack_into(self._map, slot, 0)
        place = where.encode()[:TEXT]
        SLOT.pack_into(self._map, slot + 8, arrival, signature, description, place)
        if parts:
            struct.pack_into(f"={len(parts)}q", self._map, slot + SPLITS_AT, *parts)
        QUAD.pack_into(self._map, slot, number + 1)
        QUAD.pack_into(self._map, self._offsets.group(self.rank, index) + COUNT_AT, number + 1)
        with self._barrier:  # see [Note: memory ordering]
            pass

    def count_message(self, key: bytes, arrival: float) -> int:
        """Publish a message on a channel; returns its number there, -1 if the table is full."""
        place = self._channels.get(key)
        if place is None:
            if len(self._channels) == CHANNELS:
                return -1
            place = self._offsets.channel(self.rank, len(self._channels))
            self._channels[key] = place
            self._map[place : place + KEY] = key
        number = QUAD.unpack_from(self._map, place + COUNT_AT)[0]
        TIME.pack_into(self._map, place + 24 + 8 * (number % TIMES), arrival)
        QUAD.pack_into(self._map, place + COUNT_AT, number + 1)
        return number
