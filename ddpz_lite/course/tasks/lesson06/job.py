"""Jobs of lesson 06: sending less."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpz_lite.course.check.watch import Kept


def top_k(answer: Callable[..., Any], *, streams: list[dict[str, Any]]) -> dict[str, Any]:
    """streams: {"gradients" of this rank for each step, "k"}, in turn; each has its residual.

    Matrices are transposed views, here and in int8_mean.
    """
    streams = [s | {"gradients": list(map(_turned, s["gradients"]))} for s in streams]
    residuals: list[Any] = [torch.zeros_like(s["gradients"][0]) for s in streams]
    steps, changed = [], []
    for number in range(max(len(s["gradients"]) for s in streams)):
        for index, stream in enumerate(streams):
            if number >= len(stream["gradients"]):
                continue
            given = {"gradient": stream["gradients"][number], "residual": residuals[index]}
            kept = Kept(**given)
            mean, residual = answer(given["gradient"], given["residual"], stream["k"])
            changed += kept.changed()
            steps.append([index, number, _copy(mean), _copy(residual)])
            residuals[index] = residual
    return {"steps": steps, "changed": changed}


def top_k_momentum(answer: Callable[..., Any], *, streams: list[dict[str, Any]]) -> dict[str, Any]:
    """streams: as in top_k, with a "momentum"."""
    streams = [s | {"gradients": list(map(_turned, s["gradients"]))} for s in streams]
    states = [[torch.zeros_like(s["gradients"][0]) for _ in range(2)] for s in streams]
    steps, changed = [], []
    for number in range(max(len(s["gradients"]) for s in streams)):
        for index, stream in enumerate(streams):
            if number >= len(stream["gradients"]):
                continue
            velocity, residual = states[index]
            gradient = stream["gradients"][number]
            kept = Kept(gradient=gradient, velocity=velocity, residual=residual)
            mean, *state = answer(gradient, velocity, residual, stream["k"], stream["momentum"])
            changed += kept.changed()
            states[index] = state
            steps.append([index, number, _copy(mean), *map(_copy, state)])
    return {"steps": steps, "changed": changed}


def int8_mean(answer: Callable[..., Any], *, gradients: list[torch.Tensor]) -> dict[str, Any]:
    """gradients: of this rank, one after the other.

    undefined: the calls in which something not finite became an int8.
    """
    gradients = list(map(_turned, gradients))
    kept, means, undefined = Kept(gradients=gradients), [], []
    for call, gradient in enumerate(gradients):
        with _Casts() as casts:
            means.append(_copy(answer(gradient)))
        undefined += [call] if casts.undefined else []
    return {"means": means, "changed": kept.changed(), "undefined": undefined}


class _Casts(TorchDispatchMode):
    """Looks at whatever becomes an int8: what that makes of nan and inf is not defined."""

    undefined = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.is_tensor(made) and made.dtype == torch.int8:
            floats = [t for t in args if torch.is_tensor(t) and t.is_floating_point()]
            self.undefined |= not all(t.isfinite().all() for t in floats)
        return made


def backward(params: list[nn.Parameter], x: torch.Tensor) -> None:
    """Add the gradients of a small net's loss, x (rows, in), to those that are there."""
    loss = (torch.tanh(x @ params[0] + params[1]) @ params[2]).square().mean()
    loss.backward()


def local_sgd(answer: Callable[..., Any], *, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """runs: {"weights", "batches" of each step (a list of micro-batches), "every", "options"}.

    The weights are noted before each step and at the end.
    """
    return {"runs": [_local(answer, **run) for run in runs]}


def _local(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    batches: list[list[torch.Tensor]],
    every: int,
    options: dict[str, float],
) -> dict[str, Any]:
    params = [nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = torch.optim.SGD(groups, **options)
    seen: list[torch.Tensor] = []

    def gradient(x: torch.Tensor, first: bool) -> None:
        if first:
            seen.append(_flat(params))
        backward(params, x)

    steps = [[partial(gradient, x, i == 0) for i, x in enumerate(step)] for step in batches]
    answer(params, optimizer, steps, every)
    momenta = [optimizer.state[p].get("momentum_buffer") for p in params]
    return {
        "during": seen,
        "after": _flat(params),
        "momenta": None if any(m is None for m in momenta) else _flat(momenta),
    }


def _flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
