"""The four transitions, and the only module of training that calls a collective.

    all_gather      Shard     to Replicate   in place: the buffer holds this rank's slice already
    reduce_scatter  Partial   to Shard       the mean over ranks, summed in fp32
    all_reduce      Partial   to Replicate   the sum over ranks, in place
    shard           Replicate to Shard       a view of this rank's slice; moves nothing

Each starts at once and returns a `Handle`; `wait()` makes its result usable. Which collective
serves a transition is decided here, once. NCCL has all four. gloo's `reduce_scatter` is an
all-reduce inside and pays its bytes; its `all_gather` copies through a second buffer. So on gloo a
reduce-scatter is an all-to-all and a local sum in the order of ranks, and an all-gather is one
broadcast of each slice: half the bytes, a third of the time (44 MB, 2 and 4 ranks on one machine).

[Note: order] A collective has no name: the n-th call on one rank meets the n-th call on another.
All callers start transitions in an order that all ranks share, never in the order of arrival.

[Note: streams] Under NCCL `async_op=True` runs on NCCL's own stream, after what the current stream
has queued so far, and `wait()` makes the current stream wait, not the host. Buffers are allocated
and freed on the current stream only, and only after `wait()`, so the caching allocator needs no
`record_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpz_lite.strategies.groups import Group, backend_of

# torch 2.13 renamed both and warns on the old names; torch 2.11 has only the old.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A transition in flight. `wait()` ends it and returns its result; again, the same one."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Tensor]) -> None:
        self._works, self._finish = works, finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._works, self._finish = (), None  # frees the buffers of the transition
        return self._result


class Comm(Group):
    """The transitions between the ranks that hold a model together; see `Group` for which they are.

    `rank` and `world` are those of the sharding group, `size` counts replicas too, and `across` is
    a Comm of the replicas if they cut the shard among themselves.
    """

    # -- the four transitions

    def shard(self, full: Tensor) -> Tensor:
        """Replicate to Shard: (n * world,) to a view (n,) of this rank's slice."""
        n = full.numel() // self.world
        return full[self.rank * n : (self.rank + 1) * n]

    def all_gather(self, full: Tensor) -> Handle:
        """Shard to Replicate, in place: `full` (n * world,) holds this rank's slice when called."""
        if self.world == 1:
            works = ()
        elif self._native(full):
            works = (_all_gather(full, self.shard(full), group=self.group, async_op=True),)
        else:
            works = [
                dist.broadcast(local, group_src=r, group=self.group, async_op=True)
                for r, local in enumerate(full.view(self.world, -1))
            ]
        return Handle(works, lambda: full)

    def reduce_scatter(self, rows: Tensor, dtype: torch.dtype) -> Handle:
        """Partial to Shard: row r of `rows` (world, n) goes to rank r. Result: their mean (n,).

        The mean is over replicas too, unless they cut the shard: then `across` takes it later.

        [Note: sum, then divide] ReduceOp.AVG has been silently wrong on gloo in some releases, and
        dividing first loses small fp16 gradients. gloo's sum is taken in `dtype`, in the order of
        ranks, so it does not depend on how parameters are laid out.
        """
        if self.world == 1:
            return self._mean((), lambda: rows[0].to(dtype))
        if self._native(rows):
            out = rows.new_empty(rows.shape[1])  # (n,)
            work = _reduce_scatter(out, rows.view(-1), group=self.group, async_op=True)
            return self._mean((work,), lambda: out.to(dtype))
        received = self.all_to_all(rows)  # (world, n): row r is rank r's part of our slice
        return self._mean((received,), lambda: _sum(received.wait(), dtype))

    def all_to_all(self, rows: Tensor) -> Handle:
        """Row r of `rows` (world, n) goes to rank r. Result (world, n): row r comes from rank r."""
        if self.world == 1:
            return Handle((), lambda: rows)
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)
        return Handle((work,), lambda: received)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Partial to Replicate, in place: the sum over the sharding group and its replicas."""
        works = []
        if self.world > 1:
            works = [dist.all_reduce(tensor, group=self.group, async_op=True)]
        return Handle(works, lambda: self.over_replicas(tensor))

    def reduce_scalar(
        self, value: Tensor, maximum: bool = False, everywhere: bool = False
    ) -> Tensor:
        """Sum (or maximum) over all that hold other shards: the small all-reduce of norms.

        everywhere: over the other axes of a mesh too.
        """
        groups = [axis.group for axis in (self, self.across) if axis.world > 1]
        for group in (*groups, *self.axes.values()) if everywhere else groups:
            if "nccl" in dist.get_backend(group):
                value = value.cuda()  # offloaded shards have their norm on the host
            op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
            dist.all_reduce(value, op=op, group=group)
        return value

    # -- which collective serves

    def _native(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and backend_of(dist.get_backend(self.group), "cuda") != "gloo"

    def _mean(self, works: Sequence[Any], total: Callable[[], Tensor]) -> Handle:
        cut = self.across.world > 1  # then `across` sums, and divides, for itself

        def finish() -> Tensor:
            result, ranks = total(), self.world if cut else self.size
            result = result if cut else self.over_replicas(result)
            return result.div_(ranks) if ranks > 1 else result

        return Handle(works, finish)

    def over_replicas(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the same shard, in place."""
        if self.copies > 1:
            dist.all_reduce(tensor, group=self.replicas)
        return tensor


def _sum(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(world, n) to (n,): the sum in `dtype`, row by row: half the time of `torch.sum(rows, 0)`."""
    total = rows[0].to(dtype) + rows[1]  # (n,), of its own: a view would keep all rows
    for row in rows[2:]:
        total.add_(row)
    return total
