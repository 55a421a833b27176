"""Jobs of lesson 15: seeing and debugging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpz_lite.course.check.watch import Kept

# ---- 15.offsets ----

COST = 1e-5  # seconds that a send and a receive take by themselves


def _host(
    base: float, rate: float, delays: list[list[float]], pause: float
) -> tuple[tuple[Callable[..., Any], ...], Callable[[], dict[str, Any]]]:
    """(clock, send, recv and rest of a host in a world whose time is kept in numbers, its report).

    base, rate: its clock shows base + rate * time. delays: by receiver, the seconds that this
    host's messages to it travel, in turn; they begin again at the end. All are closures: what the
    time really is stands in no attribute.
    """
    time, sent, rests = 0.0, [0] * len(delays), 0

    def clock() -> float:
        return base + rate * time

    def send(value: float, to: int) -> None:
        """Send a number to a rank; it takes it with recv()."""
        nonlocal time
        arrives = time + COST + delays[to][sent[to] % len(delays[to])]
        sent[to] += 1
        dist.send(torch.tensor([float(value), arrives], dtype=torch.float64), to)
        time += COST

    def recv(sender: int) -> float:
        """Wait for the next number of a rank."""
        nonlocal time
        box = torch.empty(2, dtype=torch.float64)
        dist.recv(box, sender)
        value, arrives = box.tolist()
        time = max(time, arrives) + COST
        return value

    def rest() -> None:
        """Let some time pass."""
        nonlocal time, rests
        time += pause
        rests += 1

    return (clock, send, recv, rest), lambda: {"time": time, "sent": list(sent), "rests": rests}


def offsets(answer: Callable[..., Any], *, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """hosts: what this rank's host is, in each of several worlds, one after the other."""
    found = []
    for about in hosts:
        functions, report = _host(**about)
        got = answer(*functions)
        found.append({"got": [float(value) for value in got], **report()})
    return {"found": found}


# ---- 15.culprit ----


def culprit(answer: Callable[..., Any], *, hangs: list[Any]) -> dict[str, Any]:
    """hangs: of each hang the records of all its ranks."""
    kept = Kept(hangs=hangs)
    found = []
    for records in hangs:
        rank, number, line = answer(records)
        found.append([int(rank), int(number), str(line)])
    return {"found": found, "changed": kept.changed()}


# ---- 15.breakdown ----

PARTS = ("step", "compute", "exposed", "data", "rest", "efficiency")


def breakdown(answer: Callable[..., Any], *, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """runs: the arguments of each call."""
    kept = Kept(runs=runs)
    found = []
    for run in runs:
        got = answer(**run)
        found.append({key: float(got[key]) for key in PARTS if key in got})
    return {"found": found, "changed": kept.changed()}


# ---- 15.critical_path ----


def critical_path(
    answer: Callable[..., Any],
    *,
    traces: list[list[list[dict[str, Any]]]],
    asked: list[tuple[int, int, int]],
) -> dict[str, Any]:
    """traces: each with the events of all its ranks. asked: of each call the number of its trace,
    and the rank and the index of the event that takes half.
    """
    kept = Kept(traces=traces)
    found = [answer(traces[number], rank, index) for number, rank, index in asked]
    return {"found": found, "changed": kept.changed()}


# ---- 15.trains and 15.stops ----


def trains(
    answer: Callable[..., Any],
    *,
    weights: list[Tensor],
    steps: list[list[tuple[Tensor, Tensor]]],
    rates: list[float],
    limits: list[float],
) -> dict[str, Any]:
    """weights: (in, hidden) and (hidden,), the same on all ranks. steps: of each step this rank's
    micro-batches, (n, in) and (n,), its rate and its max_norm.
    """
    kept = Kept(steps=[list(pair) for step in steps for pair in step])
    weights = [w.clone().requires_grad_() for w in weights]
    losses, after, left = [], [], 0
    for batches, rate, limit in zip(steps, rates, limits, strict=True):
        losses.append(answer(weights, batches, rate, limit))
        left += sum(w.grad is not None for w in weights)
        after.append([w.detach().clone() for w in weights])
    reported = [_number(x) for x in losses]
    return {"losses": reported, "after": after, "left": left, "changed": kept.changed()}


def stops(answer: Callable[..., Any], *, problems: list[dict[str, Any]]) -> dict[str, Any]:
    """problems: the arguments of each call: "weight" (in,), the same on all ranks, and this rank's
    "batches" and "held_out", "rate" and "epochs".
    """
    kept = Kept(
        batches=[list(pair) for problem in problems for pair in problem["batches"]],
        held_out=[list(problem["held_out"]) for problem in problems],
    )
    found = []
    for problem in problems:
        weight = problem["weight"].clone()
        history = answer(**{**problem, "weight": weight})
        found.append({"history": [float(x) for x in history], "weight": weight})
    return {"found": found, "changed": kept.changed()}


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
