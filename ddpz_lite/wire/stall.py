"""Who can never go on?

A wait is hopeless when what it needs can only come from ranks that have ended, or that themselves
wait in vain: a peer returned without calling, two ranks receive from each other, two groups are
entered in opposite orders. `explain` looks for the largest set of ranks that could still move and
names the rest; what it names is certain.

[Note: no false alarms]
A rank counts as stuck only if its main thread waits inside an operation, no other Python thread of
it could call one, and it does not wait with a time limit. A peer that has issued its part, even
without waiting for it, or that runs Python code, counts as able to move. Heads are read twice
around everything else: a rank whose version did not change in between waited all that time, and a
rank that waits issues nothing, so all that was read held at one moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpz_lite.wire.cost import children
from ddpz_lite.wire.format import COLLECTIVE, NOTHING, PHASES, RECV, SEND, SPLITS, Head, digest
from ddpz_lite.wire.reading import Reading

_ENDED = (PHASES.index("returned"), PHASES.index("raised"))


@dataclass(frozen=True)
class Stall:
    """Ranks that can never go on: one sentence about it, and the rank to look at first."""

    sentence: str
    rank: int


def explain(board: Reading, gone: set[int]) -> Stall | None:
    """What keeps some ranks stuck for good, or None."""
    heads = [board.head(rank) for rank in range(board.world_size)]
    ended = {rank for rank, head in enumerate(heads) if rank in gone or head.phase in _ENDED}
    waiting = {
        rank: head for rank, head in enumerate(heads) if rank not in ended and head.kind != NOTHING
    }
    if not waiting:
        return None
    needs = {rank: _needs(board, rank, head) for rank, head in waiting.items()}
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
        board.head(rank).version != heads[rank].version for rank in (*stuck, *(ended - gone))
    ):
        return None
    return _stall(board, stuck, ended)


def _needs(board: Reading, rank: int, head: Head) -> set[int] | None:
    """The ranks whose call this wait needs and that have not made it.

    None if the wait may end by itself.
    """
    if head.unsure:
        return None
    key = board.key(rank, head.index)
    members = board.members(rank, head.index)
    if head.kind == COLLECTIVE:
        needed = _partners(board, rank, head, members)
        if needed is None:
            return None
        return {peer for peer in needed if board.issued(peer, key) <= head.number} - {rank}
    if head.kind in (SEND, RECV) and head.peer >= 0 and head.number >= 0:
        return _missing_end(board, rank, head, key)
    return None


def _missing_end(board: Reading, rank: int, head: Head, key: bytes) -> set[int] | None:
    """The peer of a message, if it has not called the other end."""
    if head.kind == SEND:
        done = board.messages(head.peer, digest(key, "recv", rank, head.peer, head.tag))
        if board.messages(head.peer, digest(key, "recv", -1, head.peer, head.tag)):
            return None  # it has asked for a message from anyone: that may be this one
    else:
        done = board.messages(head.peer, digest(key, "send", head.peer, rank, head.tag))
    return {head.peer} if 0 <= done <= head.number else None


def _partners(
    board: Reading, rank: int, head: Head, members: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The ranks without whose call this rank cannot leave the collective; None if not known.

    The root of a broadcast waits for those that it sends to (`cost.children`), the others for what
    it sends and for their own children. NCCL may let a root go early: there it counts as bounded.
    """
    size = len(members)
    if head.op == "all_to_all":
        if size > SPLITS:
            return None  # its sizes are not published
        parts = board.parts(rank, head.index, head.number, 2 * size)
        return tuple(peer for i, peer in enumerate(members) if parts[i] or parts[size + i])
    if head.op == "broadcast":
        below = children(members.index(rank), size, members.index(head.peer))
        return head.peer, *(members[place] for place in below)
    if head.op in ("scatter", "gather") and head.peer != rank:
        return (head.peer,)  # the root alone can release it
    if head.op == "reduce" and head.peer != rank:
        return None  # a rank with nothing to pass on may be let go early
    return members


def _stall(board: Reading, stuck: dict[int, set[int]], ended: set[int]) -> Stall:
    """As in "rank 1 waits in all_reduce #4 (cell 7:3); rank 0 returned without calling it"."""
    for rank, need in stuck.items():
        if need & ended:
            missing = _absent(board, rank, ended)
            has = "returned" if len(missing) == 1 else "have returned"
            call = board.call(board.position(rank))
            sentence = f"rank {rank} waits in {call}; {_ranks(missing)} {has} without calling it"
            return Stall(sentence, missing[0])
    cycle = _cycle(stuck)
    parts = [f"rank {rank} waits in {board.call(board.position(rank))}" for rank in cycle]
    sentence = f"{'; '.join(parts)}: each waits for another of them to move, so none ever will"
    return Stall(sentence, cycle[0])


def _absent(board: Reading, rank: int, ended: set[int]) -> list[int]:
    """The ranks that have ended without making the call in which `rank` waits."""
    head = board.head(rank)
    if head.kind != COLLECTIVE:
        return [head.peer]
    key, members = board.key(rank, head.index), board.members(rank, head.index)
    return sorted(r for r in members if r in ended and board.issued(r, key) <= head.number)


def _cycle(stuck: dict[int, set[int]]) -> list[int]:
    """Ranks that wait for each other in a circle, from the lowest on."""
    path, rank = [], min(stuck)
    while rank not in path:
        path.append(rank)
        rank = min(stuck[rank] & stuck.keys())
    circle = path[path.index(rank) :]
    start = circle.index(min(circle))
    return circle[start:] + circle[:start]


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
