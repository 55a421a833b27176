"""Jobs of lesson 10: ZeRO-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...grade.beside import tell_when_reached
from ...wire import span


def layers(weights: list[torch.Tensor]) -> nn.Sequential:
    """Linear layers in a row, a tanh after each."""
    model = nn.Sequential()
    for index, weight in enumerate(weights):
        linear = nn.Linear(*weight.T.shape, bias=False)
        linear.weight.data.copy_(weight)
        linear.register_forward_hook(lambda _, __, y, index=index: tell_when_reached(y, index))
        model.extend([linear, nn.Tanh()])
    return model


def shard_gradients(
    answer: Callable[..., Any], *, weights: list[torch.Tensor], x: list[torch.Tensor]
) -> dict[str, Any]:
    """x: a batch for each backward; between them nothing is cleared."""
    model = layers(weights)
    parameters = list(model.parameters())
    shards = answer(model)
    alive: list[int] = []  # full gradients that are there when the next one is ready
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    after = []
    for batch in x:
        loss = model(batch).square().mean()
        with span("backward"):
            loss.backward()
        after.append(
            {
                "shards": [None if s is None else s.clone() for s in shards],
                "left": sum(p.grad is not None for p in parameters),
            }
        )
    return {"after": after, "alive": max(alive)}


def clip_shards(
    answer: Callable[..., Any],
    *,
    shards: list[torch.Tensor],
    replicated: list[torch.Tensor],
    max_norm: float,
) -> dict[str, Any]:
    """shards: this rank's parts. replicated: the same on every rank."""
    mine, same = [s.clone() for s in shards], [r.clone() for r in replicated]
    norm = answer(mine, same, max_norm)
    return {"norm": float(norm), "shards": mine, "replicated": same}
