"""Jobs of lesson 03: data parallelism."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.course.check.watch import Kept
from ddpz_lite.course.tasks.lesson03 import broken


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose memory is in the order of its transpose, where it has one."""
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor.clone()


def _copy(value: Any) -> Any:
    """As it is now: what is returned may be written again in a later call."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


# ---- 03.same_start ----


def _model(inputs: int, width: int) -> nn.Module:
    """Shared weights, a frozen bias, and buffers of four dtypes, two of them in no state_dict."""
    model = nn.Sequential(
        nn.Linear(inputs, width),
        nn.BatchNorm1d(width),
        nn.Linear(width, width),
        nn.Linear(width, width),
    )
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.zeros(width, dtype=torch.bool), persistent=False)
    model[2].register_buffer("scale", torch.zeros(3, dtype=torch.float64), persistent=False)
    return model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def same_start(
    answer: Callable[..., Any],
    *,
    states: list[dict[str, torch.Tensor]],
    numbers: list[int],
    seed: int,
) -> dict[str, Any]:
    """states: for each call, what this rank's model holds at first, by name; numbers: which model
    that is. seed: of this rank's global generator.
    """
    torch.manual_seed(seed)
    models: dict[int, nn.Module] = {}
    seen = []
    for state, number in zip(states, numbers, strict=True):
        width, inputs = state["0.weight"].shape
        model = models.setdefault(number, _model(inputs, width))
        before = _tensors(model)
        asked = {name: tensor.requires_grad for name, tensor in before.items()}
        with torch.no_grad():
            for name, tensor in before.items():
                tensor.copy_(state[name])
        answer(model)
        now = _tensors(model)
        seen.append(
            {
                "state": {name: _copy(tensor) for name, tensor in now.items()},
                "tied": model[3].weight is model[2].weight,
                "replaced": [name for name in before if now.get(name) is not before[name]],
                "asks": [n for n in asked if n in now and now[n].requires_grad != asked[n]],
            }
        )
    return {"calls": seen, "seed": torch.initial_seed()}


# ---- 03.average_gradients ----


def average_gradients(
    answer: Callable[..., Any],
    *,
    models: list[list[torch.Tensor]],
    steps: list[dict[str, Any]],
    frozen: Sequence[int] = (),
) -> dict[str, Any]:
    """models: the weights of each. frozen: which of them are.

    steps: for each call, "model", its number, "gradients" of this rank, None for a parameter that
    has none, and "turned", whether they are transposed views.
    """
    built = [_nested(weights, frozen) for weights in models]
    gradients, changed = [], []
    for step in steps:
        model, parameters = built[step["model"]]
        for parameter, gradient in zip(parameters, step["gradients"], strict=True):
            laid_out = _turned if step["turned"] else torch.clone
            parameter.grad = None if gradient is None else laid_out(gradient)
        kept = Kept(parameter=parameters, buffer=list(model.buffers()))
        answer(model)
        gradients.append([_copy(p.grad) for p in parameters])
        changed += kept.changed()
    return {"gradients": gradients, "changed": changed}


def _nested(
    weights: Sequence[torch.Tensor], frozen: Sequence[int]
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Parameters in two layers, the first one in both, and a buffer."""
    model, inner = nn.Module(), nn.Module()
    parameters = [nn.Parameter(w.clone(), i not in frozen) for i, w in enumerate(weights)]
    for index, parameter in enumerate(parameters):
        (inner if index % 2 else model).register_parameter(f"p{index}", parameter)
    inner.register_parameter("shared", parameters[0])
    inner.register_buffer("mean", torch.ones(3))
    model.inner = inner
    return model, parameters


# ---- 03.weighted_mean ----


def weighted_mean(
    answer: Callable[..., Any],
    *,
    gradients: list[torch.Tensor],
    samples: int,
    later: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """gradients: this rank's mean over its `samples` samples, one tensor per parameter.

    later: the same of further calls, whose gradients are transposed views.
    """
    local, *others = [
        _in_a_list(answer, [laid_out(g) for g in turn["gradients"]], turn["samples"])
        for laid_out, turn in [
            (torch.clone, {"gradients": gradients, "samples": samples}),
            *((_turned, turn) for turn in later),
        ]
    ]
    return {**local, "later": others}


def _in_a_list(
    answer: Callable[..., Any], tensors: list[torch.Tensor], samples: int
) -> dict[str, Any]:
    """What the list holds after the call, and whether these are still the tensors it held."""
    handed = list(tensors)
    answer(handed, samples)
    same = len(handed) == len(tensors)
    same = same and all(now is before for now, before in zip(handed, tensors, strict=True))
    return {"gradients": handed, "in_place": same}


# ---- 03.rank_indices ----


def rank_indices(answer: Callable[..., Any], *, calls: list[list[Any]]) -> dict[str, Any]:
    """calls: the arguments of each: length, epoch, seed, evaluate."""
    torch.manual_seed(7)
    before = _generators()
    assigned = [answer(*arguments) for arguments in calls]
    generators = [name for name, now in _generators().items() if now != before[name]]
    return {
        "assigned": [list(d) if isinstance(d, Iterable) else d for d in assigned],
        "types": [type(d).__name__ for d in assigned],
        "drew_from": generators,
    }


def _generators() -> dict[str, Any]:
    """The state of each global generator, in a form that can be compared."""
    _, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "NumPy": (keys.tolist(), rest),
        "Python": random.getstate(),
    }


# ---- 03.batch_norm, 03.f1 ----


def batch_norm(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: for each, x, this rank's rows, (rows, channels), weight, bias and eps; from the second
    on x is a transposed view.
    """
    outputs, changed = [], []
    for number, call in enumerate(calls):
        x = _turned(call["x"]) if number else call["x"].clone()
        kept = Kept(x=x, weight=call["weight"], bias=call["bias"])
        outputs.append(_copy(answer(x, call["weight"], call["bias"], call["eps"])))
        changed += kept.changed()
    return {"y": outputs, "changed": changed}


def f1(answer: Callable[..., Any], *, calls: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """calls: for each, predicted and labels of this rank's samples, bool, (samples,); from the
    second on they are every second element of a longer tensor.
    """
    values, changed = [], []
    for number, call in enumerate(calls):
        step = 2 if number else 1
        local = {name: t.repeat_interleave(step)[::step] for name, t in call.items()}
        kept = Kept(**local)
        values.append(_copy(answer(local["predicted"], local["labels"])))
        changed += kept.changed()
    return {"f1": values, "changed": changed}


# ---- 03.diagnose ----

# The last rank runs no answer. It alone knows the mistakes: the others send it their micro-batches,
# and it sends back what each one's gradient is.
OVER, APART = 1.0, 2.0  # why there is no gradient
WHY = {
    OVER: "a rank called `step` and another one did not. Fix: call it equally often on all ranks.",
    APART: "the ranks handed over different numbers of micro-batches. Fix: hand over as many on "
    "each, with at least one sample in each.",
}


def diagnose(
    answer: Callable[..., Any], *, steps: int, mistakes: Sequence[str] = ()
) -> dict[str, Any]:
    """steps: how many have to be diagnosed. mistakes: theirs, on the last rank alone."""
    if mistakes:
        return {"asked": [_serve(mistake) for mistake in mistakes]}
    current, names = [0], []
    rank, hidden = dist.get_rank(), dist.get_world_size() - 1
    for number in range(steps):
        current[0] = number

        def step(micro_batches: Sequence[torch.Tensor], number: int = number) -> float:
            if number != current[0]:
                raise RuntimeError("this step is over. Fix: use the one that was handed in.")
            parts = [torch.as_tensor(part).double().flatten() for part in micro_batches]
            sizes = [len(part) for part in parts]
            if not sizes or not all(sizes):
                raise ValueError("a micro-batch has no samples. Fix: give each at least one.")
            dist.send(torch.tensor(len(sizes)), hidden)
            dist.send(torch.tensor(sizes), hidden)
            dist.send(torch.cat(parts), hidden)
            reply = torch.empty(2, dtype=torch.float64)
            dist.recv(reply, hidden)
            why, gradient = reply.tolist()
            if why:
                raise RuntimeError(WHY[why])
            return gradient

        try:
            names.append(answer(step, rank, hidden))
        finally:
            dist.send(torch.tensor(0), hidden)
    return {"names": names}


def _serve(mistake: str) -> list[list[list[list[float]]]]:
    """Make the steps of one diagnosis; for each, every rank's micro-batches."""
    ranks = range(dist.get_rank())
    before, asked, there = [0.0 for _ in ranks], [], set(ranks)
    while there:
        batches = {rank: parts for rank in sorted(there) if (parts := _received(rank))}
        there = set(batches)
        why = OVER if len(batches) < len(ranks) else 0.0
        if not why and len({len(parts) for parts in batches.values()}) > 1:
            why = APART
        if not why:
            before = broken.gradients(mistake, [batches[rank] for rank in ranks], before)
            asked.append([[part.tolist() for part in batches[rank]] for rank in ranks])
        for rank in sorted(there):
            dist.send(torch.tensor([why, before[rank]], dtype=torch.float64), rank)
    return asked


def _received(rank: int) -> list[torch.Tensor]:
    """A rank's micro-batches, or none where it calls no more."""
    number = torch.empty((), dtype=torch.int64)
    dist.recv(number, rank)
    if not number:
        return []
    sizes = torch.empty(int(number), dtype=torch.int64)
    dist.recv(sizes, rank)
    values = torch.empty(int(sizes.sum()), dtype=torch.float64)
    dist.recv(values, rank)
    return list(values.split(sizes.tolist()))
