"""Jobs of lesson 02: ranks and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddpz_lite.wire import span


def tree_broadcast(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the "tensor" that this rank begins with, changed in place, and the "root"."""
    for number, call in enumerate(calls):
        with span(f"call {number}"):
            answer(call["tensor"], call["root"])
    return {"tensors": [call["tensor"] for call in calls]}


def ring_all_reduce(answer: Callable[..., Any], *, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """tensors: for each call, 1-D, of any length. Changed in place."""
    for number, tensor in enumerate(tensors):
        with span(f"call {number}"):
            answer(tensor)
    return {"tensors": tensors}


def reduce_scatter(answer: Callable[..., Any], *, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """tensors: for each call, 1-D, of any length; must stay as they are."""
    shards = []
    for number, tensor in enumerate(tensors):
        with span(f"call {number}"):
            shards.append(answer(tensor))
    return {"shards": shards, "tensors": tensors}


def node_all_reduce(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the "tensor" that this rank begins with, changed in place, and the "nodes"."""
    for number, call in enumerate(calls):
        with span(f"call {number}"):
            answer(call["tensor"], list(call["nodes"]))
    return {"tensors": [call["tensor"] for call in calls]}


def hangs(answer: Callable[..., Any]) -> dict:
    return {"named": answer()}
