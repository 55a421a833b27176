"""Jobs of lesson 14: pipeline, tensor parallelism, and a plan for a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ddpz_lite.course.check.watch import Holding, Kept
from ddpz_lite.wire import span

TIMES = 1.0, 1.5  # the weights of each of two pipelines of the same shapes


class Stage(nn.Module):
    """Two linear layers and a tanh; it notes each forward and backward, and counts what is alive.

    alive: the most micro-batches whose activations were there at once. A result of the inside,
    which no code outside can hold, stands for each.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(w.clone()) for w in weights)
        self.events: list[list[Any]] = []
        self.alive = 0
        self._inside: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = sum(kind == "F" for kind, _ in self.events)
        self.events.append(["F", number])
        into, out = self.weights
        h = torch.tanh(x @ into)  # (n, hidden)
        self._inside.append(StorageWeakRef(h.untyped_storage()))
        self.alive = max(self.alive, sum(not one.expired() for one in self._inside))
        y = h @ out  # (n, width of the next)
        if y.requires_grad:
            y.register_hook(lambda _: self.events.append(["B", number]))
        return y


def one_f_one_b(
    answer: Callable[..., Any], *, weights: list[torch.Tensor], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    """weights: of this rank's stage, (width, hidden) and (hidden, next width).

    steps: for each call which "stage" of two, "shapes" of what enters this stage, "inputs" and
    "targets" (None where the
    rank has none). Gradients are not cleared between calls.
    """
    stages = [Stage([w * times for w in weights]) for times in TIMES]
    calls = []
    kept = Kept(steps=[{k: v for k, v in step.items() if v is not None} for step in steps])
    for number, step in enumerate(steps):
        stage = stages[step["stage"]]
        stage.events, stage.alive = [], 0
        with span(f"step {number}"):
            said = answer(stage, step["shapes"], step["inputs"], step["targets"])
        gradients = [None if w.grad is None else w.grad.clone() for w in stage.weights]
        calls.append(
            {
                "said": said,
                "grads": gradients,
                "events": stage.events,
                "alive": stage.alive,
            }
        )
    same = all(
        torch.equal(w * times, own)
        for times, stage in zip(TIMES, stages, strict=True)
        for w, own in zip(weights, stage.weights, strict=True)
    )
    return {"calls": calls, "changed": kept.changed() + ([] if same else ["stage"])}


NAMES = ("gate", "up", "down", "bias")


def column_row(
    answer: Callable[..., Any],
    *,
    weights: list[torch.Tensor],
    inputs: list[torch.Tensor],
    upstream: list[torch.Tensor],
    needs: list[bool],
) -> dict[str, Any]:
    """weights: gate, up, down, bias, whole. inputs: x of each call; needs: whether it wants a
    gradient. upstream: the gradient of each result.
    """
    answer(*[torch.zeros_like(w) for w in weights])  # another one, before
    holding = Holding()
    whole = [w.clone() for w in weights]
    with holding:
        module = answer(*whole)
    del whole  # a view of it would keep it
    held = [holding.now()]
    answer(*[torch.zeros_like(w) for w in weights])  # and another one, after
    own = {name: p.detach().clone() for name, p in module.named_parameters()}
    calls = []
    for x, gradient, wanted in zip(inputs, upstream, needs, strict=True):
        module.zero_grad(set_to_none=True)
        x = x.clone().requires_grad_(wanted)
        with span("forward"):
            y = module(x)
        result = y.detach().clone()
        with span("backward"):
            y.backward(gradient.clone())
        grads = {
            n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()
        }
        calls.append({"y": result, "x": x.grad, "grads": grads})
    return {"calls": calls, "own": own, "held": held}


def place(answer: Callable[..., Any], *, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """jobs: one for each call."""
    kept = Kept(jobs=jobs)
    return {"plans": [answer(job) for job in jobs], "changed": kept.changed()}


def cut_layers(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    kept = Kept(questions=questions)
    return {"cuts": [answer(**question) for question in questions], "changed": kept.changed()}
