"""Jobs of lesson 07: without lockstep."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import torch

from ddpz_lite.course.check.beside import Kept
from ddpz_lite.wire import span


def sharded_server(answer: Callable[..., Any], *, models: list[dict[str, Any]]) -> dict[str, Any]:
    """models: of each the "shard", this rank's part of the padded weights; its own "gradients",
    (length,), for each step; and the "rate". The models take their steps in turn.

    For each model and step: what the answer returned, and the shard.
    """
    kept = Kept(gradients=[model["gradients"] for model in models])
    weights: list[list[Any]] = [[] for _ in models]
    shards: list[list[torch.Tensor]] = [[] for _ in models]
    returned = []
    for step in range(len(models[0]["gradients"])):
        for place, model in enumerate(models):
            with span(f"model {place}, step {step}"):
                got = answer(model["shard"], model["gradients"][step], model["rate"])
            returned.append(got)
            weights[place].append(got.clone() if isinstance(got, torch.Tensor) else got)
            shards[place].append(model["shard"].clone())
    copies = [got for step in zip(*weights, strict=True) for got in step]
    later = [
        number
        for number, (got, copy) in enumerate(zip(returned, copies, strict=True))
        if isinstance(got, torch.Tensor) and not torch.equal(got, copy)
    ]
    return {"weights": weights, "shards": shards, "changed": kept.changed(), "later": later}


def bounded(answer: Callable[..., Any], *, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """runs: of each clock the "workers", the "bound", the seconds of each worker's steps, and when
    a worker is "lost". All clocks are made before the first is used.
    """
    clocks = [answer(len(run["seconds"]), run["bound"]) for run in runs]
    return {"logs": [_watch(clock, run) for clock, run in zip(clocks, runs, strict=True)]}


def _watch(clock: Any, run: dict[str, Any]) -> list[list[Any]]:
    """Workers in a time of their own: [what was called, for which worker, what it returned].

    A worker that has no step left leaves. Whoever is returned, and waits, begins its next step.
    """
    seconds = [list(steps) for steps in run["seconds"]]
    events = [(steps.pop(0), worker, "finished") for worker, steps in enumerate(seconds)]
    events += [(at, worker, "left") for worker, at in run["lost"]]
    heapq.heapify(events)
    waiting: set[int] = set()
    gone: set[int] = set()
    log: list[list[Any]] = []
    while events:
        now, worker, what = heapq.heappop(events)
        if worker in gone:
            continue
        if what == "finished" and not seconds[worker]:
            what = "left"
        if what == "left":
            gone.add(worker)
            waiting.discard(worker)
            answered = clock.left(worker)
        else:
            waiting.add(worker)
            answered = clock.finished(worker)
        answered = list(answered) if isinstance(answered, list | tuple | set) else answered
        log.append([what, worker, answered])
        for other in answered if isinstance(answered, list) else ():
            if type(other) is int and other in waiting:
                waiting.discard(other)
                heapq.heappush(events, (now + seconds[other].pop(0), other, "finished"))
    return log


def largest_rate(answer: Callable[..., Any], *, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """questions: the keyword arguments of one call each."""
    kept = Kept(questions=questions)
    return {"rates": [answer(**question) for question in questions], "changed": kept.changed()}
