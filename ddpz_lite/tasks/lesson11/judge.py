"""Tasks of lesson 11: ZeRO-3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...grade.compare import close, differs
from ...grade.task import Aspect, Case, Observed, Task
from ...grade.vocabulary import nbytes, padded_shards, world_name
from ...wire import Network, Record, Span


def _nudges(rng: torch.Generator, numel: int, world: int) -> list[torch.Tensor]:
    """For each rank what the job adds to its shard of `numel` elements; nothing to the padding."""
    return padded_shards([torch.randn(numel, generator=rng)], world)


def _nudged(whole: torch.Tensor, nudges: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a flat range is once each rank's shard of it has got the rank's nudge."""
    return whole + torch.cat([*nudges])[: len(whole)]


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """A flat range in pieces of the shapes of `like`."""
    pieces = flat.split([t.numel() for t in like])
    return [piece.view_as(t) for piece, t in zip(pieces, like, strict=True)]


def _padded(numel: int, world: int) -> int:
    """Bytes of that many float32, padded so that each rank has as many."""
    return -(-numel // world) * world * 4


# -- 11.unit ---------------------------------------------------------------------------------------


GATHERS = 3  # that the job asks for, each after a change of the shards


def _unit_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int) -> Case:
        weights = [torch.randn(s, generator=rng) for s in ((5, 3), (5,), (2, 2, 2))]
        x = torch.randn(4, 3, generator=rng)
        numel = sum(w.numel() for w in weights)
        nudges = [_nudges(rng, numel, world) for _ in range(GATHERS)]
        inputs = [
            {"weights": weights, "x": x, "nudges": [*own]} for own in zip(*nudges, strict=True)
        ]
        return Case(world_name(world), inputs)

    return [case(1), case(2), case(3), case(4)]


def _unit_wanted(case: Case) -> list[list[torch.Tensor]]:
    """The parameters as they are at first, and after each gather."""
    weights = case.inputs[0]["weights"]
    flats = [torch.cat([w.flatten() for w in weights])]
    for index in range(GATHERS):
        flats.append(_nudged(flats[-1], [rank["nudges"][index] for rank in case.inputs]))
    return [_cut(flat, weights) for flat in flats]


def _unit_values(seen: Observed) -> str | None:
    world = seen.case.world
    begun, *wanted = _unit_wanted(seen.case)
    for rank, got in enumerate(seen.data):
        shard = padded_shards(begun, world)[rank]
        if wrong := differs(got["shard"], shard, f"Rank {rank}'s shard", bitwise=True):
            return wrong
        for values, right in zip(got["gathered"], wanted, strict=True):
            for index, weight in enumerate(right):
                what = f"After gather, rank {rank}'s parameter {index}"
                if (wrong := differs(values[index], weight, what, bitwise=True)) is None:
                    continue
                if close(values[index], begun[index]):
                    return (
                        f"The shards were updated, and after the next gather parameter {index} is "
                        "what it was at first. Gather the shards, not a copy."
                    )
                return wrong
    return None


def _unit_backward(seen: Observed) -> str | None:
    again = _unit_wanted(seen.case)[2]  # after the second gather
    for rank, got in enumerate(seen.data):
        right = again[0].sum(0).expand_as(seen.case.inputs[rank]["x"])
        if wrong := differs(got["x_grad"], right.contiguous(), f"Rank {rank}'s gradient of x"):
            return (
                f"{wrong} It was computed after free and gather: the memory that autograd keeps "
                f"must "
                "be filled again."
            )
    return None


def _unit_bytes(seen: Observed) -> str | None:
    numel = sum(w.numel() for w in seen.case.inputs[0]["weights"])
    most = -(-numel // seen.case.world) * 4
    for rank, got in enumerate(seen.data):
        for when, held in (("When the unit is made", got["begun"]), ("After free", got["freed"])):
            if not held["shapes"]:
                return (
                    f"{when}, rank {rank}'s parameters have lost their shapes. Empty the storage."
                )
            if held["parameters"]:
                return f"{when}, rank {rank}'s parameters still hold {held['parameters']} bytes."
            if not held["all"] <= most:
                return (
                    f"{when}, the unit on rank {rank} holds {held['all']} bytes; its shard is "
                    f"{most}."
                )
        if got["freed"]["kept"]:
            return (
                f"After free, a view that autograd keeps still holds {got['freed']['kept']} bytes "
                f"on "
                f"rank {rank}. Resize the storage to 0; a new p.data leaves the old one alive."
            )
    return None


def _unit_calls(seen: Observed) -> str | None:
    size = _padded(sum(w.numel() for w in seen.case.inputs[0]["weights"]), seen.case.world)
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        if [call.op for call in calls] != ["all_gather"] * GATHERS:
            ops = ", ".join(call.op for call in calls) or "none"
            return (
                f"Rank {rank} made the calls {ops} for three gathers: one all_gather each does it."
            )
        if odd := [nbytes(call) for call in calls if nbytes(call) != size]:
            return f"Rank {rank} gathered {odd[0]} bytes at once; all shards together are {size}."
    return None


UNIT = Task(
    id="11.unit",
    title="Gather a unit, and free it",
    answer="Unit",
    job="lesson11.unit",
    minutes=25,
    cases=_unit_cases,
    aspects=(
        Aspect("gather fills the parameters from all shards", 2, _unit_values),
        Aspect("backward works after free and gather", 1, _unit_backward),
        Aspect("freed, a rank holds its shard and nothing else", 2, _unit_bytes),
        Aspect("one all_gather for each gather", 1, _unit_calls),
    ),
    hints=(
        "Autograd keeps a view of the weight. What can you shrink that the view cannot keep alive?",
        "p.untyped_storage().resize_(0) empties the memory under all views; resize_(bytes) brings "
        "it "
        "back. Which way of writing into p does not tell autograd's version counter?",
        "free: p.untyped_storage().resize_(0). gather: resize each storage to numel * itemsize, "
        "all_gather the shards into one flat buffer, p.data.copy_(piece.view_as(p)).",
    ),
    debrief="FSDP2 does this with one storage per parameter: unshard allocates them and copies "
    "out, reshard resizes them to 0. ddpz_lite lets the parameters be views of the unit's flat "
    "buffer, and copies none.",
)

# -- 11.zero3 --------------------------------------------------------------------------------------

BLOCKS, WIDTH, BATCHES = 4, 5, 2
UNIT_ELEMENTS = WIDTH * WIDTH + WIDTH


def _zero3_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int) -> Case:
        weights = [torch.randn(WIDTH, WIDTH, generator=rng) for _ in range(BLOCKS)]
        biases = [torch.randn(WIDTH, generator=rng) for _ in range(BLOCKS)]
        nudges = [
            [_nudges(rng, UNIT_ELEMENTS, world) for _ in range(BLOCKS)] for _ in range(BATCHES)
        ]
        inputs = [
            {
                "weights": weights,
                "biases": biases,
                "x": [torch.randn(6, WIDTH, generator=rng) for _ in range(BATCHES)],
                "nudges": [[of_block[rank] for of_block in step] for step in nudges],
            }
            for rank in range(world)
        ]
        return Case(world_name(world), inputs)

    return [case(1), case(2), case(3), case(4)]


def _sgd(case: Case, steps: int, kind: str) -> list[list[torch.Tensor]]:
    """For each rank the blocks' parameters, flat, after plain SGD; before each step the shards get
    their nudges. kind: which gradient the last step uses; "stale": that of the parameters before.
    """
    begun = [
        torch.cat([w.flatten(), b])
        for w, b in zip(case.inputs[0]["weights"], case.inputs[0]["biases"], strict=True)
    ]
    now = state = [[flat.clone() for flat in begun] for _ in case.inputs]
    for step in range(steps):
        how = kind if step == steps - 1 else "mean"
        nudges = list(zip(*(inputs["nudges"][step] for inputs in case.inputs), strict=True))
        state = [[_nudged(f, n) for f, n in zip(flats, nudges, strict=True)] for flats in state]
        last, now = now, [list(flats) for flats in state]
        grads = []
        for rank, inputs in enumerate(case.inputs):
            used = last if how == "stale" else now
            leaves = [flat.clone().requires_grad_() for flat in used[rank]]
            y = inputs["x"][step]
            for leaf in leaves:
                weight, bias = leaf[:-WIDTH].view(WIDTH, WIDTH), leaf[-WIDTH:]
                y = torch.tanh(torch.nn.functional.linear(y, weight, bias))
            grads.append(torch.autograd.grad(y.square().mean(), leaves))
        for rank, mine in enumerate(grads):
            for index in range(BLOCKS):
                stack = torch.stack([g[index] for g in grads])
                step_by = {"sum": stack.sum(0), "own": mine[index]}.get(how, stack.mean(0))
                state[rank][index] = state[rank][index] - 0.5 * step_by
    return state


MISTAKES = {  # kinds of `_sgd`, and what to say of them
    "stale": "used a gradient of old parameters. The shards have changed since: gather them again.",
    "sum": "used the sum of the gradients; divide by the number of ranks.",
    "own": "used the rank's own gradient; reduce it.",
}


def _zero3_values(seen: Observed) -> str | None:
    case, world = seen.case, seen.case.world
    for step in range(BATCHES):
        right = _sgd(case, step + 1, "mean")
        for rank, got in enumerate(seen.data):
            shards = got["after"][step]["shards"]
            if len(shards) != BLOCKS:
                return f"Rank {rank} returned {len(shards)} shards for {BLOCKS} blocks."
            for index, now in enumerate(shards):
                what = f"After step {step}, rank {rank}'s shard of block {index}"
                part = padded_shards([right[rank][index]], world)[rank]
                if (wrong := differs(now, part, what, rtol=1e-4)) is None:
                    continue
                for kind, words in MISTAKES.items():
                    like = padded_shards([_sgd(case, step + 1, kind)[rank][index]], world)[rank]
                    if close(now, like, rtol=1e-4):
                        return f"{what} {words}"
                return wrong
    return None


def _zero3_peak(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["begun"]:
            return f"Before the first step, rank {rank}'s blocks still hold {got['begun']} bytes."
        whole = _padded(UNIT_ELEMENTS, seen.case.world)
        if not got["live"] <= 2 * whole:
            units = got["live"] / whole
            return (
                f"While a block computed on rank {rank}, {units:.0f} of {BLOCKS} blocks were "
                f"whole. "
                "Free each after its forward and after its backward; two at once are allowed."
            )
        for after in got["after"]:
            if after["bytes"]:
                return (
                    f"After backward, parameters of {after['bytes']} bytes are whole on rank "
                    f"{rank}: "
                    "free them."
                )
            if after["gradients"]:
                return (
                    f"After backward, {after['gradients']} full gradients are left on rank {rank}. "
                    "Only shards have a .grad."
                )
    return None


REDUCES = ("all_to_all", "reduce_scatter")


def _zero3_sequence(seen: Observed) -> str | None:
    least, most = 4 * UNIT_ELEMENTS, _padded(UNIT_ELEMENTS, seen.case.world)
    for rank in range(seen.case.world):
        forward, backward = seen.ops(rank, "forward"), seen.ops(rank, "backward")
        if forward != ["all_gather"] * BLOCKS * BATCHES:
            return (
                f"Rank {rank} made {len(forward)} calls in two forwards; one all_gather for each "
                f"of "
                f"{BLOCKS} blocks is {2 * BLOCKS}."
            )
        gathers = backward.count("all_gather")
        reduces = sum(op in REDUCES for op in backward)
        if other := sorted(set(backward) - {"all_gather", *REDUCES}):
            return f"Rank {rank} called {other[0]} in backward. Gather, and reduce-scatter."
        if reduces != 2 * BLOCKS or not 2 * BLOCKS - 2 <= gathers <= 2 * BLOCKS:
            return (
                f"Rank {rank} made {gathers} gathers and {reduces} reductions in two backwards; "
                f"each "
                f"block is gathered and reduced once: {2 * BLOCKS} of each."
            )
        if backward and backward[-1] not in REDUCES:
            return f"On rank {rank} a gather is the last call of backward; nothing uses it."
        for call in (*seen.calls(rank, "forward"), *seen.calls(rank, "backward")):
            if not least <= nbytes(call) <= most:
                return (
                    f"Rank {rank} called {call.op} on {nbytes(call)} bytes; a block, padded, has "
                    f"{most}."
                )
    return None


ZERO3 = Task(
    id="11.zero3",
    title="ZeRO-3, block by block",
    answer="shard_blocks",
    job="lesson11.zero3",
    minutes=45,
    cases=_zero3_cases,
    aspects=(
        Aspect("two steps of SGD on the shards, as on one device", 3, _zero3_values),
        Aspect("never more than two blocks whole, none after backward", 3, _zero3_peak),
        Aspect("one gather forward, one backward, one reduction each", 2, _zero3_sequence),
    ),
    hints=(
        "At which four moments must something happen to a block? Which hook stands at each?",
        "Before and after forward there are module hooks. The gradient of a block's output says "
        "that "
        "its backward begins; the last of its parameters' gradients that it is over.",
        "forward_pre_hook: gather. forward_hook: free, and output.register_hook(gather). Per "
        "parameter "
        "post_accumulate_grad_hook: when all of the block have fired, cat the gradients, "
        "reduce_scatter / N into shard.grad, drop the .grad, free.",
    ),
    debrief="This is fully_shard without streams: its hooks stand at the same four moments, and "
    "its "
    "prefetch starts the next block's gather before this one's compute.",
)

# -- 11.prefetch -----------------------------------------------------------------------------------

UNITS, SECONDS, LEAST = 5, 0.06, 0.6


def _prefetch_cases(rng: torch.Generator) -> list[Case]:
    x = torch.randn(4, generator=rng)
    inputs = [
        {
            "shards": [torch.randn(3, generator=rng) for _ in range(UNITS)],
            "x": x,
            "seconds": SECONDS,
        }
        for _ in range(2)
    ]
    network = Network(latency=SECONDS, bandwidth=1e9)
    return [Case("2 ranks on a slow network", inputs, network=network)]


def _prefetch_values(seen: Observed) -> str | None:
    y = seen.case.inputs[0]["x"]
    for index in range(UNITS):
        full = torch.cat([rank["shards"][index] for rank in seen.case.inputs])
        y = torch.tanh(y * full.mean() + full.sum())
    for rank, got in enumerate(seen.data):
        computed = [name for event, name, _ in got["log"] if event == "compute"]
        if computed != [f"unit {i}" for i in range(UNITS)]:
            return f"Rank {rank} computed {', '.join(computed) or 'nothing'}: all units, in order."
        if wrong := differs(got["y"], y, f"Rank {rank}'s output"):
            return wrong
    return None


def _prefetch_live(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        live = max(count for _, _, count in got["log"])
        if not live <= 2:
            return (
                f"Rank {rank} held {live} units at once. Free a unit before you ask for the third."
            )
        if got["log"][-1][2]:
            return f"At the end, rank {rank} still holds {got['log'][-1][2]} units: free them all."
    return None


def _both(call: Record, compute: Span) -> float:
    """Seconds in which a call was under way and a unit computed."""
    both = min(call.finished, compute.finished) - max(call.started, compute.started)
    return max(0.0, both)


def _prefetch_hidden(seen: Observed) -> str | None:
    elements = seen.case.world * len(seen.case.inputs[0]["shards"][0])
    for rank in range(seen.case.world):
        _, *calls = seen.calls(rank)  # the first is the job's own barrier
        if [(c.op, c.elements) for c in calls] != [("all_gather", elements)] * UNITS:
            return (
                f"Rank {rank} made {len(calls)} calls ({', '.join(sorted({c.op for c in calls}))}) "
                f"for {UNITS} units: one gather each, and nothing else, must travel."
            )
        computes = [s for s in seen.spans if (s.rank, s.name) == (rank, "compute")]
        ahead = list(zip(calls[1:], computes[:-1], strict=True))
        late = [g for g, compute in ahead if not g.started < compute.finished]
        # Of the least time that they take: what a busy machine adds to a gather does not count.
        hidden = sum(min(_both(g, compute), SECONDS) for g, compute in ahead)
        share = hidden / (SECONDS * len(ahead))
        if late or not share >= LEAST:
            return (
                f"On rank {rank} {share:.0%} of the gathering after the first unit's ran while a "
                f"unit computed. All of it can: start the next one before you compute."
            )
    return None


PREFETCH = Task(
    id="11.prefetch",
    title="Prefetch",
    answer="prefetching_forward",
    job="lesson11.prefetch",
    minutes=10,
    cases=_prefetch_cases,
    aspects=(
        Aspect("the output of all units, in order", 1, _prefetch_values),
        Aspect("at most two units at a time, none at the end", 1, _prefetch_live),
        Aspect("gathers run while units compute", 3, _prefetch_hidden),
    ),
    hints=(
        "While unit 0 computes, the network is idle. What could it carry?",
        "unit.gather() only starts. Where do you start unit i + 1, and where do you wait for it?",
        "work = units[0].gather(); for each unit: work.wait(); if there is a next one: "
        "work = next.gather(); x = unit.compute(x); unit.free().",
    ),
    debrief="On GPUs the gathers run in a stream of their own. A CPU that is far ahead could "
    "allocate every unit at once: FSDP's first version holds the CPU back (limit_all_gathers), "
    "and FSDP2 lets that stream wait for events.",
)

# -- 11.backward_order -----------------------------------------------------------------------------

STEPS = {
    "A": "compute the gradients of unit i",
    "B": "the optimizer updates this rank's shards",
    "C": "wait for the gather of unit i: its parameters are whole",
    "D": "start the reduce-scatter of unit i's gradients",
    "E": "free the whole parameters of unit i",
    "F": "start to gather unit i - 1",
    "G": "wait for the reduce-scatter: the shard's gradient is final, drop the whole one",
}
BEFORE = {  # the first must come before the second, and why
    ("C", "A"): "the gradients are computed with the whole parameters",
    ("F", "A"): "a gather that starts after the computing hides behind nothing",
    ("A", "E"): "computing needs the parameters that would be gone",
    ("A", "D"): "there is no gradient to reduce yet",
    ("D", "G"): "nothing was started that could be waited for",
    ("G", "B"): "the optimizer needs the mean over all ranks",
    ("E", "B"): "the whole parameters would be there during the update, and be stale after it",
}


def _order_form(seen: Observed) -> str | None:
    order: Any = seen.data[0]["order"]
    if type(order) is not list or sorted(map(str, order)) != sorted(STEPS):
        return f"Return the letters {', '.join(STEPS)}, each once, as a list in the right order."
    return None


def _order_right(seen: Observed) -> str | None:
    place = {letter: index for index, letter in enumerate(seen.data[0]["order"])}
    for (first, second), why in BEFORE.items():
        if place[first] > place[second]:
            return f"{second} ({STEPS[second]}) comes too early: {why}."
    return None


ORDER = Task(
    id="11.backward_order",
    title="The backward of one unit, in order",
    answer="backward_order",
    job="lesson11.backward_order",
    minutes=5,
    cases=lambda _: [Case("your order", [{}])],
    aspects=(
        Aspect("all seven steps, each once", 0, _order_form),
        Aspect("an order that works and hides the gather", 2, _order_right),
    ),
    hints=(
        "Which steps need the whole parameters of unit i? Put those between its gather and its "
        "free.",
        "What can the network do while the gradients are computed? Start that before.",
        "Wait for unit i, ask for unit i - 1, compute, start the reduction, free, wait for the "
        "reduction, and at the very end the optimizer.",
    ),
    debrief="Freeing and starting the reduction may swap; both need only the computing. Waiting "
    "for the "
    "reduction is put off as long as memory allows.",
)

TASKS = [UNIT, ZERO3, PREFETCH, ORDER]
