"""Tensor parallelism: each rank holds some heads of attention and some columns of the MLP.

A pair of layers, the first cut by columns, the second by rows, needs one sum over ranks at its end:

    y = act(x A) B      rank t has A[:, t] and B[t]:  y = sum over t of act(x A[:, t]) B[t]

The activation works element by element, so it may come between; after a row-cut layer it may not,
for there each rank has only a part of a sum. Two functions mark the ends (f and g in the paper):

    f   copies in forward, sums the gradient over ranks in backward
    g   sums over ranks in forward, copies in backward

So attention and MLP call one all-reduce forward and one backward each, of the size of their input.
What is not cut (norms, embeddings, head, the bias of a row-cut layer) is the same on all ranks, and
so is its gradient.

In torch's convention a weight is (out, in): `ColumnLinear` cuts its rows, `RowLinear` its columns.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddpz_lite.model import GPT, Block
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import Cut, mark

Group = dist.DeviceMesh | dist.ProcessGroup | Comm | None


class _Copy(torch.autograd.Function):
    """f: this rank's layers see the whole input, so its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.clone(memory_format=torch.contiguous_format)
        return ctx.comm.all_reduce(own).wait(), None


class _Sum(torch.autograd.Function):
    """g: the output is the sum over ranks, so each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return comm.all_reduce(own).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CutLinear(nn.Linear):
    """This rank's part of a linear layer; `cuts` says which of its parameters are cut, and how.

    dim: the dimension of a parameter that is cut.
    """

    dim: int

    def __init__(self, linear: nn.Linear, comm: Comm, cuts: dict[str, Cut]) -> None:
        nn.Module.__init__(self)
        self.comm, self.cuts = comm, cuts
        for name, param in linear.named_parameters():
            cut, local = cuts.get(name), param
            if cut is not None:
                shape = list(cut.shape)
                shape[self.dim] //= comm.world
                local = nn.Parameter(cut.of(param.detach(), shape), param.requires_grad)
            self.register_parameter(name, local)
        if linear.bias is None:
            self.register_parameter("bias", None)
        self.out_features, self.in_features = self.weight.shape


class ColumnLinear(_CutLinear):
    """A linear layer of which each rank computes some outputs: (..., in) to (..., out / t).

    Args:
        linear: the whole layer, the same on all ranks; weight (out, in), bias (out) are cut.
        group: a process group or 1-D mesh; default: the world.
        blocks: how many matrices lie one above the other in `linear`, each of which is cut: 3 for
            the queries, keys and values of attention.

    Raises ValueError if the ranks do not divide a block.
    """

    dim = 0

    def __init__(self, linear: nn.Linear, group: Group = None, blocks: int = 1) -> None:
        comm, (out, inside) = Comm.of(group), linear.weight.shape
        _check(out // blocks, comm, "outputs")
        where = {"outer": blocks, "parts": comm.world, "part": comm.rank}
        cuts = {"weight": Cut((out, inside), **where)}
        if linear.bias is not None:
            cuts["bias"] = Cut((out,), **where)
        super().__init__(linear, comm, cuts)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x, self.comm), self.weight, self.bias)  # (..., out / t)


class RowLinear(_CutLinear):
    """A linear layer of which each rank has some inputs: (..., in / t) to the whole (..., out).

    `linear` and `group` as for `ColumnLinear`; ValueError if the ranks do not divide the inputs.
    The bias is whole on every rank and is added after the sum: each rank that added it before would
    add it once more.
    """

    dim = 1

    def __init__(self, linear: nn.Linear, group: Group = None) -> None:
        comm, (out, inside) = Comm.of(group), linear.weight.shape
        _check(inside, comm, "inputs")
        super().__init__(linear, comm, {"weight": Cut((out, inside), out, comm.world, comm.rank)})

    def forward(self, x: Tensor) -> Tensor:
        y = _Sum.apply(F.linear(x, self.weight), self.comm)  # (..., out)
        return y if self.bias is None else y + self.bias


def tensor_parallel(gpt: GPT, group: Group = None) -> GPT:
    """Cut attention and MLP of every block over the ranks of `group`, in place; returns the GPT.

    Rank 0's weights win. Embeddings, norms and head stay whole. Every rank must be given the same
    batch. Norms of the gradient count what is whole once if the optimizer comes from `parallelize`
    with a mesh.

    Raises ValueError if the ranks do not divide the heads, for a GPT on the meta device, and for
    dropout: masks would have to differ between heads and agree everywhere else.
    """
    comm, heads = Comm.of(group), gpt.config.heads
    if comm.world == 1:
        return gpt
    if any(p.is_meta for p in gpt.parameters()):
        raise ValueError("tensor_parallel needs a GPT with values, not one on the meta device")
    if gpt.config.dropout:
        raise ValueError(
            f"tensor_parallel with dropout {gpt.config.dropout}: ranks that draw different masks "
            "would train different embeddings and norms. Fix: GPTConfig(dropout=0)."
        )
    _check(heads, comm, "heads")
    comm.broadcast(list(gpt.parameters()))
    for block in (module for module in gpt.modules() if isinstance(module, Block)):
        attention = block.attention
        attention.heads = heads // comm.world
        attention.qkv = ColumnLinear(attention.qkv, comm, blocks=3)
        attention.out = RowLinear(attention.out, comm)
        block.up, block.down = ColumnLinear(block.up, comm), RowLinear(block.down, comm)
    cut = {id(m._parameters[n]) for m in gpt.modules() for n in getattr(m, "cuts", ())}
    for param in gpt.parameters():
        mark(param, elsewhere=comm.rank > 0 and id(param) not in cut)
    return gpt


def _check(count: int, comm: Comm, what: str) -> None:
    if count % comm.world:
        raise ValueError(
            f"{count} {what} do not divide into {comm.world} ranks. Fix: a number of ranks that "
            f"divides {count}."
        )
