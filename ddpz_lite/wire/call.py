"""One kind of call: what is the same whenever a collective is called again.

A training loop makes the same few calls thousands of times. So everything that follows from the
operation, the shapes and the options (the cost, the signature that ranks compare, the text for a
report) is computed once per process group and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddpz_lite.wire import cost
from ddpz_lite.wire.status_format import TEXT, digest


class Call(NamedTuple):
    """One kind of call on one process group."""

    op: str
    dtype: str  # "float32"
    elements: int  # of the full tensor, see `ledger.Record`
    cost: cost.Cost  # of this rank
    signature: bytes  # must be equal on all ranks of the group
    description: bytes  # "all_reduce(float32[2, 3], sum)"
    root: int | None  # global rank


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def total(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def describe(op: str, tensors: Sequence[torch.Tensor], extras: Sequence[str] = ()) -> bytes:
    """ "all_reduce(float32[2, 3], sum)", cut to TEXT bytes."""
    first = tensors[0]
    shapes = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in tensors[:2])
    if len(tensors) > 2:
        shapes = f"{len(tensors)} tensors of {dtype_name(first.dtype)}, {total(tensors)} elements"
    return f"{op}({', '.join((shapes, *extras))})".encode()[:TEXT]


def build(
    op: str,
    tensors: Sequence[torch.Tensor],
    *,
    ranks: tuple[int, ...],
    rank: int,
    backend: str,
    elements: int,
    root: int | None = None,
    reduce_op: str | None = None,
    equal: bool = True,
) -> Call:
    """A call on the group of global `ranks`, made by group rank `rank`.

    tensors: what this rank passes, for the description. elements: of the full tensor. root: its
    index in the group. equal: whether every rank must pass the same number of elements.
    """
    first = tensors[0]
    itemsize = first.element_size()
    extras = [reduce_op] if reduce_op else []
    if root is not None:
        extras.append(f"root {ranks[root]}")
    return Call(
        op=op,
        dtype=dtype_name(first.dtype),
        elements=elements,
        cost=cost.collective(
            op, backend, rank, len(ranks), elements * itemsize, itemsize, root or 0
        ),
        signature=digest(op, dtype_name(first.dtype), elements if equal else None, root, reduce_op),
        description=describe(op, tensors, extras),
        root=None if root is None else ranks[root],
    )


BARRIER_DTYPE = "uint8"


def barrier(ranks: tuple[int, ...], rank: int, backend: str, name: str = "barrier") -> Call:
    price = cost.collective("barrier", backend, rank, len(ranks), 0, 1)
    return Call("barrier", BARRIER_DTYPE, 0, price, digest(name), f"{name}()".encode(), None)


def message(op: str, tensor: torch.Tensor, ranks: tuple[int, ...], peer: int) -> Call:
    """A send to the global rank `peer`, or a recv: the sender pays."""
    nbytes = tensor.numel() * tensor.element_size()
    to = {ranks.index(peer): nbytes} if op == "send" else {}
    price = cost.Cost(to, 1, float(nbytes))
    return Call(
        op, dtype_name(tensor.dtype), tensor.numel(), price, b"", describe(op, [tensor]), peer
    )


def sparse(tensor: torch.Tensor, ranks: tuple[int, ...], rank: int, reduce_op: str) -> Call:
    """A sparse all_reduce: gloo gathers all indices and values and adds them locally.

    Ranks may hold different numbers of elements, and what a rank forwards for others is not known
    here. So the cost assumes as many as this rank's. `elements` counts the values.
    """
    coalesced = tensor.coalesce()
    values, others = coalesced.values(), len(ranks) - 1
    nbytes = values.numel() * values.element_size() + coalesced.indices().numel() * 8
    to = {(rank + 1) % len(ranks): others * nbytes}
    price = cost.Cost(to, others, float(others * nbytes))
    signature = digest("sparse", dtype_name(tensor.dtype), tuple(tensor.shape), reduce_op)
    return Call(
        "all_reduce",
        dtype_name(values.dtype),
        values.numel(),
        price,
        signature,
        describe("all_reduce", [values]),
        None,
    )


def uneven(
    call: Call, sends: Sequence[int], receives: Sequence[int], rank: int, itemsize: int
) -> Call:
    """The same all_to_all with the cost of these splits: each part goes straight to its rank."""
    to = {other: n * itemsize for other, n in enumerate(sends) if other != rank}
    into = (sum(receives) - receives[rank]) * itemsize
    path = float(max(sum(to.values()), into))
    return call._replace(cost=cost.Cost(to, 1 if len(sends) > 1 else 0, path))
