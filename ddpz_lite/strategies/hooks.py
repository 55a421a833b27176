"""Communication hooks for `DDP`: fewer bytes in place of a bucket's float32 all-reduce.

    DDP(module, comm_hook=TopK(0.01))

P gradients, N ranks, matrices of n x m; bytes that a rank sends, and what it keeps between steps:

    Rounded(dtype)   2(N-1)/N · 2P                      nothing
    Int8()           2(N-1)/N · P (1 + 4/block)         nothing
    TopK(share)      (N-1) · 8 · share · P              the residual, 4P
    PowerSGD(rank)   2(N-1)/N · 4 · rank (n + m) each   the error, 4P, and Q, 4 · rank · m each

Each describes a hook; `for_bucket` makes that of one bucket, with its state. After it the gradients
have the same bits on all ranks. What is not finite stays so, and is not kept for the next step.

[Note: two rounds] All but TopK send a second time, what they made of what had arrived. The second
round begins when the bucket is waited for, at the end of backward and in the order of buckets, so
only the first hides under backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddpz_lite.strategies.comm import Comm, Handle
from ddpz_lite.strategies.layout import Layout
from ddpz_lite.strategies.precision import HALF
from ddpz_lite.strategies.quantised import BLOCK, dequantise, quantise
from ddpz_lite.strategies.reducer import CommHook


@dataclass(frozen=True)
class Rounded:
    """Gradients travel in 16 bits and are summed in float32, so only twice is rounded.

    (`DDP(reduce_dtype=...)` sums in 16 bits, too. On NCCL so does this.)

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3, for the formats.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in HALF:
            raise ValueError(f"Rounded: dtype must be one of {HALF}, got {self.dtype!r}")

    def for_bucket(self, gradients: Sequence[Tensor], comm: Comm) -> CommHook:
        _real(gradients)
        return self._reduce

    def _reduce(self, gradients: Tensor, comm: Comm) -> Handle:
        rows = _rows(gradients, comm.world).to(self.dtype)  # (world, n)
        part = comm.reduce_scatter(rows, torch.float32)

        def finish() -> Tensor:
            full = torch.empty_like(rows).view(-1)  # (world * n,)
            comm.shard(full).copy_(part.wait())
            return gradients.copy_(comm.all_gather(full).wait()[: gradients.numel()])

        return Handle((), finish)


@dataclass(frozen=True)
class Int8:
    """Gradients travel as whole steps of -127 to 127, each block of them with a scale of its own.

    An all-reduce cannot add such numbers: sums do not fit 8 bits, and each rank has other scales.
    So the parts go to their rank, are summed there in float32, and the mean travels as int8 again:
    two roundings, each off by half a step at most, whatever the world. A step is 1/127 of the
    largest value of its block, so one outlier coarsens no other block.

    block: elements that share a scale; a multiple of 4.

    Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016; blocks as
    in Wang et al., "ZeRO++", 2023, section 3.3, which sends the gradients by all-to-all too.
    """

    block: int = BLOCK

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 4 or self.block % 4:
            raise ValueError(f"Int8: block must be a multiple of 4 elements, got {self.block!r}")

    def for_bucket(self, gradients: Sequence[Tensor], comm: Comm) -> CommHook:
        _real(gradients)
        _one_group(self, comm)
        return self._reduce

    def _reduce(self, gradients: Tensor, comm: Comm) -> Handle:
        rows = quantise(_rows(gradients.float(), comm.world, self.block), self.block)
        parts = comm.all_to_all(rows)

        def finish() -> Tensor:
            mean = dequantise(parts.wait(), self.block).mean(0)  # (n,), in the order of ranks
            full = torch.empty_like(rows).view(-1)
            comm.shard(full).copy_(quantise(mean, self.block))
            whole = comm.all_gather(full).wait().view(rows.shape)
            values = dequantise(whole, self.block).flatten()
            return gradients.copy_(values[: gradients.numel()])

        return Handle((), finish)


@dataclass(frozen=True)
class TopK:
    """Each rank sends the largest `share` of its gradients, with their places.

    What is not sent waits in the residual and is added to the next gradient (error feedback), so
    over the steps all of it is sent: the sum of what a rank sent, and its residual, are the sum of
    its gradients. Without `feedback` it is lost, and the direction is biased.

    A pair takes 8 bytes, and all pairs go to all ranks: it sends less than float32 by an all-reduce
    only for a share below 1/N.

    Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, algorithm 1.
    """

    share: float
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"TopK: share must lie in (0, 1], got {self.share!r}")

    def for_bucket(self, gradients: Sequence[Tensor], comm: Comm) -> CommHook:
        _real(gradients)
        _one_group(self, comm)
        return _TopK(self, gradients)


class _TopK:
    def __init__(self, how: TopK, gradients: Sequence[Tensor]) -> None:
        numel = sum(g.numel() for g in gradients)
        self.count = max(1, round(how.share * numel))
        self.state: list[Tensor] = []  # the residual, (numel,)
        if how.feedback:
            self.state.append(gradients[0].new_zeros(numel, dtype=torch.float32))

    def __call__(self, gradients: Tensor, comm: Comm) -> Handle:
        total = sum(self.state, gradients.float())  # (numel,)
        places = total.abs().topk(self.count, sorted=False).indices  # (count,)
        pairs = torch.stack([places.int(), total[places].view(torch.int32)])  # (2, count)
        for residual in self.state:
            residual.copy_(total.index_fill(0, places, 0)).nan_to_num_(0, 0, 0)
        full = pairs.new_empty(comm.world * pairs.numel())
        comm.shard(full).copy_(pairs.flatten())
        gathered = comm.all_gather(full)

        def finish() -> Tensor:
            mean = torch.zeros_like(total)
            for places, values in gathered.wait().view(comm.world, 2, -1):  # in the order of ranks
                mean.index_add_(0, places, values.view(torch.float32))
            return gradients.copy_(mean.div_(comm.world))

        return Handle((), finish)


@dataclass(frozen=True)
class PowerSGD:
    """Each matrix M (n, m) of gradients travels as P (n, rank) and Q (m, rank), M about P Qᵀ.

    One step of the power method, begun where the last one ended: P = M Q, summed and made
    orthonormal, then Q = Mᵀ P, summed. Both are linear in M, so all-reduces can add them. What the
    mean P Qᵀ lacks of a rank's own M is added to its next gradient. Vectors, and matrices that
    would not shrink, travel whole, along with P.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"PowerSGD: rank must be a whole number from 1 on, got {self.rank!r}")

    def for_bucket(self, gradients: Sequence[Tensor], comm: Comm) -> CommHook:
        _real(gradients)
        return _PowerSGD(self.rank, gradients)


class _PowerSGD:
    def __init__(self, rank: int, gradients: Sequence[Tensor]) -> None:
        self.rank = rank
        self.layout = Layout(tuple(g.shape for g in gradients), world=1, rank=0)
        # fp32 for half precision, so that what is left out of the mean adds up; fp64 stays fp64
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        self.error = gradients[0].new_zeros(self.layout.padded, dtype=dtype)
        matrices, self.whole = self._split(self.error)
        self.qs = [m.new_empty(m.shape[1], rank) for m in matrices]
        self._draw()

    @property
    def state(self) -> list[Tensor]:
        return [self.error, *self.qs]

    def __call__(self, gradients: Tensor, comm: Comm) -> Handle:
        total = self.error + gradients  # (numel,)
        matrices, vectors = self._split(total)
        ps = [m @ _orthonormal(q) for m, q in zip(matrices, self.qs, strict=True)]
        sent = _end_to_end([*ps, *vectors], total)
        first = comm.all_reduce(sent)

        def finish() -> Tensor:
            *means, rest = _apart(first.wait().div_(comm.size), ps)
            ps_now = [_orthonormal(p) for p in means]
            qs = [m.T @ p for m, p in zip(matrices, ps_now, strict=True)]
            all_qs = comm.all_reduce(_end_to_end(qs, total)).wait().div_(comm.size)
            self.qs = [q.clone() for q in _apart(all_qs, qs)[:-1]]
            mean = torch.empty_like(total)
            parts, whole = self._split(mean)
            for part, p, q in zip(parts, ps_now, self.qs, strict=True):
                part.copy_(p @ q.T)
            for vector, value in zip(whole, _apart(rest, whole), strict=False):
                vector.copy_(value)
            self._keep(total, mean)
            return gradients.copy_(mean)

        return Handle((), finish)

    def _split(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the matrices that shrink, and of all else."""
        matrices, whole = [], []
        for view in self.layout.views(flat):
            matrix = view.flatten(1) if view.dim() > 1 else view
            shrinks = matrix.dim() == 2 and self.rank * sum(matrix.shape) < matrix.numel()
            (matrices if shrinks else whole).append(matrix if shrinks else view)
        return matrices, whole

    def _keep(self, total: Tensor, mean: Tensor) -> None:
        torch.sub(total, mean, out=self.error).nan_to_num_(0, 0, 0)
        for vector in self._split(self.error)[1]:
            vector.zero_()  # was sent whole
        if not all(q.isfinite().all() for q in self.qs):
            self._draw()

    def _draw(self) -> None:
        """The first Q: random, and the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        for q in self.qs:
            q.copy_(torch.randn(q.shape, generator=generator))


def _orthonormal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q


def _end_to_end(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(t.flatten() for t in tensors)])


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `flat` in these shapes, and what is left of it."""
    ends = [0]
    for tensor in like:
        ends.append(ends[-1] + tensor.numel())
    parts = [flat[a:b].view_as(t) for (a, b), t in zip(pairwise(ends), like, strict=True)]
    return [*parts, flat[ends[-1] :]]


def _rows(flat: Tensor, world: int, block: int = 1) -> Tensor:
    """(numel,) to (world, n): padded with zeros so that each row has whole blocks."""
    n = -(-flat.numel() // (world * block)) * block
    return pad(flat, (0, world * n - flat.numel())).view(world, n)


def _real(gradients: Sequence[Tensor]) -> None:
    if gradients[0].is_complex():
        raise TypeError(
            f"a communication hook compresses real gradients, and these are {gradients[0].dtype}. "
            "Fix: no comm_hook for this model."
        )


def _one_group(hook: object, comm: Comm) -> None:
    if comm.size > comm.world:
        raise ValueError(
            f"{type(hook).__name__} works inside one group, and here replicas, or ranks with other "
            "experts, stand behind it. Fix: Rounded or PowerSGD, or a mesh of one dimension."
        )
