"""Tasks of lesson 10: ZeRO-2."""

from __future__ import annotations

from typing import Any

import torch

from ...grade.compare import close, differs
from ...grade.task import Aspect, Case, Observed, Task
from ...grade.vocabulary import calls_until, padded_shards, world_name
from .job import layers

# -- 10.shard_gradients ----------------------------------------------------------------------------

WIDTHS = (3, 5, 4, 7, 2)


def _shard_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int) -> Case:
        pairs = zip(WIDTHS[1:], WIDTHS, strict=False)
        weights = [torch.randn(pair, generator=rng) for pair in pairs]
        inputs = [
            {"weights": weights, "x": [torch.randn(6, 3, generator=rng) for _ in range(2)]}
            for _ in range(world)
        ]
        return Case(world_name(world), inputs)

    return [case(1), case(2), case(3), case(4)]


def _local(rank: dict[str, Any], step: int) -> list[torch.Tensor]:
    """One rank's gradients of one batch."""
    model = layers(rank["weights"])
    return list(
        torch.autograd.grad(model(rank["x"][step]).square().mean(), list(model.parameters()))
    )


def _first_values(seen: Observed) -> str | None:
    return _shard_values(seen, 0)


def _second_values(seen: Observed) -> str | None:
    return _shard_values(seen, 1)


def _shard_values(seen: Observed, step: int) -> str | None:
    """The shards after backward number `step`, which holds all gradients up to it."""
    world, inputs = seen.case.world, seen.case.inputs
    by_step = [[_local(rank, s) for rank in inputs] for s in range(step + 1)]
    for index in range(len(inputs[0]["weights"])):
        stacks = [torch.stack([rank[index] for rank in ranks]) for ranks in by_step]
        mean = torch.stack([stack.mean(0) for stack in stacks]).sum(0)
        for rank, got in enumerate(seen.data):
            now, right = got["after"][step]["shards"][index], padded_shards([mean], world)
            what = f"Rank {rank}'s shard of gradient {index}"
            if (wrong := differs(now, right[rank], what)) is None:
                continue
            if now is None:
                return f"{what} is None after backward."
            if step and close(now, padded_shards([stacks[-1].mean(0)], world)[rank]):
                return f"{what} holds the second backward alone: add to what is there."
            if world > 1:
                if close(now, padded_shards([mean * world], world)[rank]):
                    return f"{what} is the sum over the ranks. Divide by their number."
                if close(
                    now, padded_shards([torch.stack([s[rank] for s in stacks]).sum(0)], world)[rank]
                ):
                    return f"{what} is cut from the rank's own gradient: nothing was added up."
                if type(now) is torch.Tensor and now.numel() == mean.numel():
                    return (
                        f"{what} is the whole gradient; {len(right[rank])} elements are its share."
                    )
                if any(close(now, part) for part in right):
                    return f"{what} is the part of another rank."
            return wrong
    return None


def _left(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for after in got["after"]:
            if after["left"]:
                return (
                    f"After backward, {after['left']} full gradients are left on rank {rank}. Set "
                    ".grad to None when its shard is there."
                )
    return None


def _alive(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if not got["alive"] <= 1:
            return (
                f"During backward, {got['alive']} full gradients lived on rank {rank} at once; "
                f"one is "
                "enough. Reduce each when it is ready, and free it."
            )
        if wrong := _kept_back(seen, rank):
            return wrong
    return None


def _kept_back(seen: Observed, rank: int) -> str | None:
    """Whether gradients that were ready had not been sent when backward came to a layer."""
    world = seen.case.world
    numels = [weight.numel() for weight in seen.case.inputs[0]["weights"]]
    for layer in reversed(range(len(numels))):
        # at least: all but the own part, without padding
        due = sum(4 * (numel - -(-numel // world)) for numel in numels[layer + 1 :])
        for calls in calls_until(seen, rank, layer):
            if (sent := sum(call.bytes_sent for call in calls)) < due:
                return (
                    f"When backward came to layer {layer} (layer 0 is the first), rank {rank} had "
                    f"sent {sent} bytes; to reduce the gradients that were ready takes {due}. "
                    "Reduce each when it is ready, and keep none for later."
                )
    return None


def _shard_traffic(seen: Observed) -> str | None:
    world = seen.case.world
    numels = [weight.numel() for weight in seen.case.inputs[0]["weights"]]
    most = 2 * sum((world - 1) * -(-numel // world) * 4 for numel in numels)
    for rank in range(world):
        if seen.sent(rank) > most:
            ops = " and ".join(sorted(set(seen.ops(rank))))
            return (
                f"Rank {rank} sent {seen.sent(rank):,} bytes with {ops} in two backwards; a "
                f"reduce-scatter of each gradient is {most:,}."
            )
        if len(seen.calls(rank, "backward")) < len(seen.calls(rank)):
            return f"Rank {rank} sends outside of backward."
    return None


SHARD = Task(
    id="10.shard_gradients",
    title="Gradients that go to their owner",
    answer="shard_gradients",
    job="lesson10.shard_gradients",
    minutes=20,
    cases=_shard_cases,
    aspects=(
        Aspect("each rank's shard of the mean gradient", 2, _first_values),
        Aspect("a second backward adds to the shards", 1, _second_values),
        Aspect("no full gradient is left after backward", 1, _left),
        Aspect("at most one full gradient lives at a time", 2, _alive),
        Aspect("the bytes of a reduce-scatter", 1, _shard_traffic),
    ),
    hints=(
        "When is a gradient final, and when is the last moment that anybody needs it whole?",
        "A post-accumulate hook may set parameter.grad = None. Where do you keep the shard, and "
        "what "
        "if one is there already?",
        "In the hook: pad the flattened gradient to a multiple of N, reduce_scatter it, divide by "
        "N, "
        "add it to shards[index] (or put it there), free .grad.",
    ),
    debrief="ZeRO-2 reduces whole buckets, asynchronously. Keeping the shards over m "
    "micro-batches costs "
    "m reduce-scatters; no_sync costs one and keeps full gradients: traffic against memory.",
)

# -- 10.clip_shards --------------------------------------------------------------------------------


def _clip_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, max_norm: float, says: str, kind: str = "", same: int = 0) -> Case:
        replicated = [torch.randn(3, 2, generator=rng) for _ in range(same)]
        inputs = [
            {
                "shards": [torch.randn(s, generator=rng) * (rank + 1) for s in (7, 4)],
                "replicated": replicated,
                "max_norm": max_norm,
            }
            for rank in range(world)
        ]
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    return [
        case(1, 1.0, "too long"),
        case(2, 1.0, "too long"),
        case(3, 0.5, "too long"),
        case(4, 2.0, "too long"),
        case(3, 1e4, "short enough", "short"),
        case(2, 1.0, "with replicated parameters", "replicated", same=2),
        case(4, 1.0, "with replicated parameters", "replicated", same=1),
    ]


def _clip_values(seen: Observed) -> str | None:
    inputs, world = seen.case.inputs, seen.case.world
    limit, same = inputs[0]["max_norm"], inputs[0]["replicated"]
    squares = [sum(float(s.double().square().sum()) for s in rank["shards"]) for rank in inputs]
    shared = sum(float(r.double().square().sum()) for r in same)
    norm = (sum(squares) + shared) ** 0.5
    known = {
        "of the rank's own part": [(s + shared) ** 0.5 for s in squares],
        "of the rank's own shards": [s**0.5 for s in squares],
        "the sum of the ranks' norms: add up squares": [sum(s**0.5 for s in squares)] * world,
        "the sum of squares, without the root": [norm**2] * world,
        "that counts replicated parameters once for each rank": [
            (sum(squares) + world * shared) ** 0.5
        ]
        * world,
        "without the replicated parameters": [sum(squares) ** 0.5] * world,
        "the mean over the ranks": [((sum(squares) + shared) / world) ** 0.5] * world,
    }
    factor = min(1.0, limit / norm)
    for rank, got in enumerate(seen.data):
        value = got["norm"]
        if not abs(value - norm) <= 1e-4 * norm:  # nan is no norm either
            if abs(value - min(norm, limit)) <= 1e-4 * norm:
                return f"Rank {rank} returned the norm after clipping; return the one before."
            for words, like in known.items():
                if abs(value - like[rank]) <= 1e-4 * norm:
                    return f"Rank {rank} returned a norm {words}."
            return f"Rank {rank} returned {value:.4g}, and the global norm is another."
        for name in ("shards", "replicated"):
            for now, begun in zip(got[name], inputs[rank][name], strict=True):
                if close(now, begun * factor, rtol=1e-4):
                    continue
                if close(now, begun) and factor < 1:
                    return f"On rank {rank}, {name} are as long as before; scale all in place."
                if factor == 1:
                    return f"On rank {rank}, gradients were scaled though they are short enough."
                return f"On rank {rank}, {name} were not multiplied by max_norm / norm."
    return None


def _clip_calls(seen: Observed) -> str | None:
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        if len(calls) != 1:
            return f"Rank {rank} made {len(calls)} calls; one all_reduce of one number is enough."
        if calls[0].elements > seen.case.world:
            return (
                f"Rank {rank} sent {calls[0].elements} elements with {calls[0].op}; the sum of "
                "squares is one number."
            )
    return None


CLIP = Task(
    id="10.clip_shards",
    title="Clip by the global norm",
    answer="clip_shards",
    job="lesson10.clip_shards",
    minutes=10,
    cases=_clip_cases,
    aspects=(
        Aspect("the norm of all ranks' shards, and all scaled by it", 2, _clip_values, on=("",)),
        Aspect("gradients that are short enough stay", 1, _clip_values, on=("short",)),
        Aspect("replicated parameters count once", 1, _clip_values, on=("replicated",)),
        Aspect("one all-reduce of one number", 1, _clip_calls),
    ),
    hints=(
        "Norms of parts do not add up. What of them does?",
        "Every element of the whole model counts once. Who has it: one rank, or all?",
        "total = sum of squares of own shards; all_reduce; add the squares of the replicated ones "
        "after that; norm = root; factor = min(1, max_norm / norm); multiply everything.",
    ),
    debrief="clip_grad_norm_ on FSDP2's DTensors does the same inside. On plain shards it clips "
    "by the "
    "local norm, each rank by another factor, and nothing warns you (pytorch #72548).",
)

TASKS = [SHARD, CLIP]
