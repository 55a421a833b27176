"""Jobs of lesson 02: ranks and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def tree_broadcast(answer: Callable[..., Any], *, tensor: torch.Tensor, root: int) -> dict:
    """tensor: what this rank begins with. Changed in place."""
    mine = tensor.clone()
    answer(mine, root)
    return {"tensor": mine}


def ring_all_reduce(answer: Callable[..., Any], *, tensor: torch.Tensor) -> dict:
    """tensor: 1-D, of any length. Changed in place."""
    mine = tensor.clone()
    answer(mine)
    return {"tensor": mine}


def reduce_scatter(answer: Callable[..., Any], *, tensor: torch.Tensor) -> dict:
    """tensor: 1-D, of any length; must stay as it is."""
    mine = tensor.clone()
    shard = answer(mine)
    return {"shard": shard, "tensor": mine}


def hangs(answer: Callable[..., Any]) -> dict:
    return {"named": answer()}
