"""Jobs of lesson 16: beyond one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ddpz_lite.course.check.watch import Kept
from ddpz_lite.wire import span


def hierarchical(
    answer: Callable[..., Any], *, nodes: list[int], tensors: list[torch.Tensor]
) -> dict[str, Any]:
    """nodes: of each rank its node. tensors: for each call, 1-D. Changed in place.

    What is built first, once, is built in the span "groups".
    """
    kept = Kept(nodes=nodes)
    with span("groups"):
        reduce = answer(nodes)
    groups = [len(c10d._world.pg_map)]
    for number, tensor in enumerate(tensors):
        with span(f"call {number}"):
            reduce(tensor)
        groups.append(len(c10d._world.pg_map))
    return {"tensors": tensors, "changed": kept.changed(), "groups": groups}


def halving_doubling(answer: Callable[..., Any], *, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """tensors: for each call, 1-D, of any length. Changed in place."""
    for number, tensor in enumerate(tensors):
        with span(f"call {number}"):
            answer(tensor)
    return {"tensors": tensors}


def broadcast(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the arguments of each call. Of these, the tensor is changed in place.

    What is judged is the memory that each tensor had at first.
    """
    kept = Kept(nodes=[call["nodes"] for call in calls])
    tensors = [call["tensor"].detach() for call in calls]
    for number, call in enumerate(calls):
        with span(f"call {number}"):
            answer(**call)
    return {"tensors": tensors, "changed": kept.changed()}


def launch_plan(answer: Callable[..., Any], *, plans: list[dict[str, Any]]) -> dict[str, Any]:
    """plans: the keyword arguments of one call each."""
    kept = Kept(plans=plans)
    return {"lines": [answer(**plan) for plan in plans], "changed": kept.changed()}


def capstone(answer: Callable[..., Any], *, seed: int | None = None) -> dict[str, Any]:
    """seed: the learner's, for the judge; the answer has it from `check.seed()`."""
    return {"page": answer()}
