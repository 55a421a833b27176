"""Which rank waits where, in the form from which the wire explains a stall.

The wire reads a status file that the ranks write. Here the broker writes the same state from what
arrived, so the sentences are the same.
"""

from __future__ import annotations

from ddpz_lite.wire.stall import Stall, explain
from ddpz_lite.wire.status_format import COLLECTIVE, NOTHING, PHASES, RECV, SEND, Head, digest
from ddpz_lite.wire.status_reader import StatusReader


class Watch(StatusReader):
    """A status file in memory.

    A rank waits from the frame in which it reports the wait until its answer is sent. In between it
    can issue nothing, so all states read together are consistent.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._groups: list[tuple[bytes, tuple[int, ...]]] = []  # key, members
        self._counts: dict[tuple[int, bytes], int] = {}  # calls of a group that a rank has issued
        self._parts: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._messages: dict[tuple[int, bytes], int] = {}
        self.heads = [self.at_work("starting") for _ in range(world_size)]

    # -- written by the broker ---------------------------------------------------------------------

    def at_work(self, phase: str) -> Head:
        """The head of a rank that does not wait."""
        return Head(PHASES.index(phase), 0, 0, NOTHING, 0, 0, -1, 0, 0.0, "", "")

    def add_group(self, name: str, members: tuple[int, ...]) -> int:
        self._groups.append((digest("group", name, members), members))
        return len(self._groups) - 1

    def issue(self, rank: int, index: int, parts: tuple[int, ...]) -> int:
        """Count a collective; its number in the group."""
        key = self._groups[index][0]
        number = self._counts.get((rank, key), 0)
        self._counts[rank, key] = number + 1
        self._parts[rank, index, number] = parts
        return number

    def announce(self, rank: int, index: int, op: str, peer: int, tag: int) -> int:
        """Count a message on this rank's side of its channel; its number."""
        ends = (rank, peer) if op == "send" else (peer, rank)
        side = rank, digest(self._groups[index][0], op, *ends, tag)
        number = self._messages.get(side, 0)
        self._messages[side] = number + 1
        return number

    def wait(self, rank: int, sure: bool, **at: object) -> None:
        """The rank's main thread waits; see `Head`."""
        running = PHASES.index("running")
        self.heads[rank] = Head(running, 0, int(not sure), since=0.0, **at)

    def resume(self, rank: int, phase: str = "running") -> None:
        self.heads[rank] = self.at_work(phase)

    # -- read by the wire --------------------------------------------------------------------------

    def head(self, rank: int) -> Head:
        return self.heads[rank]

    def stall(self) -> Stall | None:
        return explain(self, set())

    def key(self, rank: int, index: int) -> bytes:
        return self._groups[index][0]

    def members(self, rank: int, index: int) -> tuple[int, ...]:
        return self._groups[index][1]

    def issued(self, rank: int, key: bytes) -> int:
        return self._counts.get((rank, key), 0)

    def messages(self, rank: int, key: bytes) -> int:
        return self._messages.get((rank, key), 0)

    def parts(self, rank: int, index: int, number: int, count: int) -> tuple[int, ...]:
        return self._parts[rank, index, number]


KINDS = {"send": SEND, "recv": RECV}
__all__ = ["COLLECTIVE", "KINDS", "Watch"]
