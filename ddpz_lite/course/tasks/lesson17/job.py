"""Jobs of lesson 17: the interview gym."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpz_lite.course.check.watch import Kept

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-3, "maximize": False}),
    "Adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.3, "eps": 1e-2, "maximize": True}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def each(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    kept = Kept(questions=questions)
    return {"answers": [answer(**question) for question in questions], "changed": kept.changed()}


def _recorded(kind: type) -> tuple[type, list[torch.optim.Optimizer]]:
    """The optimizer class, and a list of all of its instances that will be made."""
    made: list[torch.optim.Optimizer] = []

    class Recorded(kind):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    Recorded.__name__ = Recorded.__qualname__ = kind.__name__
    return Recorded, made


def _backward(
    parameters: list[nn.Parameter], steps: list[list[torch.Tensor]]
) -> tuple[Callable[[int], None], list[int]]:
    """backward(step), and a list of the steps that it was asked for."""
    counted: list[int] = []

    def backward(step: int) -> None:
        counted.append(step)
        for parameter, drawn in zip(parameters, steps[step], strict=True):
            parameter.grad = drawn + 0.5 * parameter.detach()

    return backward, counted


def repair(
    answer: Callable[..., Any],
    *,
    weights: list[list[torch.Tensor]],
    noise: list[list[list[torch.Tensor]]],
    optimizers: list[str],
) -> dict[str, Any]:
    """weights: this rank's own, for each call of the answer and parameter; optimizers: of each.

    noise: for each call, step and parameter. A gradient is this rank's noise, and half the weight
    as it is when it is asked for: who does not bring the new weights back gets other gradients.
    """
    after, states, asked = [], [], []
    for own, steps, name in zip(weights, noise, optimizers, strict=True):
        kind, options = OPTIMIZERS[name]
        parameters = [nn.Parameter(w.clone()) for w in own]
        recorded, made = _recorded(kind)
        backward, counted = _backward(parameters, steps)
        answer(list(parameters), backward, len(steps), recorded, **options)
        kept = [item for o in made for state in o.state.values() for item in state.items()]
        states.append([t.numel() for name, t in kept if torch.is_tensor(t) and name != "step"])
        after.append([p.detach().clone() for p in parameters])
        asked.append(counted)
    return {"after": after, "states": states, "asked": asked}
