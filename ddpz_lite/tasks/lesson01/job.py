"""Jobs of lesson 01: one device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
}


def trained(
    sizes: list[int], optimizer: str, dtype: str, tied: bool, frozen: bool, stepped: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of linear layers after one backward and, if `stepped`, one step.

    sizes: widths. tied: two more layers share one weight. frozen: the first layer takes no
    gradient.
    """
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    if tied:
        layers += [nn.Linear(sizes[-1], sizes[-1], bias=False) for _ in range(2)]
        layers[-1].weight = layers[-2].weight
    model = nn.Sequential(*layers).to(getattr(torch, dtype))
    if frozen:
        model[0].requires_grad_(False)
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(2, sizes[0], dtype=getattr(torch, dtype))).sum().backward()
    if stepped:
        made.step()
    return model, made


def state_bytes(answer: Callable[..., Any], **state: Any) -> dict[str, Any]:
    """state: the arguments of `trained`."""
    model, optimizer = trained(**state)
    return {"bytes": answer(model, optimizer)}


def accumulate(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    micro_batch: int,
    stale: bool,
) -> dict[str, Any]:
    """weights: of two linear layers with a tanh between. stale: the gradients of a step before are
    still there.
    """
    model = nn.Sequential(
        nn.Linear(*reversed(weights[0].shape), bias=False),
        nn.Tanh(),
        nn.Linear(*reversed(weights[1].shape), bias=False),
    )
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(value)
        if stale:
            parameter.grad = torch.ones_like(parameter)
    events: list[Any] = []

    def forward(_: Any, inputs: Any, output: torch.Tensor) -> None:
        events.append(["forward", len(inputs[0])])
        if output.requires_grad:
            output.register_hook(lambda _: events.append(["backward", len(output)]))

    model.register_forward_hook(forward)
    answer(model, nn.functional.mse_loss, x, y, micro_batch)
    return {
        "gradients": [p.grad for p in model.parameters()],
        "weights": list(model.parameters()),
        "events": events,
    }


def scaled_step(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    steps: list[list[torch.Tensor]],
    scale: float,
    interval: int,
) -> dict[str, Any]:
    """steps: for each step the gradients, as a backward of the scaled loss would leave them."""
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
    scaler = {"scale": scale, "good_steps": 0, "interval": interval}
    log = []
    for unscaled in steps:
        for parameter, gradient in zip(parameters, unscaled, strict=True):
            parameter.grad = gradient * scaler["scale"]
        stepped = answer(parameters, optimizer, scaler)
        log.append(
            {
                "stepped": stepped,
                "scale": scaler["scale"],
                "good_steps": scaler["good_steps"],
                "weights": [p.detach().clone() for p in parameters],
            }
        )
    return {"log": log}
