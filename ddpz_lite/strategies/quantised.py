"""Numbers in 8 bits, to be sent: integer steps of -127 to 127, a scale for each block of them.

A step is 1/127 of the largest value of its block, so a number comes back within half a step, and
one outlier coarsens no other block. n numbers take n + 4 n / block bytes.

Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016; blocks as in
Wang et al., "ZeRO++", 2023, section 3 (qwZ).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddpz_lite.strategies.comm import Comm, Handle

BLOCK = 256  # elements that share a scale


def quantise(values: Tensor, block: int = BLOCK) -> Tensor:
    """(..., n) float32, n in whole blocks, to (..., n + 4 n / block) int8: steps, scales."""
    blocks = values.unflatten(-1, (-1, block))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo().tiny)
    steps = (blocks / scales).round().to(torch.int8).flatten(-2)
    return torch.cat([steps, scales.squeeze(-1).view(torch.int8)], -1)


def dequantise(packed: Tensor, block: int = BLOCK) -> Tensor:
    """What `quantise` made, back in float32: (..., n)."""
    n = packed.shape[-1] * block // (block + 4)
    scales = packed[..., n:].clone().view(torch.float32)  # (..., n / block)
    return (packed[..., :n].unflatten(-1, (-1, block)) * scales.unsqueeze(-1)).flatten(-2)


def padded(shard: Tensor) -> Tensor:
    """(n,) to (n + p,) float32, in whole blocks."""
    return pad(shard.float(), (0, -shard.numel() % BLOCK))


def rounded(shard: Tensor) -> Tensor:
    """What the ranks get of a shard (n,) by `all_gather`: float32."""
    return dequantise(quantise(padded(shard)))[: shard.numel()]


def all_gather(comm: Comm, shard: Tensor, full: Tensor) -> Handle:
    """Shard to Replicate: every rank's `shard` (n,), rounded, in `full` (n * world,).

    This rank's own is rounded too, so that all compute with the same numbers; `shard` itself stays.
    """
    local = quantise(padded(shard)).to(full.device)  # (m,)
    rows = local.new_empty(comm.world * local.numel())  # (world * m,)
    comm.shard(rows).copy_(local)
    gathered = comm.all_gather(rows)

    def finish() -> Tensor:
        values = dequantise(gathered.wait().view(comm.world, -1))
        return full.view(comm.world, -1).copy_(values[:, : shard.numel()]).view(-1)

    return Handle((), finish)
