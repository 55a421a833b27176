"""Jobs of lesson 10: ZeRO-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpz_lite.course.check.watch import Holding, Kept, tell_when_reached
from ddpz_lite.wire import span


def _laid_out(tensor: torch.Tensor, turned: bool) -> torch.Tensor:
    """A copy, with its memory in the order of its transpose if `turned`."""
    if turned and tensor.dim() == 2:
        return tensor.T.clone(memory_format=torch.contiguous_format).T
    return tensor.clone()


def layers(weights: list[torch.Tensor], turned: bool = False) -> nn.Sequential:
    """Linear layers in a row, a tanh after each.

    turned: the weights are transposed views, and the last one comes first in `parameters()`.
    """
    model = nn.Sequential()
    for index, weight in enumerate(weights):
        linear = nn.Linear(*weight.T.shape, bias=False, dtype=weight.dtype)
        linear.weight = nn.Parameter(_laid_out(weight, turned))
        linear.register_forward_hook(lambda _, __, y, index=index: tell_when_reached(y, index))
        model.extend([linear, nn.Tanh()])
    if turned:
        model.register_parameter("last", model[-2].weight)
    return model


def shard_gradients(
    answer: Callable[..., Any],
    *,
    models: list[list[torch.Tensor]],
    x: list[torch.Tensor],
    turned: bool = False,
) -> dict[str, Any]:
    """models: of each, the weights. x: a batch for each backward of all of them in turn; before the
    last one the shards are cleared.
    """
    rows = [layers(weights, turned) for weights in models]
    parameters = [p for row in rows for p in row.parameters()]
    holding = Holding([*parameters, *x])
    with holding:
        every = [answer(row) for row in rows]
    alive: list[int] = []  # full gradients that are there when the next one is ready
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    after = []
    for number, batch in enumerate(x):
        if number == len(x) - 1:
            for shards in every:
                shards[:] = [None] * len(shards)
        for row in rows:
            loss = row(batch).square().mean()
            with holding, span("backward"):
                loss.backward()
            del loss
        shards = [shard for shards in every for shard in shards]
        now = {"shards": [None if s is None else s.clone() for s in shards]}
        now["left"] = sum(p.grad is not None for p in parameters)
        after.append(now | {"held": holding.now()})
    return {"after": after, "alive": max(alive)}


def clip_shards(
    answer: Callable[..., Any], *, calls: list[dict[str, Any]], turned: bool = False
) -> dict[str, Any]:
    """calls: for each the shards of this rank, the replicated ones, the same on every rank, and the
    limit. turned: two-dimensional ones are transposed views.
    """

    results = []
    for call in calls:
        shards, replicated = (
            [_laid_out(t, turned) for t in call[name]] for name in ("shards", "replicated")
        )
        norm = answer(list(shards), list(replicated), call["max_norm"])
        results.append({"norm": norm, "shards": shards, "replicated": replicated})
    return {"calls": results}


def keep_whole(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    kept = Kept(questions=questions)
    return {"plans": [answer(**question) for question in questions], "changed": kept.changed()}
