"""Tasks of lesson 05: DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch

from ddpz_lite.course.check.compare import close
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import calls_until, explain, moved, nbytes, world_name
from ddpz_lite.course.tasks.lesson05 import job
from ddpz_lite.course.tasks.lesson05.job import Gradients, _Net
from ddpz_lite.wire import Network, Record

STEPS = 3


# ---- what is run ----


def _drawn(rng: torch.Generator, sizes: Sequence[int], *dtypes: torch.dtype) -> list[torch.Tensor]:
    """Weights of linear layers, the last two reading the same input; dtypes in turn."""
    pairs = list(zip(sizes[1:], sizes, strict=False))
    pairs.append(pairs[-1])
    dtypes = dtypes or (torch.float32,)
    drawn = [torch.randn(pair, generator=rng) for pair in pairs]
    return [w.to(dtypes[index % len(dtypes)]) for index, w in enumerate(drawn)]


def _batch(rng: torch.Generator, net: dict[str, Any], rows: int = 3) -> torch.Tensor:
    first = net["weights"][0]
    return torch.randn(rows, first.shape[1], generator=rng).to(first.dtype)


def _hooks_inputs(
    rng: torch.Generator, world: int, nets: list[dict[str, Any]], **more: Any
) -> list[dict[str, Any]]:
    """For each rank: these nets and STEPS batches for each. The last rank's first have no rows."""
    return [
        {
            "nets": nets,
            "batches": [
                [_batch(rng, net, 0 if rank == world - 1 > 0 == step else 3) for net in nets]
                for step in range(STEPS)
            ],
            **more,
        }
        for rank in range(world)
    ]


# ---- the values ----


def _still(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same, without naps and barriers."""
    nets = [{**net, "nap": 0.0} for net in inputs["nets"]]
    return {**inputs, "nets": nets} | ({"in_step": False} if "in_step" in inputs else {})


def _alone(seen: Observed) -> list[dict[str, Any]]:
    """What the job returns, by rank, with an answer that does nothing."""
    return [job.hooks(lambda _, **options: None, **_still(inputs)) for inputs in seen.case.inputs]


def _which(step: int, model: int) -> str:
    """Words for all but the first backward."""
    words = [f"step {step + 1}"] * (step > 0) + [f"model {model + 1}"] * (model > 0)
    return f" in {' of '.join(words)}" if words else ""


def _values(seen: Observed) -> str | None:
    alone = _alone(seen)
    for rank, got in enumerate(seen.data):
        if wrong := _wrong_weights(seen.case.inputs[rank]["nets"], got["weights"], rank):
            return wrong
    for step in range(len(seen.case.inputs[0]["batches"])):
        for model in range(len(seen.case.inputs[0]["nets"])):
            parts = [own["steps"][step][model] for own in alone]
            for rank, got in enumerate(seen.data):
                mine = got["steps"][step][model]
                if wrong := _wrong_gradients(mine, parts, rank, _which(step, model)):
                    return wrong
    return None


def _wrong_weights(nets: list[dict[str, Any]], weights: Any, rank: int) -> str | None:
    for net, got in zip(nets, weights, strict=True):
        for index, begun in enumerate(_Net(**net).parameters()):
            if not close(got[index], begun.detach(), bitwise=True):
                return (
                    f"Rank {rank}'s weight {index} has changed, but backward does not change "
                    "weights. A post-accumulate hook receives the parameter itself: average its "
                    ".grad."
                )
    return None


def _wrong_gradients(got: Any, alone: list[Gradients], rank: int, where: str = "") -> str | None:
    """What is wrong with one rank's gradients, if they should be the mean of `alone`, by rank."""
    world = len(alone)
    for index, parts in enumerate(zip(*alone, strict=True)):
        if parts[0] is None:
            if got[index] is not None:
                return f"Rank {rank}'s frozen weight {index} has a gradient{where}."
            continue
        stack = torch.stack(parts)
        mistakes = {
            "is the sum over the ranks. Divide by their number.": stack.sum(0),
            "is still the rank's own after backward(): it was not averaged.": stack[rank],
            "is divided by the number of ranks, but was not added up before backward() returned.": (
                stack[rank] / world
            ),
            "is divided by the number of ranks twice.": stack.mean(0) / world,
            f"is half of the sum, on {world} ranks. Use dist.get_world_size().": stack.sum(0) / 2,
        }
        what = f"Rank {rank}'s gradient {index}{where}"
        wrong = explain(got[index], stack.mean(0), what, mistakes if world > 1 else {})
        if wrong is None:
            continue
        others = [part for part in alone[1 - rank] if part is not None] if world == 2 else []
        same = [part for part in others if part.shape == stack[rank].shape]
        if any(close(got[index], (stack[rank] + part) / 2) for part in same):
            return (
                f"{what} is a mean of two different gradients: the ranks sent their buckets in "
                "different orders."
            )
        return wrong
    return None


# ---- the traffic ----


def _backwards(seen: Observed, rank: int, name: str = "backward") -> list[list[Record]]:
    """The calls of each backward."""
    spans = [s for s in seen.spans if (s.rank, s.name) == (rank, name)]
    calls = seen.calls(rank, name)
    return [[c for c in calls if s.started <= c.started <= s.finished] for s in spans]


def _outside(seen: Observed, rank: int) -> str | None:
    """Calls that are neither in a backward nor the job's own."""
    if len(seen.calls(rank)) > len(seen.calls(rank, "backward")) + len(seen.calls(rank, "start")):
        return f"Rank {rank} makes calls outside of backward. Let the hooks do the work."
    return None


def _trained(net: dict[str, Any]) -> list[torch.Tensor]:
    return [p for p in _Net(**net).parameters() if p.requires_grad]


def _too_many_bytes(seen: Observed, net: dict[str, Any], calls: Sequence[Record]) -> str | None:
    """calls: of all ranks in one backward. At most what an all-reduce of each gradient sends."""
    world = seen.case.world
    each = [-(-p.numel() // world) * world * p.itemsize for p in _trained(net)]
    most = 2 * (world - 1) * sum(each)
    sent = sum(_sent(call, world) for call in calls)
    if sent <= most:
        return None
    return (
        f"In one backward all ranks sent {sent:,} bytes; an all-reduce of each gradient takes "
        f"{most:,}."
    )


def _sent(call: Record, world: int) -> int:
    """Bytes that a rank sent. gloo makes a reduce_scatter of a full all-reduce; the caller cannot
    change this.
    """
    if call.op == "reduce_scatter":
        return nbytes(call) * (world - 1) // world
    return moved(call)


def _kept_back(seen: Observed, sizes: list[list[int]], lag: int, first: int = 0) -> str | None:
    """A judge's sentence if calls come later than they could, seen when backward comes to a layer.

    sizes: of each model, elements of each call of one backward, in order. lag: by how many layers a
    call may be late. first: the number of the first backward that counts.
    """
    nets = [_Net(**{**net, "nap": 0.0}) for net in seen.case.inputs[0]["nets"]]
    for rank in range(seen.case.world):
        for layer in range(len(nets[0].layers) - 3, -1, -1):
            backwards = list(enumerate(calls_until(seen, rank, layer)))
            for number, calls in backwards[first:]:
                model = number % len(nets)
                ready = _ready_at(nets[model], layer + lag)
                due = max((n for n in accumulate(sizes[model]) if n <= ready), default=0)
                if (sent := sum(call.elements for call in calls)) < due:
                    return (
                        f"When backward came to layer {layer} (layer 0 is the first), rank {rank} "
                        f"had sent {sent} elements, but could have sent {due}. Send from the "
                        "hooks, not at the end."
                    )
    return None


def _ready_at(net: _Net, layer: int) -> int:
    """Elements of the gradients that are final when backward comes to this layer."""
    to_come = {id(p) for p in net.layers[: layer + 1].parameters()}
    later = [p for p in net.layers[layer + 1 :].parameters() if id(p) not in to_come]
    return sum(p.numel() for p in later if p.requires_grad)


# -- 05.hooks --------------------------------------------------------------------------------------


def _hooks_cases(rng: torch.Generator) -> list[Case]:
    def nets(*sizes: Sequence[int], **more: Any) -> list[dict[str, Any]]:
        return [{"weights": _drawn(rng, s)} | more for s in sizes]

    def case(says: str, world: int, nets: list[dict[str, Any]], kind: str = "") -> Case:
        return Case(f"{world_name(world)}{says}", _hooks_inputs(rng, world, nets), kind)

    mixed = _drawn(rng, (3, 5, 2, 4), torch.float64, torch.float32, torch.bfloat16)
    late = case(", two models, one of three dtypes", 3, [*nets((4, 6, 3, 9)), {"weights": mixed}])
    _nap(late, rank=0)
    single = [{"weights": _drawn(rng, (n, n + 2))[:1], "order": "row"} for n in (3, 5)]
    odd = [
        {"weights": _drawn(rng, (4, 6, 4, 6)), "tied": True},
        {"weights": _drawn(rng, (4, 5, 3, 7)), "frozen": 1},
    ]
    return [
        late,
        case(", transposed weights", 4, nets((4, 6, 3, 9), (3, 5, 2, 4), turned=True)),
        case(", models of one layer", 2, single),
        case("", 1, nets((4, 6, 3, 9), (3, 5, 2, 4))),
        case(", two models of the same shapes", 3, nets((3, 5, 2, 4), (3, 5, 2, 4))),
        case(", a tied and a frozen weight", 2, odd, "odd"),
    ]


def _nap(case: Case, rank: int) -> None:
    """Let this rank be late in the last model, so that no call ends before its wait."""
    *others, last = case.inputs[rank]["nets"]
    case.inputs[rank]["nets"] = [*others, last | {"nap": 0.02}]


def _ready_order(net: dict[str, Any], batch: torch.Tensor) -> list[int]:
    """Elements of the parameters, in the order in which backward finishes their gradients."""
    model, order = _Net(**{**net, "nap": 0.0}), []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: order.append(p.numel()))
    model(batch).backward()
    return order


def _hooks_calls(seen: Observed) -> str | None:
    inputs = seen.case.inputs[0]
    sizes = [_ready_order(n, x) for n, x in zip(inputs["nets"], inputs["batches"][0], strict=True)]
    for rank in range(seen.case.world):
        if wrong := _outside(seen, rank):
            return wrong
        for number, calls in enumerate(_backwards(seen, rank)):
            wanted, made = sizes[number % len(sizes)], [call.elements for call in calls]
            if seen.case.world == 1 and not made:
                continue
            if wrong := _hooks_backward(rank, calls, made, wanted):
                return wrong
    return _kept_back(seen, sizes, lag=0) if seen.case.world > 1 else None


def _hooks_backward(
    rank: int, calls: Sequence[Record], made: list[int], wanted: list[int]
) -> str | None:
    if other := {call.op for call in calls} - {"all_reduce"}:
        return f"Rank {rank} calls {min(other)}. Send each gradient in its own all_reduce."
    if sum(made) > sum(wanted):
        return (
            f"Rank {rank} sent {sum(made)} elements in a backward, but its gradients have "
            f"{sum(wanted)}: some were sent more than once."
        )
    if len(made) < len(wanted):
        return (
            f"Rank {rank} made {len(made)} calls for {len(wanted)} gradients. Send each one "
            "alone, as soon as it is ready."
        )
    if made != wanted:
        return f"Rank {rank} sent gradients in the order {made}; they were ready as {wanted}."
    return None


def _hooks_odd(seen: Observed) -> str | None:
    if wrong := _values(seen):
        return wrong
    nets = seen.case.inputs[0]["nets"]
    wanted = STEPS * sum(p.numel() for net in nets for p in _trained(net))
    for rank in range(seen.case.world):
        if (sent := sum(call.elements for call in seen.calls(rank))) > wanted:
            return (
                f"Rank {rank} sent {sent} elements in {STEPS} steps, but its gradients have "
                f"{wanted}: some were sent more than once. Is a tied weight counted once?"
            )
    return None


HOOKS = Task(
    id="05.hooks",
    title="Gradients that average themselves",
    answer="average_when_ready",
    job="lesson05.hooks",
    minutes=10,
    cases=_hooks_cases,
    criteria=(
        Criterion("after backward() every gradient is the mean", 2, _values, on=("",)),
        Criterion("tied and frozen parameters", 1, _hooks_odd, on=("odd",)),
        Criterion("each gradient is sent once, when it is ready", 2, _hooks_calls, on=("",)),
    ),
    hints=(
        "Which hook runs after a parameter's .grad has its final value, and what does it receive?",
        "p.register_post_accumulate_grad_hook(f) calls f(p). On a parameter with "
        "requires_grad=False this raises an error.",
        "The hook does to one gradient what lesson 03 did to all of them after backward. Which "
        "parameters get it? model.parameters() names a tied one once.",
    ),
    debrief="One collective per parameter is one latency per parameter. The largest GPT-3 has more "
    "than a thousand; that is why DDP fills buckets, which comes next.",
)

# -- 05.buckets ------------------------------------------------------------------------------------


def _buckets_cases(rng: torch.Generator) -> list[Case]:
    def case(says: str, world: int, nets: list, limits: Sequence[int], kind: str = "") -> Case:
        options = [{"limit": limit} for limit in limits]
        inputs = _hooks_inputs(rng, world, nets, options=options)
        if kind == "order":
            for rank in inputs[1::2]:
                rank["nets"] = [net | {"order": "right first"} for net in nets]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    def drawn(*sizes: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return {"weights": _drawn(rng, sizes, dtype)}

    # From the last: 36, 36, 27, 3, 2, 4 elements, of which three fill a bucket to the last one;
    # and 15, 15, 30, 12, 8, 12 with two and one that do.
    full = [drawn(2, 2, 1, 3, 9, 4), drawn(3, 4, 2, 6, 5, 3)]
    late = case(", two models", 3, full, (32, 30))
    _nap(late, rank=0)
    single = [{"weights": _drawn(rng, (n, n + 2))[:1], "order": "row"} for n in (3, 5)]
    turned = {"turned": True}
    return [
        late,
        case(", models of one layer", 2, single, (20, 9)),
        case(
            ", two models of the same shapes", 2, [drawn(2, 3, 6, 5), drawn(2, 3, 6, 5)], (40, 20)
        ),
        case(
            ", float64 and transposed weights",
            1,
            [drawn(4, 6, 3, 9, dtype=torch.float64) | turned, drawn(3, 5, 2, 4) | turned],
            (44, 16),
        ),
        case(
            ", whose backward runs in different orders",
            2,
            [drawn(4, 6, 3, 9), drawn(3, 5, 2, 4, dtype=torch.float64) | turned],
            (44, 16),
            "order",
        ),
        case(
            ", whose backward runs in different orders, a tied weight",
            4,
            [drawn(4, 6, 3, 4, 6) | {"tied": True}, drawn(3, 5, 2, 4, 4)],
            (37, 1),
            "order",
        ),
    ]


def _buckets(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of each bucket, if parameters of these sizes are put into them one by one."""
    buckets = [0]
    for size in sizes:
        if buckets[-1] and buckets[-1] + size > limit:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _reached(sizes: list[int], limit: int) -> list[int]:
    """Elements of the buckets of one who closes a bucket when it has reached the limit."""
    buckets = [0]
    for size in sizes:
        if buckets[-1] >= limit:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _first_fit(sizes: list[int], limit: int) -> list[int]:
    """Elements of the buckets of one who fills up those that were closed."""
    buckets: list[int] = []
    for size in sizes:
        place = next((i for i, held in enumerate(buckets) if held + size <= limit), len(buckets))
        buckets[place : place + 1] = [sum(buckets[place : place + 1]) + size]
    return buckets


def _bucket_calls(seen: Observed) -> str | None:
    inputs = seen.case.inputs[0]
    nets = list(zip(inputs["nets"], inputs["options"], strict=True))
    sizes = [[p.numel() for p in _trained(net)][::-1] for net, _ in nets]
    wanted = [_buckets(s, options["limit"]) for s, (_, options) in zip(sizes, nets, strict=True)]
    for rank in range(seen.case.world):
        if wrong := _outside(seen, rank):
            return wrong
        for number, calls in enumerate(_backwards(seen, rank)):
            model = number % len(nets)
            if seen.case.world == 1 and not calls:
                continue
            if other := {call.op for call in calls} - {"all_reduce"}:
                return f"Rank {rank} calls {min(other)}. Send each bucket in one all_reduce."
            made = [call.elements for call in calls]
            if made != wanted[model]:
                return _wrong_buckets(rank, made, sizes[model], nets[model][1]["limit"])
    # a bucket may leave with the gradient that comes after it
    return _kept_back(seen, wanted, lag=1) if seen.case.world > 1 else None


def _wrong_buckets(rank: int, made: list[int], sizes: list[int], limit: int) -> str:
    mistakes = {
        "the last layers come first.": _buckets(sizes[::-1], limit),
        "one for each parameter.": sizes,
        "as if `limit` were bytes. It counts elements.": _buckets(sizes, limit // 4),
        "a bucket may hold exactly `limit` elements.": _buckets(sizes, limit - 1),
        "a parameter went into an earlier bucket. Once a new bucket is started, do not fill "
        "earlier ones.": (_first_fit(sizes, limit)),
        "each was closed after it had reached the limit. Close it before it gets larger.": (
            _reached(sizes, limit)
        ),
    }
    wanted = _buckets(sizes, limit)
    for words, mistake in mistakes.items():
        if made == mistake:
            return f"With limit {limit}, rank {rank} sent buckets of {made} elements: {words}"
    more = "" if len(made) >= len(wanted) else " Is a bucket sent when its last gradient is there?"
    return (
        f"With limit {limit}, rank {rank} sent {made or 'nothing'} in a backward, but buckets of "
        f"{wanted} elements were expected.{more}"
    )


BUCKETS = Task(
    id="05.buckets",
    title="Buckets",
    answer="average_in_buckets",
    job="lesson05.hooks",
    minutes=20,
    cases=_buckets_cases,
    criteria=(
        Criterion("after backward() every gradient is the mean", 2, _values, on=("",)),
        Criterion("the right buckets, from the last layer to the first", 2, _bucket_calls),
        Criterion("ranks whose backward runs in another order", 1, _values, on=("order",)),
    ),
    hints=(
        "When is a bucket complete? How does a hook know which of its gradients are missing?",
        "Plan the buckets once. Count down in each hook; at 0 the bucket is ready. May bucket 2 "
        "leave before bucket 1?",
        "A hook removes p from its bucket's set of missing gradients. While the next bucket in "
        "order misses none, send it. What must you reset before the next backward?",
    ),
    debrief="DDP's buckets hold 25 MiB (the first 1 MiB). With gradient_as_bucket_view=True the "
    "gradients are views of them, so nothing is copied back; and it launches bucket k + 1 after "
    "bucket k on every rank, as you did.",
)

# -- 05.overlap ------------------------------------------------------------------------------------

SECONDS = 0.1  # of computing before each gradient, and of latency for each message
LEAST = 0.5  # of the communication must run while backward computes
WAKING = 0.001  # seconds


def _alike(rng: torch.Generator, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Two nets of the same shapes."""
    return [{"weights": _drawn(rng, sizes)} for _ in range(2)]


def _overlap_cases(rng: torch.Generator) -> list[Case]:
    weights = [torch.randn(4, 4, generator=rng) for _ in range(5)]
    row = [{"weights": weights, "order": "row", "nap": SECONDS}]
    inputs = _hooks_inputs(rng, 2, row, in_step=True)
    for rank in inputs:
        del rank["batches"][2:]
    # an all_reduce of 2 ranks is two messages long
    network = Network(latency=SECONDS / 2, bandwidth=1e9)
    slow = Case("2 ranks on a slow network", inputs, "slow", network=network)

    def case(says: str, world: int, *nets: dict[str, Any]) -> Case:
        return Case(f"{world_name(world)}{says}", _hooks_inputs(rng, world, list(nets)))

    one = {"weights": _drawn(rng, (3, 5))[:1], "order": "row"}
    two = {"weights": _drawn(rng, (4, 6, 3, 9), torch.float64), "turned": True}
    three = {"weights": _drawn(rng, (3, 5, 2, 4))}
    return [
        slow,
        case(", a model of one layer, one in float64", 3, one, two),
        case(", two models", 4, three, two),
        case(", two models of the same shapes", 2, *_alike(rng, (3, 5, 2, 4))),
        case(", whose last weight comes first", 3, _alike(rng, (4, 6, 3, 9))[0] | {"early": True}),
        case("", 1, three, one),
    ]


def _overlap_values(seen: Observed) -> str | None:
    if seen.case.kind == "slow":
        for rank, got in enumerate(seen.data):
            if wrong := _in_flight(seen, rank, got["used"]):
                return wrong
    return _values(seen)


def _in_flight(seen: Observed, rank: int, used: list[int]) -> str | None:
    """Whether a gradient is used, or backward returns, before its call is over."""
    reduces = [call for call in seen.calls(rank, "backward") if call.op == "all_reduce"]
    moments = [s.started for s in seen.spans if (s.rank, s.name) == (rank, "used")]
    for number, moment in zip(used, moments, strict=True):
        end = reduces[number].finished
        if end is None or moment < end - WAKING:
            return (
                f"Rank {rank} computes with a gradient while its all-reduce is in flight, so the "
                "value is undefined. Divide before the call, or after the wait."
            )
    ends = [s.finished for s in seen.spans if (s.rank, s.name) == (rank, "backward")]
    for calls, end in zip(_backwards(seen, rank), ends, strict=True):
        if any(call.finished is None or call.finished > end for call in calls):
            return (
                f"When backward() returned on rank {rank}, a gradient was still in flight: wait "
                "for every Work before backward() returns."
            )
    return None


def _overlap_timeline(seen: Observed) -> str | None:
    nets = seen.case.inputs[0]["nets"]
    every = []
    for rank in range(seen.case.world):
        if wrong := _outside(seen, rank):
            return wrong
        every.append(_backwards(seen, rank))
    for number, by_rank in enumerate(zip(*every, strict=True)):
        calls = [call for mine in by_rank for call in mine]
        if not calls and seen.case.world > 1:
            return "Nothing is sent during backward."
        if wrong := _too_many_bytes(seen, nets[number % len(nets)], calls):
            return wrong
    if seen.case.kind != "slow":
        return None
    told = (_exposed(seen, rank, every[rank]) for rank in range(seen.case.world))
    return next(filter(None, told), None)


def _exposed(seen: Observed, rank: int, backwards: list[list[Record]]) -> str | None:
    """Whether too little of this rank's communication is hidden, and how that came about."""
    spans = [s for s in seen.spans if (s.rank, s.name) == (rank, "backward")]
    naps = [s for s in seen.spans if (s.rank, s.name) == (rank, "compute")]
    computing = [[n for n in naps if s.started <= n.started <= s.finished] for s in spans]
    shares = list(map(_covered, backwards, computing))
    if sum(shares) / len(shares) >= LEAST:
        return None
    worst = shares.index(min(shares))
    calls, last = backwards[worst], max(nap.finished for nap in computing[worst])
    if calls[0].started > last and len(calls) == 1:
        return (
            "All gradients travel in one call, when the last of them is ready. Then no "
            "computation is left that could hide it. Send each from its own hook."
        )
    if calls[0].started > last:
        return (
            "The first call is made after backward has computed everything, so nothing is hidden."
        )
    if len(calls) > 1 and all(a.finished and a.finished <= b.started for a, b in pairwise(calls)):
        return (
            "Each hook waits for its call, so backward cannot continue until the call is "
            "complete. How long can you delay the waiting?"
        )
    return f"Less than {LEAST:.0%} of the communication is hidden behind computing."


def _covered(calls: Sequence[Record], computing: Sequence[Any]) -> float:
    """The share of the bytes of one backward's calls that travelled while this rank computed."""
    total = hidden = 0.0
    for call in calls:
        if not call.bytes_sent:  # a barrier, a recv: they hide nothing
            continue
        shared = [min(call.finished, n.finished) - max(call.started, n.started) for n in computing]
        total += call.bytes_sent
        hidden += call.bytes_sent * sum(s for s in shared if s > 0) / (call.finished - call.started)
    return hidden / total if total else 0.0


OVERLAP = Task(
    id="05.overlap",
    title="Send while backward computes",
    answer="overlap",
    job="lesson05.hooks",
    minutes=15,
    cases=_overlap_cases,
    criteria=(
        Criterion("after backward() every gradient is the mean", 2, _overlap_values),
        Criterion("at least half of the communication is hidden", 3, _overlap_timeline),
    ),
    hints=(
        "Does backward need the averaged gradient of one layer to compute the next layer's? How "
        "long can you delay the waiting?",
        "async_op=True returns a Work. Wait for each before backward() returns.",
        "Which hook runs last in a backward? Or: lesson 05, step 4, has a way to call a function "
        "when backward has ended. There, wait, and clear your list for the next backward. Divide "
        "each gradient once, before or after the sum.",
    ),
    debrief="On a GPU, wait() makes a stream wait, not the program. DDP's reducer does the same "
    "in its own final callback, and so does ZeRO-2.",
)

# -- 05.no_sync ------------------------------------------------------------------------------------


def _quiet_cases(rng: torch.Generator) -> list[Case]:
    def case(says: str, world: int, nets: list, *rounds: tuple[str, int], kind: str = "") -> Case:
        inputs = [
            {
                "nets": nets,
                "rounds": [
                    {
                        "how": how,
                        "batches": [[_batch(rng, net) for _ in range(count)] for net in nets],
                    }
                    for how, count in rounds
                ],
            }
            for _ in range(world)
        ]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    nets = [{"weights": _drawn(rng, (4, 6, 3))}, {"weights": _drawn(rng, (3, 5, 2), torch.float64)}]
    turned = [net | {"turned": True} for net in nets]
    one = [{"weights": _drawn(rng, (3, 5))[:1], "order": "row"}, nets[0]]
    odd = [("raises", 2), ("nested", 3), ("beside", 2), ("each", 2)]
    return [
        case(", micro-batches", 3, nets, ("each", 3), ("each", 1), ("each", 2)),
        case(", one micro-batch, then four", 2, one, ("each", 1), ("each", 4)),
        case(", transposed weights", 4, turned, ("each", 2), ("each", 3)),
        case(
            ", two models of the same shapes", 2, _alike(rng, (4, 6, 3)), ("each", 2), ("each", 1)
        ),
        case("", 1, nets, ("each", 3), ("each", 2)),
        case(", contexts in contexts", 2, nets, *odd, kind="odd"),
    ]


HOW = {  # in words
    "each": "",
    "nested": " with one context inside another",
    "raises": " after an exception inside two contexts",
    "beside": " while another model's no_sync is on",
}


def _quiet_values(seen: Observed) -> str | None:
    nothing = [job.no_sync(lambda _: nullcontext, **inputs) for inputs in seen.case.inputs]
    for number, turn in enumerate(seen.case.inputs[0]["rounds"]):
        for model in range(len(seen.case.inputs[0]["nets"])):
            alone = [own["rounds"][number] for own in nothing]
            for rank, got in enumerate(seen.data):
                mine = got["rounds"][number]
                later = number and not seen.case.kind
                where = " in a later step" if later else HOW[turn["how"]]
                if mine["raised"][model] != alone[rank]["raised"][model]:
                    return f"Rank {rank}: an exception inside no_sync does not come out of it."
                inside = [own["inside"][model] for own in alone]
                after = [own["after"][model] for own in alone]
                if wrong := _wrong_inside(mine["inside"][model], inside, rank, where):
                    return wrong
                if wrong := _wrong_after(mine["after"][model], inside, after, rank, where):
                    return wrong
    return None


def _wrong_inside(got: Any, alone: list[Gradients], rank: int, where: str) -> str | None:
    """Under no_sync a rank has the sum of its own."""
    for index, own in enumerate(alone[rank]):
        if own is None:  # no batch came before
            continue
        what = f"Under no_sync{where}, rank {rank}'s gradient {index}"
        stack = torch.stack([part[index] for part in alone])
        mistakes = {"was averaged already.": stack.mean(0)}
        if wrong := explain(got[index], own, what, mistakes):
            return wrong
    return None


def _wrong_after(
    got: Any, inside: list[Gradients], after: list[Gradients], rank: int, where: str
) -> str | None:
    """Outside of it the mean of all that was collected."""
    wrong = _wrong_gradients(got, after, rank, where)
    for index, parts in enumerate(zip(*after, strict=True)):
        own = inside[rank][index]
        if wrong is None or own is None:
            continue
        newest = [now - before[index] for now, before in zip(parts, inside, strict=True)]
        if close(got[index], own + torch.stack(newest).mean(0)):
            return (
                f"Rank {rank}{where}: only the last micro-batch's gradient was averaged, without "
                "what had accumulated before. Reduce the accumulated .grad."
            )
        if close(got[index], parts[rank]) and "exception" in where:
            return (
                "After an exception inside no_sync nothing is averaged any more: restore the "
                "switch in `finally`."
            )
    return wrong


def _quiet_calls(seen: Observed) -> str | None:
    nets = seen.case.inputs[0]["nets"]
    for rank in range(seen.case.world):
        silent, synced = seen.calls(rank, "silent"), seen.calls(rank, "synced")
        if silent:
            return (
                f"Rank {rank} made {len(silent)} calls under no_sync, but must send nothing there."
            )
        if not synced and seen.case.world > 1:
            return f"Rank {rank} made no call in the backward that should average."
        if len(seen.calls(rank)) > len(synced):
            return (
                f"Rank {rank} sends outside of backward. Send in the first backward outside of "
                "the context."
            )
    every = [_backwards(seen, rank, "synced") for rank in range(seen.case.world)]
    for number, by_rank in enumerate(zip(*every, strict=True)):
        calls = [call for mine in by_rank for call in mine]
        if wrong := _too_many_bytes(seen, nets[number % len(nets)], calls):
            return wrong
    return None


NO_SYNC = Task(
    id="05.no_sync",
    title="Accumulate without sending",
    answer="with_no_sync",
    job="lesson05.no_sync",
    minutes=10,
    cases=_quiet_cases,
    criteria=(
        Criterion("the mean of the accumulated gradients", 2, _quiet_values, on=("",)),
        Criterion("nothing is sent under no_sync", 2, _quiet_calls, on=("",)),
        Criterion("nested contexts, an exception, another model", 1, _quiet_values, on=("odd",)),
    ),
    hints=(
        "What must the hook know, and where can both the hook and the context see it?",
        "contextlib.contextmanager makes a context of a generator. What if the block raises?",
        "The context sets a switch and afterwards restores its old value, even after an "
        "exception. Each model has its own switch: where do you keep it?",
    ),
    debrief="torch's DDP decides in forward whether the coming backward sends, so its no_sync must "
    "cover forward as well; around backward alone it does nothing.",
)

# -- 05.rebuild ------------------------------------------------------------------------------------


def _rebuild_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*sizes: int, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
        return {"weights": _drawn(rng, sizes, dtype)} | more

    def case(says: str, world: int, nets: list, limits: Sequence[int], kind: str = "") -> Case:
        inputs = _hooks_inputs(rng, world, nets, options=[{"limit": limit} for limit in limits])
        if kind == "order":
            for rank in inputs[1::2]:
                rank["nets"] = [net | {"order": "right first"} for net in nets]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    first = {"early": True}
    return [
        case(", whose last weight is registered first", 3,
             [drawn(2, 2, 1, 3, 9, 4, **first), drawn(3, 4, 2, 6, 5, 3, **first)], (32, 30)),
        case(", two models of the same shapes", 2,
             [drawn(3, 5, 2, 4, **first), drawn(3, 5, 2, 4)], (30, 9)),
        case(", float64 and transposed weights", 1,
             [drawn(4, 6, 3, 9, dtype=torch.float64, turned=True, **first)], (44,)),
        case(", whose backward runs in different orders", 2,
             [drawn(4, 6, 3, 9), drawn(3, 5, 2, 4, turned=True)], (54, 9), "order"),
        case(", whose backward runs in different orders, a tied weight", 4,
             [drawn(4, 6, 3, 4, 6, tied=True)], (37,), "order"),
    ]  # fmt: skip


def _rebuilt(seen: Observed) -> tuple[list[list[int]], list[list[int]]]:
    """(for each model the elements of its parameters as they become ready on rank 0, of its
    buckets).
    """
    inputs = seen.case.inputs[0]
    sizes = [_ready_order(n, x) for n, x in zip(inputs["nets"], inputs["batches"][0], strict=True)]
    limits = [options["limit"] for options in inputs["options"]]
    return sizes, [_buckets(*one) for one in zip(sizes, limits, strict=True)]


def _rebuild_told(seen: Observed) -> str | None:
    sizes, _ = _rebuilt(seen)
    for rank in range(seen.case.world):
        if wrong := _outside(seen, rank):
            return wrong
        for number, calls in enumerate(_backwards(seen, rank)):
            step, model = divmod(number, len(sizes))
            told = [call for call in calls if call.op != "all_reduce"]
            if seen.case.world == 1 and not calls:
                continue
            if other := {call.op for call in told} - {"broadcast"}:
                return f"Rank {rank} calls {min(other)}. Use one broadcast for the order."
            if step and told:
                return (
                    f"Rank {rank} calls broadcast in backward {step + 1} of a model. Send the "
                    "order once, in the first."
                )
            if not step and len(told) != 1:
                return (
                    f"Rank {rank} made {len(told)} broadcasts in the first backward of a model. "
                    "Make exactly one, with the order of rank 0."
                )
            if told and told[0].peer:
                return f"Rank {told[0].peer} sends its order. Use the order of rank 0."
            if told and told[0].elements > len(sizes[model]):
                return (
                    f"Rank {rank} broadcast {told[0].elements} elements; {len(sizes[model])} "
                    "are enough, one for each parameter."
                )
            reduced = sum(call.elements for call in calls if call.op == "all_reduce")
            if reduced != sum(sizes[model]):
                return (
                    f"Rank {rank} sent {reduced} elements in a backward, but its gradients have "
                    f"{sum(sizes[model])}: send each once."
                )
    return None


def _rebuild_buckets(seen: Observed) -> str | None:
    sizes, wanted = _rebuilt(seen)
    inputs = seen.case.inputs[0]
    for rank in range(seen.case.world):
        backwards = _backwards(seen, rank)
        for number, calls in enumerate(backwards[len(sizes) :]):
            model = number % len(sizes)
            if seen.case.world == 1 and not calls:
                continue
            made = [call.elements for call in calls if call.op == "all_reduce"]
            if made == wanted[model]:
                continue
            limit = inputs["options"][model]["limit"]
            net = _Net(**{**inputs["nets"][model], "nap": 0.0})
            registered = [p.numel() for p in net.parameters()]
            if made in (_buckets(registered[::-1], limit), _buckets(registered, limit)):
                return (
                    f"Rank {rank} sent buckets of {made} elements, in the order in which the model "
                    f"registers its parameters; in the order of arrival they have {wanted[model]}."
                )
            if made == _buckets(sizes[model][::-1], limit):
                return (
                    f"Rank {rank} sent buckets of {made} elements: the gradients that came first "
                    "are in the last one. Fill the buckets in the order of arrival."
                )
            return _wrong_buckets(rank, made, sizes[model], limit)
    return _kept_back(seen, wanted, lag=1, first=len(sizes)) if seen.case.world > 1 else None


REBUILD = Task(
    id="05.rebuild",
    title="Buckets in the order of arrival",
    answer="rebuild_buckets",
    job="lesson05.hooks",
    minutes=25,
    cases=_rebuild_cases,
    criteria=(
        Criterion("after each backward() every gradient is the mean", 2, _values, on=("",)),
        Criterion("one broadcast, in the first backward", 1, _rebuild_told),
        Criterion("from the second on, buckets in the order of arrival", 2, _rebuild_buckets,
                  on=("",)),
        Criterion("ranks whose backward runs in another order", 1,
                  lambda seen: _values(seen) or _rebuild_buckets(seen), on=("order",)),
    ),
    hints=(
        "What would two ranks send if each made its buckets in its own order?",
        "When does a rank know that the first backward is over, and may it wait for a broadcast "
        "then?",
        "Each hook appends its parameter's number to a list. When the list is complete and all "
        "gradients are sent, broadcast it from rank 0, fill new buckets in this order, and empty "
        "the list.",
    ),
    debrief="torch's DDP does this after its first backward, unless find_unused_parameters is on: "
    "then the order may differ from step to step.",
)  # fmt: skip

TASKS = [HOOKS, BUCKETS, OVERLAP, NO_SYNC, REBUILD]
