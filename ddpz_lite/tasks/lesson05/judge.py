"""Tasks of lesson 05: DDP."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch

from ...grade.compare import close, differs
from ...grade.task import Aspect, Case, Observed, Task
from ...grade.vocabulary import calls_until, world_name
from ...wire import Network
from .job import _net

Gradients = list[torch.Tensor | None]


def _drawn(rng: torch.Generator, *sizes: int) -> list[torch.Tensor]:
    """Weights of linear layers, the last two reading the same input."""
    pairs = list(zip(sizes[1:], sizes, strict=False))
    return [torch.randn(pair, generator=rng) for pair in [*pairs, pairs[-1]]]


def _local(inputs: dict[str, Any], batches: list[torch.Tensor]) -> Gradients:
    """The gradients of one rank alone, summed over its batches."""
    net = {name: inputs[name] for name in ("weights", "tied", "frozen", "order") if name in inputs}
    model = _net(**net)
    for batch in batches:
        model(batch).backward()
    return [p.grad for p in model.parameters()]


def _wrong_gradient(
    got: Any, alone: list[Gradients], rank: int, begun: list[torch.Tensor], weights: Any
) -> str | None:
    """What is wrong with one rank's gradients, if they should be the mean of `alone`, by rank."""
    world = len(alone)
    for index, parts in enumerate(zip(*alone, strict=True)):
        if weights is not None and not close(weights[index], begun[index], bitwise=True):
            return (
                f"Rank {rank}'s parameter {index} has changed. A post-accumulate hook is given the "
                "parameter: average its .grad."
            )
        if parts[0] is None:
            if got[index] is not None:
                return f"Rank {rank}'s frozen parameter {index} has a gradient now."
            continue
        stack = torch.stack(parts)
        what = f"Rank {rank}'s gradient {index}"
        if (wrong := differs(got[index], stack.mean(0), what)) is None:
            continue
        if world > 1:
            if close(got[index], stack.sum(0)):
                return f"{what} is the sum over the ranks. Divide by their number."
            if close(got[index], stack[rank]):
                return (
                    f"{what} is the rank's own when backward() has returned: it was not averaged."
                )
            if close(got[index], stack[rank] / world):
                return f"{what} is divided by the number of ranks, and never added up, or too late."
            if close(got[index], stack.mean(0) / world):
                return f"{what} is divided by the number of ranks twice."
            if close(got[index], stack.sum(0) / 2):
                return f"{what} is half of the sum, on {world} ranks. Ask how many there are."
            others = [part for part in alone[1 - rank] if part is not None] if world == 2 else []
            same = [part for part in others if part.shape == stack[rank].shape]
            if any(close(got[index], (stack[rank] + part) / 2) for part in same):
                return (
                    f"{what} is a mean of two different gradients: the ranks sent their buckets in "
                    "different orders."
                )
        return wrong
    return None


def _step_values(seen: Observed) -> str | None:
    inputs = seen.case.inputs
    for step in range(len(inputs[0]["x"])):
        alone = [_local(rank, [rank["x"][step]]) for rank in inputs]
        for rank, got in enumerate(seen.data):
            begun = list(
                _net(inputs[rank]["weights"], inputs[rank].get("tied", False)).parameters()
            )
            wrong = _wrong_gradient(got["steps"][step], alone, rank, begun, got["weights"])
            if wrong:
                return wrong if step == 0 else f"In the second step: {wrong}"
    return None


def _step_cases(rng: torch.Generator, options: dict | None, orders: bool) -> list[Case]:
    def case(world: int, says: str = "", kind: str = "", **net: Any) -> Case:
        weights = _drawn(rng, 4, 6, 3, 9)
        if net.get("tied"):
            weights[-1] = weights[-2].clone()
        inputs = []
        for rank in range(world):
            order = "right first" if orders and kind == "order" and rank % 2 else "left first"
            x = [torch.randn(3, 4, generator=rng) for _ in range(2)]
            mine = {"weights": weights, "x": x, "order": order} | net
            inputs.append(mine | ({"options": options} if options else {}))
        return Case(world_name(world) + says, inputs, kind)

    cases = [case(1), case(2), case(3)]
    if orders:
        cases += [case(2, ", whose backward runs in different orders", "order")]
    else:
        cases += [case(2, ", a tied weight", "odd", tied=True)]
        cases += [case(3, ", a frozen layer", "odd", frozen=1)]
    return cases


# -- 05.hooks --------------------------------------------------------------------------------------


def _kept_back(seen: Observed, once: list[int], layers: Iterable[int]) -> str | None:
    """A judge's sentence if calls come later than they could, seen when backward comes to `layers`.

    once: elements in each call of one backward, in order.
    """
    net = _net(**{k: v for k, v in seen.case.inputs[0].items() if k not in ("x", "options")})
    for rank in range(seen.case.world):
        for layer in layers:
            later = {p for p in net.layers[layer + 1 :].parameters() if p.requires_grad}
            ready = sum(p.numel() for p in later)
            due = max((total for total in accumulate(once) if total <= ready), default=0)
            for calls in calls_until(seen, rank, layer):
                if (sent := sum(call.elements for call in calls)) < due:
                    return (
                        f"When backward came to layer {layer} (layer 0 is the first), rank {rank} "
                        f"had sent {sent} elements and could have sent {due}. Send from the hooks, "
                        "not at the end."
                    )
    return None


def _ready_order(seen: Observed) -> list[int]:
    """Elements of the parameters, in the order in which backward finishes their gradients."""
    model = _net(**{k: v for k, v in seen.case.inputs[0].items() if k not in ("x", "options")})
    order: list[int] = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: order.append(p.numel()))
    model(seen.case.inputs[0]["x"][0]).backward()
    return order


def _outside(seen: Observed, rank: int) -> str | None:
    if len(seen.calls(rank, "backward")) < len(seen.calls(rank)):
        return f"Rank {rank} makes calls outside of backward. The hooks do the work."
    return None


def _hooks_calls(seen: Observed) -> str | None:
    wanted = _ready_order(seen) * len(seen.case.inputs[0]["x"])
    for rank in range(seen.case.world):
        if wrong := _outside(seen, rank):
            return wrong
        sizes = [call.elements for call in seen.calls(rank)]
        if sizes == wanted:
            continue
        if sum(sizes) > sum(wanted):
            return (
                f"Rank {rank} sent {sum(sizes)} elements, and its gradients have {sum(wanted)}: "
                "some travel more than once."
            )
        if len(sizes) < len(wanted):
            return (
                f"Rank {rank} made {len(sizes)} calls for {len(wanted)} gradients. Here each one "
                "travels alone, as soon as it is ready."
            )
        return f"Rank {rank} sent gradients in the order {sizes}; they were ready as {wanted}."
    last = len(seen.case.inputs[0]["weights"]) - 3  # the layer before the two branches
    return _kept_back(seen, _ready_order(seen), range(last, -1, -1))


HOOKS = Task(
    id="05.hooks",
    title="Gradients that average themselves",
    answer="average_when_ready",
    job="lesson05.hooks",
    minutes=10,
    cases=lambda rng: _step_cases(rng, None, orders=False),
    aspects=(
        Aspect("after backward() every gradient is the mean", 2, _step_values, on=("",)),
        Aspect("tied and frozen parameters", 1, _step_values, on=("odd",)),
        Aspect("each gradient is sent once, when it is ready", 2, _hooks_calls),
    ),
    hints=(
        "Which hook runs after a parameter's .grad has its final value, and what is it given?",
        "p.register_post_accumulate_grad_hook(f) calls f(p). A parameter that takes no gradient "
        "refuses the hook.",
        "def hook(p): dist.all_reduce(p.grad); p.grad /= world. Register it on every parameter "
        "that "
        "requires a gradient; model.parameters() names a tied one once.",
    ),
    debrief="One collective per parameter is one latency per parameter. The largest GPT-3 has more "
    "than a thousand; that is why DDP fills buckets, which comes next.",
)

# -- 05.buckets ------------------------------------------------------------------------------------

LIMIT = 44  # elements


def _bucket_sizes(seen: Observed) -> list[int]:
    """Elements of each bucket: parameters from the last to the first, up to LIMIT."""
    inputs = seen.case.inputs[0]
    sizes = [p.numel() for p in _net(inputs["weights"]).parameters()][::-1]
    buckets = [0]
    for size in sizes:
        if buckets[-1] and buckets[-1] + size > LIMIT:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _bucket_calls(seen: Observed) -> str | None:
    once = _bucket_sizes(seen)
    wanted = once * len(seen.case.inputs[0]["x"])
    for rank in range(seen.case.world):
        if wrong := _outside(seen, rank):
            return wrong
        sizes = [call.elements for call in seen.calls(rank)]
        if sizes == wanted:
            continue
        if len(sizes) > len(wanted):
            return f"Rank {rank} made {len(sizes)} calls; {len(wanted)} buckets were to be sent."
        if len(sizes) < len(wanted):
            return (
                f"Rank {rank} made {len(sizes)} calls where {len(wanted)} buckets of {once} "
                f"elements "
                "were to be sent in two steps. Is a bucket sent when its last gradient is there?"
            )
        if sizes == once[::-1] * 2:
            return f"Rank {rank} sent buckets of {sizes[: len(once)]}: the last layers come first."
        return f"Rank {rank} sent buckets of {sizes} elements; {wanted} were expected."
    return _kept_back(seen, once, [0])  # a bucket may leave with the gradient that comes after it


BUCKETS = Task(
    id="05.buckets",
    title="Buckets",
    answer="average_in_buckets",
    job="lesson05.hooks",
    minutes=20,
    cases=lambda rng: _step_cases(rng, {"limit": LIMIT}, orders=True),
    aspects=(
        Aspect("after backward() every gradient is the mean", 2, _step_values, on=("",)),
        Aspect("the right buckets, from the last layer to the first", 2, _bucket_calls),
        Aspect("ranks whose backward runs in another order", 1, _step_values, on=("order",)),
    ),
    hints=(
        "When is a bucket complete? What must you know of it, and who tells you?",
        "Plan the buckets once. Count down in each hook; at 0 the bucket is ready. May bucket 2 "
        "leave "
        "before bucket 1?",
        "buckets: lists of parameters. A hook takes p out of its bucket's set of missing ones. "
        "Then: "
        "while the next bucket in order misses nothing: cat, all_reduce, divide, copy back, next "
        "+= 1.",
    ),
    debrief="DDP's buckets hold 25 MiB (the first 1 MiB). With gradient_as_bucket_view=True the "
    "gradients are views of them, so nothing is copied back; and it launches bucket k + 1 after "
    "bucket k on every rank, as you did.",
)

# -- 05.overlap ------------------------------------------------------------------------------------

SECONDS = 0.1  # of computing before each gradient, and of latency for each message
LEAST = 0.5  # of the communication must run while backward computes


def _overlap_cases(rng: torch.Generator) -> list[Case]:
    weights = [torch.randn(4, 4, generator=rng) for _ in range(5)]

    def case(world: int) -> Case:
        inputs = [
            {"weights": weights, "x": torch.randn(3, 4, generator=rng), "seconds": SECONDS}
            for _ in range(world)
        ]
        # an all_reduce of 2 ranks is two messages long
        network = Network(latency=SECONDS / 2, bandwidth=1e9)
        return Case(f"{world_name(world)} on a slow network", inputs, network=network)

    return [case(2)]


def _overlap_alone(inputs: dict[str, Any]) -> Gradients:
    leaves = [w.clone().requires_grad_() for w in inputs["weights"]]
    x = inputs["x"]
    for leaf in leaves:
        x = torch.tanh(x @ leaf.T)
    return list(torch.autograd.grad(x.square().mean(), leaves))


def _overlap_values(seen: Observed) -> str | None:
    alone = [_overlap_alone(rank) for rank in seen.case.inputs]
    for rank, got in enumerate(seen.data):
        end = seen.span(rank, "backward").finished
        if any(c.finished is None or c.finished > end for c in seen.calls(rank, "backward")):
            return (
                f"When backward() returned on rank {rank}, a gradient was still under way: wait "
                "for every Work before it does."
            )
        if wrong := _wrong_gradient(got["gradients"], alone, rank, [], None):
            return wrong
    return None


def covered(seen: Observed, rank: int, during: str) -> float:
    """The share of the bytes sent by calls of a span that travelled while this rank computed."""
    compute = [(s.started, s.finished) for s in seen.spans if (s.rank, s.name) == (rank, "compute")]
    total = hidden = 0.0
    for call in seen.calls(rank, during):
        if not call.bytes_sent:  # a barrier, a recv: they hide nothing
            continue
        end = call.finished if call.finished is not None else seen.span(rank, during).finished
        beside = sum(max(0.0, min(end, b) - max(call.started, a)) for a, b in compute)
        total += call.bytes_sent
        hidden += call.bytes_sent * beside / (end - call.started)
    return hidden / total if total else 0.0


def _overlap_timeline(seen: Observed) -> str | None:
    world = seen.case.world
    numel = sum(weight.numel() for weight in seen.case.inputs[0]["weights"])
    most = 2 * (world - 1) * numel * 4 // world
    for rank in range(world):
        calls = seen.calls(rank, "backward")
        if not calls:
            return f"Rank {rank} sent nothing during backward."
        if len(seen.calls(rank)) > len(calls) + 1:  # the job's own barrier
            return f"Rank {rank} makes calls outside of backward. The hooks do the work."
        if (sent := seen.sent(rank)) > most:
            return f"Rank {rank} sent {sent} bytes; to average each gradient once takes {most}."
        share = covered(seen, rank, "backward")
        if share >= LEAST:
            continue
        last = max(s.finished for s in seen.spans if (s.rank, s.name) == (rank, "compute"))
        if calls[0].started > last and len(calls) == 1:
            return (
                "All gradients travel in one call, when the last of them is there: nothing is left "
                "to compute that could hide it. Send each from its own hook."
            )
        if calls[0].started > last:
            return (
                "The first call is made when backward has computed everything: nothing is hidden."
            )
        if len(calls) > 1 and all(
            a.finished is not None and a.finished <= b.started for a, b in pairwise(calls)
        ):
            return (
                "Each call is complete before backward computes on: the hook waits. Start it with "
                "async_op=True and wait at the end."
            )
        return f"Less than {LEAST:.0%} of the communication is hidden behind computing."
    return None


OVERLAP = Task(
    id="05.overlap",
    title="Send while backward computes",
    answer="overlap",
    job="lesson05.overlap",
    minutes=15,
    cases=_overlap_cases,
    aspects=(
        Aspect("after backward() every gradient is the mean", 2, _overlap_values),
        Aspect("at least half of the communication is hidden", 3, _overlap_timeline),
    ),
    hints=(
        "Who waits for the first gradient to arrive? Need it be the one who computes the next?",
        "async_op=True returns a Work. Keep them, and wait for all of them before backward() "
        "returns.",
        "In the first hook of a backward: "
        "torch.autograd.Variable._execution_engine.queue_callback(f). "
        "f runs when backward is done: wait for each Work, divide, and empty the list.",
    ),
    debrief="On a GPU, wait() makes a stream wait, not the program. DDP's reducer does the same "
    "in its "
    "own final callback, and so does ZeRO-2.",
)

# -- 05.no_sync ------------------------------------------------------------------------------------


def _quiet_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, batches: int, fails: bool = False) -> Case:
        weights = _drawn(rng, 4, 6, 3)
        inputs = [
            {
                "weights": weights,
                "x": [torch.randn(3, 4, generator=rng) for _ in range(batches)],
                "fails": fails,
            }
            for _ in range(world)
        ]
        says = ", an exception inside no_sync" if fails else f", {batches} micro-batches"
        return Case(world_name(world) + says, inputs, "fails" if fails else "")

    return [case(1, 3), case(2, 1), case(2, 3), case(3, 2), case(2, 1, fails=True)]


def _quiet_values(seen: Observed) -> str | None:
    inputs = seen.case.inputs
    silent = [[] if rank["fails"] else rank["x"][:-1] for rank in inputs]
    before = [_local(rank, batches) for rank, batches in zip(inputs, silent, strict=True)]
    alone = [_local(rank, [*s, rank["x"][-1]]) for rank, s in zip(inputs, silent, strict=True)]
    last = [_local(rank, [rank["x"][-1]]) for rank in inputs]
    for rank, got in enumerate(seen.data):
        for index, own in enumerate(before[rank]):
            if own is None:
                continue
            if wrong := differs(got["inside"][index], own, f"Rank {rank}'s gradient {index}"):
                every = torch.stack([b[index] for b in before]).mean(0)
                if close(got["inside"][index], every):
                    return f"Under no_sync, rank {rank}'s gradient {index} was averaged already."
                return f"{wrong} This is under no_sync, where a rank keeps its own sum."
        wrong = _wrong_gradient(got["gradients"], alone, rank, [], None)
        if not wrong:
            continue
        for index, whole in enumerate(zip(*alone, strict=True)):
            newest = torch.stack([part[index] for part in last]).mean(0)
            own = before[rank][index]
            if own is not None and close(got["gradients"][index], own + newest):
                return (
                    f"Rank {rank}: only the last micro-batch's gradient was averaged; what had "
                    "been collected before stayed its own. Reduce the accumulated .grad."
                )
            if seen.case.kind == "fails" and close(got["gradients"][index], whole[rank]):
                return (
                    "After an exception inside no_sync nothing is averaged any more: restore the "
                    "switch in `finally`."
                )
        return wrong
    return None


def _quiet_calls(seen: Observed) -> str | None:
    count = len(seen.case.inputs[0]["weights"])
    for rank in range(seen.case.world):
        silent, synced = seen.ops(rank, "silent"), seen.ops(rank, "synced")
        if silent:
            return f"Rank {rank} made {len(silent)} calls under no_sync, and none is needed there."
        if len(synced) > count:
            return f"Rank {rank} made {len(synced)} calls in the last backward; {count} are enough."
        if not synced:
            return f"Rank {rank} made no call in the backward that should average."
        if len(seen.ops(rank)) > len(synced):
            return f"Rank {rank} sends outside of backward: the last backward brings all together."
    return None


NO_SYNC = Task(
    id="05.no_sync",
    title="Accumulate without sending",
    answer="with_no_sync",
    job="lesson05.no_sync",
    minutes=10,
    cases=_quiet_cases,
    aspects=(
        Aspect("the mean of the accumulated gradients", 2, _quiet_values, on=("",)),
        Aspect("nothing is sent under no_sync", 2, _quiet_calls),
        Aspect("an exception leaves the switch as it was", 1, _quiet_values, on=("fails",)),
    ),
    hints=(
        "What does the hook have to know, and where can both the hook and the context see it?",
        "contextlib.contextmanager makes a context of a generator. What if the block raises?",
        "sync = [True]; the hook returns at once unless sync[0]; the context sets it False, "
        "yields in "
        "`try`, and restores the old value in `finally`.",
    ),
    debrief="torch's DDP decides in forward whether the coming backward sends, so its no_sync must "
    "cover forward as well; around backward alone it does nothing.",
)

TASKS = [HOOKS, BUCKETS, OVERLAP, NO_SYNC]
