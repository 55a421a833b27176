"""Jobs of lesson 07: without lockstep."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import torch

from ddpz_lite.course.check.watch import Kept
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
    """Workers on a simulated clock: [what was called, for which worker, what it returned].

    A worker that has no step left leaves. One that is returned, and waits, begins its next step.
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


def update_bound(answer: Callable[..., Any], *, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """runs: of each server the "bound", and its "workers", see `_serve`. The servers are made
    before the first is called, and then called in turn.
    """
    servers = [answer(run["bound"]) for run in runs]
    logs: list[list[list[Any]]] = [[] for _ in runs]
    open_runs = [_serve(server, **run) for server, run in zip(servers, runs, strict=True)]
    for calls in zip_longest(*open_runs):
        for log, call in zip(logs, calls, strict=True):
            if call is not None:
                log.append(call)
    return {"logs": logs}


def _serve(server: Any, bound: int, workers: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Workers on a simulated clock; yields [what was called, for which worker, the answer].

    workers: of each its "name", when it first asks ("starts"), the "seconds" of each of its steps,
    the time from a push until it asks again ("idle"), and "lost": when it leaves, and when it asks
    again, or None.
    """
    by_name = {worker["name"]: worker for worker in workers}
    seconds = {name: list(worker["seconds"]) for name, worker in by_name.items()}
    lives = dict.fromkeys(by_name, 0)  # a worker that was lost has plans that no longer hold
    events = [(worker["starts"], name, "asks", 0) for name, worker in by_name.items()]
    for name, worker in by_name.items():
        for life, (leaves, returns) in enumerate(worker["lost"]):
            events.append((leaves, name, "left", life))
            if returns is not None:
                events.append((returns, name, "asks", life + 1))
    heapq.heapify(events)
    waiting: set[int] = set()
    while events:
        now, name, what, life = heapq.heappop(events)
        if life != lives[name]:
            continue
        if what == "asks" and not seconds[name]:
            what = "left"
        if what == "asks":
            waiting.add(name)
        elif what == "left":
            waiting.discard(name)
            lives[name] += 1
        else:
            again = now + by_name[name]["idle"]
            heapq.heappush(events, (again, name, "asks", life))
        answered = getattr(server, what)(name)
        answered = list(answered) if isinstance(answered, list | tuple | set) else answered
        yield [what, name, answered]
        for other in answered if isinstance(answered, list) else ():
            if type(other) is int and other in waiting:
                waiting.discard(other)
                lasts = seconds[other].pop(0)
                heapq.heappush(events, (now + lasts, other, "pushed", lives[other]))
