"""What each collective computes from the bytes that the ranks sent, and which ranks must have
called before a rank may continue. Group ranks throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ddpz_lite.course.grader.sandbox.frames import DTYPES, Refused, clean
from ddpz_lite.wire import cost

OPS = {
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce_scatter",
    "scatter",
    "all_to_all",
    "barrier",
}
ROOTED = {"reduce", "broadcast", "gather", "scatter"}
REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
WHOLE = 1 << 40  # more elements than any message can hold


@dataclass
class Asked:
    """One rank's call of a collective: checked, and still only data."""

    number: int  # the rank's own, for the answer
    op: str
    dtype: str
    elements: int  # of the full tensor, see `wire.Record`
    reduce: str | None
    root: int | None
    parts: list[int]  # elements for each rank, or one number
    expects: list[int]  # in an all_to_all: elements from each rank
    body: bytes | bytearray
    says: str
    where: str = "?"
    arrival: float = 0.0
    entry: object = None

    @property
    def signature(self) -> tuple:
        """What must be the same on all ranks of the group."""
        elements = None if self.op == "all_to_all" else self.elements
        return self.op, self.dtype, elements, self.root, self.reduce


@dataclass
class Gathering:
    """A collective that some ranks have called and not all have left."""

    calls: dict[int, Asked] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    total: memoryview | None = None  # of a reduction, made once


def read(head: dict, body: bytearray, me: int, size: int) -> Asked:
    """A rank's call. Raises Refused for one that no honest rank makes."""
    op, dtype = head.get("op"), head.get("dtype")
    if op not in OPS or dtype not in DTYPES:
        raise Refused("asked for a collective that does not exist")
    root, reduce = head.get("root"), head.get("reduce")
    if (op in ROOTED) != (root is not None) or (op in REDUCING) != isinstance(reduce, str):
        raise Refused(f"sent a {op} with wrong options")
    if root is not None:
        count_of(root, size - 1)
    asked = Asked(
        number=count_of(head.get("id")),
        op=op,
        dtype=dtype,
        elements=count_of(head.get("elements")),
        reduce=reduce and clean(reduce, 20),
        root=root,
        parts=_counts(head.get("parts"), size),
        expects=_counts(head.get("expects", []), size),
        body=body,
        says=clean(head.get("says"), 88),
    )
    _check_sizes(asked, me, size)
    return asked


def count_of(value: object, most: int = WHOLE) -> int:
    """A whole number from 0 to `most`. Raises Refused."""
    if type(value) is not int or not 0 <= value <= most:
        raise Refused("sent a number that makes no sense")
    return value


def _counts(values: object, size: int) -> list[int]:
    if not isinstance(values, list) or len(values) > max(size, 1):
        raise Refused("sent a list that makes no sense")
    return [count_of(value) for value in values]


def _check_sizes(asked: Asked, me: int, size: int) -> None:
    """Whether the bytes that came are as many as the words say."""
    op, parts = asked.op, asked.parts
    many = op in ("reduce_scatter", "all_to_all") or (op == "scatter" and me == asked.root)
    wanted = 0 if op == "barrier" else size if many else 1
    silent = op in ("broadcast", "scatter") and me != asked.root
    sent = 0 if silent else sum(parts) * DTYPES[asked.dtype]
    whole = sum(parts) * (size if op == "gather" or (op == "scatter" and silent) else 1)
    if (
        len(parts) != wanted
        or len(asked.body) != sent
        or (op != "all_gather" and asked.elements != whole)
        or (op == "all_to_all") != bool(asked.expects)
        or (asked.expects and len(asked.expects) != size)
    ):
        raise Refused(f"sent a {op} whose sizes do not fit together")


def required(op: str, me: int, root: int | None, size: int) -> set[int]:
    """The ranks that must have called before `me` may leave."""
    if op in ("broadcast", "scatter"):
        return {me, root}
    if op in ("reduce", "gather") and me != root:
        return {me}
    return set(range(size))


def price(asked: Asked, me: int, size: int) -> cost.Cost:
    """The cost of the call for this rank, with gloo's algorithms; see `wire.cost`."""
    itemsize = DTYPES[asked.dtype]
    if asked.op == "all_to_all":
        to = {other: n * itemsize for other, n in enumerate(asked.parts) if other != me}
        into = (sum(asked.expects) - asked.expects[me]) * itemsize
        return cost.Cost(to, 1 if size > 1 else 0, float(max(sum(to.values()), into)))
    nbytes = asked.elements * itemsize
    return cost.collective(asked.op, "gloo", me, size, nbytes, itemsize, asked.root or 0)


def find_mismatch(calls: Mapping[int, Asked]) -> tuple[int, int] | None:
    """Two ranks of an all_to_all of which one does not send what the other expects."""
    for me, local in calls.items():
        for you, remote in calls.items():
            if local.op == "all_to_all" and local.parts[you] != remote.expects[me]:
                return me, you
    return None


def answer(gathering: Gathering, me: int, size: int) -> Sequence[bytes | memoryview]:
    """What `me` gets, in pieces to be sent one after the other."""
    calls = gathering.calls
    local = calls[me]
    if local.op in REDUCING:
        return _reduced(gathering, local, me)
    if local.op == "broadcast":
        return [] if me == local.root else [calls[local.root].body]
    if local.op == "scatter":
        return [_part(calls[local.root], me)]
    if local.op == "all_to_all":
        return [_part(calls[peer], me) for peer in range(size)]
    if local.op == "barrier" or (local.op == "gather" and me != local.root):
        return []
    pieces = [calls[peer].body for peer in range(size)]
    if sum(map(len, pieces)) != local.elements * DTYPES[local.dtype]:
        raise Refused(f"sent parts of an {local.op} of another size than announced")
    return pieces


def _part(asked: Asked, index: int) -> memoryview:
    """What is meant for one rank."""
    itemsize = DTYPES[asked.dtype]
    start = sum(asked.parts[:index]) * itemsize
    return memoryview(asked.body)[start : start + asked.parts[index] * itemsize]


def _reduced(gathering: Gathering, local: Asked, me: int) -> Sequence[memoryview]:
    if local.op == "reduce" and me != local.root:
        return []
    if gathering.total is None:
        calls = gathering.calls
        bodies = [calls[rank].body for rank in sorted(calls)]
        gathering.total = _total(bodies, local.dtype, local.reduce)
    if local.op != "reduce_scatter":
        return [gathering.total]
    itemsize = DTYPES[local.dtype]
    start = sum(local.parts[:me]) * itemsize
    return [gathering.total[start : start + local.parts[me] * itemsize]]


COMBINE = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


def _total(bodies: Sequence[bytes | bytearray], dtype: str, how: str) -> memoryview:
    """All ranks' elements combined, in the order of the ranks."""
    if not bodies[0]:
        return memoryview(b"")
    kind = getattr(torch, dtype)
    first, *others = (torch.frombuffer(bytearray(body), dtype=kind) for body in bodies)
    for other in others:
        if how in ("min", "max"):
            extreme = torch.minimum if how == "min" else torch.maximum
            torch.where(other.isnan(), other, extreme(first, other), out=first)
        elif how in COMBINE:
            COMBINE[how](first, other)
        else:
            raise Refused(f"asked for a reduction that does not exist: {how}")
    if how == "avg":
        first.div_(len(bodies))
    return memoryview(first.view(torch.uint8).numpy())
