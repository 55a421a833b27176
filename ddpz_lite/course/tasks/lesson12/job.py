"""Jobs of lesson 12: ZeRO in practice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpz_lite.course.check.watch import Holding, Kept, form
from ddpz_lite.wire import span

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def agree_on_overflow(answer: Callable[..., Any], *, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs make their steps in turn. Each has this rank's "weights", perhaps none, the name of
    its "optimizer", what is in its "scaler", "max_norm", and "steps": for each the gradients, as a
    backward of the loss leaves them.
    """
    every = []
    for run in runs:
        parameters = [nn.Parameter(w.clone()) for w in run["weights"]]
        optimizer = OPTIMIZERS[run["optimizer"]](parameters or [nn.Parameter(torch.zeros(0))])
        every.append((parameters, optimizer, dict(run["scaler"])))
    logs: list[list[Any]] = [[] for _ in runs]
    for number in range(max(len(run["steps"]) for run in runs)):
        for run, log, (parameters, optimizer, scaler) in zip(runs, logs, every, strict=True):
            if number >= len(run["steps"]):
                continue
            for parameter, gradient in zip(parameters, run["steps"][number], strict=True):
                parameter.grad = gradient * scaler["scale"]
            with span("step"):
                stepped = answer(list(parameters), optimizer, scaler, run["max_norm"])
            cleared = all(p.grad is None or not p.grad.any() for p in parameters)
            now = {"stepped": stepped, "scaler": dict(scaler), "cleared": cleared}
            log.append(now | {"weights": [p.detach().clone() for p in parameters]})
    return {"logs": logs}


def hybrid_step(
    answer: Callable[..., Any],
    *,
    models: list[torch.Tensor],
    node: int,
    steps: list[list[torch.Tensor]],
    rates: list[float],
    again: int,
) -> dict[str, Any]:
    """models: of each, all weights, flat. steps: for each, this rank's gradient of each model;
    rates: the lr of each. again: another `node`, for a second object over the first model.
    """
    holding = Holding([*models, *(g for step in steps for g in step)])
    kept, begun = Kept(models=models, steps=steps), models[0].clone()
    with holding, span("build"):
        made = [answer(weights, node) for weights in models]

    def shards() -> list[Any]:
        return [one.shard.detach().clone() for one in made]

    got: dict[str, Any] = {"begun": shards(), "held": [holding.now()], "shards": [], "whole": []}
    for gradients, lr in zip(steps, rates, strict=True):
        for one, gradient in zip(made, gradients, strict=True):
            with holding, span("gather"):
                whole = one.gather()
            got["whole"].append(whole.detach().clone())
            del whole
            with holding, span("step"):
                one.step(gradient, lr)
        got["shards"].append(shards())
        got["held"].append(holding.now())
    with span("again"):
        other = answer(begun, again)
        got["again"] = [other.shard.detach().clone(), other.gather().detach().clone()]
    return got | {"changed": kept.changed()}


def int8_gather(
    answer: Callable[..., Any],
    *,
    shards: list[torch.Tensor],
    nudges: list[torch.Tensor],
    block: int,
    other: int,
) -> dict[str, Any]:
    """shards: this rank's, gathered one after the other. nudges: what is then added to the last of
    them, and it is gathered again; at last once more, in blocks of `other` values.
    """
    masters = [shard.clone() for shard in shards]
    gathered, forms, changed = [], [], []
    holding = Holding(masters)

    def ask(master: torch.Tensor, block: int = block) -> None:
        kept = Kept(shard=master)
        with holding, span("gather"):
            whole = answer(master, block)
        changed.extend(kept.changed())
        if isinstance(whole, torch.Tensor) and whole is not master:
            gathered.append(whole.detach().clone())
            forms.append(form(whole))
            with torch.no_grad():
                whole.zero_()  # what was handed out is not needed for the next one
        else:
            gathered.append(whole)
            forms.append(None)

    for master in masters:
        ask(master)
    for nudge in nudges:
        masters[-1] += nudge
        ask(masters[-1])
    ask(masters[-1], other)
    held = [holding.now()]
    return {"gathered": gathered, "changed": changed, "masters": masters, "held": held}
