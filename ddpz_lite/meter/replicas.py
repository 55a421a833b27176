"""Find replicas that differ, by checksums of their tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


def checksums(tensors: nn.Module | Mapping[str, Tensor]) -> dict[str, str]:
    """{name: 16 hex digits} of the bits of each tensor on this rank; nothing is sent.

    tensors: a module (its parameters and buffers), or tensors by name. Equal bits, dtype and shape
    give equal digits; 0.0 and -0.0 differ, as do sums in a different order.
    """
    if isinstance(tensors, nn.Module):
        tensors = dict([*tensors.named_parameters(), *tensors.named_buffers()])
    return {name: _digest(tensor.detach()) for name, tensor in tensors.items()}


def drifted(
    tensors: nn.Module | Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, tuple[int, ...]]:
    """{name: ranks whose tensor differs from the majority}; empty if all replicas are equal.

    Every rank of the group must call it: one gather of names and checksums, 16 hex digits a tensor.
    Ranks are those of the group; without a majority, rank 0's value counts as right. A name that a
    rank does not have counts as another value. Use it for replicated tensors: the shards of ZeRO-3
    always differ.
    """
    local = checksums(tensors)
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, local, group)
    odd: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(name for sums in found for name in sums):
        values = [sums.get(name) for sums in found]
        right = Counter(values).most_common(1)[0][0]  # of equal counts the first, so rank 0's
        if others := tuple(rank for rank, value in enumerate(values) if value != right):
            odd[name] = others
    return odd


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()  # (bytes,)
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    return hashlib.blake2b(data, digest_size=8, key=kind.encode()[:64]).hexdigest()
