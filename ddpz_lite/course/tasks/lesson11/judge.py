"""Tasks of lesson 11: ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    calls_until,
    explain,
    holds_at_most,
    nbytes,
    padded_shards,
    same_calls,
    unchanged,
    world_name,
)
from ddpz_lite.wire import Record


def _nudges(
    rng: torch.Generator, like: list[torch.Tensor], world: int, size: float = 1.0
) -> list[torch.Tensor]:
    """For each rank what the job adds to its shard of these tensors; nothing to the padding."""
    whole = size * torch.randn(_numel(like), generator=rng, dtype=like[0].dtype)
    return padded_shards([whole], world)


def _nudged(whole: torch.Tensor, nudges: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a flat range is once each rank's shard of it has got the rank's nudge."""
    return whole + torch.cat([*nudges])[: len(whole)]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """A flat range in pieces of the shapes of `like`."""
    pieces = flat.split([t.numel() for t in like])
    return [piece.view_as(t) for piece, t in zip(pieces, like, strict=True)]


def _share(tensors: list[torch.Tensor], world: int) -> int:
    """Bytes of a rank's shard of these tensors."""
    return -(-_numel(tensors) // world) * tensors[0].element_size()


# -- 11.unit ---------------------------------------------------------------------------------------

# 29 and 4 elements: of the second unit some ranks have nothing but padding, and rows differ in size
UNIT_SHAPES = ((5, 3), (5,), (3, 3))
SECOND = ((3,), ())
GATHERS = 3  # that the job asks for, each after a change of the shards


def _unit_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, kind: str = "", says: str = "") -> Case:
        odd = kind == "other"
        shapes = (UNIT_SHAPES, SECOND) if odd else (UNIT_SHAPES,)
        dtype = torch.float16 if odd else torch.float32
        units = [[torch.randn(s, generator=rng, dtype=dtype) for s in u] for u in shapes]
        x = torch.randn(4, 3, generator=rng, dtype=dtype)
        nudges = [[_nudges(rng, u, world) for u in units] for _ in range(GATHERS)]
        inputs = [
            {
                "units": units,
                "x": x,
                "nudges": [[by_rank[rank] for by_rank in turn] for turn in nudges],
                "odd": odd,
            }
            for rank in range(world)
        ]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    other = ", two units in float16, transposed weights, some frozen"
    return [case(3), case(4), case(2), case(1), case(3, "other", other), case(4, "other", other)]


def _unit_wanted(case: Case) -> list[list[torch.Tensor]]:
    """All parameters as they are at first, and after each gather."""
    units = case.inputs[0]["units"]
    flats = [list(map(_flat, units))]
    for turn in range(GATHERS):
        by_unit = zip(*(rank["nudges"][turn] for rank in case.inputs), strict=True)
        flats.append([_nudged(f, own) for f, own in zip(flats[-1], by_unit, strict=True)])
    return [
        [p for f, unit in zip(every, units, strict=True) for p in _cut(f, unit)] for every in flats
    ]


def _unit_values(seen: Observed) -> str | None:
    world, units = seen.case.world, seen.case.inputs[0]["units"]
    begun, *wanted = _unit_wanted(seen.case)
    for rank, got in enumerate(seen.data):
        for unit, shard in zip(units, got["shards"], strict=True):
            right = padded_shards(unit, world)
            if wrong := differs(shard, right[rank], f"Rank {rank}'s shard", bitwise=True):
                other = any(close(shard, part) for part in right)
                return f"Rank {rank}'s shard is that of another rank." if other else wrong
        for values, right in zip(got["gathered"], wanted, strict=True):
            for index, weight in enumerate(right):
                what = f"After gather, rank {rank}'s parameter {index}"
                if wrong := differs(values[index], weight, what, bitwise=True):
                    return _unit_stale(got, values[index], begun[index], index) or wrong
        if not got["same"]:
            return f"Rank {rank} changed requires_grad of a parameter, or the list of parameters."
    return None


def _unit_stale(got: dict[str, Any], now: Any, begun: torch.Tensor, index: int) -> str | None:
    if not close(now, begun):
        return None
    if held := got["freed"][0]["parameters"]:
        return (
            f"When the unit is made, its parameters hold {held} bytes, and gather does not fill "
            "them. A unit begins freed."
        )
    return (
        f"The shards were updated, but after the next gather parameter {index} has its first "
        "value. Gather the shards, not a copy."
    )


def _unit_backward(seen: Observed) -> str | None:
    weight = _unit_wanted(seen.case)[2][0]  # after the second gather
    for rank, got in enumerate(seen.data):
        if said := got["raised"]:
            if "inplace operation" in said:
                return (
                    "After free and gather, backward says that a variable it needs has been "
                    "modified: autograd's version counter has seen how the parameters were filled."
                )
            return f"Backward after free and gather raised: {said[:200]}"
        right = weight.sum(0).expand_as(seen.case.inputs[rank]["x"])
        if wrong := differs(got["x_grad"], right.contiguous(), f"Rank {rank}'s gradient of x"):
            return (
                f"{wrong} It was computed after free and gather: the memory that autograd keeps "
                "must be filled again."
            )
    return None


def _unit_other(seen: Observed) -> str | None:
    return _unit_values(seen) or _unit_backward(seen)


def _unit_bytes(seen: Observed) -> str | None:
    units, world = seen.case.inputs[0]["units"], seen.case.world
    shares = sum(_share(unit, world) for unit in units)
    most = shares + 4 * world * len(units)  # a DeviceMesh keeps the numbers of its ranks
    shapes = [list(p.shape) for unit in units for p in unit]
    for rank, got in enumerate(seen.data):
        for number, held in enumerate(got["freed"]):
            when = "After free" if number else "When the unit is made"
            if held["shapes"] != shapes:
                return (
                    f"{when}, rank {rank}'s parameters have lost their shapes. Empty the storage."
                )
            if held["parameters"]:
                return f"{when}, rank {rank}'s parameters still hold {held['parameters']} bytes."
            if held["kept"]:
                return (
                    f"{when}, a view that autograd keeps still holds {held['kept']} bytes on rank "
                    f"{rank}. A new p.data leaves the old storage alive."
                )
    shard, whole = "after free, its shards", "while gathered, its shards and the parameters"
    return holds_at_most(seen, lambda got: [f["held"] for f in got["freed"]], most, shard) or (
        holds_at_most(seen, lambda got: got["whole"], most + world * shares, whole)
    )


def _unit_calls(seen: Observed) -> str | None:
    units = seen.case.inputs[0]["units"]
    if wrong := same_calls(seen, ["all_gather"] * GATHERS * len(units)):
        return f"{wrong} One all_gather is enough for a unit."
    sizes = [seen.case.world * _share(unit, seen.case.world) for unit in units] * GATHERS
    for rank in range(seen.case.world):
        for call, size in zip(seen.calls(rank), sizes, strict=False):
            if nbytes(call) != size:
                return f"Rank {rank} gathered {nbytes(call)} bytes; all shards together are {size}."
    return None


UNIT = Task(
    id="11.unit",
    title="Gather a unit, and free it",
    answer="Unit",
    job="lesson11.unit",
    minutes=25,
    cases=_unit_cases,
    criteria=(
        Criterion("gather fills the parameters from all shards", 1, _unit_values, on=("",)),
        Criterion("backward works after free and gather", 1, _unit_backward, on=("",)),
        Criterion("another dtype, any layout, two units at a time", 1, _unit_other, on=("other",)),
        Criterion("freed, a rank holds its shard and nothing else", 2, _unit_bytes),
        Criterion("one all_gather for each gather", 1, _unit_calls),
    ),
    hints=(
        "Autograd keeps a view of the weight. What do the weight and its view share, and how can "
        "you shrink it?",
        "p.untyped_storage().resize_(0) empties the memory under all views; resize_(bytes) brings "
        "it back. Which way of writing into p does not tell autograd's version counter?",
        "free: p.untyped_storage().resize_(0). gather: resize each storage to numel * itemsize, "
        "all_gather the shards into one flat buffer, p.data.copy_(piece.view_as(p)).",
    ),
    debrief="FSDP2 does this with one storage per parameter: unshard allocates them and copies "
    "out, reshard resizes them to 0. ddpz_lite lets the parameters be views of the unit's flat "
    "buffer, and copies none.",
)

# -- 11.zero3 --------------------------------------------------------------------------------------

# Of each block the widths that its layers pass through: 49, 59, 47, 41 and 43 elements, which no
# world from 2 to 4 divides; of a second model 29 and 13.
BLOCKS = ((5, 4, 5), (5, 4, 7), (7, 4, 3), (3, 4, 5), (5, 6, 1))
OTHER_BLOCKS = ((5, 4, 1), (1, 2, 3))
BATCHES = (1, 2, 1)  # in each step
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-2}  # of the largest gradient


def _zero3_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, kind: str = "", says: str = "") -> Case:
        other = kind == "other"
        dtype = torch.float16 if other else torch.float32

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng, dtype=dtype)

        def block(widths: tuple[int, ...]) -> list[torch.Tensor]:
            return [t for a, b in pairwise(widths) for t in (drawn(b) / 4, drawn(b, a) / a**0.5)]

        models = [
            [block(w) for w in m]
            for m in ((BLOCKS, OTHER_BLOCKS, OTHER_BLOCKS) if other else (BLOCKS,))
        ]
        blocks = [block for model in models for block in model]
        nudges = [[_nudges(rng, b, world, 0.2) for b in blocks] for _ in BATCHES]
        inputs = [
            {
                "models": models,
                "steps": [[drawn(6, BLOCKS[0][0]) for _ in range(n)] for n in BATCHES],
                "x": drawn(6, BLOCKS[0][0]),
                "nudges": [[by_rank[rank] for by_rank in step] for step in nudges],
                "turned": other,
            }
            for rank in range(world)
        ]
        return Case(f"{world_name(world)}{says}", inputs, kind)

    other = ", three models in float16, transposed weights"
    return [case(3), case(4), case(2), case(1), case(3, "other", other)]


def _blocks(case: Case) -> list[list[torch.Tensor]]:
    """The parameters of all blocks, of one model after the other."""
    return [block for model in case.inputs[0]["models"] for block in model]


def _outputs(case: Case, flats: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """What each model gives for x. flats: of all blocks, the parameters."""
    left, ys = iter(flats), []
    for model in case.inputs[0]["models"]:
        y = x
        for block in model:
            layers = _cut(next(left), block)
            for bias, weight in zip(layers[::2], layers[1::2], strict=True):
                y = torch.tanh(torch.nn.functional.linear(y, weight, bias))
        ys.append(y)
    return ys


def _gradients(
    case: Case, flats: list[torch.Tensor], batches: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Of all blocks, flat; summed over the batches."""
    leaves = [flat.clone().requires_grad_() for flat in flats]
    losses = [y.square().mean() for x in batches for y in _outputs(case, leaves, x)]
    return list(torch.autograd.grad(torch.stack(losses).sum(), leaves))


def _history(case: Case) -> list[list[torch.Tensor]]:
    """All blocks as they are at first, in the forwards of each step, and at the end."""
    history = [list(map(_flat, _blocks(case)))]
    now = history[0]
    for step in range(len(BATCHES)):
        by_block = zip(*(rank["nudges"][step] for rank in case.inputs), strict=True)
        now = [_nudged(f, own) for f, own in zip(now, by_block, strict=True)]
        history.append(now)
        every = [_gradients(case, now, rank["steps"][step]) for rank in case.inputs]
        means = [torch.stack(of_block).mean(0) for of_block in zip(*every, strict=True)]
        now = [f - 0.5 * mean for f, mean in zip(now, means, strict=True)]
    return [*history, now]


def _zero3_values(seen: Observed) -> str | None:
    blocks, world = _blocks(seen.case), seen.case.world
    models = [len(model) for model in seen.case.inputs[0]["models"]]
    for rank, got in enumerate(seen.data):
        if got["counts"] != models:
            return f"Rank {rank} returned {got['counts'][0]} shards for {models[0]} blocks."
        for index, (block, shard) in enumerate(zip(blocks, got["shards"], strict=True)):
            what = f"Rank {rank}'s shard of block {index}"
            if wrong := differs(shard, padded_shards(block, world)[rank], what, bitwise=True):
                return wrong
    history = _history(seen.case)
    for step in range(len(BATCHES)):
        if wrong := _zero3_gradients(seen, history, step):
            return wrong
    for rank, got in enumerate(seen.data):
        right = _outputs(seen.case, history[-1], seen.case.inputs[rank]["x"])
        rtol = 3 * TOLERANCE[right[0].dtype]
        for now, wanted in zip(got["outputs"], right, strict=True):
            if wrong := differs(now, wanted, f"Rank {rank}'s output under no_grad", rtol=rtol):
                return wrong
    return None


def _zero3_gradients(seen: Observed, history: list, step: int) -> str | None:
    """What the shards' gradients are after a step. history: see `_history`."""
    case, world = seen.case, seen.case.world
    every = [_gradients(case, history[step + 1], rank["steps"][step]) for rank in case.inputs]
    sums = [torch.stack(of_block).sum(0) for of_block in zip(*every, strict=True)]
    largest = max(float(total.abs().max()) for total in sums) / world
    for rank, got in enumerate(seen.data):
        for index, now in enumerate(got["after"][step]["grads"]):
            mean = sums[index] / world
            right = padded_shards([mean], world)[rank]
            rtol = largest * TOLERANCE[mean.dtype] / max(float(right.abs().max()), 1e-6)
            if close(now, right, rtol=rtol):
                continue
            what = f"After step {step}, rank {rank}'s shard.grad of block {index}"
            cut = {
                words: padded_shards([whole], world)[rank]
                for words, whole in _zero3_mistakes(case, history, step, rank, index).items()
            }
            wrong = explain(now, right, what, cut | _multiple(now, right), rtol=rtol)
            left = got["after"][step - 1]["unsharded"] if step else []
            if left and not got["begun"]["bytes"]:
                wrong = (
                    f"{wrong} Block {left[0]} was still unsharded after the backward of step "
                    f"{step - 1}. Free it there, or its next gather may bring no new weights."
                )
            if got["begun"]["bytes"]:
                wrong = (
                    f"{wrong} Rank {rank}'s blocks are unsharded from the beginning: free them, "
                    "and gather each before it computes."
                )
            return wrong
    return None


def _multiple(now: Any, right: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mistake of a gradient that is a multiple of the right one; none if it cannot be one."""
    if type(now) is not torch.Tensor or now.shape != right.shape or not right.any():
        return {}
    factor = float((now.float() * right.float()).sum() / right.float().square().sum())
    if not 0 < factor < 1e6:
        return {}
    words = f"is {factor:.3g} times the mean gradient. Check how you divide, and that no hook"
    return {f"{words} returns another gradient.": factor * right}


def _zero3_mistakes(
    case: Case, history: list, step: int, rank: int, index: int
) -> dict[str, torch.Tensor]:
    """What people make of the mean gradient of a block."""

    def stack(flats: list[torch.Tensor], first: int = 0) -> torch.Tensor:
        batches = [rank["steps"][step][first:] for rank in case.inputs]
        return torch.stack([_gradients(case, flats, own)[index] for own in batches])

    now, before = history[step + 1], history[step]
    mistakes = {
        "was computed with old parameters. The shards have changed since: gather them again.": (
            stack(before).mean(0)
        ),
        "is the sum over the ranks; divide by their number.": stack(now).sum(0),
        "is cut from the rank's own gradient; reduce it.": stack(now)[rank],
    }
    if BATCHES[step] > 1:
        last = "is only that of the last backward; a second one adds to shard.grad."
        mistakes[last] = stack(now, BATCHES[step] - 1).mean(0)
    return mistakes


def _zero3_memory(seen: Observed) -> str | None:
    world, blocks = seen.case.world, _blocks(seen.case)
    for rank, got in enumerate(seen.data):
        if held := got["begun"]["bytes"]:
            return f"Before the first step, rank {rank}'s blocks still hold {held} bytes."
        if got["most"] > 2:
            return (
                f"While a block computed on rank {rank}, {got['most']} blocks were unsharded. "
                "Free each after its forward and after its backward; two at once are allowed."
            )
        for when, now in [("backward", a) for a in got["after"]] + [("evaluation", got["end"])]:
            if now["bytes"]:
                return (
                    f"After {when}, parameters of {now['bytes']} bytes are unsharded on rank "
                    f"{rank}: free them."
                )
            if now["gradients"]:
                return (
                    f"After {when}, {now['gradients']} full gradients are left on rank {rank}. "
                    "Only shards have a .grad."
                )
    shares = [_share(block, world) for block in blocks]
    models = len(seen.case.inputs[0]["models"])
    # two blocks of each model, and a few numbers that hooks keep
    between = sum(shares) + 2 * models * world * max(shares) + 64
    shard, two = "the shards and their gradients", "after forward, the shards and two whole blocks"
    grads = sum(shares)  # after the first step the job has cleared them

    def after(got: dict[str, Any]) -> list[int]:
        return [got["begun"]["held"] + grads, got["end"]["held"] + grads] + [
            now["held"] for now in got["after"]
        ]

    return holds_at_most(seen, after, 2 * sum(shares), shard) or holds_at_most(
        seen, lambda got: got["forward"], between + grads, two
    )


REDUCES = ("all_to_all", "reduce_scatter")


def _zero3_sequence(seen: Observed) -> str | None:
    blocks, backwards = len(BLOCKS), sum(BATCHES)
    if seen.case.world == 1 and not seen.ops(0):
        return None
    for rank in range(seen.case.world):
        forward = [*seen.calls(rank, "forward"), *seen.calls(rank, "evaluation")]
        backward = seen.calls(rank, "backward")
        gathers = [call for call in backward if call.op == "all_gather"]
        reduces = [call for call in backward if call.op in REDUCES]
        if [call.op for call in forward] != ["all_gather"] * blocks * (backwards + 1):
            return (
                f"Rank {rank} made {len(forward)} calls in {backwards + 1} forwards; one "
                f"all_gather for each of {blocks} blocks is {blocks * (backwards + 1)}."
            )
        if other := sorted({call.op for call in backward} - {"all_gather", *REDUCES}):
            return f"Rank {rank} called {other[0]} in backward. Gather, and reduce-scatter."
        kept = len(gathers) == (blocks - 1) * backwards  # the last block, from forward
        if len(reduces) != blocks * backwards or not (kept or len(gathers) == len(reduces)):
            return (
                f"Rank {rank} made {len(gathers)} gathers and {len(reduces)} reductions in "
                f"{backwards} backwards; each block is gathered and reduced once: "
                f"{blocks * backwards} of each."
            )
        order = list(range(blocks))
        wrong = (
            _zero3_sizes(seen, forward, order)
            or _zero3_sizes(seen, gathers, order[::-1][1:] if kept else order[::-1])
            or _zero3_sizes(seen, reduces, order[::-1])
            or _zero3_kept_back(seen, rank)
        )
        if wrong:
            return f"Rank {rank} {wrong}"
    return None


def _zero3_sizes(seen: Observed, calls: list[Record], order: list[int]) -> str | None:
    """order: the blocks that the calls are for, again and again."""
    blocks, world = _blocks(seen.case), seen.case.world
    for number, call in enumerate(calls):
        block = blocks[order[number % len(order)]]
        least, most = 4 * _numel(block), world * _share(block, world)
        if not least <= nbytes(call) <= most:
            return (
                f"called {call.op} on {nbytes(call)} bytes for block "
                f"{order[number % len(order)]}, which has {most}, padded."
            )
    return None


def _zero3_kept_back(seen: Observed, rank: int) -> str | None:
    """When backward comes to a block, the one after it has all its gradients, and those after that
    must be on their way.
    """
    for block in range(len(BLOCKS)):
        due = len(BLOCKS) - block - 2
        for calls in calls_until(seen, rank, block):
            reduced = sum(call.op in REDUCES for call in calls)
            if reduced < due:
                return (
                    f"had reduced the gradients of {reduced} blocks when backward came to block "
                    f"{block}, but {due} were complete. Reduce each when it is ready."
                )
    return None


ZERO3 = Task(
    id="11.zero3",
    title="ZeRO-3, block by block",
    answer="shard_blocks",
    job="lesson11.zero3",
    minutes=45,
    cases=_zero3_cases,
    criteria=(
        Criterion("three steps of SGD on the shards, as on one device", 2, _zero3_values, on=("",)),
        Criterion("another dtype, any layout, two models", 1, _zero3_values, on=("other",)),
        Criterion("never more than two blocks whole, none after backward", 3, _zero3_memory),
        Criterion("one gather forward, one backward, one reduction", 2, _zero3_sequence, on=("",)),
    ),
    hints=(
        "At which four moments must something happen to a block? Which hook stands at each?",
        "Before and after forward there are module hooks. When the gradient of a block's output "
        "is ready, the block's backward begins. When the last of its parameters' gradients is "
        "ready, its backward has ended.",
        "forward_pre_hook: gather. forward_hook: free, and output.register_hook(gather). Per "
        "parameter post_accumulate_grad_hook: when all of the block have fired, cat the gradients, "
        "reduce_scatter / N, add to shard.grad, drop the .grad, free.",
    ),
    debrief="This is fully_shard without streams: its hooks stand at the same four moments, and "
    "its prefetch starts the next block's gather before this one's compute.",
)

# -- 11.prefetch -----------------------------------------------------------------------------------


def _prefetch_cases(rng: torch.Generator) -> list[Case]:
    def case(*units: int, world: int) -> Case:
        x = [torch.randn(4, generator=rng) for _ in units]
        inputs = [
            {"rows": [[torch.randn(3, generator=rng) for _ in range(n)] for n in units], "x": x}
            for _ in range(world)
        ]
        counts = " and then ".join(map(str, units))
        return Case(f"{world_name(world)}, {counts} units", inputs)

    return [case(5, 2, 5, world=2), case(4, 1, 6, world=3), case(1, world=1), case(2, 3, world=4)]


def _names(case: Case) -> list[list[str]]:
    """The units of each row, as the job names them."""
    return [
        [f"unit {i}" if row == 0 else f"unit {row}.{i}" for i in range(len(shards))]
        for row, shards in enumerate(case.inputs[0]["rows"])
    ]


def _prefetch_values(seen: Observed) -> str | None:
    for row, names in enumerate(_names(seen.case)):
        y = seen.case.inputs[0]["x"][row]
        for index in range(len(names)):
            full = torch.cat([rank["rows"][row][index] for rank in seen.case.inputs])
            y = torch.tanh(y * full.mean() + full.sum())
        for rank, got in enumerate(seen.data):
            computed = [name for event, name, _ in got["logs"][row] if event == "compute"]
            if computed != names:
                done = ", ".join(computed) or "nothing"
                return f"Rank {rank} computed {done}: all units, in order."
            if wrong := differs(got["outputs"][row], y, f"Rank {rank}'s output"):
                return wrong
    return unchanged(seen)


def _prefetch_live(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for log in got["logs"]:
            live = max(count for _, _, count in log)
            if not live <= 2:
                return (
                    f"Rank {rank} held {live} units at once. Free a unit before you ask for the "
                    "third."
                )
            if left := log[-1][2]:
                return f"At the end, rank {rank} still holds {left} of the units: free them all."
    return None


def _prefetch_hidden(seen: Observed) -> str | None:
    every = _names(seen.case)
    elements = seen.case.world * len(seen.case.inputs[0]["rows"][0][0])
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        units = sum(map(len, every))
        if [(c.op, c.elements) for c in calls] != [("all_gather", elements)] * units:
            return (
                f"Rank {rank} made {len(calls)} calls ({', '.join(sorted({c.op for c in calls}))}) "
                f"for {units} units: one gather each, and nothing else, must travel."
            )
        left = iter(calls)
        for names in every:
            gathers = [next(left) for _ in names]
            for index in range(1, len(names)):
                computes = seen.span(rank, f"compute {names[index - 1]}")
                name = f"wait {names[index]}"  # the first time: a second wait takes no time
                waited = min(s.started for s in seen.spans if (s.rank, s.name) == (rank, name))
                if gathers[index].started > computes.started:
                    return (
                        f"On rank {rank}, nothing was sent while {names[index - 1]} computed, "
                        "because the next gather began afterwards. Start it before you compute."
                    )
                if waited < computes.finished:
                    return (
                        f"On rank {rank}, {names[index]} was waited for before {names[index - 1]} "
                        "computed. Start the next one before you compute, and wait when you need "
                        "it."
                    )
    return None


PREFETCH = Task(
    id="11.prefetch",
    title="Prefetch",
    answer="prefetching_forward",
    job="lesson11.prefetch",
    minutes=10,
    cases=_prefetch_cases,
    criteria=(
        Criterion("the output of all units, in order", 1, _prefetch_values),
        Criterion("at most two units at a time, none at the end", 1, _prefetch_live),
        Criterion("gathers run while units compute", 3, _prefetch_hidden),
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


def _order(seen: Observed) -> str | None:
    order: Any = seen.data[0]["order"]
    if type(order) is not list or sorted(map(str, order)) != sorted(STEPS):
        return f"Return the letters {', '.join(STEPS)}, each once, as a list in the right order."
    place = {letter: index for index, letter in enumerate(order)}
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
    criteria=(Criterion("an order that works and hides the gather", 2, _order),),
    hints=(
        "Which steps need the whole parameters of unit i? Put those between its gather and its "
        "free.",
        "What can the network do while the gradients are computed? Start that before.",
        "Wait for unit i, ask for unit i - 1, compute, start the reduction, free, wait for the "
        "reduction, and at the very end the optimizer.",
    ),
    debrief="Freeing and starting the reduction may swap; both need only the computing. Waiting "
    "for the reduction is put off as long as memory allows.",
)

# -- 11.shared_blocks ------------------------------------------------------------------------------

ACTIONS = ("gather", "free", "forward", "backward", "reduce")
Action = tuple[str, str]


def _computes(uses: list[str]) -> list[Action]:
    return [("forward", b) for b in uses] + [("backward", b) for b in reversed(uses)]


def _fewest_gathers(uses: list[str], room: int) -> int:
    """Over all choices of what to free: for each set of unsharded blocks the fewest gathers."""
    best = {frozenset[str](): 0}
    for _, block in _computes(uses):
        then: dict[frozenset[str], int] = {}
        for there, count in best.items():
            stays = [there]
            if block not in there:
                count += 1
                stays = [there - {out} for out in there] if len(there) == room else [there]
            for stay in stays:
                now = stay | {block}
                then[now] = min(count, then.get(now, count))
        best = then
    return min(best.values())


def _next_use(order: list[str], after: int, block: str) -> int:
    return next((i for i in range(after, len(order)) if order[i] == block), len(order))


def _gathers_by(uses: list[str], room: int, rule: str) -> int:
    """Gathers of a plan that frees by another rule than the farthest next use."""
    order = [block for _, block in _computes(uses)]
    there: dict[str, int] = {}  # block -> when it was gathered or used
    count = 0
    for index, block in enumerate(order):
        if rule == "forward alone" and index == len(uses):
            there.clear()
        if block not in there:
            count += 1
            if len(there) == room:
                rules: dict[str, Callable[[str], int]] = {
                    "oldest use": lambda b: there[b],
                    "oldest gather": lambda b: there[b],
                    "nearest use": lambda b: _next_use(order, index, b),  # noqa: B023
                    "forward alone": lambda b: -_next_use(order[: len(uses)], index, b),  # noqa: B023
                }
                del there[min(there, key=rules[rule])]
            there[block] = index
        if rule != "oldest gather":
            there[block] = index
    return count


RULES = ("oldest use", "oldest gather", "nearest use", "forward alone")


def _blocks_cases(rng: torch.Generator) -> list[Case]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    def names(count: int) -> list[str]:
        return [f"block {i}" for i in torch.randperm(20, generator=rng)[:count].tolist()]

    def drawn(count: int, length: int) -> list[str]:
        blocks = names(count)
        return [blocks[number(0, count)] for _ in range(length)]

    def question(count: int, length: int, room: int) -> dict[str, Any]:
        """Every other rule than the farthest next use gathers more."""
        while True:
            uses = drawn(count, length)
            best = _fewest_gathers(uses, room)
            if all(_gathers_by(uses, room, rule) > best for rule in RULES):
                return {"uses": uses, "room": room}

    def varied(asked: dict[str, Any]) -> list[dict[str, Any]]:
        """The question, and with each argument in turn changed."""
        turned = dict(zip(asked["uses"], asked["uses"][1:] + asked["uses"][:1], strict=True))
        return [
            asked,
            asked | {"room": asked["room"] + 1},
            asked | {"uses": asked["uses"][::-1]},
            asked | {"uses": [turned[b] for b in asked["uses"]]},
            asked | {"room": asked["room"] - 1},
        ]

    every = [varied(question(*size)) for size in ((4, 9, 2), (5, 12, 3), (4, 11, 2))]
    (one, other), many = names(2), names(12)
    edges = [
        {"uses": [one], "room": 1},
        {"uses": [one] * 12, "room": 1},
        {"uses": [one, other] * 3, "room": 1},
        {"uses": [one, other, one], "room": 2},
        {"uses": many, "room": 1},
        {"uses": many, "room": 4},
        {"uses": many, "room": 50},
    ]
    return [
        Case("blocks used several times", [{"questions": [q for group in every for q in group]}]),
        Case("one block, no repeats, room for one or for all", [{"questions": edges}], "edge"),
    ]


def _told(asked: dict[str, Any]) -> str:
    return f"With uses = {asked['uses']} and room = {asked['room']}"


def _pairs(plan: Any) -> bool:
    return type(plan) is list and all(type(p) in (tuple, list) and len(p) == 2 for p in plan)


def _blocks_each(
    seen: Observed, look: Callable[[dict[str, Any], list[Action]], str | None]
) -> str | None:
    for asked, plan in zip(seen.case.inputs[0]["questions"], seen.data[0]["plans"], strict=True):
        pairs = [p if type(p) is tuple else tuple(p) for p in plan] if _pairs(plan) else None
        if pairs is None or not all(a in ACTIONS and b in asked["uses"] for a, b in pairs):
            return (
                f"{_told(asked)}: return a list of pairs, an action ({', '.join(ACTIONS)}) and a "
                "block of uses."
            )
        if wrong := look(asked, pairs):
            return f"{_told(asked)}: {wrong}"
    return None


def _blocks_compute(seen: Observed) -> str | None:
    return _blocks_each(seen, _computes_well)


def _computes_well(asked: dict[str, Any], plan: list[Action]) -> str | None:
    there: set[str] = set()
    for number, (action, block) in enumerate(plan):
        if action == "gather":
            if block in there:
                return f"action {number} gathers {block}, which is unsharded already."
            there.add(block)
        elif action != "reduce":
            if block not in there:
                what = {"free": "frees"}.get(action, f"is the {action} of")
                return f"action {number} {what} {block}, which is not gathered then."
            if action == "free":
                there.remove(block)
    done = [step for step in plan if step[0] in ("forward", "backward")]
    wanted = _computes(asked["uses"])
    if done != wanted:
        if done == wanted[: len(asked["uses"])] + [("backward", b) for b in asked["uses"]]:
            return "backward comes to the last use first. Yours begins with the first."
        return (
            "forward must compute each use from first to last, and backward each from last to "
            f"first; yours computes {len(done)} times, and {len(wanted)} are due in that order."
        )
    if there:
        return f"{sorted(there)[0]} is still unsharded at the end: free it."
    return None


def _blocks_room(seen: Observed) -> str | None:
    return _blocks_each(seen, _keeps_room)


def _keeps_room(asked: dict[str, Any], plan: list[Action]) -> str | None:
    there = 0
    for number, (action, block) in enumerate(plan):
        there += (action == "gather") - (action == "free")
        if there > asked["room"]:
            return (
                f"action {number} gathers {block}, and then {there} blocks are unsharded. Free one "
                "before."
            )
    return None


def _blocks_reduce(seen: Observed) -> str | None:
    return _blocks_each(seen, _reduces_once)


def _reduces_once(asked: dict[str, Any], plan: list[Action]) -> str | None:
    for block in dict.fromkeys(asked["uses"]):
        reduced = [i for i, step in enumerate(plan) if step == ("reduce", block)]
        used = [i for i, step in enumerate(plan) if step == ("backward", block)]
        if not used:
            return f"{block} has no backward."
        if len(reduced) == len(used) > 1:
            return (
                f"{block} is reduced after each of its {len(used)} backwards. They add to one "
                "gradient, which travels once."
            )
        if len(reduced) != 1:
            return f"{block} is reduced {len(reduced)} times; once is right."
        if reduced[0] < used[-1]:
            return (
                f"{block} is reduced before its last backward: the gradient lacks what that use "
                "adds."
            )
        if any(action == "backward" for action, _ in plan[used[-1] + 1 : reduced[0]]):
            return (
                f"{block} is reduced late: its gradient is complete, and another block's backward "
                "comes first."
            )
    return None


def _blocks_fewest(seen: Observed) -> str | None:
    return _blocks_compute(seen) or _blocks_room(seen) or _blocks_each(seen, _gathers_few)


def _gathers_few(asked: dict[str, Any], plan: list[Action]) -> str | None:
    uses, room = asked["uses"], asked["room"]
    order = [block for _, block in _computes(uses)]
    gathers = sum(action == "gather" for action, _ in plan)
    fewest = _fewest_gathers(uses, room)
    if gathers <= fewest:
        return None
    told = f"{gathers} gathers, but {fewest} are enough."
    if gathers == len(order):
        return f"{told} Every use gathers. Nothing needs the memory yet, so a block may stay."
    there: list[str] = []
    computed = 0
    for number, (action, block) in enumerate(plan):
        if action == "gather":
            there.append(block)
        elif action == "free":
            again = _next_use(order, computed, block)
            later = [b for b in there if _next_use(order, computed, b) > again]
            there.remove(block)
            if computed == len(uses) and again < len(order) and len(there) + 1 <= room:
                return (
                    f"{told} Action {number} frees {block} between forward and backward. Backward "
                    "begins with what forward used last."
                )
            if later:
                return (
                    f"{told} Action {number} frees {block}, which is used again before {later[0]}."
                )
        elif action != "reduce":
            computed += 1
    return f"{told} A block was freed although there was room for it."


def _blocks_edges(seen: Observed) -> str | None:
    return _blocks_fewest(seen) or _blocks_reduce(seen)


SHARED = Task(
    id="11.shared_blocks",
    title="Blocks that are used twice",
    answer="shared_blocks",
    job="lesson11.shared_blocks",
    minutes=30,
    cases=_blocks_cases,
    criteria=(
        Criterion("each use in order, on an unsharded block", 2, _blocks_compute, on=("",)),
        Criterion("never more blocks than there is room for", 1, _blocks_room, on=("",)),
        Criterion("one reduction, of the whole gradient, at once", 1, _blocks_reduce, on=("",)),
        Criterion("the fewest gathers", 2, _blocks_fewest, on=("",)),
        Criterion("one block, no repeats, room for one or for all", 1, _blocks_edges, on=("edge",)),
        Criterion("uses stays as it is", 1, unchanged),
    ),
    hints=(
        "When is a block's gradient complete? And when must a block be freed?",
        "Write all computations of the step in one list, forward and backward. If there is no "
        "room, which of the unsharded blocks will be needed last?",
        "For each computation: if its block is not there, free (if room is used up) the one whose "
        "next use in the list is farthest away or never, and gather; compute; if the block is "
        "not in the rest of the list, reduce. At the end free all.",
    ),
    debrief="FSDP2 gathers a unit before each of its forwards and frees it after, unless "
    "reshard_after_forward=False keeps it until backward. To free what is needed last is Belady's "
    "rule (1966) for the pages of a memory.",
)

TASKS = [UNIT, ZERO3, PREFETCH, ORDER, SHARED]
