"""Jobs of lesson 19: experts that lie on different ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddpz_lite.course.check.watch import Kept
from ddpz_lite.wire import span


def route(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the arguments of each."""
    kept = Kept(calls=calls)
    results = [answer(**call) for call in calls]
    return {"results": results, "changed": kept.changed()}


def dispatch_combine(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: tokens, experts and weights of this rank, "matrices" of its own experts, (own, h, h),
    the "number" of experts, and the "upstream" gradient of the result.
    """
    kept = Kept(calls=calls)
    results = []
    for number, call in enumerate(calls):
        tokens = call["tokens"].clone().requires_grad_()
        weights = call["weights"].clone().requires_grad_()
        matrices = call["matrices"].clone().requires_grad_()
        log: list[list[int]] = []
        compute = _computing(matrices, log)
        with span(f"call {number}"):
            out = answer(tokens, call["experts"], weights, call["number"], compute)
        result = {"out": out, "log": log}
        if isinstance(out, torch.Tensor):
            with span(f"backward {number}"):
                out.backward(call["upstream"].clone())
            result |= {"tokens": tokens.grad, "weights": weights.grad, "matrices": matrices.grad}
        results.append(result)
    return {"results": results, "changed": kept.changed()}


def _computing(matrices: torch.Tensor, log: list[list[int]]) -> Callable[..., torch.Tensor]:
    own = len(matrices)
    first = dist.get_rank() * own

    def compute(expert: int, x: torch.Tensor) -> torch.Tensor:
        """What an expert of this rank makes of some tokens, (rows, h): (rows, h)."""
        if not first <= expert < first + own:
            raise ValueError(
                f"expert {expert} is not on rank {dist.get_rank()}, which has {first} to "
                f"{first + own - 1}"
            )
        log.append([int(expert), len(x)])
        return torch.tanh(x @ matrices[expert - first])

    return compute


def expert_gradients(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: "dense" and "experts", the gradients on this rank (None where there is none), with
    "shapes" of the experts, the size of the expert group, "group", and "max_norm".
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    groups: dict[int, tuple[Any, Any]] = {}
    for size in sorted({call["group"] for call in calls}):
        own = [list(range(r, r + size)) for r in range(0, world, size)]
        replicas = [list(range(r, world, size)) for r in range(size)]
        made = [[dist.new_group(ranks) for ranks in kind] for kind in (own, replicas)]
        groups[size] = made[0][rank // size], made[1][rank % size]
    results = []
    for number, call in enumerate(calls):
        given = {"dense": [], "experts": []}
        for name, shapes in (("dense", call["dense_shapes"]), ("experts", call["shapes"])):
            for gradient, shape in zip(call[name], shapes, strict=True):
                p = torch.nn.Parameter(torch.zeros(*shape))
                p.grad = None if gradient is None else gradient.clone()
                given[name].append(p)
        expert_group, replicas = groups[call["group"]]
        with span(f"call {number}"):
            norm = answer(
                given["dense"], given["experts"], expert_group, replicas, call["max_norm"]
            )
        results.append(
            {
                "norm": norm,
                "dense": [p.grad for p in given["dense"]],
                "experts": [p.grad for p in given["experts"]],
                "same": not any(p.any().item() for ps in given.values() for p in ps),
            }
        )
    return {"results": results}


def balance(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: logits and experts of each, and the factor "times" of the loss in backward."""
    kept = Kept(calls=calls)
    results = []
    for number, call in enumerate(calls):
        logits = call["logits"].clone().requires_grad_()
        with span(f"call {number}"):
            loss = answer(logits, call["experts"])
        result = {"loss": loss.detach().clone() if isinstance(loss, torch.Tensor) else loss}
        result |= {"early": logits.grad is not None, "grad": None}
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            with span(f"backward {number}"):
                (loss * call["times"]).backward()
            result["grad"] = logits.grad
        results.append(result)
    return {"results": results, "changed": kept.changed()}


def place(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    kept = Kept(questions=questions)
    return {"plans": [answer(**question) for question in questions], "changed": kept.changed()}
