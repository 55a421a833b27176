"""Optimizers that mix elements, which cannot step on shards, or parameters, which no rank may own.

Found by trying: a 2x4 parameter is cut as ranks would cut it, each part has its own optimizer, and
three steps of all, the last with large gradients, must do what three steps on the whole do, and
leave the same numbers in the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def check_elementwise(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device | str = "cpu",
) -> None:
    """Raise TypeError unless each element's update depends on that element alone.

    That of Muon (matrices), Adafactor (row and column means), L-BFGS (inner products), Prodigy
    (sums over all parameters) and whatever divides by a global norm does not.
    """
    cuts = (
        lambda t: [[t]],
        lambda t: [[t[0]], [t[1]]],  # a row each
        lambda t: [[t.flatten()[:3]], [t.flatten()[3:], t.flatten()[:0]]],  # and one holds nothing
    )
    _check(optimizer_class, options, device, cuts, "element")


def check_parameterwise(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device | str = "cpu",
) -> None:
    """Raise TypeError unless each parameter's update depends on that parameter alone.

    That of L-BFGS, Prodigy and whatever divides by a global norm does not.
    """
    cuts = (
        lambda t: [[t[:, :2], t[:, 2:]]],
        lambda t: [[t[:, :2]], [t[:, 2:]]],  # two ranks own one each
    )
    _check(optimizer_class, options, device, cuts, "parameter")


def _check(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device | str,
    cuts: Sequence[Callable[[Tensor], list[list[Tensor]]]],
    unit: str,
) -> None:
    """Raise TypeError unless all cuts, each a list of parts for each rank, do what the first does.

    unit: "element" or "parameter", of which each is to be updated alone.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    unsupported = _unsupported if unit == "element" else _mixes_parameters
    values = torch.linspace(-1.0, 1.0, 8, device=device).view(2, 4)
    grads = torch.linspace(0.5, -2.5, 8, device=device).view(2, 4) ** 3
    optimizer_class([nn.Parameter(values.clone())], **options)  # wrong options raise as they are
    first: list[Any] = []
    for cut in cuts:
        try:
            pairs = zip(cut(values), cut(grads), strict=True)
            ranks = [_try(optimizer_class, options, *pair) for pair in pairs]
        except Exception as error:
            raise TypeError(unsupported(name, f"it fails on one ({error})")) from error
        after = torch.cat([elements for elements, _ in ranks], dim=1)  # (steps, 8)
        first = first or [after, ranks[0][1]]
        if not torch.allclose(first[0], after):
            raise TypeError(unsupported(name, f"an {unit}'s update depends on other {unit}s"))
        for key, value in first[1].items():
            if not all(_same(value, numbers.get(key)) for _, numbers in ranks):
                raise TypeError(unsupported(name, f"its {key!r} depends on all {unit}s"))


def check_class(optimizer_class: Any) -> None:
    """Raise TypeError for an optimizer in place of its class."""
    if not callable(optimizer_class):
        name = type(optimizer_class).__name__
        raise TypeError(
            f"optimizer_class is an instance of {name}: it has the parameters as they were, and "
            f"shards need one of their own. Fix: pass the class and its options, as in {name}, "
            "lr=1e-3."
        )


def _try(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    values: list[Tensor],
    grads: list[Tensor],
) -> tuple[Tensor, dict[str, Any]]:
    """Three steps of one rank: its elements after each, and at the end the options of its group."""
    parts = [nn.Parameter(part.clone()) for part in values]
    optimizer, after = optimizer_class(parts, **options), []
    getattr(optimizer, "train", int)()  # schedule-free ones have two modes
    for size in (1.0, 1.0, 1e3):
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad * size
        optimizer.step()
        after.append(torch.cat([p.detach().flatten() for p in parts]))
    return torch.stack(after), {n: v for n, v in optimizer.param_groups[0].items() if n != "params"}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | float) and isinstance(b, Tensor | float):
        a, b = (torch.as_tensor(x, dtype=torch.double, device="cpu") for x in (a, b))
        return torch.allclose(a, b, atol=0)
    return a == b


def _unsupported(name: str, reason: str) -> str:
    return (
        f"{name} cannot step on a shard: {reason}. Fix: take an optimizer that works element by "
        "element (SGD, Adagrad, RMSprop, Adam, AdamW); at stages 1 and 2 pass "
        'ownership="parameter" if it needs whole matrices only; or take stage 0 without '
        "mixed_precision and offload, where every rank steps on all parameters."
    )


def _mixes_parameters(name: str, reason: str) -> str:
    return (
        f"{name} cannot step on some parameters only: {reason}. Fix: take stage 0 without "
        "mixed_precision and offload, where every rank steps on all parameters."
    )
