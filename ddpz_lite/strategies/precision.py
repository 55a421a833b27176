"""Mixed precision: half-precision compute, fp32 master copies, and a loss scale for fp16.

The master copies and the reduction are made by the strategies (`Flat`). Here is what is left, and
it belongs to the ends of the model, so that the training loop stays as it was:

    inputs    floating-point tensors become bf16 or fp16 before the model
    outputs   become fp32 after it, so that the loss is computed in fp32
    gradient  fp16: is multiplied by the loss scale where backward enters the model, divided by it
              where backward leaves by an input, and just before the step; the user's loss is never
              touched, so a term of it that reads parameters, and no output, is not scaled

Source: Micikevicius et al., "Mixed Precision Training", 2018, sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors

from ddpz_lite.strategies.comm import Comm

HALF = (torch.bfloat16, torch.float16)


@dataclass
class LossScale:
    """A factor that keeps small fp16 gradients from becoming zero, and finds its own size.

    scale: the factor now. It doubles after `interval` good steps in a row, and halves when a
    gradient is inf or nan on any rank; that step is skipped on all ranks. `skipped` counts those.
    """

    scale: float = 2.0**16
    interval: int = 2000
    good: int = 0
    skipped: int = 0

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], comm: Comm, device: torch.device) -> bool:
        """Adapt the scale. Returns whether all gradients on all ranks are finite.

        One all-reduce of one number, so that every rank answers the same; none if `comm` is alone.
        """
        found_inf = torch.zeros((), device=device)  # () 0 or 1
        if gradients:
            one = torch.ones((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, one)
        finite = not comm.reduce_scalar(found_inf, maximum=True, everywhere=True).item()
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale, self.skipped = self.scale / 2, self.skipped + 1
        elif self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return finite


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss_scale: LossScale, power: int) -> Tensor:
        ctx.loss_scale, ctx.power = loss_scale, power
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.loss_scale.scale**ctx.power, None, None


def keeps_dtype(module: nn.Module) -> bool:
    """Whether the module's own parameters are never cast.

    True of BatchNorm: its running statistics are fp32, and torch's kernels take half-precision
    inputs with fp32 statistics only if weight and bias are fp32 too. It computes in fp32 then.
    """
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def cast_ends(module: nn.Module, dtype: torch.dtype, loss_scale: LossScale | None) -> None:
    """Cast the inputs of `module` to dtype and its outputs to fp32; scale its gradient.

    Tensors inside tuples, lists, dicts and dataclasses are found; integers stay as they are.
    Raises TypeError in a forward where none is found and a loss scale would be lost.
    """
    left: list[bool] = []

    def scaled(tensor: Tensor, power: int) -> Tensor:
        if loss_scale is None or not tensor.requires_grad:
            return tensor
        return _ScaleGradient.apply(tensor, loss_scale, power)

    def enter(tensor: Tensor) -> Tensor:
        return scaled(tensor, -1).to(dtype) if tensor.is_floating_point() else tensor

    def leave(tensor: Tensor) -> Tensor:
        left.append(True)
        return scaled(tensor.float(), 1) if tensor.is_floating_point() else tensor

    def leave_all(_: nn.Module, args: Any, output: Any) -> Any:
        left.clear()
        output = _apply_to_tensors(leave, output)
        if loss_scale is not None and not left:
            raise TypeError(
                f"fp16: no tensor was found in the model's output, a {type(output).__name__}, so "
                "its gradient would not be scaled. Fix: return a tensor, tuple, list, dict or "
                "dataclass."
            )
        return output

    module.register_forward_pre_hook(
        lambda _, args, kwargs: (_apply_to_tensors(enter, args), _apply_to_tensors(enter, kwargs)),
        with_kwargs=True,
    )
    module.register_forward_hook(leave_all)


def cast_module(
    module: nn.Module, dtype: torch.dtype | None, loss_scale: LossScale | None
) -> LossScale | None:
    """Cast the ends of the module; returns the loss scale, which fp16 has and nothing else."""
    if dtype not in (None, *HALF):
        raise ValueError(
            f"mixed_precision must be None, torch.bfloat16 or torch.float16, got {dtype!r}"
        )
    if dtype is torch.float16:
        loss_scale = loss_scale or LossScale()
    elif loss_scale is not None:
        raise ValueError("loss_scale needs mixed_precision=torch.float16; bf16 and fp32 need none")
    if dtype is not None:
        cast_ends(module, dtype, loss_scale)
    return loss_scale
