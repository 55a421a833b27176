"""Jobs of lesson 09: ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpz_lite.course.check.watch import Holding, Kept
from ddpz_lite.wire import span


def shard_owners(answer: Callable[..., Any], *, models: list[list[int]]) -> dict[str, Any]:
    """models: for each call, the elements of each parameter."""
    kept = Kept(sizes=models)
    return {"owners": [answer(sizes) for sizes in models], "changed": kept.changed()}


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.03, "weight_decay": 0.3}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def _recorded(kind: type, made: list[torch.optim.Optimizer]) -> type:
    """The optimizer class; its instances add themselves to `made`."""

    class Recorded(kind):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    Recorded.__name__ = Recorded.__qualname__ = kind.__name__
    return Recorded


def zero1(
    answer: Callable[..., Any],
    *,
    models: list[list[torch.Tensor]],
    gradients: list[list[list[torch.Tensor]]],
    optimizers: list[str],
    turned: bool = False,
    factors: list[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """models: the weights of each; optimizers: the kind of each, which step in turn.

    gradients: of this rank, for each step, model and parameter. turned: parameters and gradients
    are transposed views. factors: for each step; after it, this rank's exp_avg are multiplied by
    them. No other rank knows them, so only who steps with these very states comes to the right
    parameters.
    """
    made: list[torch.optim.Optimizer] = []
    kinds = {name: _recorded(OPTIMIZERS[name][0], made) for name in optimizers}
    every = [[nn.Parameter(_laid_out(w, turned)) for w in weights] for weights in models]
    flat = [p for parameters in every for p in parameters]
    holding = Holding(flat)
    with holding:
        sharded_ones = [
            answer(parameters, kinds[name], **OPTIMIZERS[name][1])
            for parameters, name in zip(every, optimizers, strict=True)
        ]
    after, first, held = [], [], []
    for number, step in enumerate(gradients):
        for parameters, sharded, own in zip(every, sharded_ones, step, strict=True):
            for parameter, gradient in zip(parameters, own, strict=True):
                parameter.grad = _laid_out(gradient, turned)
            holding.know(p.grad for p in parameters)
            with holding:
                sharded.step()
        after.append([p.detach().clone() for p in flat])
        held.append(holding.now([*flat, *(p.grad for p in flat if p.grad is not None)]))
        if factors is not None:
            means = [s["exp_avg"] for o in made for s in o.state.values() if "exp_avg" in s]
            first = first or [state.clone() for state in means]
            for state in means:
                state *= factors[number][: state.numel()].view_as(state)
    kept = [item for o in made for state in o.state.values() for item in state.items()]
    states = [t for name, t in kept if torch.is_tensor(t) and name != "step"]
    return {"after": after, "states": states, "first": first, "held": held}


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.count += len(made) if made.dim() == 3 else 1
        return made


def muon(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    rates: list[float],
    factors: list[list[float]],
) -> dict[str, Any]:
    """gradients: of this rank, for each step. rates: for each step. factors: for each step and
    matrix; after it, the momentum is multiplied by them where it is kept. A model of the first
    matrix alone makes a step before.
    """
    with span("another model"):
        answer([weights[0].clone()], [gradients[0][0].clone()], [None], 2 * rates[0])
    weights = [w.clone() for w in weights]
    momenta: list[Any] = [None] * len(weights)
    holding = Holding(weights)
    steps = []
    for given, lr, factor in zip(gradients, rates, factors, strict=True):
        own = [g.clone() for g in given]
        holding.know(own)
        products = _Products()
        with holding, products:
            answer(weights, own, momenta, lr)
        del own
        there = [isinstance(m, torch.Tensor) for m in momenta]
        steps.append(
            {
                "weights": [w.clone() for w in weights],
                "momenta": there,
                "products": products.count,
            }
        )
        for i, kept in enumerate(there):
            if kept:
                momenta[i] *= factor[i]
    return {"steps": steps, "held": holding.now(weights)}


def _laid_out(tensor: torch.Tensor, turned: bool) -> torch.Tensor:
    """A copy, with its memory in the order of its transpose if `turned`."""
    return tensor.T.contiguous().T if turned and tensor.dim() == 2 else tensor.clone()
