"""Read the status file: the launcher for its reports, ranks for each other's calls."""

from __future__ import annotations

import mmap
import os
import struct

from ddpz_lite.wire.status_format import (
    CHANNELS,
    COLLECTIVE,
    COUNT_AT,
    GROUPS,
    HEAD,
    KEY,
    MEMBERS_AT,
    NOTHING,
    OTHER,
    PHASES,
    QUAD,
    RECV,
    SEND,
    SIGNATURE_AT,
    SLOT,
    SPLITS_AT,
    TIME,
    TIMES,
    Head,
    Offsets,
    Position,
    Slot,
    text,
)

_EMPTY = bytes(KEY)


class StatusReader:
    """The mapped status file of a job."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "r+b") as file:
            self.world_size: int = QUAD.unpack(file.read(8))[0]
            self._map = mmap.mmap(file.fileno(), 0)
        self._offsets = Offsets(self.world_size)
        self._groups: dict[tuple[int, bytes], int] = {}

    def close(self) -> None:
        """Unmap the file; the launcher removes it with the job's folder."""
        self._map.close()

    # -- what a rank is doing ----------------------------------------------------------------------

    def head(self, rank: int) -> Head:
        """A consistent copy of a rank's head."""
        start = self._offsets.head(rank)
        while True:
            phase, version = struct.unpack_from("=qq", self._map, start)
            fields = HEAD.unpack_from(self._map, start + 16)
            if not version & 1 and QUAD.unpack_from(self._map, start + 8)[0] == version:
                return Head(phase, version, *fields[:7], text(fields[7]), text(fields[8]))

    def position(self, rank: int) -> Position:
        """Where a rank is, for a report."""
        head = self.head(rank)
        phase = PHASES[head.phase]
        if head.kind == NOTHING or phase in ("returned", "raised"):
            return Position(phase)
        group = None if head.kind == OTHER else self.members(rank, head.index)
        number = head.number if head.kind == COLLECTIVE else None
        peer = head.peer if head.kind in (SEND, RECV) and head.peer >= 0 else None
        return Position("waiting", head.op, group, number, peer, head.where, head.since, head.tag)

    def describe(self, rank: int) -> str:
        """The same as part of a sentence: "waits in all_reduce #4 (cell 7:3)", "returned"."""
        at = self.position(rank)
        if at.phase in ("starting", "running"):
            return f"is {at.phase}"
        return at.phase if at.phase != "waiting" else f"waits in {self.call(at)}"

    def call(self, at: Position) -> str:
        """The call behind a position: "all_reduce #4 of ranks 0, 2 (cell 7:3)"."""
        name = at.op or "?"
        if at.group_seq is not None:
            name += f" #{at.group_seq}"
            if at.group is not None and len(at.group) < self.world_size:
                name += f" of ranks {', '.join(map(str, at.group))}"
        elif at.op == "send":
            name += f" to rank {at.peer}"
        elif at.op == "recv":
            name += f" from {'any rank' if at.peer is None else f'rank {at.peer}'}"
        if at.tag:
            name += f", tag {at.tag}"
        return f"{name} ({at.where})"

    # -- what a rank has called --------------------------------------------------------------------

    def members(self, rank: int, index: int) -> tuple[int, ...]:
        """The global ranks of a group in a rank's table."""
        offset = self._offsets.group(rank, index) + MEMBERS_AT
        ranks = struct.unpack_from(f"={self.world_size}h", self._map, offset)
        return tuple(rank - 1 for rank in ranks if rank)

    def key(self, rank: int, index: int) -> bytes:
        """The key of a group, equal on all its members."""
        offset = self._offsets.group(rank, index)
        return self._map[offset : offset + KEY]

    def find_group(self, rank: int, key: bytes) -> int | None:
        """The index of a group in a rank's table; None while that rank has not joined it."""
        found = self._groups.get((rank, key))
        if found is None:
            for index in range(GROUPS):
                known = self.key(rank, index)
                if known == key:
                    self._groups[rank, key] = found = index
                if known in (key, _EMPTY):
                    break
        return found

    def issued(self, rank: int, key: bytes) -> int:
        """How many collectives of this group the rank has issued."""
        index = self.find_group(rank, key)
        if index is None:
            return 0
        return QUAD.unpack_from(self._map, self._offsets.group(rank, index) + COUNT_AT)[0]

    def disagrees(self, rank: int, index: int, number: int, signature: bytes) -> bool:
        """Whether a rank's ring shows call `number` with another signature. (The hot path.)"""
        slot = self._offsets.slot(rank, index, number)
        if QUAD.unpack_from(self._map, slot)[0] != number + 1:
            return False  # not yet, or overwritten since
        return self._map[slot + SIGNATURE_AT : slot + SIGNATURE_AT + KEY] != signature

    def slot(self, rank: int, index: int, number: int) -> Slot | None:
        """Call `number` of a group on a rank; None before the call, and once it is overwritten."""
        offset = self._offsets.slot(rank, index, number)
        stamp = QUAD.unpack_from(self._map, offset)[0]
        arrival, signature, description, where = SLOT.unpack_from(self._map, offset + 8)
        if stamp != number + 1 or QUAD.unpack_from(self._map, offset)[0] != stamp:
            return None
        return Slot(number, arrival, signature, text(description), text(where))

    def parts(self, rank: int, index: int, number: int, count: int) -> tuple[int, ...]:
        """The sizes published with an all_to_all: sent to each rank, then received from each."""
        offset = self._offsets.slot(rank, index, number) + SPLITS_AT
        return struct.unpack_from(f"={count}q", self._map, offset)

    def arrival(self, rank: int, key: bytes, number: int) -> float | None:
        """When a rank issued a group's collective `number`: None if not yet, -inf if long ago."""
        if self.issued(rank, key) <= number:
            return None
        slot = self.slot(rank, self._groups[rank, key], number)
        return float("-inf") if slot is None else slot.arrival

    # -- messages ----------------------------------------------------------------------------------

    def messages(self, rank: int, key: bytes) -> int:
        """Messages that a rank has published on a channel; -1 if its table is full."""
        place = self._find_channel(rank, key)
        if place is not None:
            return QUAD.unpack_from(self._map, place + COUNT_AT)[0]
        last = self._offsets.channel(rank, CHANNELS - 1)
        return -1 if self._map[last : last + KEY] != _EMPTY else 0

    def message_arrival(self, rank: int, key: bytes, number: int) -> float | None:
        """When a rank published a channel's message `number`: None if not yet, -inf if long ago."""
        place = self._find_channel(rank, key)
        count = 0 if place is None else QUAD.unpack_from(self._map, place + COUNT_AT)[0]
        if count <= number:
            return None
        if count > number + TIMES:
            return float("-inf")
        return TIME.unpack_from(self._map, place + 24 + 8 * (number % TIMES))[0]

    def _find_channel(self, rank: int, key: bytes) -> int | None:
        for place in range(CHANNELS):
            offset = self._offsets.channel(rank, place)
            found = self._map[offset : offset + KEY]
            if found == key:
                return offset
            if found == _EMPTY:
                break
        return None
