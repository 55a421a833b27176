"""Two tensors, and one sentence on how they differ.

A judge compares with these and with nothing that an answer could have brought along: the result is
a plain tensor by now, and its dtype, shape and finiteness are looked at before its values.
"""

from __future__ import annotations

from typing import Any

import torch

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def differs(
    got: Any, wanted: torch.Tensor, what: str, *, rtol: float | None = None, bitwise: bool = False
) -> str | None:
    """None if `got` equals `wanted`; else what is wrong, beginning with `what`.

    rtol: relative to the largest wanted value; by default by dtype. bitwise: every bit.
    """
    if type(got) is not torch.Tensor:
        return f"{what} is {_name(got)}, and a tensor of shape {list(wanted.shape)} was expected."
    if got.dtype != wanted.dtype:
        return f"{what} has dtype {_dtype(got)}, and {_dtype(wanted)} was expected."
    if got.shape != wanted.shape:
        return f"{what} has shape {list(got.shape)}, and {list(wanted.shape)} was expected."
    if close(got, wanted, rtol=rtol, bitwise=bitwise):
        return None
    if got.is_floating_point() and not got.isfinite().all():
        return f"{what} holds values that are not finite."
    distance = (got.double() - wanted.double()).abs().max().item()
    return f"{what} is wrong: it is off by up to {distance:.2g}."


def close(
    got: Any, wanted: torch.Tensor, *, rtol: float | None = None, bitwise: bool = False
) -> bool:
    """Whether `got` is a plain tensor of the same dtype and shape, with equal values."""
    if type(got) is not torch.Tensor or got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    if bitwise or not wanted.is_floating_point():
        return torch.equal(got, wanted)
    if wanted.numel() == 0:
        return True
    rtol = TOLERANCES[wanted.dtype] if rtol is None else rtol
    atol = rtol * max(wanted.double().abs().max().item(), 1e-6)
    return torch.allclose(got.double(), wanted.double(), rtol=0.0, atol=atol)


def number(got: Any) -> float | None:
    """`got` as a number if it is one (a tensor of one element too, not a bool), else None."""
    if type(got) is torch.Tensor and got.numel() == 1:
        got = got.item()
    return float(got) if type(got) in (int, float) else None


def whole(got: Any) -> int | None:
    """`got` as a whole number if it is one (a tensor of one integer too, not a bool), else None."""
    if type(got) is torch.Tensor and got.numel() == 1 and not got.is_floating_point():
        got = got.item()
    return got if type(got) is int else None


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
