"""Jobs of lesson 09: ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def shard_owners(answer: Callable[..., Any], *, sizes: list[int]) -> dict[str, Any]:
    """sizes: elements of each parameter."""
    return {"owners": answer(list(sizes))}


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def _recorded(kind: type) -> tuple[type, list[torch.optim.Optimizer]]:
    """The optimizer class, and a list of all of its instances that will be made."""
    made: list[torch.optim.Optimizer] = []

    class Recorded(kind):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    Recorded.__name__ = Recorded.__qualname__ = kind.__name__
    return Recorded, made


def zero1(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    optimizer: str,
    factors: list[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """gradients: of this rank, for each step and parameter.

    factors: for each step; after it, this rank's exp_avg are multiplied by them. No other rank
    knows them, so only who steps with these very states comes to the right parameters.
    """
    kind, options = OPTIMIZERS[optimizer]
    recorded, made = _recorded(kind)
    parameters = [nn.Parameter(w.clone()) for w in weights]
    sharded = answer(parameters, recorded, **options)
    after, first = [], []
    for number, step in enumerate(gradients):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        sharded.step()
        after.append([p.detach().clone() for p in parameters])
        if factors is not None:
            means = [s["exp_avg"] for o in made for s in o.state.values() if "exp_avg" in s]
            first = first or [state.clone() for state in means]
            for state in means:
                state *= factors[number][: state.numel()].view_as(state)
    kept = [item for o in made for state in o.state.values() for item in state.items()]
    states = [t for name, t in kept if torch.is_tensor(t) and name != "step"]
    return {"after": after, "states": states, "first": first}
