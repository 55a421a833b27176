"""Find ranks that can never continue.

A wait is hopeless when what it needs can only come from ranks that have ended, or that wait in vain
themselves: a peer returned without calling, two ranks receive from each other, two groups are
entered in opposite orders. `explain` finds the largest set of ranks that could still continue and
names the others.

[Note: no false alarms]
A rank counts as stuck only if its main thread waits inside an operation, none of its other Python
threads could call one, and the wait has no time limit. A peer that has issued its part, even
without waiting for it, or that runs Python code, counts as able to continue. Heads are read twice
around everything else: a rank whose version did not change in between waited all that time, and a
waiting rank issues nothing, so everything that was read was true at one moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpz_lite.wire.cost import children
from ddpz_lite.wire.status_format import (
    COLLECTIVE,
    NOTHING,
    PHASES,
    RECV,
    SEND,
    SPLITS,
    Head,
    digest,
)
from ddpz_lite.wire.status_reader import StatusReader

_ENDED = (PHASES.index("returned"), PHASES.index("raised"))


@dataclass(frozen=True)
class Stall:
    """Ranks that can never continue: a sentence that names them, and the rank to look at first."""

    sentence: str
    rank: int


def explain(status_file: StatusReader, gone: set[int]) -> Stall | None:
    """The stall of some ranks, or None. `gone`: ranks that have ended."""
    heads = [status_file.head(rank) for rank in range(status_file.world_size)]
    ended = {rank for rank, head in enumerate(heads) if rank in gone or head.phase in _ENDED}
    waiting = {
        rank: head for rank, head in enumerate(heads) if rank not in ended and head.kind != NOTHING
    }
    if not waiting:
        return None
    needs = {rank: _needs(status_file, rank, head) for rank, head in waiting.items()}
    stuck = {rank: need for rank, need in needs.items() if need is not None}
    while True:
        moving = [
            rank for rank, need in stuck.items() if not any(n in ended or n in stuck for n in need)
        ]
        if not moving:
            break
        for rank in moving:
            del stuck[rank]
    if not stuck or any(
        status_file.head(rank).version != heads[rank].version for rank in (*stuck, *(ended - gone))
    ):
        return None
    return _stall(status_file, stuck, ended)


def _needs(status_file: StatusReader, rank: int, head: Head) -> set[int] | None:
    """The ranks whose call this wait needs and that have not made it; None if it may still end."""
    if head.unsure:
        return None
    key = status_file.key(rank, head.index)
    members = status_file.members(rank, head.index)
    if head.kind == COLLECTIVE:
        needed = _partners(status_file, rank, head, members)
        if needed is None:
            return None
        return {peer for peer in needed if status_file.issued(peer, key) <= head.number} - {rank}
    if head.kind in (SEND, RECV) and head.peer >= 0 and head.number >= 0:
        return _missing_end(status_file, rank, head, key)
    return None


def _missing_end(status_file: StatusReader, rank: int, head: Head, key: bytes) -> set[int] | None:
    """The peer of a message, if it has not called the other end."""
    if head.kind == SEND:
        done = status_file.messages(head.peer, digest(key, "recv", rank, head.peer, head.tag))
        if status_file.messages(head.peer, digest(key, "recv", -1, head.peer, head.tag)):
            return None  # it has posted a receive from any rank, which may match this message
    else:
        done = status_file.messages(head.peer, digest(key, "send", head.peer, rank, head.tag))
    return {head.peer} if 0 <= done <= head.number else None


def _partners(
    status_file: StatusReader, rank: int, head: Head, members: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The ranks without whose call this rank cannot leave the collective; None if not known.

    The root of a broadcast waits for its children (`cost.children`), the others for the root and
    for their own children. NCCL may release a root early, so there the wait counts as bounded.
    """
    size = len(members)
    if head.op == "all_to_all":
        if size > SPLITS:
            return None  # the sizes are not published
        parts = status_file.parts(rank, head.index, head.number, 2 * size)
        return tuple(peer for i, peer in enumerate(members) if parts[i] or parts[size + i])
    if head.op == "broadcast":
        below = children(members.index(rank), size, members.index(head.peer))
        return head.peer, *(members[place] for place in below)
    if head.op in ("scatter", "gather") and head.peer != rank:
        return (head.peer,)  # only the root can release it
    if head.op == "reduce" and head.peer != rank:
        return None  # a rank that forwards nothing may be released early
    return members


def _stall(status_file: StatusReader, stuck: dict[int, set[int]], ended: set[int]) -> Stall:
    """As in "rank 1 waits in all_reduce #4 (cell 7:3); rank 0 returned without calling it"."""
    for rank, need in stuck.items():
        if need & ended:
            missing = _absent(status_file, rank, ended)
            has = "returned" if len(missing) == 1 else "have returned"
            call = status_file.call(status_file.position(rank))
            other_end = {SEND: "receiving it", RECV: "sending it"}
            without = other_end.get(status_file.head(rank).kind, "calling it")
            sentence = f"rank {rank} waits in {call}; {name_ranks(missing)} {has} without {without}"
            return Stall(sentence, missing[0])
    cycle = _cycle(stuck)
    parts = [
        f"rank {rank} waits in {status_file.call(status_file.position(rank))}" for rank in cycle
    ]
    sentence = f"deadlock: {'; '.join(parts)}. Each rank waits for another one in this list."
    return Stall(sentence, cycle[0])


def _absent(status_file: StatusReader, rank: int, ended: set[int]) -> list[int]:
    """The ranks that have ended without making the call in which `rank` waits."""
    head = status_file.head(rank)
    if head.kind != COLLECTIVE:
        return [head.peer]
    key, members = status_file.key(rank, head.index), status_file.members(rank, head.index)
    return sorted(r for r in members if r in ended and status_file.issued(r, key) <= head.number)


def _cycle(stuck: dict[int, set[int]]) -> list[int]:
    """Ranks that wait for each other in a cycle, starting with the lowest."""
    path, rank = [], min(stuck)
    while rank not in path:
        path.append(rank)
        rank = min(stuck[rank] & stuck.keys())
    cycle = path[path.index(rank) :]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def name_ranks(ranks: list[int]) -> str:
    """ "rank 3", or "ranks 0, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
