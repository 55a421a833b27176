"""Simulated compute: layers that sleep for a known time and use no core.

On an accelerator the host is free while a kernel runs. Where ranks share the cores of one machine
they are not, and a picture of overlap would show how the ranks fight for them. So the lessons show
*time* with a model whose layers also sleep. Numbers, bytes, order and memory stay those of the
model.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from ddpz_lite.wire import span


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class _SleepInSpans(_Sleep):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        with span("forward"):
            return _Sleep.forward(ctx, x, forward, backward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        with span("backward"):
            return _Sleep.backward(ctx, gradient)


def simulate_compute(module: nn.Module, forward: float, backward: float) -> nn.Module:
    """Let the linear layers of `module` sleep, `forward` and `backward` seconds in all.

    Each sleeps in proportion to its weights, as it would compute; in backward before its own
    gradients are there. Returns the module; its outputs and gradients stay as they were. Raises
    ValueError for a module without a linear layer, or for negative seconds.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise ValueError(
            f"simulate_compute: {type(module).__name__} has no linear layer that could sleep."
        )
    _refuse_negative(forward, backward)
    weights = sum(layer.weight.numel() for layer in layers)
    for layer in layers:
        share = layer.weight.numel() / weights
        layer.register_forward_hook(
            lambda layer, inputs, y, share=share: _Sleep.apply(y, share * forward, share * backward)
        )
    return module


def simulate_compute_in_unit(module: nn.Module, forward: float, backward: float) -> nn.Module:
    """Let `module` sleep as a whole: after its own forward, and before its own backward.

    Each sleep is a span, "forward" or "backward", so that a timeline shows it as compute. Returns
    the module; its output, one tensor, and its gradients stay as they were. Raises ValueError for
    negative seconds.
    """
    _refuse_negative(forward, backward)
    module.register_forward_hook(lambda _, inputs, y: _SleepInSpans.apply(y, forward, backward))
    return module


def _refuse_negative(forward: float, backward: float) -> None:
    if forward < 0 or backward < 0:
        raise ValueError(
            f"simulate_compute: seconds must not be negative, got {forward} and {backward}."
        )
