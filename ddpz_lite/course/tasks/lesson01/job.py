"""Jobs of lesson 01: one device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ddpz_lite.course.check.watch import Holding, Kept


class Slow(torch.optim.Optimizer):
    """SGD, and an average of the weights: states under names that no optimizer of torch has."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p -= group["lr"] * p.grad
                state = self.state[p]
                state.setdefault("slow", p.clone()).lerp_(p, 0.5)
                state |= {"drift": p.double().sum(), "seen": 1 + state.get("seen", 0)}


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AMSGrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "an optimizer of your colleague's": lambda p: Slow(p, 0.1),
    "SGD with two parameter groups": lambda p: torch.optim.SGD(
        [{"params": p[:1]}, {"params": p[1:], "momentum": 0.5}], lr=0.25
    ),
}


def trained(
    sizes: list[int],
    optimizer: str,
    dtypes: list[str],
    tied: bool = False,
    frozen: bool = False,
    stepped: bool = True,
    cleared: bool = False,
    int8: bool = False,
    evaluates: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Linear layers and a BatchNorm after one backward and, if `stepped`, one step.

    sizes: widths. dtypes: of the layers, in turn. tied: two more layers share one weight. frozen:
    the first layer takes no gradient. cleared: the second layer's gradients are gone again. int8: a
    frozen parameter holds int8. evaluates: the model is left in eval mode.
    """
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    if tied:
        layers += [nn.Linear(sizes[-1], sizes[-1], bias=False) for _ in range(2)]
        layers[-1].weight = layers[-2].weight
    model = nn.Sequential(*layers, nn.BatchNorm1d(sizes[-1]))
    for index, layer in enumerate(model):
        layer.to(getattr(torch, dtypes[0 if tied else index % len(dtypes)]))
    if frozen:
        model[0].requires_grad_(False)
    if int8:
        steps = torch.ones(sizes[0], sizes[1] + 2, dtype=torch.int8)
        model.steps = nn.Parameter(steps, requires_grad=False)
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    for layer in model.children():
        ones = torch.ones(2, layer.weight.shape[-1], dtype=layer.weight.dtype)
        if layer.weight.requires_grad:
            layer(ones).sum().backward()
    if stepped:
        made.step()
    if cleared:
        model[1].zero_grad()
    model.train(not evaluates)
    return model, made


def state_bytes(answer: Callable[..., Any], *, states: list[dict[str, Any]]) -> dict[str, Any]:
    """states: the arguments of `trained`, for each call."""
    reported, changed = [], []
    for state in states:
        model, optimizer = trained(**state)
        there = _inside(model, optimizer)
        kept = Kept(the=there)
        reported.append(answer(model, optimizer))
        there.update(_inside(model, optimizer))
        changed += kept.changed()
    return {"bytes": reported, "changed": changed}


def _inside(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """All tensors of a training state, as they are now."""
    states = [state for group in optimizer.param_groups for state in group["params"]]
    return {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "states": [dict(optimizer.state[p]) if p in optimizer.state else None for p in states],
        "training": [module.training for module in model.modules()],
    }


LOSSES = {
    "mse": nn.functional.mse_loss,
    "smooth l1": nn.functional.smooth_l1_loss,
    "cross entropy": nn.functional.cross_entropy,
}


def accumulate(answer: Callable[..., Any], *, models: list[dict[str, Any]]) -> dict[str, Any]:
    """models: each has "weights" of two linear layers with a tanh between, the name of its "loss"
    and its "batches" of "x", "y" and "micro_batch". They have their turns one after the other.

    Gradients are never cleared here, and begin as ones.
    """
    made = [_model(local["weights"]) for local in models]
    known = [p for model, _ in made for p in model.parameters()]
    known += [batch[name] for local in models for batch in local["batches"] for name in "xy"]
    holding, log = Holding(known), []
    for number in range(max(len(local["batches"]) for local in models)):
        for which, ((model, events), local) in enumerate(zip(made, models, strict=True)):
            if number >= len(local["batches"]):
                continue
            batch = local["batches"][number]
            parameters = list(model.parameters())
            modes = [module.training for module in model.modules()]
            kept = Kept(weights=parameters, x=batch["x"], y=batch["y"])
            holding.know(p.grad for p in parameters if p.grad is not None)
            holding.peak = 0
            events.clear()
            with holding:
                loss = LOSSES[local["loss"]]
                answer(model, loss, batch["x"], batch["y"], batch["micro_batch"])
            log.append(
                {
                    "of": [which, number],
                    "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
                    "changed": kept.changed(),
                    "modes": modes == [module.training for module in model.modules()],
                    "events": list(events),
                    "peak": holding.peak,
                }
            )
    return {"log": log}


def _model(weights: list[torch.Tensor]) -> tuple[nn.Module, list[Any]]:
    """The model, and a list to which it adds ["forward", samples] and ["backward", samples]."""
    first, second = weights
    layers = [nn.Linear(*reversed(w.shape), bias=False, dtype=w.dtype) for w in (first, second)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(value)
        parameter.grad = torch.ones_like(parameter)
    events: list[Any] = []

    def forward(_: Any, inputs: Any, output: torch.Tensor) -> None:
        samples = len(inputs[0])  # the hook below must not keep the output alive
        events.append(["forward", samples])
        if output.requires_grad:
            output.register_hook(lambda _: events.append(["backward", samples]))

    model.register_forward_hook(forward)
    return model, events


def scaled_step(answer: Callable[..., Any], *, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs make their steps in turn. Each has "weights", the name of its "optimizer", what is
    in its "scaler", and "steps": for each the gradients, as a backward of the loss leaves them.
    """
    every = []
    for run in runs:
        parameters = [nn.Parameter(w.clone()) for w in run["weights"]]
        every.append((parameters, OPTIMIZERS[run["optimizer"]](parameters), dict(run["scaler"])))
    logs: list[list[Any]] = [[] for _ in runs]
    for number in range(max(len(run["steps"]) for run in runs)):
        for run, log, (parameters, optimizer, scaler) in zip(runs, logs, every, strict=True):
            if number >= len(run["steps"]):
                continue
            for parameter, gradient in zip(parameters, run["steps"][number], strict=True):
                scaled = gradient * scaler["scale"]
                parameter.grad = scaled.T.contiguous().T if scaled.dim() == 2 else scaled
            stepped = answer(parameters, optimizer, scaler)
            log.append(
                {
                    "stepped": stepped,
                    "scaler": dict(scaler),
                    "weights": [p.detach().clone() for p in parameters],
                    "cleared": all(p.grad is None or not p.grad.any() for p in parameters),
                }
            )
    return {"logs": logs}


def largest_batch(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    return {"batches": [answer(**{**q, "peaks": dict(q["peaks"])}) for q in questions]}
