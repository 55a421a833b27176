"""Ulysses: an all-to-all turns some tokens of all heads into all tokens of some heads, and back.

Attention treats each head alone, so a rank with all tokens of H / N heads computes them as one
process would, with any mask and any kernel. Each of the four tensors (queries, keys, values, and
the output on its way back) sends (N - 1) / N of a rank's T / N tokens: less, the more ranks there
are. But there can be no more ranks than heads.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models", 2023, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.context.order import Order


def heads_of(part: Tensor, comm: Comm, order: Order) -> Tensor:
    """Tokens (K, B, H, T / N, D) of each rank to heads (K, B, H / N, T, D), tokens in order."""
    rows = torch.stack(part.chunk(comm.world, 2))  # (N, K, B, H / N, T / N, D): row r for rank r
    received = comm.all_to_all(rows.view(comm.world, -1)).wait().view(rows.shape)
    return order.join(list(received), dim=3)


def tokens_of(full: Tensor, comm: Comm, order: Order) -> Tensor:
    """Heads (K, B, H / N, T, D) of each rank to tokens (K, B, H, T / N, D)."""
    ranks = range(comm.world)
    rows = torch.stack([Order(comm.world, r, order.zigzag).of(full, dim=3) for r in ranks])
    received = comm.all_to_all(rows.view(comm.world, -1)).wait().view(rows.shape)
    return torch.cat(list(received), 2)


class ToHeads(torch.autograd.Function):
    """`heads_of`; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm, order: Order) -> Tensor:
        ctx.comm, ctx.order = comm, order
        return heads_of(part, comm, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return tokens_of(grad, ctx.comm, ctx.order), None, None


class ToTokens(torch.autograd.Function):
    """`tokens_of`; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, comm: Comm, order: Order) -> Tensor:
        ctx.comm, ctx.order = comm, order
        return tokens_of(full, comm, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return heads_of(grad, ctx.comm, ctx.order), None, None
