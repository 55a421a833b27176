"""The layout of the status file: sizes, offsets, and the records that are read from it.

    page 0      world size
    region r    written only by rank r:
        head        phase, and what the main thread waits in
        groups      per process group: its key, calls issued in it, its members
        rings       per process group: the last RING calls, call k in slot k % RING
        channels    per (group, source, destination, tag): number of messages, times of the last

Every number is eight aligned bytes, so that it is read and written atomically.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from typing import NamedTuple

GROUPS = 256  # process groups that a rank can be in, over the whole job
RING = 16  # calls of a group that can be compared: how far one rank may run ahead of another
SPLITS = 16  # largest group whose all_to_all sizes are compared
CHANNELS = 256  # (peer, tag) pairs that a rank can publish
TIMES = 8  # arrivals kept per channel

HEAD_BYTES, SLOT_BYTES, CHANNEL_BYTES = 256, 512, 96
NOTHING, COLLECTIVE, SEND, RECV, OTHER = range(5)  # what a main thread can wait in
PHASES = ("starting", "running", "returned", "raised")

QUAD = struct.Struct("=q")
TIME = struct.Struct("=d")
HEAD = struct.Struct("=qqqqqqd24s96s")  # from byte 16 on, after phase and version: see `Head`
SLOT = struct.Struct("=d16s88s88s")  # from byte 8 on, after the call's number: see `Slot`
SIGNATURE_AT, SPLITS_AT = 16, 8 + SLOT.size
KEY, COUNT_AT, MEMBERS_AT = (
    16,
    16,
    24,
)  # in an entry of the group table; a channel begins the same way
TEXT = 88  # bytes of a description or a place in a slot


@dataclass(frozen=True)
class Position:
    """Where a rank is; all but the phase is set only while it waits.

    phase: "starting", "running", "waiting", "returned" or "raised".
    """

    phase: str
    op: str | None = None
    group: tuple[int, ...] | None = None  # global ranks
    group_seq: int | None = None  # None for a send or recv
    peer: int | None = None  # global rank, for a send or recv
    where: str | None = None  # the line of user code
    since: float | None = None  # time.monotonic()
    tag: int = 0  # of a send or recv


class Head(NamedTuple):
    """A consistent reading of a rank's head."""

    phase: int
    version: int
    unsure: int  # another thread may call collectives, or the wait is bounded: never a stall
    kind: int
    index: int  # of the group in this rank's table
    number: int  # of the call in its group, or of the message in its channel
    peer: int  # of a message; the root of a rooted collective
    tag: int
    since: float
    op: str
    where: str


class Slot(NamedTuple):
    """One call in a ring."""

    number: int
    arrival: float  # time.monotonic()
    signature: bytes
    description: str
    where: str


class Offsets:
    """Offsets in the file of a job with `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.table_entry = -(-(MEMBERS_AT + 2 * world_size) // 8) * 8
        self._rings = HEAD_BYTES + GROUPS * self.table_entry
        self._channels = self._rings + GROUPS * RING * SLOT_BYTES
        region = self._channels + CHANNELS * CHANNEL_BYTES
        self._region = -(-region // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size = mmap.PAGESIZE + world_size * self._region

    def head(self, rank: int) -> int:
        return mmap.PAGESIZE + rank * self._region

    def group(self, rank: int, index: int) -> int:
        return self.head(rank) + HEAD_BYTES + index * self.table_entry

    def slot(self, rank: int, index: int, number: int) -> int:
        return self.head(rank) + self._rings + (index * RING + number % RING) * SLOT_BYTES

    def channel(self, rank: int, place: int) -> int:
        return self.head(rank) + self._channels + place * CHANNEL_BYTES


def digest(*parts: object) -> bytes:
    """Sixteen bytes that identify a group, a channel or a kind of call on every rank."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
