"""Jobs of lesson 03: data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def same_start(answer: Callable[..., Any], *, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """state: what this rank's model holds at first, parameters and buffers by name."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[3].weight = model[2].weight
    model.load_state_dict(state)
    answer(model)
    return {
        "state": dict(model.state_dict()),
        "tied": model[3].weight is model[2].weight,
        "trainable": [p.requires_grad for p in model.parameters()],
    }


def average_gradients(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
) -> dict[str, Any]:
    """gradients: of this rank; None for a parameter that has none, on any rank."""
    model = nn.Module()
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        parameter = nn.Parameter(weight.clone(), requires_grad=gradient is not None)
        parameter.grad = None if gradient is None else gradient.clone()
        model.register_parameter(f"p{index}", parameter)
    answer(model)
    parameters = list(model.parameters())
    return {"gradients": [p.grad for p in parameters], "weights": parameters}


def weighted_mean(
    answer: Callable[..., Any], *, gradients: list[torch.Tensor], samples: int
) -> dict[str, Any]:
    """gradients: this rank's mean over its `samples` samples, one tensor per parameter."""
    mine = [gradient.clone() for gradient in gradients]
    answer(mine, samples)
    return {"gradients": mine}


def rank_indices(
    answer: Callable[..., Any], *, length: int, seed: int, evaluate: bool
) -> dict[str, Any]:
    """Epochs 0 and 1, and epoch 0 once more; other: epoch 0 with another seed."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    epochs = [list(map(int, answer(length, epoch, seed, evaluate))) for epoch in (0, 1, 0)]
    other = list(map(int, answer(length, 0, seed + 1, evaluate)))
    disturbed = not torch.equal(before, torch.get_rng_state())
    return {"epochs": epochs, "other": other, "disturbed": disturbed}


def batch_norm(
    answer: Callable[..., Any],
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> dict[str, Any]:
    """x: this rank's rows, (rows, channels)."""
    y = answer(x.clone(), weight, bias, eps)
    return {"y": y}


def f1(
    answer: Callable[..., Any], *, predicted: torch.Tensor, labels: torch.Tensor
) -> dict[str, Any]:
    """predicted, labels: of this rank's samples, bool, (samples,)."""
    value = answer(predicted.clone(), labels.clone())
    return {"f1": value}
