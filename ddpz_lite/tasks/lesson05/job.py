"""Jobs of lesson 05: DDP."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep  # its own: an answer may patch the module's
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...grade.beside import tell_when_reached
from ...wire import span


class _Net(nn.Module):
    """Linear layers in a row. `order` is the order in which two branches at the end are computed,
    which backward walks the other way round.
    """

    def __init__(self, weights: list[torch.Tensor], tied: bool, frozen: int | None, order: str):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*w.T.shape, bias=False) for w in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight.data.copy_(weight)
        if tied:
            self.layers[-1].weight = self.layers[-2].weight
        if frozen is not None:
            self.layers[frozen].weight.requires_grad_(False)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *trunk, left, right = self.layers
        for index, layer in enumerate(trunk):
            x = torch.tanh(layer(x))
            tell_when_reached(x, index)
        if self.order == "left first":
            a = left(x)
            b = right(x)
        else:
            b = right(x)
            a = left(x)
        return (a + 2 * b).square().mean()


def _net(weights, tied=False, frozen=None, order="left first") -> _Net:
    return _Net(weights, tied, frozen, order)


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def hooks(
    answer: Callable[..., Any],
    *,
    x: list[torch.Tensor],
    options: dict[str, Any] | None = None,
    **net,
) -> dict[str, Any]:
    """x: one batch for each step; gradients are dropped between steps. options: for the answer."""
    model = _net(**net)
    with span("attach"):
        answer(model, **(options or {}))
    steps = []
    for batch in x:
        model.zero_grad()
        loss = model(batch)
        with span("backward"):
            loss.backward()
        steps.append(_gradients(model))
    return {"steps": steps, "weights": list(model.parameters())}


class _Slow(torch.autograd.Function):
    """The identity, with a backward that takes its time. What computes is a span "compute"."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with span("compute"):
            sleep(ctx.seconds)
        return gradient, None


def overlap(
    answer: Callable[..., Any], *, weights: list[torch.Tensor], x: torch.Tensor, seconds: float
) -> dict[str, Any]:
    """A row of layers; before each layer's gradient, backward computes for `seconds`."""
    layers = [nn.Linear(*w.T.shape, bias=False) for w in weights]
    model = nn.Sequential(*layers)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data.copy_(weight)
    answer(model)
    dist.barrier()
    for layer in layers:
        x = torch.tanh(_Slow.apply(layer(x), seconds))
    loss = x.square().mean()
    with span("backward"):
        loss.backward()
    return {"gradients": _gradients(model)}


def no_sync(
    answer: Callable[..., Any], *, weights: list[torch.Tensor], x: list[torch.Tensor], fails: bool
) -> dict[str, Any]:
    """All batches but the last under no_sync. fails: an exception leaves it, before the first."""
    model = _net(weights)
    quiet = answer(model)
    if fails:
        try:
            with quiet():
                raise ArithmeticError
        except ArithmeticError:
            pass
    else:
        for batch in x[:-1]:
            with quiet():
                loss = model(batch)
                with span("silent"):
                    loss.backward()
    inside = _gradients(model)
    loss = model(x[-1])
    with span("synced"):
        loss.backward()
    return {"inside": inside, "gradients": _gradients(model)}
