"""Backward in two halves: the gradient of the input now, those of the weights when there is time.

    with deferred(later):
        output = module(x)
    output.backward(gradient)     # gradients of inputs, norms, biases, embeddings
    accumulate(later)             # gradients of the matrices

In a linear layer y = x W^T the two halves are matrix products of the same size, and only dx = dy W
is needed by the layer before. So `deferred` replaces each such product of the forward by one whose
backward computes dx and keeps (x, dy) in `later`; `accumulate` computes dW = dy^T x from them.

Layers are found where they call `torch.nn.functional.linear` with a parameter. Other parameters
get their gradients in the first half, which is correct, but leaves less for the second. The same
holds under autocast, where a layer computes with copies of its weights, and where hooks decide what
is saved for backward: activation checkpoints, which compute the layer again in backward.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2 (B and W).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Later = list[tuple[nn.Parameter, Tensor, Tensor]]  # weight (out, in), x (..., in), dy (..., out)


class deferred(TorchFunctionMode):
    """Inside, linear layers keep what their weights' gradients need in `later`."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self.later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(func, self.later, *args, **kwargs)
        return func(*args, **kwargs)


def _linear(
    func: Callable[..., Tensor], later: Later, input: Tensor, weight: Tensor, bias: Any = None
) -> Tensor:
    learns = isinstance(weight, nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()
    plain = not torch.is_autocast_enabled(weight.device.type) and not _saves_by_hooks()
    if learns and plain and weight.is_floating_point():
        return _Linear.apply(input, weight, bias, later)
    return func(input, weight, bias)


def _saves_by_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def accumulate(later: Later) -> None:
    """Add the weights' gradients to their `.grad`, in one backward; `later` is empty afterwards."""
    if later:
        torch.autograd.backward([_Weight.apply(*one) for one in later])
        later.clear()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        ctx.later.append((ctx.weight, x.detach(), grad))
        of_x = grad @ weight if ctx.needs_input_grad[0] else None  # (..., in)
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None  # (out,)
        return of_x, None, of_bias, None


class _Weight(torch.autograd.Function):
    """A zero whose gradient for the weight is dy^T x: so hooks of the parameter run as always."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(x, grad)
        return grad.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        x, grad = ctx.saved_tensors
        return grad.flatten(0, -2).T @ x.flatten(0, -2), None, None  # (out, in)
