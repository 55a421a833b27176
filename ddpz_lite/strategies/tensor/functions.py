"""What tensor parallelism sends, as autograd functions: in pairs, each the other's backward.

    function         forward               backward             the tensor is, before and after
    copy     f       nothing               all-reduce           replicated, replicated
    add      g       all-reduce            nothing              partial, replicated
    split            a slice               all-gather           replicated, cut by tokens
    join             all-gather            a slice              cut by tokens, replicated
    scatter  g'      reduce-scatter        all-gather           partial, cut by tokens
    gather_linear    all-gather, product   again; reduce-scatter    cut by tokens, cut by columns

A tensor is cut by tokens along its second-to-last dimension, (..., T, C) to (..., T / t, C).

Sources: Shoeybi et al., "Megatron-LM", 2019, section 3 (f, g); Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, section 4.2.2 (by tokens).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddpz_lite.strategies.comm import Comm

HALF = (torch.bfloat16, torch.float16)


def all_gather_tokens(part: Tensor, comm: Comm) -> Tensor:
    """(..., T / t, C) of each rank to (..., T, C)."""
    full = part.new_empty(comm.world * part.numel())
    comm.shard(full).copy_(part.reshape(-1))
    parts = comm.all_gather(full).wait().view(comm.world, *part.shape)
    return torch.cat(parts.unbind(), -2)


def reduce_scatter_tokens(partial: Tensor, comm: Comm) -> Tensor:
    """(..., T, C) of each rank to this rank's tokens of the sum, (..., T / t, C)."""
    parts = torch.stack(partial.chunk(comm.world, -2))  # (t, ..., T / t, C)
    dtype = torch.float32 if partial.dtype in HALF else partial.dtype
    mean = comm.reduce_scatter(parts.view(comm.world, -1), dtype).wait()
    return mean.mul_(comm.world).to(partial.dtype).view(parts.shape[1:])


def tokens_of(full: Tensor, comm: Comm) -> Tensor:
    """This rank's tokens, (..., T / t, C). Raises ValueError if the ranks do not divide T."""
    if full.shape[-2] % comm.world:
        raise ValueError(
            f"{full.shape[-2]} tokens do not divide into {comm.world} ranks, so they cannot be "
            f"cut. Fix: windows of a multiple of {comm.world} tokens, or sequence=False."
        )
    return full.chunk(comm.world, -2)[comm.rank].contiguous()


class Copy(torch.autograd.Function):
    """f: this rank's layers see the whole input, so its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.clone(memory_format=torch.contiguous_format)
        return ctx.comm.all_reduce(own).wait(), None


class Add(torch.autograd.Function):
    """g: the output is the sum over ranks, so each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return comm.all_reduce(own).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Split(torch.autograd.Function):
    """The same tensor on all ranks, of which each goes on with its tokens."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return tokens_of(tensor, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_tokens(grad, ctx.comm), None


class Join(torch.autograd.Function):
    """All tokens on all ranks, which do the same with them: so gradients are the same, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return all_gather_tokens(tensor, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return tokens_of(grad, ctx.comm), None


class Scatter(torch.autograd.Function):
    """g of sequence parallelism: the sum over ranks, of which each gets its tokens."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        tokens_of(tensor, comm)  # or an error
        return reduce_scatter_tokens(tensor, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_tokens(grad, ctx.comm), None


class GatherLinear(torch.autograd.Function):
    """f of sequence parallelism and the linear layer after it: x (..., T / t, C) to (..., T, out).

    Backward needs all tokens for the weight's gradient. It gathers them again, because keeping
    them would keep t times the activation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, comm: Comm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return F.linear(all_gather_tokens(x, comm), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = reduce_scatter_tokens(grad @ weight, ctx.comm)  # (..., T / t, C)
        if ctx.needs_input_grad[1]:
            full = all_gather_tokens(x, ctx.comm)  # (..., T, C)
            of_weight = grad.flatten(0, -2).T @ full.flatten(0, -2)  # (out, C)
        if ctx.needs_input_grad[2]:
            of_bias = grad.flatten(0, -2).sum(0)  # (out,)
        return of_x, of_weight, of_bias, None
