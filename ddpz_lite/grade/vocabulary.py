"""What the judges of several lessons say or compute alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..wire import Record


def world_name(world: int) -> str:
    """The size of a world in words: "1 rank", "3 ranks"."""
    return "1 rank" if world == 1 else f"{world} ranks"


def nbytes(call: Record) -> int:
    """Bytes of the full tensor of a call: of all that an all_gather brings, say."""
    return call.elements * getattr(torch, call.dtype).itemsize


def padded_shards(tensors: Sequence[torch.Tensor], world: int) -> list[torch.Tensor]:
    """All tensors end to end, padded with zeros and cut: (ceil(numel / world),) for each rank."""
    flat = torch.cat([t.flatten() for t in tensors])
    size = -(-len(flat) // world)
    return list(torch.nn.functional.pad(flat, (0, size * world - len(flat))).split(size))
