"""Jobs of lesson 05: DDP."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep  # its own: an answer may patch the module's
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpz_lite.course.check.watch import tell_when_reached
from ddpz_lite.meter.memory_use import storages
from ddpz_lite.wire import span

Gradients = list[torch.Tensor | None]


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


class _Net(nn.Module):
    """Linear layers in a row, and after them two side by side; or all in a row.

    weights: (out, in) of each layer, each in its own dtype. order: "left first" or "right first",
    in which the two are computed, which backward walks the other way round; or "row". tied: the
    last layer but one has the weight of layer 0. frozen: the layer that is not trained. turned:
    weights are transposed views. early: the last weight is the first of `parameters()`. nap:
    seconds that backward computes before the gradient of each
    layer in the row.
    """

    def __init__(
        self,
        weights: list[torch.Tensor],
        order: str = "left first",
        tied: bool = False,
        frozen: int | None = None,
        turned: bool = False,
        early: bool = False,
        nap: float = 0.0,
    ):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*w.T.shape, bias=False) for w in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.T.contiguous().T if turned else weight.clone())
        if tied:
            self.layers[-2].weight = self.layers[0].weight
        if frozen is not None:
            self.layers[frozen].weight.requires_grad_(False)
        if early:
            self.register_parameter("early", self.layers[-1].weight)
        self.order, self.nap = order, nap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, (rows, in); that of no rows is 0."""
        layers = list(self.layers)
        row, pair = (layers, []) if self.order == "row" else (layers[:-2], layers[-2:])
        for index, layer in enumerate(row):
            x = layer(x.to(layer.weight.dtype))
            x = torch.tanh(_Slow.apply(x, self.nap) if self.nap else x)
            tell_when_reached(x, index)
        if not pair:
            return x.square().sum()
        places = [0, 1] if self.order == "left first" else [1, 0]
        out = {place: pair[place](x.to(pair[place].weight.dtype)) for place in places}
        return (out[0] + 2 * out[1]).square().sum()


class _Reduced(TorchDispatchMode):
    """Watches for tensors that are used after their all-reduce was started.

    used: the numbers of these all-reduces, counted from 0, each at its tensor's first use, which is
    a span "used". Views and whatever reads no values are no use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []
        self._started = 0
        self._number: dict[int, int] = {}  # of the all-reduce of a storage
        self._kept: list[torch.UntypedStorage] = []  # so that no two have the same place

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation: more than a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        given = storages(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        if name == "c10d::allreduce_":
            for storage in given:
                self._number[storage._cdata] = self._started
                self._kept.append(storage)
            self._started += 1
        elif not (name.startswith("c10d") or func.is_view or "_like" in name or "new_" in name):
            for storage in given:
                if (number := self._number.pop(storage._cdata, None)) is not None:
                    self.used.append(number)
                    with span("used"):
                        pass
        return func(*args, **(kwargs or {}))


def _gradients(model: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def hooks(
    answer: Callable[..., Any],
    *,
    nets: list[dict[str, Any]],
    batches: list[list[torch.Tensor]],
    options: list[dict[str, Any]] | None = None,
    in_step: bool = False,
) -> dict[str, Any]:
    """nets, options: of each model. All get their hooks first; then they are used in turn.

    batches: for each step and model. Before the first step gradients are dropped, before the second
    set to zero, before the third left as they are. in_step: all ranks begin a backward together.
    """
    models = [_Net(**net) for net in nets]
    for model, given in zip(models, options or [{}] * len(nets), strict=True):
        answer(model, **given)
    watch, steps = _Reduced(), []
    for number, step in enumerate(batches):
        steps.append([])
        for model, batch in zip(models, step, strict=True):
            if number < 2:
                model.zero_grad(set_to_none=number == 0)
            loss = model(batch)
            if in_step:
                with span("start"):
                    dist.barrier()
            with watch, span("backward"):
                loss.backward()
            steps[-1].append(_gradients(model))
    weights = [list(model.parameters()) for model in models]
    return {"steps": steps, "weights": weights, "used": watch.used}


def no_sync(
    answer: Callable[..., Any], *, nets: list[dict[str, Any]], rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    """nets: of each model; all get their hooks first.

    rounds: {"how": see below, "batches": of each model, the last one averaged}; gradients are
    dropped before each. how the others are collected:
    "each"    under a context for each batch
    "nested"  the first under two contexts, the others under one
    "raises"  the same, and both contexts are left by an exception
    "beside"  each, and the later models average under the context of the first
    """
    models = [_Net(**net) for net in nets]
    contexts = [answer(model) for model in models]
    rounds_seen = []
    for turn in rounds:
        seen = {"inside": [], "after": [], "raised": []}
        rounds_seen.append(seen)
        first = contexts[0]
        for number, (model, quiet) in enumerate(zip(models, contexts, strict=True)):
            model.zero_grad()
            *silent, last = turn["batches"][number]
            seen["raised"].append(_collect(model, quiet, silent, turn["how"]))
            seen["inside"].append(_gradients(model))
            if turn["how"] == "beside" and number:
                with first():
                    _backward(model, last, "synced")
            else:
                _backward(model, last, "synced")
            seen["after"].append(_gradients(model))
    return {"rounds": rounds_seen}


def _collect(model: nn.Module, quiet: Any, batches: list[torch.Tensor], how: str) -> int:
    """How many exceptions came out of the contexts."""
    if how not in ("nested", "raises"):
        for batch in batches:
            with quiet():
                _backward(model, batch, "silent")
        return 0
    raised = 0
    try:
        with quiet():
            try:
                with quiet():
                    _backward(model, batches[0], "silent")
                    if how == "raises":
                        raise ArithmeticError
            except ArithmeticError:
                raised += 1
            for batch in batches[1:]:
                _backward(model, batch, "silent")
            if how == "raises":
                raise ArithmeticError
    except ArithmeticError:
        raised += 1
    return raised


def _backward(model: nn.Module, batch: torch.Tensor, name: str) -> None:
    loss = model(batch)
    with span(name):
        loss.backward()
