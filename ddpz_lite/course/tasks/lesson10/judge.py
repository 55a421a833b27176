"""Tasks of lesson 10: ZeRO-2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch

from ddpz_lite.course.check.compare import close
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    calls_until,
    explain,
    explain_number,
    holds_at_most,
    ops_of_all,
    padded_shards,
    sent_by_all,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson10.job import layers

# -- 10.shard_gradients ----------------------------------------------------------------------------

# Weights of 35, 77, 55 and 5 elements, of a second model 49 and 1: no world from 2 to 4 divides one
# that is larger than it, and the last ranks have nothing but padding of the small ones.
WIDTHS = (5, 7, 11, 5, 1)
SECOND = (5, 5, 1, 1)
BACKWARDS = 3  # of each model; before the last one the shards are cleared


def _shard_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, kind: str = "", says: str = "") -> Case:
        other = kind == "other"
        dtype = torch.float64 if other else torch.float32
        models = [
            [torch.randn(b, a, generator=rng, dtype=dtype) / a**0.5 for a, b in pairwise(widths)]
            for widths in ((SECOND, WIDTHS, SECOND) if other else (WIDTHS,))
        ]
        inputs = [
            {
                "models": models,
                "x": [
                    torch.randn(6, WIDTHS[0], generator=rng, dtype=dtype) for _ in range(BACKWARDS)
                ],
                "turned": other,
            }
            for _ in range(world)
        ]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    other = ", three models in float64, transposed weights"
    return [case(3), case(4), case(2), case(1), case(4, "other", other)]


def _local(rank: dict[str, Any], step: int) -> list[torch.Tensor]:
    """One rank's gradients of one batch, of one model after the other."""
    rows = [layers(weights, rank["turned"]) for weights in rank["models"]]
    loss = torch.stack([row(rank["x"][step]).square().mean() for row in rows]).sum()
    return list(torch.autograd.grad(loss, [p for row in rows for p in row.parameters()]))


def _first_values(seen: Observed) -> str | None:
    return _shard_values(seen, 0)


def _later_values(seen: Observed) -> str | None:
    return _shard_values(seen, 1) or _shard_values(seen, 2)


def _other_values(seen: Observed) -> str | None:
    return _first_values(seen) or _later_values(seen)


def _shard_values(seen: Observed, step: int) -> str | None:
    """The shards after backward number `step`: all gradients since they were cleared."""
    world, inputs = seen.case.world, seen.case.inputs
    counted = [step] if step == BACKWARDS - 1 else list(range(step + 1))
    by_step = [[_local(rank, s) for rank in inputs] for s in counted]
    for index in range(len(by_step[0][0])):
        # (backwards, ranks, *shape)
        every = torch.stack([torch.stack([own[index] for own in ranks]) for ranks in by_step])
        mean = every.mean(1).sum(0)
        parts = padded_shards([mean], world)
        for rank, got in enumerate(seen.data):
            now, what = (
                got["after"][step]["shards"][index],
                f"Rank {rank}'s shard of gradient {index}",
            )
            if close(now, parts[rank]):
                continue
            if now is None:
                return f"{what} is None after backward."
            if type(now) is torch.Tensor and now.numel() == mean.numel() > len(parts[rank]):
                return f"{what} is the full gradient; the shard has {len(parts[rank])} elements."

            def cut(whole: torch.Tensor) -> torch.Tensor:
                return padded_shards([whole], world)[rank]  # noqa: B023

            mistakes = {
                "holds only the second backward's gradient: add to the existing shard.": cut(
                    every[-1].mean(0)
                ),
                "is the sum over the ranks. Divide by their number.": cut(mean * world),
                "is cut from the rank's own gradient: nothing was added up.": cut(
                    every[:, rank].sum(0)
                ),
            }
            wrong = explain(now, parts[rank], what, mistakes)
            other = any(close(now, part) for part in parts)
            return f"{what} is the part of another rank." if other else wrong
    return None


def _left(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for after in got["after"]:
            if after["left"]:
                return (
                    f"After backward, {after['left']} full gradients are left on rank {rank}. Set "
                    ".grad to None when its shard is there."
                )
    world, models = seen.case.world, seen.case.inputs[0]["models"]
    sizes = [(-(-w.numel() // world)) * w.element_size() for m in models for w in m]
    return holds_at_most(
        seen,
        lambda got: [a["held"] for a in got["after"]],
        sum(sizes),
        "after backward, its shards",
    )


def _alive(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if not got["alive"] <= 1:
            return (
                f"During backward, {got['alive']} full gradients lived on rank {rank} at once; one "
                "is enough. Reduce each when it is ready, and free it."
            )
        if wrong := _kept_back(seen, rank):
            return wrong
    return None


def _kept_back(seen: Observed, rank: int) -> str | None:
    """Whether gradients that were ready had not been sent when backward came to a layer."""
    world = seen.case.world
    numels = [weight.numel() for weight in seen.case.inputs[0]["models"][0]]
    for layer in reversed(range(len(numels))):
        # at least: all but the own part, without padding
        due = sum(4 * (numel - -(-numel // world)) for numel in numels[layer + 1 :])
        for calls in calls_until(seen, rank, layer):
            if (sent := sum(call.bytes_sent for call in calls)) < due:
                return (
                    f"When backward came to layer {layer} (layer 0 is the first), rank {rank} had "
                    f"sent {sent} bytes, but reducing the gradients that were ready takes {due}. "
                    "Reduce each when it is ready, and keep none for later."
                )
    return None


def _shard_traffic(seen: Observed) -> str | None:
    world = seen.case.world
    padded = sum(-(-weight.numel() // world) * 4 for weight in seen.case.inputs[0]["models"][0])
    most = BACKWARDS * world * (world - 1) * padded
    if (sent := sent_by_all(seen)) > most:
        gloo = "gloo's own reduce_scatter sends as much as an all-reduce. "
        why = gloo if "reduce_scatter" in ops_of_all(seen) else ""
        return (
            f"All ranks sent {sent:,} bytes with {ops_of_all(seen)} in three backwards. {why}"
            f"A reduce-scatter of each gradient takes half as much: {most:,}."
        )
    for rank in range(world):
        if len(seen.calls(rank, "backward")) < len(seen.calls(rank)):
            return f"Rank {rank} sends outside of backward. Send from the hooks."
    return None


SHARD = Task(
    id="10.shard_gradients",
    title="Gradients that go to their owner",
    answer="shard_gradients",
    job="lesson10.shard_gradients",
    minutes=20,
    cases=_shard_cases,
    criteria=(
        Criterion("each rank's shard of the mean gradient", 1, _first_values, on=("",)),
        Criterion("a second backward adds to the shards", 1, _later_values, on=("",)),
        Criterion("another dtype, any layout, two models", 1, _other_values, on=("other",)),
        Criterion("no full gradient is left after backward", 1, _left),
        Criterion("at most one full gradient lives at a time", 2, _alive, on=("",)),
        Criterion("the bytes of a reduce-scatter", 1, _shard_traffic, on=("",)),
    ),
    hints=(
        "When is a gradient final, and until when is the full gradient needed?",
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
    def case(
        world: int, limits: list[float], says: str, kind: str = "", same: tuple[int, ...] = (0,)
    ) -> Case:
        shared = [[torch.randn(3, 2, generator=rng) for _ in range(n)] for n in same]
        inputs = [
            {
                "calls": [
                    {
                        "shards": [
                            torch.randn(s, generator=rng) * (rank + 1) for s in ((7,), (4, 5))
                        ],
                        "replicated": shared[i % len(shared)],
                        "max_norm": limit,
                    }
                    for i, limit in enumerate(limits)
                ],
                "turned": kind == "replicated",
            }
            for rank in range(world)
        ]
        return Case(f"{world_name(world)}, {says}", inputs, kind)

    long = "too long, three times"
    return [
        _between(case(3, [0.5, 3.0, 1.0], long), 0.02),
        _between(case(4, [2.0, 1.0, 0.1], long), 1.0, nearly=True),
        case(2, [1.0, 2.0, 0.7], long),
        case(1, [1.0, 2.0, 0.7], long),
        _between(
            _short(case(3, [1e4, 5.0, 2.0], "short enough, at the limit, zero", "short")), 1.0
        ),
        case(4, [1.0, 1e4, 2.0], "with replicated parameters", "replicated", same=(2, 1, 1)),
        case(2, [0.5, 2.0], "with replicated parameters", "replicated", same=(3, 0)),
    ]


def _between(case: Case, times: float, nearly: bool = False) -> Case:
    """One more call: the first one's gradients, `times` as long, and a limit between their norm and
    its square; or, with `nearly`, a little below their norm.
    """
    shards = [[times * t for t in rank["calls"][0]["shards"]] for rank in case.inputs]
    norm = torch.cat([t.flatten() for own in shards for t in own]).norm().item()
    for rank, own in zip(case.inputs, shards, strict=True):
        limit = 0.995 * norm if nearly else norm**1.5
        rank["calls"].append({"shards": own, "replicated": [], "max_norm": limit})
    return case


def _short(case: Case) -> Case:
    """The second call has the norm 5, exactly, and the third one 0."""
    for rank, inputs in enumerate(case.inputs):
        _, at_limit, zero = inputs["calls"]
        for shard in (*at_limit["shards"], *zero["shards"]):
            shard.zero_()
        if rank < 2:
            at_limit["shards"][rank].view(-1)[1] = 3.0 + rank
    return case


def _clip_values(seen: Observed) -> str | None:
    for number in range(len(seen.case.inputs[0]["calls"])):
        inputs = [rank["calls"][number] for rank in seen.case.inputs]
        for rank, got in enumerate(seen.data):
            if wrong := _clipped(inputs, rank, got["calls"][number]):
                return wrong
    return None


def _clipped(inputs: list[dict[str, Any]], rank: int, got: dict[str, Any]) -> str | None:
    """One call on one rank."""
    world, limit = len(inputs), inputs[0]["max_norm"]
    squares = [sum(float(s.double().square().sum()) for s in own["shards"]) for own in inputs]
    shared = sum(float(r.double().square().sum()) for r in inputs[0]["replicated"])
    norm = (sum(squares) + shared) ** 0.5
    mistakes = {
        "is the norm after clipping; return the one before.": min(norm, limit),
        "is the norm of its own part.": (squares[rank] + shared) ** 0.5,
        "is the norm of its own shards.": squares[rank] ** 0.5,
        "is the sum of the ranks' norms: add up squares.": sum(s**0.5 for s in squares),
        "is the sum of squares, without the root.": norm**2,
        "is a norm that counts replicated parameters once for each rank.": (
            (sum(squares) + world * shared) ** 0.5
        ),
        "is a norm without the replicated parameters.": sum(squares) ** 0.5,
        "is the root of the mean over the ranks.": ((sum(squares) + shared) / world) ** 0.5,
    }
    what = f"What rank {rank} returned"
    if wrong := explain_number(got["norm"], norm, what, mistakes, rtol=1e-5):
        return wrong
    factor = min(1.0, limit / norm) if norm else 1.0
    for name in ("shards", "replicated"):
        for now, begun in zip(got[name], inputs[rank][name], strict=True):
            if close(now, begun * factor):
                continue
            if close(now, begun):
                return f"On rank {rank}, `{name}` were not scaled; scale all of them in place."
            if factor == 1:
                return (
                    f"On rank {rank}, gradients were scaled, although their norm is at most "
                    "max_norm."
                )
            return f"On rank {rank}, `{name}` were not multiplied by max_norm / norm."
    return None


def _clip_calls(seen: Observed) -> str | None:
    count = len(seen.case.inputs[0]["calls"])
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        if len(calls) != count and (calls or seen.case.world > 1):
            return (
                f"Rank {rank} made {len(calls)} calls to clip {count} times; one all_reduce of one "
                "number is enough."
            )
        for call in calls:
            if call.elements > (seen.case.world if call.op == "all_gather" else 1):
                return (
                    f"Rank {rank} sent {call.elements} elements with {call.op}; the sum of squares "
                    "is one number."
                )
    return None


CLIP = Task(
    id="10.clip_shards",
    title="Clip by the global norm",
    answer="clip_shards",
    job="lesson10.clip_shards",
    minutes=10,
    cases=_clip_cases,
    criteria=(
        Criterion("the norm of all ranks' shards, and all scaled by it", 2, _clip_values, on=("",)),
        Criterion("gradients that are short enough stay", 1, _clip_values, on=("short",)),
        Criterion("replicated parameters count once", 1, _clip_values, on=("replicated",)),
        Criterion("one all-reduce of one number", 1, _clip_calls),
    ),
    hints=(
        "Norms of parts do not add up. Which function of them does?",
        "Every element of the full gradient counts once. Does one rank have it, or do all?",
        "total = sum of squares of own shards; all_reduce; add the squares of the replicated ones "
        "after that; norm = root; factor = min(1, max_norm / norm); multiply everything.",
    ),
    debrief="clip_grad_norm_ on FSDP2's DTensors does the same inside. On plain shards it clips "
    "by the "
    "local norm, each rank by another factor, and nothing warns you (pytorch #72548).",
)

# -- 10.keep_whole ---------------------------------------------------------------------------------

Plan = Sequence[bool]


def _peak(sizes: list[int], world: int, plan: Plan, *, in_flight: bool = True) -> int:
    """Bytes of gradients at most. in_flight: with the bucket that is just being reduced."""
    held = sum(n if whole else -(-n // world) for n, whole in zip(sizes, plan, strict=True))
    sharded = [n for n, whole in zip(sizes, plan, strict=True) if not whole]
    return 4 * (held + (max(sharded, default=0) if in_flight else 0))


def _sent(sizes: list[int], world: int, micros: int, plan: Plan) -> int:
    """Bytes that a rank sends in a step."""
    parts = [
        -(-n // world) * (1 if whole else micros) for n, whole in zip(sizes, plan, strict=True)
    ]
    return 4 * (world - 1) * sum(parts)


def _fewest(
    sizes: list[int], world: int, micros: int, budget: int, **peak: bool
) -> tuple[int, Plan] | None:
    """(bytes sent, a plan) of the cheapest plan that fits."""
    plans = (p for p in product((False, True), repeat=len(sizes)))
    fit = [p for p in plans if _peak(sizes, world, p, **peak) <= budget]
    return min(((_sent(sizes, world, micros, p), p) for p in fit), default=None)


def _keep_cases(rng: torch.Generator) -> list[Case]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    def question(world: int, micros: int, count: int, spare: int = 0) -> dict[str, Any]:
        """A budget that some plan just takes. A greedy choice or a wrong peak finds another."""
        while True:
            sizes = [number(20, 2000) for _ in range(count)]
            plan = [bool(number(0, 2)) for _ in sizes]
            about = {"sizes": sizes, "world": world, "micros": micros}
            asked = about | {"budget": _peak(sizes, world, plan) + spare}
            _, best = _fewest(**asked)
            chosen = [_greedy(**asked, order=order) for order in (1, -1)]
            best_sent = _sent(sizes, world, micros, best)
            too_many = [c is None or _sent(sizes, world, micros, c) > best_sent for c in chosen]
            fewer = [_peak(sizes, world - 1, p) for p in ([False] * count, best)]
            told_apart = fewer[0] <= asked["budget"] < fewer[1]  # on a rank fewer
            if any(best) and not all(best) and all(too_many) and told_apart:
                return asked

    def same_shapes(asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The question, and with each argument in turn changed."""
        larger = asked["budget"] + 4 * max(asked["sizes"])
        return [
            asked,
            asked | {"budget": larger},
            asked | {"world": asked["world"] - 1},  # larger shards: the plan fits no more
            asked | {"sizes": asked["sizes"][::-1]},
            asked | {"micros": asked["micros"] + 1},
        ]

    def limits(world: int, micros: int, count: int) -> list[dict[str, Any]]:
        sizes = [number(20, 2000) for _ in range(count)]
        about = {"sizes": sizes, "world": world, "micros": micros}
        least = min(_peak(sizes, world, p) for p in product((False, True), repeat=count))
        whole = 4 * sum(sizes)
        return [about | {"budget": b} for b in (least, least - 1, whole, whole - 1, 0)]

    every = [same_shapes(question(world, micros, count))
             for world, micros, count in ((3, 4, 6), (5, 2, 7), (4, 8, 5), (7, 3, 8))]  # fmt: skip
    exact = [limits(3, 4, 5), limits(2, 2, 1), limits(8, 3, 6)]
    plain = [limits(4, 1, 5), limits(1, 3, 4), limits(64, 2, 3)]

    def case(says: str, kind: str, questions: list[list[dict[str, Any]]]) -> Case:
        return Case(says, [{"questions": [q for group in questions for q in group]}], kind)

    return [
        case("budgets between the two extremes", "", every),
        case("to the byte, and too little", "exact", exact),
        case("one micro-batch, one rank, more ranks than elements", "plain", plain),
    ]


def _greedy(
    sizes: list[int], world: int, micros: int, budget: int, order: int
) -> list[bool] | None:
    """One bucket after another is kept whole if it still fits; order: 1 the smallest first."""
    plan = [False] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: order * sizes[i]):
        plan[index] = True
        if _peak(sizes, world, plan) > budget:
            plan[index] = False
    return plan if _peak(sizes, world, plan) <= budget else None


def _keep_form(seen: Observed) -> str | None:
    for asked, plan in zip(seen.case.inputs[0]["questions"], seen.data[0]["plans"], strict=True):
        sizes = asked["sizes"]
        if plan is None:
            if (best := _fewest(**asked)) is not None:
                return f"{_asked(asked)}: None is wrong, because {list(best[1])} fits."
            continue
        if type(plan) is not list or [type(p) for p in plan] != [bool] * len(sizes):
            return f"{_asked(asked)}: return a list of {len(sizes)} bools, or None, not {plan!r}."
        peak, budget = _peak(sizes, asked["world"], plan), asked["budget"]
        if peak <= budget:
            continue
        message = f"{_asked(asked)}: {plan} takes {peak:,} bytes at its peak."
        if _fewest(**asked) is None:
            return f"{message} Nothing fits here: return None."
        if _peak(sizes, asked["world"], plan, in_flight=False) <= budget:
            return (
                f"{message} A sharded bucket, too, is in memory in full until it is reduced, in "
                "addition to the shards of earlier micro-batches."
            )
        return f"{message} Whole buckets take 4n bytes each, sharded ones 4 ceil(n / N)."
    return None


def _asked(asked: dict[str, Any]) -> str:
    return (
        f"Buckets of {asked['sizes']}, {world_name(asked['world'])}, {asked['micros']} "
        f"micro-batches, {asked['budget']:,} bytes"
    )


def _keep_fewest(seen: Observed) -> str | None:
    if wrong := _keep_form(seen):
        return wrong
    for asked, plan in zip(seen.case.inputs[0]["questions"], seen.data[0]["plans"], strict=True):
        if plan is None:
            continue
        sent = _sent(asked["sizes"], asked["world"], asked["micros"], plan)
        fewest, _ = _fewest(**asked)
        if sent <= fewest:
            continue
        message = f"{_asked(asked)}: {plan} sends {sent:,} bytes, but {fewest:,} are possible."
        if not any(plan):
            return f"{message} Nothing is kept whole, so each micro-batch reduces everything."
        for order, words in ((1, "smallest"), (-1, "largest")):
            if plan == _greedy(**asked, order=order):
                return f"{message} Taking the {words} bucket first is not always best."
        return (
            f"{message} If you keep a bucket whole, it needs no second buffer. For which buckets "
            "does this lower the peak?"
        )
    return None


KEEP_WHOLE = Task(
    id="10.keep_whole",
    title="What is worth its memory?",
    answer="keep_whole",
    job="lesson10.keep_whole",
    minutes=15,
    cases=_keep_cases,
    criteria=(
        Criterion("plans that fit the budget", 2, _keep_form, on=("",)),
        Criterion("the fewest bytes", 2, _keep_fewest, on=("",)),
        Criterion("to the byte, and None where nothing fits", 1, _keep_fewest, on=("exact",)),
        Criterion("one micro-batch, one rank, many ranks", 1, _keep_fewest, on=("plain",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "When is most memory held? What does the rank hold then, besides the bucket that is being "
        "reduced?",
        "Keeping the largest bucket whole can lower the peak of the others, because the bucket in "
        "flight is then a smaller one.",
        "for plan in itertools.product([False, True], repeat=len(sizes)): compute the peak and the "
        "bytes; keep the cheapest plan whose peak fits.",
    ),
    debrief="FSDP2 offers the two ends, with or without set_requires_gradient_sync(False); "
    "DeepSpeed's stage 2 always shards, and refuses no_sync.",
)

TASKS = [SHARD, CLIP, KEEP_WHOLE]
