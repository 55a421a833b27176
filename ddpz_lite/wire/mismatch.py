"""Two ranks of a group made different calls: say so at once, to the one that came later.

A backend does not notice (gloo and NCCL match calls by their order alone): it hangs, dies of a
broken message, or gives back garbage. The ranks of a group must make the same calls in the same
order; here they compare notes before each one.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from torch.distributed import Store

from ddpz_lite.wire.board import RECHECK, Board
from ddpz_lite.wire.call import Call
from ddpz_lite.wire.format import Slot


class Members(NamedTuple):
    """A process group as the board knows it."""

    ranks: tuple[int, ...]  # global, in group order
    key: bytes  # what names the group on all of them


class CollectiveMismatch(RuntimeError):
    """Raised at the call that differs from what another rank of the group called in its place."""


def compare_calls(
    board: Board, group: Members, peer: int, number: int, call: Call, where: str
) -> None:
    """Read a peer's call once more, for certain; raises CollectiveMismatch if it still differs."""
    slot = _reread(board, group, peer, number)
    if slot is None or slot.signature == call.signature:
        return
    raise CollectiveMismatch(
        f"the ranks of a group must make the same calls in the same order, but call #{number} "
        f"of {_name(group.ranks)} differs:\n"
        f"  rank {board.rank} calls {call.description.decode(errors='replace')} at {where}\n"
        f"  rank {peer} called {slot.description} at {slot.where}"
    )


def compare_parts(
    board: Board, group: Members, peer: int, number: int, where: str, parts: tuple[int, ...]
) -> None:
    """In an all_to_all, what one rank sends to another must be what that one expects of it."""
    theirs = _parts(board, group, peer, number)
    if theirs is None or _agree(group, board.rank, peer, parts, theirs):
        return
    slot = _reread(board, group, peer, number)
    theirs = _parts(board, group, peer, number)
    if slot is None or theirs is None or _agree(group, board.rank, peer, parts, theirs):
        return
    me, you, size = group.ranks.index(board.rank), group.ranks.index(peer), len(group.ranks)
    raise CollectiveMismatch(
        f"the split sizes of all_to_all #{number} of {_name(group.ranks)} do not fit together:\n"
        f"  rank {board.rank} at {where} sends {parts[you]} elements to rank {peer} "
        f"and expects {parts[size + you]} of it\n"
        f"  rank {peer} at {slot.where} sends {theirs[me]} elements to rank {board.rank} "
        f"and expects {theirs[size + me]} of it"
    )


def compare_members(
    board: Board, store: Store, name: str, ranks: tuple[int, ...], where: str
) -> None:
    """Compare the n-th group that this rank makes with what another rank makes as its n-th.

    torch tells groups apart by how many have been made, so all ranks must make all of them, in the
    same order, members or not. Raises CollectiveMismatch where the members differ.
    """
    mine = json.dumps([board.rank, ranks, where])
    rank, theirs, there = json.loads(store.compare_set(f"wire: members of {name}", "", mine))
    if tuple(theirs) != ranks:
        raise CollectiveMismatch(
            "every rank must make every group, in the same order, a member of it or not, but one "
            f"group has two lists of members:\n"
            f"  rank {board.rank} calls new_group({list(ranks)}) at {where}\n"
            f"  rank {rank} called new_group({theirs}) at {there}"
        )


def _agree(
    group: Members, rank: int, peer: int, mine: tuple[int, ...], theirs: tuple[int, ...]
) -> bool:
    me, you, size = group.ranks.index(rank), group.ranks.index(peer), len(group.ranks)
    return mine[you] == theirs[size + me] and theirs[me] == mine[size + you]


def _parts(board: Board, group: Members, peer: int, number: int) -> tuple[int, ...] | None:
    index = board.find_group(peer, group.key)
    if index is None or board.slot(peer, index, number) is None:
        return None
    return board.parts(peer, index, number, 2 * len(group.ranks))


def _reread(board: Board, group: Members, peer: int, number: int) -> Slot | None:
    time.sleep(RECHECK)  # see [Note: memory ordering] in board.py
    index = board.find_group(peer, group.key)
    return None if index is None else board.slot(peer, index, number)


def _name(ranks: tuple[int, ...]) -> str:
    return f"group ({', '.join(map(str, ranks))})"
