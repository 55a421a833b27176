"""The task 16.broadcast: one rank's large tensor on all nodes, over each inter-node link once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddpz_lite.course.check.chance import apart
from ddpz_lite.course.check.compare import differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import all_in_spans, unchanged, waited_for, world_name
from ddpz_lite.wire import Record

FORMS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}
Call = dict[str, Any]  # what all ranks share in one call: "root", "nodes", "piece", "length"


# ---- cases ----


def _drawn(rng: torch.Generator, length: int, form: str) -> torch.Tensor:
    return torch.randint(-100, 100, (length,), generator=apart(rng)).to(FORMS[form])


def _spread_cases(rng: torch.Generator) -> list[Case]:
    def case(
        *calls: tuple[int, list[int], int, int], kind: str = "", form: str = "float32"
    ) -> Case:
        """calls: (root, nodes, length, piece) of each, all of one world."""
        world = len(calls[0][1])
        inputs = [
            {
                "calls": [
                    {"tensor": _drawn(rng, length, form), "root": root, "nodes": nodes}
                    | {"piece": piece}
                    for root, nodes, length, piece in calls
                ]
            }
            for _ in range(world)
        ]
        many = dict.fromkeys(", ".join(map(str, nodes)) for _, nodes, _, _ in calls)
        says = f"{world_name(world)} on nodes {' and on '.join(many)}"
        return Case(says + f", {form}" * (form != "float32"), inputs, kind)

    pairs, turned = [0, 0, 1, 1], [0, 1, 0, 1]
    return [
        case((0, pairs, 240, 40), (0, pairs, 240, 60), (0, turned, 240, 40), (2, pairs, 240, 40)),
        case((0, [0, 1], 30, 10), (1, [0, 1], 30, 10)),
        case((1, [0, 0, 0], 60, 20), (0, [0, 1, 2], 60, 20)),
        case((0, [0], 20, 5)),
        case(
            (0, [0, 0, 0, 1, 2, 2], 400, 50),
            (2, [0, 0, 0, 1, 2, 2], 400, 50),
            (3, [0, 0, 0, 1, 2, 2], 400, 50),
            (4, [5, 2, 5, 2, 7, 5], 400, 80),
            kind="unequal",
        ),
        case((1, [1, 0, 1, 1, 2], 300, 50), (4, [2, 0, 0, 0, 0], 300, 60), kind="unequal"),
        case((0, [0, 1, 1], 60, 10), (2, [0, 1, 1], 60, 10), kind="unequal"),
        case((0, [0, 0, 1], 7, 3), (1, [0, 0, 1], 2, 5), (2, [0, 0, 1], 1, 1), kind="uneven"),
        case((3, pairs, 50, 8), (0, pairs, 49, 7), kind="uneven", form="bfloat16"),
        case((1, [3, 3, 1], 20, 6), kind="uneven", form="int64"),
        case((1, [0, 1], 20, 6), kind="uneven", form="float64"),
        case((0, [0, 1], 9, 4), kind="uneven", form="bool"),
    ]


# ---- judging ----


def _calls(seen: Observed) -> Iterator[tuple[int, Call]]:
    """(number of the call, what all ranks share in it)."""
    for number, call in enumerate(seen.case.inputs[0]["calls"]):
        yield number, call | {"length": len(call["tensor"])}


def _values(seen: Observed) -> str | None:
    for number, call in _calls(seen):
        begun = [rank["calls"][number]["tensor"] for rank in seen.case.inputs]
        right = begun[call["root"]]
        for rank in sorted(range(seen.case.world), key=lambda rank: rank != call["root"]):
            got = seen.data[rank]["tensors"][number]
            message = differs(got, right, f"Rank {rank}'s tensor", bitwise=True)
            if message:
                return f"{message}{_misled(seen, number, call, rank)}"
    return unchanged(seen)


def _misled(seen: Observed, number: int, call: Call, rank: int) -> str:
    """What a wrong tensor of a rank looks like, as a sentence."""
    begun = [inputs["calls"][number]["tensor"] for inputs in seen.case.inputs]
    got, root, length = seen.data[rank]["tensors"][number], call["root"], call["length"]
    if type(got) is not torch.Tensor or (got.dtype, got.shape) != (begun[0].dtype, begun[0].shape):
        return ""
    if rank == root:
        return f" Rank {root} is the root, and its tensor must stay."
    if torch.equal(got, begun[rank]):
        return " It is what that rank began with: receive into the tensor that was given."
    for other, tensor in enumerate(begun):
        if other != rank and torch.equal(got, tensor):
            return f" It is what rank {other} began with, and the root is rank {root}."
    same = int((got == begun[root]).int().cumprod(0).sum())
    if torch.equal(got[same:], begun[rank][same:]):
        return f" Its first {same} of {length} elements are the root's, and the rest never came."
    return ""


def _sends(seen: Observed, number: int) -> list[Record]:
    ranks = range(seen.case.world)
    return [c for r in ranks for c in seen.calls(r, f"call {number}") if c.op == "send"]


def _messages_alone(seen: Observed) -> str | None:
    if wrong := all_in_spans(seen) or waited_for(seen):
        return wrong
    for rank in range(seen.case.world):
        for op in seen.ops(rank):
            if op not in ("send", "recv"):
                return f"Rank {rank} called {op}. Build it from messages between two ranks."
    return None


def _came(sends: list[Record], rank: int) -> int:
    return sum(c.bytes_sent for c in sends if c.peer == rank)


def _crossings(seen: Observed) -> str | None:
    """Every byte once into each node, and at most once out of it."""
    if wrong := _messages_alone(seen):
        return wrong
    for number, call in _calls(seen):
        nodes, tensor = call["nodes"], seen.case.inputs[0]["calls"][number]["tensor"]
        most, form = tensor.numel() * tensor.element_size(), str(tensor.dtype).split(".")[-1]
        across = [c for c in _sends(seen, number) if nodes[c.rank] != nodes[c.peer]]
        where = f"With root {call['root']} and nodes {nodes}"
        if other := [c for c in across if c.dtype != form]:
            return f"Rank {other[0].rank} sent {other[0].dtype}, and the tensor is {form}."
        for node in dict.fromkeys(nodes):
            into = [c for c in across if nodes[c.peer] == node]
            came = sum(c.bytes_sent for c in into)
            if came and node == nodes[call["root"]]:
                return f"{where}, {came:,} bytes were sent to the root's node, which has them."
            if twice := [r for r in {c.peer for c in into} if _came(into, r) > most]:
                return (
                    f"{where}, rank {min(twice)} was sent {_came(into, min(twice)):,} bytes from "
                    f"other nodes, and the tensor has {most:,}: it is sent some of them twice."
                )
            if came > most:
                ranks = " and ".join(map(str, sorted({c.peer for c in into})))
                return (
                    f"{where}, {came:,} bytes were sent to node {node}, to ranks {ranks}. The "
                    f"tensor has {most:,}, and a rank that has it can pass it on inside its node."
                )
        for node in dict.fromkeys(nodes):
            out = [c for c in across if nodes[c.rank] == node]
            left = sum(c.bytes_sent for c in out)
            if left > most:
                others = " and ".join(map(str, sorted({nodes[c.peer] for c in out})))
                return (
                    f"{where}, node {node} sent {left:,} bytes to the nodes {others}, and the "
                    f"tensor has {most:,}. The next node can send it on."
                )
    return None


def _pieces(seen: Observed) -> str | None:
    """Messages are no longer than allowed, no more than needed, and passed on early."""
    for number, call in _calls(seen):
        length, piece = call["length"], call["piece"]
        sends = _sends(seen, number)
        if long := [c for c in sends if c.elements > piece]:
            return (
                f"Rank {long[0].rank} sent {long[0].elements} elements in one message, and `piece` "
                f"is {piece}."
            )
        for rank in range(seen.case.world):
            to_it = [c for c in sends if c.peer == rank]
            needed = -(-length // piece) if rank != call["root"] else 0
            if len(to_it) > needed:
                return (
                    f"Rank {rank} was sent {len(to_it)} messages. {needed} of at most {piece} "
                    f"elements hold all {length} of them."
                )
            if needed > 2 and (message := _late(seen, number, call, rank)):
                return message
    return None


def _late(seen: Observed, number: int, call: Call, rank: int) -> str | None:
    """Whether the rank waits for the last piece before it sends the first to the next node.

    Only this machine's wire records when a rank waits. Where nothing was recorded, this is None.
    """
    calls, nodes = seen.calls(rank, f"call {number}"), call["nodes"]
    waits = [c.waited for c in calls if c.op == "recv"]
    sends = [c for c in calls if c.op == "send"]
    sends = [c for c in sends if nodes[c.peer] != nodes[rank]] or sends
    if not sends or None in waits or not waits:
        return None
    if min(c.started for c in sends) < max(end for _, end in waits):
        return None
    return (
        f"Rank {rank} waits for all {len(waits)} pieces before it sends the first one to rank "
        f"{sends[0].peer}. Then each further node adds the time of the full tensor."
    )


BROADCAST = Task(
    id="16.broadcast",
    title="Once over each link",
    answer="broadcast",
    job="lesson16.broadcast",
    minutes=25,
    cases=_spread_cases,
    criteria=(
        Criterion("the root's numbers on every rank", 2, _values, on=("",)),
        Criterion("nodes of unequal sizes, any order, any root", 2, _values, on=("unequal",)),
        Criterion("any length and dtype", 1, _values, on=("uneven",)),
        Criterion("every byte once into each node, and at most once out of it", 3, _crossings),
        Criterion("in pieces, which are passed on at once", 2, _pieces),
    ),
    hints=(
        "The root's node may send the tensor to one other node. From which node does a third node "
        "get it? And from which rank?",
        "Put all ranks in one row, so that the root is the first, and the ranks of a node stand "
        "next to each other. Who sends to whom, if each rank sends the tensor only once?",
        "order = sorted(range(N), key=lambda r: (nodes[r] != nodes[root], nodes[r], r != root)). "
        "For each part of tensor.split(piece): receive it from the rank before, if there is one, "
        "and isend it to the rank after, if there is one. Wait for all sends at the end.",
    ),
    debrief="NCCL's broadcast is such a row, too: it follows the ring, which goes from node to "
    "node, in chunks. For a short tensor a tree of nodes has fewer latencies one after the other.",
)
