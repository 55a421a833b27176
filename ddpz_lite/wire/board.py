"""The board: a file that all ranks map, where each says what it has called and waits for.

It answers three questions without a message and without a lock. Do the ranks of a group make the
same calls (`wire.mismatch`)? What does each rank wait for, and can that still come (`wire.stall`)?
When did the last participant of an operation arrive (`wire.shaping`)? The format is in
`wire.format`: one region per rank, of a fixed size, and only that rank writes into it.

[Note: memory ordering]
Writers never wait and readers never lock, so a reader may meet a half-written slot. A slot's call
number is taken away before its contents change and written after them; a head carries a version
that is odd while it changes. x86 keeps stores in order; ARM may not. So whoever is about to accuse
reads again RECHECK seconds later (no store stays invisible that long) and believes only what did
not change. A rank publishes its call before it looks at the others', with a full barrier (a lock
taken and released) in between: of two ranks that disagree, at least one sees the other. All that a
stale read can do is to miss a difference once; the next call will differ too.
"""

from __future__ import annotations

import os
import struct
import threading
import time

from ddpz_lite.wire.format import (
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
from ddpz_lite.wire.reading import Reading
from ddpz_lite.wire.stall import Stall, explain

__all__ = ["RECHECK", "Board", "Position"]

RECHECK = 0.002  # seconds
_TWO = struct.Struct("=qq")


class Board(Reading):
    """The board as one rank writes it; with `rank` None (the launcher's) it is only read."""

    def __init__(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        super().__init__(path)
        if rank is not None and not 0 <= rank < self.world_size:
            raise ValueError(f"Board: rank must lie in 0..{self.world_size - 1}, got {rank}")
        self.rank = rank
        self._head = self._offsets.head(rank or 0)
        self._version = 0
        self._quiet = threading.active_count()
        self._channels: dict[bytes, int] = {}
        self._joined: list[tuple[str, tuple[int, ...]]] = []
        self._barrier = threading.Lock()

    @classmethod
    def create(cls, path: str | os.PathLike[str], world_size: int) -> Board:
        """Make the file (sparse where the file system can) and open it for reading."""
        with open(path, "xb") as file:
            file.write(QUAD.pack(world_size))
            file.truncate(Offsets(world_size).size)
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], rank: int) -> Board:
        """Open it as `rank`, which from now on is "starting"."""
        return cls(path, rank)

    def stall(self, gone: set[int]) -> Stall | None:
        """What keeps some ranks stuck for good, or None. gone: ranks that have ended.

        Certain when it speaks; cheap enough to ask twenty times a second. See `wire.stall`.
        """
        return explain(self, gone)

    # -- the head ----------------------------------------------------------------------------------

    def mark(self, phase: str) -> None:
        """Say that this rank is now "running", has "returned" or has "raised"."""
        if phase not in PHASES:
            raise ValueError(f"Board.mark: expected one of {', '.join(PHASES)}, got {phase!r}")
        self._write_head(_TWO, 0, (self._unsure(), NOTHING))
        QUAD.pack_into(self._map, self._head, PHASES.index(phase))

    def quiet(self, threads: int) -> None:
        """Say how many Python threads of this process never call a collective."""
        self._quiet = threads

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
        """The main thread begins to wait; a `bounded` wait ends by itself and is not stuck."""
        unsure = bounded or self._unsure()
        place = where.encode()[:TEXT]
        since = time.monotonic()
        self._write_head(HEAD, 0, (unsure, kind, index, number, peer, tag, since, op, place))

    def leave(self) -> None:
        """The main thread goes on."""
        self._write_head(QUAD, 8, (NOTHING,))

    def _unsure(self) -> bool:
        """Whether the program has started threads: they might call collectives too."""
        return threading.active_count() > self._quiet

    def _write_head(self, what: struct.Struct, at: int, fields: tuple) -> None:
        """Write part of the head, `at` bytes after phase and version."""
        self._version += 2
        QUAD.pack_into(self._map, self._head + 8, self._version - 1)
        what.pack_into(self._map, self._head + 16 + at, *fields)
        QUAD.pack_into(self._map, self._head + 8, self._version)

    # -- calls -------------------------------------------------------------------------------------

    def join(self, name: str, ranks: tuple[int, ...]) -> int:
        """Enter a process group in this rank's table; returns its index there.

        A group keeps its place after it is destroyed, for its peers may still be reading. A group
        made again under the same name is another group: how often each has joined tells them apart.
        """
        generation = sum(1 for known in self._joined if known == (name, ranks))
        index = len(self._joined)
        if index == GROUPS:
            raise RuntimeError(
                f"the wire follows at most {GROUPS} process groups per rank, and this is one "
                "more. Make groups once and reuse them, or launch with record=False."
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
        """Announce collective `number` of group `index`, before it is issued."""
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
        """Announce one more message on a channel: its number there, -1 past the last channel."""
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
