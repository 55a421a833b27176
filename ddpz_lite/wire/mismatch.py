"""Detect that two ranks of a group made different calls, and raise on the later one.

A backend does not notice, because gloo and NCCL match calls only by their order: it hangs, fails on
a broken message, or returns garbage. The ranks of a group must make the same calls in the same
order, so each rank compares every call with what the others published.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from torch.distributed import Store

from ddpz_lite.wire.call import Call
from ddpz_lite.wire.status_file import RECHECK, StatusFile
from ddpz_lite.wire.status_format import Slot


class Members(NamedTuple):
    """A process group in the status file."""

    ranks: tuple[int, ...]  # global, in group order
    key: bytes  # identifies the group on all of them


class CollectiveMismatch(RuntimeError):
    """Raised at the call that differs from what another rank of the group called in its place."""


def compare_calls(
    status_file: StatusFile, group: Members, peer: int, number: int, call: Call, where: str
) -> None:
    """Read a peer's call again, to be certain; raises CollectiveMismatch if it still differs."""
    slot = _reread(status_file, group, peer, number)
    if slot is None or slot.signature == call.signature:
        return
    raise CollectiveMismatch(
        f"the ranks of a group must make the same calls in the same order, but call #{number} "
        f"of {_name(group.ranks)} differs:\n"
        f"  rank {status_file.rank} calls {call.description.decode(errors='replace')} at {where}\n"
        f"  rank {peer} called {slot.description} at {slot.where}"
    )


def compare_parts(
    status_file: StatusFile,
    group: Members,
    peer: int,
    number: int,
    where: str,
    parts: tuple[int, ...],
) -> None:
    """In an all_to_all, what one rank sends to another must be what the other expects."""
    theirs = _parts(status_file, group, peer, number)
    if theirs is None or _agree(group, status_file.rank, peer, parts, theirs):
        return
    slot = _reread(status_file, group, peer, number)
    theirs = _parts(status_file, group, peer, number)
    if slot is None or theirs is None or _agree(group, status_file.rank, peer, parts, theirs):
        return
    me, you, size = group.ranks.index(status_file.rank), group.ranks.index(peer), len(group.ranks)
    raise CollectiveMismatch(
        f"the split sizes of all_to_all #{number} of {_name(group.ranks)} do not match:\n"
        f"  rank {status_file.rank} at {where} sends {parts[you]} elements to rank {peer} "
        f"and expects {parts[size + you]} from it\n"
        f"  rank {peer} at {slot.where} sends {theirs[me]} elements to rank {status_file.rank} "
        f"and expects {theirs[size + me]} from it"
    )


def compare_members(
    status_file: StatusFile, store: Store, name: str, ranks: tuple[int, ...], where: str
) -> None:
    """Compare the n-th group that this rank makes with what another rank makes as its n-th.

    torch tells groups apart by how many have been made, so all ranks must make all of them, in the
    same order, members or not. Raises CollectiveMismatch where the members differ.
    """
    local = json.dumps([status_file.rank, ranks, where])
    rank, theirs, there = json.loads(store.compare_set(f"wire: members of {name}", "", local))
    if tuple(theirs) != ranks:
        raise CollectiveMismatch(
            "every rank must make every group, in the same order, a member of it or not, but one "
            f"group has two lists of members:\n"
            f"  rank {status_file.rank} calls new_group({list(ranks)}) at {where}\n"
            f"  rank {rank} called new_group({theirs}) at {there}"
        )


def _agree(
    group: Members, rank: int, peer: int, local: tuple[int, ...], theirs: tuple[int, ...]
) -> bool:
    me, you, size = group.ranks.index(rank), group.ranks.index(peer), len(group.ranks)
    return local[you] == theirs[size + me] and theirs[me] == local[size + you]


def _parts(
    status_file: StatusFile, group: Members, peer: int, number: int
) -> tuple[int, ...] | None:
    index = status_file.find_group(peer, group.key)
    if index is None or status_file.slot(peer, index, number) is None:
        return None
    return status_file.parts(peer, index, number, 2 * len(group.ranks))


def _reread(status_file: StatusFile, group: Members, peer: int, number: int) -> Slot | None:
    time.sleep(RECHECK)  # see [Note: memory ordering] in status_file.py
    index = status_file.find_group(peer, group.key)
    return None if index is None else status_file.slot(peer, index, number)


def _name(ranks: tuple[int, ...]) -> str:
    return f"group ({', '.join(map(str, ranks))})"
