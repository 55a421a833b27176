"""Tasks of lesson 03: data parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import drawn_again, one_at_a_time
from ddpz_lite.course.check.vocabulary import (
    explain,
    explain_number,
    nbytes,
    silent,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson03 import broken

SHAPES = ((3, 5), (7,), (2, 1, 2), ())
OTHER = ((4, 3), (0, 2), (5,))  # of a second call


def _drawn(rng: torch.Generator, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=rng) for shape in shapes]


def _one_each(seen: Observed, most: Sequence[int], why: str, op: str = "") -> str | None:
    """One collective for each call of the answer, of no more elements than `most` has for it.

    One rank alone may leave it out. op: which one it must be. why: a sentence's end.
    """
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        if seen.case.world == 1 and len(calls) <= len(most):
            continue
        if len(calls) != len(most):
            counted = Counter(seen.ops(rank)).items()
            made = ", ".join(f"{number} x {name}" for name, number in counted) or "none"
            return (
                f"Rank {rank} made {len(calls)} calls ({made}) while your function ran "
                f"{len(most)} times. One call each time is enough: {why}"
            )
        for call, limit in zip(calls, most, strict=True):
            if op and call.op != op:
                return f"Rank {rank} called {call.op}. An {op} adds up and sends less."
            if call.elements > limit:
                return (
                    f"Rank {rank} called {call.op} on {call.elements} elements, but {limit} are "
                    f"enough: {why}"
                )
    return None


# -- 03.same_start ---------------------------------------------------------------------------------

BUFFERS = {
    "1.running_mean": torch.float32,
    "1.running_var": torch.float32,
    "1.num_batches_tracked": torch.int64,
    "2.scale": torch.float64,
    "mask": torch.bool,
}
COUNTER = "1.num_batches_tracked"
MODELS = ((4, 6), (4, 6), (4, 6), (5, 3))  # (inputs, width) for each call
NUMBERS = (0, 0, 1, 2)  # of the model of each call: two have the same shapes


def _shapes(inputs: int, width: int) -> dict[str, tuple[int, ...]]:
    square = {f"{layer}.weight": (width, width) for layer in (2, 3)}
    rows = [f"{layer}.bias" for layer in range(4)] + ["1.weight", "mask"]
    rows += ["1.running_mean", "1.running_var"]
    return {
        "0.weight": (width, inputs),
        **square,
        **dict.fromkeys(rows, (width,)),
        COUNTER: (),
        "2.scale": (3,),
    }


def _start_cases(rng: torch.Generator) -> list[Case]:
    def state(rank: int, inputs: int, width: int) -> dict[str, torch.Tensor]:
        shapes = _shapes(inputs, width)
        drawn = {
            name: torch.rand(shape, generator=rng, dtype=torch.float64).to(
                BUFFERS.get(name, torch.float32)
            )
            + 0.1
            for name, shape in shapes.items()
        }
        drawn["mask"] = torch.arange(width) % 2 == min(rank, 1)
        # more than float32 can count, and another number on every rank
        drawn[COUNTER] = 2**40 + 9 * torch.randint(999, (), generator=rng) + rank
        drawn["3.weight"] = drawn["2.weight"].clone()
        return drawn

    return [
        Case(
            world_name(world),
            [
                {
                    "states": [state(rank, *sizes) for sizes in MODELS],
                    "numbers": list(NUMBERS),
                    "seed": 100 + rank,
                }
                for rank in range(world)
            ],
        )
        for world in (3, 4, 2, 1)
    ]


def _start_values(kind: str) -> Callable[[Observed], str | None]:
    def judge(seen: Observed) -> str | None:
        for call, sizes in enumerate(MODELS):
            for name in _shapes(*sizes):
                if (name in BUFFERS) is not (kind == "buffers"):
                    continue
                for rank in range(seen.case.world):
                    if wrong := _start_value(seen, call, rank, name, kind):
                        return wrong
        return None

    return judge


def _start_value(seen: Observed, call: int, rank: int, name: str, kind: str) -> str | None:
    begun = [inputs["states"][call][name] for inputs in seen.case.inputs]
    ended = [got["calls"][call]["state"].get(name) for got in seen.data]
    right, what = begun[0], f"Rank {rank}'s {name}"
    mistakes: dict[str, Any] = {f"is its own: {kind} must come from rank 0, too.": begun[rank]}
    if rank and len({got["seed"] for got in seen.data}) == 1:
        mistakes = {
            "is its own, although all ranks have set the same seed: a seed does not change "
            f"existing {kind}. They must come from rank 0.": begun[rank]
        }
    if right.dtype.is_floating_point:
        every = torch.stack(begun)
        mix = (
            "is a mix of all ranks' values. Copy rank 0's values unchanged: the mean of random "
            "weights is too close to zero."
        )
        mistakes |= {mix: every.mean(0), f"{mix} ": every.sum(0)}
    else:
        mistakes["lost digits in float32: send each tensor in its own dtype."] = right.float().to(
            right.dtype
        )
    wrong = explain(ended[rank], right, what, mistakes, bitwise=True)
    equal = all(close(other, right * 0 + ended[0], bitwise=True) for other in ended[1:])
    if wrong and "wrong:" in wrong and seen.case.world > 1 and equal:
        return f"All ranks hold the same {name}, but it is not rank 0's."
    return wrong and wrong.strip()


def _start_in_place(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for call in got["calls"]:
            if call["tied"] is not True:
                return (
                    f"On rank {rank} two layers shared one weight, and now each has its own. Copy "
                    "into the existing tensors."
                )
            if call["replaced"]:
                return (
                    f"Rank {rank}'s {call['replaced'][0]} is a new tensor, and an optimizer that "
                    "holds the old one would not see it. Copy into the existing tensors."
                )
            if call["asks"]:
                return (
                    f"On rank {rank} {call['asks'][0]} has another requires_grad than before: "
                    "frozen parameters stay frozen."
                )
    return None


def _start_sent(seen: Observed) -> str | None:
    begun = seen.case.inputs[0]["states"]
    once = [t for state in begun for name, t in state.items() if name != "3.weight"]
    elements, bytes_ = sum(t.numel() for t in once), sum(t.nbytes for t in once)
    for rank in range(seen.case.world if seen.case.world > 1 else 0):
        calls = [call for call in seen.calls(rank) if call.op != "barrier"]
        if not calls or {call.op for call in calls} - {"broadcast", "send", "recv"}:
            called = ", ".join(sorted({call.op for call in calls})) or "nothing"
            return f"Rank {rank} called {called}. A broadcast copies rank 0's."
        copies = [call for call in calls if call.op != "send"]
        travelled, total = sum(call.elements for call in copies), sum(map(nbytes, copies))
        if total != bytes_ and any(call.dtype == "uint8" for call in calls):
            return (
                f"Rank {rank} sent pickled objects, {total} bytes of them. Let the tensors "
                "themselves travel."
            )
        if travelled > elements and total > bytes_:
            return (
                f"Rank {rank} took part in copies of {travelled} elements, but the models have "
                f"{elements}. Send each tensor once, also the shared weight."
            )
    return None


SAME_START = Task(
    id="03.same_start",
    title="The same start",
    answer="same_start",
    job="lesson03.same_start",
    minutes=5,
    cases=_start_cases,
    criteria=(
        Criterion("parameters as on rank 0", 1, _start_values("parameters")),
        Criterion("buffers as on rank 0", 1, _start_values("buffers")),
        Criterion("in place: shared weights stay shared", 1, _start_in_place),
        Criterion("rank 0's values are sent, each once", 1, _start_sent),
    ),
    hints=(
        "Which of a model's tensors must be equal on all ranks before the first step? Print "
        "list(model.named_parameters()) and list(model.named_buffers()) of one with BatchNorm.",
        "model.parameters() names a shared weight once; model.buffers() has the rest. One "
        "collective copies a tensor from one rank to all.",
        "For each tensor of both lists: one broadcast from rank 0, where autograd does not look "
        "(torch.no_grad).",
    ),
    debrief="DDP does this when it wraps a model, in large buckets. It never looks again: a "
    "replica that you change by hand afterwards stays different.",
)

# -- 03.average_gradients --------------------------------------------------------------------------

FROZEN = 1  # of SHAPES
MODEL_OF_CALL = ((0, SHAPES), (0, SHAPES), (1, SHAPES), (2, OTHER))  # (number, its shapes)


def _average_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, kind: str = "") -> Case:
        without = ({FROZEN, 2}, {FROZEN, 3}, {FROZEN, 3}, set()) if kind else (set(),) * 4
        frozen = [FROZEN] if kind else []
        inputs = []
        for _ in range(world):
            steps = [
                {"model": model, "gradients": _drawn(rng, shapes), "turned": bool(number)}
                for number, (model, shapes) in enumerate(MODEL_OF_CALL)
            ]
            for step, missing in zip(steps, without, strict=True):
                for index in missing:
                    step["gradients"][index] = None
            if kind:  # the second model has no such parameter
                steps.pop()
            models = [_drawn(rng, SHAPES), _drawn(rng, SHAPES), _drawn(rng, OTHER)]
            inputs.append({"models": models, "steps": steps, "frozen": frozen})
        says = ", parameters without a gradient" if kind else ""
        return Case(world_name(world) + says, inputs, kind)

    return [case(3), case(4), case(2), case(1), case(3, "frozen")]


def _average_values(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["changed"]:
            return f"Rank {rank}'s {got['changed'][0]} has changed: average its .grad."
        steps = zip(seen.case.inputs[rank]["steps"], got["gradients"], strict=True)
        for step, (local, now) in enumerate(steps):
            every = [inputs["steps"][step]["gradients"] for inputs in seen.case.inputs]
            for index, own in enumerate(local["gradients"]):
                what = f"Rank {rank}'s gradient {index} in call {step}"
                if own is None and now[index] is not None:
                    return f"{what} must stay None, because the parameter is frozen or unused."
                stack = None if own is None else torch.stack([grads[index] for grads in every])
                if own is not None and (wrong := _average_value(now[index], stack, rank, what)):
                    return wrong
    return None


def _average_value(got: Any, stack: torch.Tensor, rank: int, what: str) -> str | None:
    """stack: (N, *shape), the gradient on all ranks."""
    total, world = stack.sum(0), len(stack)
    mistakes = {
        "is the sum over the ranks. Divide by their number.": total,
        f"is half of the sum, on {world} ranks. Use dist.get_world_size().": total / 2,
        "was divided twice by the number of ranks.": total / world**2,
        "is the rank's own: nothing was averaged, or the mean was not written back.": stack[rank],
    }
    return explain(got, total / world, what, mistakes)


def _average_reduced(seen: Observed) -> str | None:
    most = [
        sum(g.numel() for g in step["gradients"] if g is not None)
        for step in seen.case.inputs[0]["steps"]
    ]
    why = "all gradients can travel as one tensor."
    return _one_each(seen, most, why, "all_reduce")


AVERAGE = Task(
    id="03.average_gradients",
    title="Average the gradients, in one collective",
    answer="average_gradients",
    job="lesson03.average_gradients",
    minutes=10,
    cases=_average_cases,
    criteria=(
        Criterion("every rank has the mean over the ranks", 2, _average_values, on=("",)),
        Criterion("a parameter without gradient keeps none", 1, _average_values, on=("frozen",)),
        Criterion("one all-reduce of all gradients", 2, _average_reduced),
    ),
    hints=(
        "A collective costs latency each time. How can many tensors travel as one?",
        "torch.cat of flattened gradients is one buffer. `split` and `view_as` bring back the "
        "shapes.",
        "Lay all gradients that are not None end to end in one buffer. Call one all_reduce on it "
        "and divide. Copy each part back to its gradient, in its shape.",
    ),
    debrief="One buffer must wait for the last gradient. DDP takes several of 25 MB each and "
    "sends the first while backward still computes the rest (lesson 05).",
)

# -- 03.weighted_mean ------------------------------------------------------------------------------


# Of each rank, in one more call: more than float16 can count.
MORE_SAMPLES = {"": (5001,) * 4, "unequal": (5001, 2, 0, 3)}


def _mean_cases(rng: torch.Generator) -> list[Case]:
    def case(*samples: int, then: Sequence[int], kind: str = "") -> Case:
        inputs = [
            {
                "gradients": _drawn(rng, SHAPES),
                "samples": n,
                "later": [{"gradients": _drawn(rng, OTHER), "samples": m}],
            }
            for n, m in zip(samples, then, strict=True)
        ]
        firsts = [{name: rank[name] for name in ("gradients", "samples")} for rank in inputs]
        others = [
            {"samples": again, **drawn_again(first, rng, "gradients")}
            for first, again in zip(firsts, MORE_SAMPLES[kind], strict=False)
        ]
        for rank, calls in zip(inputs, one_at_a_time(firsts, others), strict=True):
            rank["later"] = [*calls[1:], *rank["later"]]
        counts = ", ".join(map(str, samples))
        return Case(f"{world_name(len(samples))} with {counts} samples", inputs, kind)

    return [
        case(4, 4, 4, then=(1, 1, 1)),
        case(4, 4, then=(7, 7)),
        case(4, then=(3,)),
        case(2, 7, kind="unequal", then=(0, 5)),
        case(5, 1, 3, 6, kind="unequal", then=(100, 1, 30, 7)),
        case(5, 0, 3, kind="unequal", then=(0, 0, 2)),
    ]


def _turns(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """The first call and the later ones, of a rank's inputs or of its data."""
    return [rank, *rank.get("later", ())]


def _mean_values(seen: Observed) -> str | None:
    turns = list(zip(*map(_turns, seen.case.inputs), strict=True))
    for rank, data in enumerate(seen.data):
        for ranks, got in zip(turns, _turns(data), strict=True):
            every = zip(*(r["gradients"] for r in ranks), strict=True)
            stacks = [torch.stack(same) for same in every]
            samples = torch.tensor([float(r["samples"]) for r in ranks])
            for index, (now, stack) in enumerate(zip(got["gradients"], stacks, strict=True)):
                what = f"Rank {rank}'s gradient {index}"
                if wrong := _mean_value(now, stack, samples, rank, what):
                    return wrong
            if got["in_place"] is not True:
                return (
                    f"Rank {rank}'s list holds new tensors: write into the given ones, because "
                    "the model holds them, too."
                )
    return None


def _mean_value(
    got: Any, stack: torch.Tensor, samples: torch.Tensor, rank: int, what: str
) -> str | None:
    """stack: (N, *shape), the gradient on all ranks. samples: (N,)."""
    world, total = len(stack), samples.sum()
    weighted = torch.tensordot(samples, stack, 1)
    few = int(samples.argmin())
    means = (
        f"Your result is the mean of the ranks' means. Rank {few} had {int(samples[few])} of "
        f"{int(total)} samples and got 1/{world} of the weight."
    )
    mistakes = {
        "is the sum over the ranks: divide by the number of samples in all.": stack.sum(0),
        "is the sum over all samples: divide by their number.": weighted,
        means: stack.mean(0),
        "is the sum over all samples, divided by the number of ranks.": weighted / world,
        "was divided by the number of samples, and then by the number of ranks, too.": (
            weighted / total / world
        ),
        "was divided twice by the number of samples.": weighted / total**2,
        f"is half of the sum of the means, on {world} ranks.": stack.sum(0) / 2,
        "has not changed: write the result in place.": stack[rank],
    }
    wrong = explain(got, weighted / total, what, mistakes)
    return means if wrong and wrong.endswith(means) else wrong


def _mean_calls(seen: Observed) -> str | None:
    most = [sum(g.numel() for g in turn["gradients"]) + 1 for turn in _turns(seen.case.inputs[0])]
    why = "lay the gradients, and what else you must add up, end to end."
    return _one_each(seen, most, why, "all_reduce")


WEIGHTED_MEAN = Task(
    id="03.weighted_mean",
    title="A mean that counts every sample once",
    answer="weighted_mean",
    job="lesson03.weighted_mean",
    minutes=10,
    cases=_mean_cases,
    criteria=(
        Criterion("equal batches: the mean over all ranks", 2, _mean_values, on=("",)),
        Criterion("unequal batches: the mean over all samples", 2, _mean_values, on=("unequal",)),
        Criterion("one collective, no larger than it must be", 1, _mean_calls),
    ),
    hints=(
        "If one rank saw 7 samples and another 2, how much should each one's mean weigh?",
        "Sums can be added over ranks, means cannot. What turns your mean back into a sum?",
        "Multiply by `samples`, flatten everything into one buffer with `samples` at its end, "
        "all_reduce it, divide by the last element, copy the pieces back.",
    ),
    debrief="torch's DDP divides by the number of ranks, which is right only for equal batches. "
    "Trainers for language models therefore add up the number of tokens over the ranks and divide "
    "the loss by it (transformers #34242).",
)

# -- 03.rank_indices -------------------------------------------------------------------------------

LONG = {1: 199, 2: 203, 3: 200, 4: 201}  # samples: no world divides its own
BOTH = ("training", "evaluation")  # a case of the one has a call of the other
EPOCHS = (0, 1, 2, 9)  # then epoch 0 again, then epoch 0 of another seed


def _index_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, evaluate: bool) -> Case:
        seed = int(torch.randint(1000, (), generator=rng))
        long = LONG[world]
        calls = [[long, epoch, seed, evaluate] for epoch in (*EPOCHS, 0)]
        calls.append([long, 0, seed + 1, evaluate])
        calls += [[length, 1, seed, evaluate] for length in (world, world + 1, 4 * world)]
        calls += [[long, 0, seed, not evaluate], [long, 0, seed, evaluate]]
        word = "evaluation" if evaluate else "training"
        return Case(f"{world_name(world)}, {word} first", [{"calls": calls}] * world, word)

    return [case(3, False), case(4, False), case(2, False), case(1, False),
            case(3, True), case(4, True), case(1, True)]  # fmt: skip


Assigned = list[list[int]]  # by rank


def _dealt(seen: Observed, call: int) -> Assigned:
    return [[whole(index) for index in got["assigned"][call]] for got in seen.data]


def _lists(
    evaluates: bool, judge: Callable[[Assigned, int], str | None]
) -> Callable[[Observed], str | None]:
    """A judge of what is assigned in each call to evaluate, or to train; before it, whether that is
    lists of ints.
    """

    def over_calls(seen: Observed) -> str | None:
        for number, (length, epoch, _, evaluate) in enumerate(seen.case.inputs[0]["calls"]):
            if evaluate is not evaluates:
                continue
            for rank, got in enumerate(seen.data):
                if got["types"][number] != "list":
                    return f"Rank {rank} returned a {got['types'][number]}, not a list of ints."
                if any(whole(index) is None for index in got["assigned"][number]):
                    return f"Rank {rank} returned a list with something other than ints."
            if wrong := judge(_dealt(seen, number), length):
                use = "to evaluate" if evaluates else "to train on"
                return f"Of {length} samples {use} in epoch {epoch}, {wrong}"
        return None

    return over_calls


@partial(_lists, False)
def _train_values(assigned: Assigned, length: int) -> str | None:
    every = Counter(index for rank in assigned for index in rank)
    world, counts = len(assigned), [len(rank) for rank in assigned]
    if set(every) - set(range(length)):
        return f"some indices were not among 0 to {length - 1}."
    if missing := length - len(every):
        return _missing(assigned, missing)
    if len(set(counts)) > 1:
        return f"the ranks got {counts}: a rank with more waits forever."
    if world > 1 and min(counts) >= length:
        return "every rank got all: N times the work for the same epoch."
    if sum(counts) > -(-length // world) * world:
        return "more were repeated than needed to give every rank equally many."
    if (most := max(every.values())) > 2:
        return f"one came {most} times. No sample may come more than twice."
    return None


def _missing(assigned: Assigned, missing: int) -> str:
    twice = [rank for rank, local in enumerate(assigned) if len(set(local)) < len(local)]
    repeated = sum(map(len, assigned)) - len({index for rank in assigned for index in rank})
    if twice:
        return f"rank {twice[0]} got one twice, but {missing} never came."
    if repeated:
        return (
            f"{repeated} came twice and {missing} never: the ranks shuffled in different orders. "
            "All must use the same order."
        )
    return f"{missing} never came. None may be left out."


@partial(_lists, True)
def _eval_values(assigned: Assigned, length: int) -> str | None:
    every = Counter(index for rank in assigned for index in rank)
    if twice := every.total() - len(every):
        return f"{twice} came twice: padding is counted twice in what is measured."
    if missing := len(set(range(length)) - set(every)):
        return f"{missing} were never evaluated."
    if len(every) > length:
        return f"some indices were not among 0 to {length - 1}."
    counts = [len(rank) for rank in assigned]
    if max(counts) - min(counts) > 1:
        return f"the ranks got {counts} to evaluate: the fullest works while others wait."
    return None


def _shuffled(seen: Observed) -> str | None:
    first, *others, again, reseeded = (_dealt(seen, call) for call in range(len(EPOCHS) + 2))
    if first != again:
        return "Epoch 0 was requested twice and gave two orders."
    for rank, local in enumerate(first):
        if local == sorted(local):
            return f"Rank {rank} gets its samples in ascending order: they are not shuffled."
        for epoch, other in zip(EPOCHS[1:], others, strict=True):
            if local == other[rank]:
                return (
                    f"Rank {rank} gets the same samples in the same order in epochs 0 and {epoch}."
                )
            if seen.case.world > 1 and set(local) == set(other[rank]):
                return (
                    f"Rank {rank} gets the same samples in epochs 0 and {epoch}, in another order: "
                    "it never sees the others'."
                )
        if local == reseeded[rank]:
            return f"Rank {rank} gets the same order from two seeds: the seed is not used."
    return _patterned(first, others, reseeded) if seen.case.world == 1 else None


def _patterned(first: Assigned, others: Sequence[Assigned], reseeded: Assigned) -> str | None:
    """Whether an order follows from another. One rank alone, which sees the whole order."""
    known = {"Another seed's order": reseeded[0]}
    known |= {f"Epoch {n}": assigned[0] for n, assigned in zip(EPOCHS[1:], others, strict=True)}
    for words, order in {"Epoch 0": first[0], **known}.items():
        if _follows(order, sorted(order)):
            return f"{words} follows from 0, 1, 2, ... by a simple rule: it is not shuffled."
        if order is not first[0] and _follows(order, first[0]):
            return f"{words} follows from epoch 0 by a simple rule: it is not shuffled again."
    return None


def _follows(order: list[int], other: list[int]) -> bool:
    """Whether few different steps lead through `other` in this order: begun elsewhere, backwards,
    every seventh, in blocks. In a random order about 63% of the steps differ.
    """
    place = {index: at for at, index in enumerate(other)}
    steps = {(place[b] - place[a]) % len(order) for a, b in pairwise(order)}
    return len(steps) < len(order) / 3


def _no_trace(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["drew_from"]:
            return (
                f"Rank {rank} drew from {got['drew_from'][0]}'s global generator, which other "
                "code uses, too. Make a separate generator."
            )
    return silent(seen, "Every rank can compute the order from the seed.")


INDICES = Task(
    id="03.rank_indices",
    title="Distribute the samples",
    answer="rank_indices",
    job="lesson03.rank_indices",
    minutes=15,
    cases=_index_cases,
    criteria=(
        Criterion("training: all samples, equally many on each rank", 2, _train_values, on=BOTH),
        Criterion(
            "a new order in each epoch, the same on all ranks", 1, _shuffled, on=("training",)
        ),
        Criterion("evaluation: each sample exactly once", 1, _eval_values, on=BOTH),
        Criterion("no collective, no trace in the global generators", 1, _no_trace),
    ),
    hints=(
        "How can all ranks know the same shuffled order without sending it?",
        "torch.randperm takes a generator. What must the generator's seed depend on, and on what "
        "must it not?",
        "Every rank computes the full order, the same on all ranks. For training, repeat some "
        "samples at its end until N divides its length. Then rank r takes every N-th sample, "
        "beginning with number r.",
    ),
    debrief="torch's DistributedSampler pads in both cases, so a plain evaluation loop counts "
    "samples twice; and it needs set_epoch(epoch), or every epoch has the same order.",
)

# -- 03.batch_norm ---------------------------------------------------------------------------------


def _norm_cases(rng: torch.Generator) -> list[Case]:
    def call(rows: Sequence[int], channels: int, eps: float, offset: float) -> list[dict[str, Any]]:
        weight, bias = _drawn(rng, [(channels,)] * 2)
        return [
            {
                "x": torch.randn(n, channels, generator=rng) * (r + 1) + r + offset,
                "weight": weight + torch.sign(weight),
                "bias": bias,
                "eps": eps,
            }
            for r, n in enumerate(rows)
        ]

    def case(*rows: int, then: Sequence[int], offset: float = 0.0, kind: str = "") -> Case:
        firsts = call(rows, 3, 0.1, offset)
        calls = zip(firsts, call(then, 5, 0.4, offset), strict=True)
        far = f", values near {offset:,.0f}" if offset else ""
        counts = ", ".join(map(str, rows))
        says = f"{world_name(len(rows))} with {counts} rows{far}"
        weights = {"weight": torch.full((3,), 0.5), "bias": torch.full((3,), -0.25), "eps": 0.3}
        others = [weights | drawn_again(first, rng, "x") for first in firsts]
        varied = [[]] * len(rows) if offset else one_at_a_time(firsts, others)
        both = zip(calls, varied, strict=True)
        return Case(says, [{"calls": [*pair, *more[1:]]} for pair, more in both], kind)

    return [
        case(5, 5, 5, then=(8, 8, 8)),
        case(6, 6, then=(3, 3)),
        case(8, then=(4,)),
        case(7, 1, 4, 3, then=(1, 2, 9, 2), kind="unequal"),
        case(6, 0, 5, then=(1, 0, 0), kind="unequal"),
        case(6, 9, then=(3001, 3), offset=3000.0, kind="far"),
    ]


def _normal(call: dict[str, Any], mean: Any, var: Any, *, outside: bool = False) -> torch.Tensor:
    """What a rank would return, had it used this mean and this variance, both (channels,)."""
    scale = var.sqrt() + call["eps"] if outside else (var + call["eps"]).sqrt()
    return ((call["x"].double() - mean) / scale * call["weight"] + call["bias"]).float()


def _norm_values(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for number, y in enumerate(got["y"]):
            calls = [inputs["calls"][number] for inputs in seen.case.inputs]
            # far from zero, sums of squared distances in float32 are off by up to 3e-4,
            # E[x²] - E[x]² by 6e-3 or more
            rtol = 1.5e-3 if seen.case.kind == "far" else 2e-4
            if wrong := _norm_value(y, calls, rank, rtol):
                return wrong
    return unchanged(seen)


def _norm_value(y: Any, calls: list[dict[str, Any]], rank: int, rtol: float) -> str | None:
    """calls: of all ranks."""
    parts = [call["x"].double() for call in calls if len(call["x"])]
    whole_, own = torch.cat(parts), calls[rank]["x"].double()
    mean, var = whole_.mean(0), whole_.var(0, unbiased=False)
    what, wanted = f"Rank {rank}'s output", _normal(calls[rank], mean, var)
    if (wrong := differs(y, wanted, what, rtol=rtol)) is None:
        return None
    means = torch.stack([part.mean(0) for part in parts])
    variances = torch.stack([part.var(0, unbiased=False) for part in parts])
    normal = partial(_normal, calls[rank])
    known = {
        "divided the variance by the rows minus one; BatchNorm divides by the rows": (
            normal(mean, whole_.var(0, unbiased=True))
        ),
        "added eps to the standard deviation; it belongs to the variance": (
            normal(mean, var, outside=True)
        ),
    }
    if len(parts) > 1:  # alone, the others come to the same
        known |= {
            "used its own statistics, not those of all rows": (
                normal(own.mean(0), own.var(0, unbiased=False))
            ),
            "used the mean of the ranks' means: ranks with more rows must weigh more": (
                normal(means.mean(0), (variances + means**2).mean(0) - means.mean(0) ** 2)
            ),
            "used the mean of the ranks' variances, which leaves out that their means differ": (
                normal(mean, variances.mean(0))
            ),
        }
    for words, like in known.items():
        if close(y, like, rtol=2e-4):
            return f"Rank {rank} {words}."
    if rtol > 1e-3:
        return (
            f"{wrong} E[x²] - E[x]² loses its digits where the mean is large: two large numbers "
            "are subtracted."
        )
    return wrong


def _norm_calls(seen: Observed) -> str | None:
    # an all_gather of count, mean and squares of each channel is as good as a sum
    most = [4 * call["x"].shape[1] * seen.case.world for call in seen.case.inputs[0]["calls"]]
    return _one_each(seen, most, "lay count, sums and sums of squares end to end.")


BATCH_NORM = Task(
    id="03.batch_norm",
    title="BatchNorm over all ranks, in one collective",
    answer="batch_norm",
    job="lesson03.batch_norm",
    minutes=20,
    cases=_norm_cases,
    criteria=(
        Criterion("equal batches: statistics of all rows", 1, _norm_values, on=("",)),
        Criterion("unequal batches", 1, _norm_values, on=("unequal",)),
        Criterion("values far from zero", 3, _norm_values, on=("far",)),
        Criterion("one collective of a few numbers per channel", 1, _norm_calls),
    ),
    hints=(
        "Which numbers of each rank, added up, give both the mean and the variance of all rows?",
        "Rows, sum, sum of squares: 2C + 1 numbers. The variance is E[x²] - E[x]². What happens "
        "to it when the mean is 3,000 and the spread is 1?",
        "Make the three sums in float64, torch.cat, one all_reduce; mean = sum / rows, "
        "var = squares / rows - mean², then the formula, and back to float32.",
    ),
    debrief="SyncBatchNorm gathers mean, inverse deviation and count of each rank in one "
    "all_gather, and backward has one all_reduce more. In a job it needs a GPU or a similar "
    "accelerator.",
)

# -- 03.f1 -----------------------------------------------------------------------------------------

# TP, FP, FN and TN of a rank: more than a byte counts, and FP and FN differ in every sum
COUNTS = ((3001, 25, 110, 30), (5, 14, 20, 8), (33, 2, 9, 41), (1, 7, 3, 50))


def _f1_cases(rng: torch.Generator) -> list[Case]:
    def samples(tp: int, fp: int, fn: int, tn: int) -> dict[str, torch.Tensor]:
        order = torch.randperm(tp + fp + fn + tn, generator=rng)
        predicted = torch.tensor([True] * (tp + fp) + [False] * (fn + tn))
        labels = torch.tensor([True] * tp + [False] * fp + [True] * fn + [False] * tn)
        return {"predicted": predicted.bool()[order], "labels": labels.bool()[order]}

    def case(*calls: Sequence[tuple[int, int, int, int]], kind: str = "", says: str = "") -> Case:
        inputs = [{"calls": [samples(*c) for c in local]} for local in zip(*calls, strict=True)]
        return Case(world_name(len(inputs)) + says, inputs, kind)

    none, two = (0, 0, 0, 0), (0, 4, 1, 6)
    return [
        *(case(COUNTS[:n], COUNTS[:n][::-1], COUNTS[4 - n :]) for n in (3, 4, 2, 1)),
        case((none, (7, 3, 5, 4), none), (none, none, (5, 0, 0, 3)), kind="edge",
             says=", some of them without samples"),
        case(((0, 0, 0, 8), (0, 0, 0, 9), none), (two, none, two), (none, none, none), kind="edge",
             says=", nothing that is positive, or no hit"),
    ]  # fmt: skip


def _f1_of(tp: float, fp: float, fn: float) -> float:
    return 2 * tp / (2 * tp + fp + fn) if tp else 0.0


def _f1_values(seen: Observed) -> str | None:
    for number in range(len(seen.case.inputs[0]["calls"])):
        calls = [inputs["calls"][number] for inputs in seen.case.inputs]
        table = torch.tensor([_counts(**call) for call in calls])  # (N, 4)
        for rank, got in enumerate(seen.data):
            value, what = got["f1"][number], f"What rank {rank} returned"
            mistakes = _f1_mistakes(table, rank)
            right = _f1_of(*table.sum(0).tolist()[:3])
            if wrong := explain_number(value, right, what, mistakes, rtol=2e-6):
                if "nan" in wrong:
                    return f"Rank {rank} returned nan. If F1 would divide by 0, return 0."
                return wrong
    return unchanged(seen)


def _counts(predicted: torch.Tensor, labels: torch.Tensor) -> list[int]:
    """TP, FP, FN, TN."""
    pairs = ((predicted & labels), predicted & ~labels, ~predicted & labels, ~predicted & ~labels)
    return [int(pair.sum()) for pair in pairs]


def _f1_mistakes(table: torch.Tensor, rank: int) -> dict[str, float]:
    """table: (N, 4), TP, FP, FN and TN of each rank."""
    parts, sizes = [_f1_of(*row[:3]) for row in table.tolist()], table.sum(1).tolist()
    tp, fp, fn, tn = table.sum(0).tolist()
    ratios = "a mean of ratios is not the ratio of sums."
    weighted = sum(part * size for part, size in zip(parts, sizes, strict=True))
    nothing = {"is 1, but nothing is positive: if F1 would divide by 0, return 0.": 1.0}
    return {
        **(nothing if tp + fp + fn == 0 else {}),
        f"is the mean of the ranks' F1 values; {ratios}": sum(parts) / len(parts),
        f"is a weighted mean of the ranks' F1 values; {ratios}": weighted / max(sum(sizes), 1),
        "is the sum of the ranks' F1 values.": sum(parts),
        "is the accuracy.": (tp + tn) / max(sum(sizes), 1),
        "is the precision.": tp / max(tp + fp, 1),
        "is the recall.": tp / max(tp + fn, 1),
        "uses TN in place of FN.": _f1_of(tp, fp, tn),
        "uses TN in place of FP.": _f1_of(tp, tn, fn),
        "uses TN in place of TP.": _f1_of(tn, fp, fn),
        "is TP / (TP + FP + FN): TP counts twice in F1.": tp / max(tp + fp + fn, 1),
        "is the F1 of its own samples.": parts[rank],
        "uses counts of one byte, which start again at 0 after 255.": (
            2 * (tp % 256) / max((tp + fp) % 256 + (tp + fn) % 256, 1)
        ),
        "uses counts of one byte: after 255 they start again at 0.": _f1_of(
            tp % 256, fp % 256, fn % 256
        ),
    }


def _f1_calls(seen: Observed) -> str | None:
    most = [4 * seen.case.world] * len(seen.case.inputs[0]["calls"])
    return _one_each(seen, most, "counts can be added; samples need not travel.")


F1 = Task(
    id="03.f1",
    title="F1 over ranks",
    answer="f1",
    job="lesson03.f1",
    minutes=10,
    cases=_f1_cases,
    criteria=(
        Criterion("the F1 of all samples", 2, _f1_values, on=("",)),
        Criterion("a rank without samples, a class without positives", 1, _f1_values, on=("edge",)),
        Criterion("one collective, a few counts", 1, _f1_calls),
    ),
    hints=(
        "Which numbers of each rank can be added without losing what F1 needs?",
        "F1 = 2 TP / (2 TP + FP + FN). How many counts is that, and what do `&` and `~` of two "
        "bool tensors give?",
        "A tensor of the counts of this rank, added up over the ranks; then the formula, or 0 if "
        "its divisor is 0.",
    ),
    debrief="torchmetrics keeps such counts as state with dist_reduce_fx='sum' and reduces when "
    "you ask for the value, not at every step.",
)

# -- 03.diagnose -----------------------------------------------------------------------------------

EXPERIMENTS = 3
ALIKE = {  # what an experiment lacked that gives two names the same numbers
    "equal": "Give the ranks different numbers of samples, and values whose means differ.",
    "last": "Pass several micro-batches whose means differ.",
    "again": "Pass several micro-batches, and let the first not add up to 0.",
    "stale": "Only a second step shows what the first one left.",
    "local": "Give the ranks values for which no rank's own mean is the mean of all samples.",
}


def _diagnose_cases(rng: torch.Generator) -> list[Case]:
    def case(ranks: int) -> Case:
        order = torch.randperm(len(broken.MISTAKES), generator=rng).tolist()
        mistakes = [broken.MISTAKES[i] for i in [*order, order[0]]]
        inputs: list[dict[str, Any]] = [{"steps": len(mistakes)} for _ in range(ranks)]
        inputs.append({"steps": len(mistakes), "mistakes": mistakes})
        return Case(f"{ranks} ranks", inputs)

    return [case(3), case(2), case(4)]


def _named(mistakes: Sequence[str]) -> Callable[[Observed], str | None]:
    def judge(seen: Observed) -> str | None:
        hidden = seen.case.inputs[-1]["mistakes"]
        asked = seen.data[-1]["asked"]
        for rank, got in enumerate(seen.data[:-1]):
            for number, (name, mistake) in enumerate(zip(got["names"], hidden, strict=True)):
                if mistake in mistakes and name != mistake:
                    return _misnamed(rank, name, mistake, asked[number])
        return None

    return judge


def _misnamed(rank: int, name: Any, mistake: str, asked: list[Any]) -> str:
    if type(name) is not str or name not in broken.MISTAKES:
        return f"Rank {rank} returned {name!r}. Return one of the names in the table."
    if not asked:
        return f"Rank {rank} returned {name!r} without calling `step`."
    true, claimed = _ran(mistake, asked)[rank], _ran(name, asked)[rank]
    if all(abs(a - b) <= 1e-6 * max(abs(a), 1e-3) for a, b in zip(true, claimed, strict=True)):
        pair = [one for one in ALIKE if one in (name, mistake)]
        return (
            f"You called a step {name!r}, but it is a different one. Your samples cannot tell the "
            f"two apart: rank {rank} gets {true[0]:.4g} from both. "
            "" + (ALIKE[pair[-1]] if pair else "A mean of 0 shows nothing.")
        )
    at = next(i for i, (a, b) in enumerate(zip(true, claimed, strict=True)) if abs(a - b) > 1e-9)
    return (
        f"Rank {rank} returned {name!r}. With this mistake, call {at + 1} would have given it "
        f"{claimed[at]:.4g}, but it got {true[at]:.4g}."
    )


def _ran(mistake: str, asked: list[Any]) -> list[list[float]]:
    """By rank: the gradients that a step with this mistake gives, call by call."""
    ranks = len(asked[0])
    given, before = [], [0.0] * ranks
    for batches in asked:
        parts = [[torch.tensor(p, dtype=torch.float64) for p in local] for local in batches]
        before = broken.gradients(mistake, parts, before)
        given.append(before)
    return [list(local) for local in zip(*given, strict=True)]


def _experiments(seen: Observed) -> str | None:
    most = max(len(asked) for asked in seen.data[-1]["asked"])
    if most > EXPERIMENTS:
        return f"`step` was called {most} times for one diagnosis; {EXPERIMENTS} are allowed."
    return None


DIAGNOSE = Task(
    id="03.diagnose",
    title="Which mistake is in this step?",
    answer="diagnose",
    job="lesson03.diagnose",
    minutes=15,
    cases=_diagnose_cases,
    criteria=(
        Criterion("a right step, and mistakes in the size", 2,
                  _named(("right", "local", "sum", "twice"))),
        Criterion("a mean of means", 1, _named(("equal",))),
        Criterion("mistakes between micro-batches", 1, _named(("last", "again"))),
        Criterion("what the step before left", 1, _named(("stale",))),
        Criterion("at most three calls", 1, _experiments),
    ),
    hints=(
        "If every rank has one micro-batch with one sample of value 1, which names give the same "
        "gradient as a right step?",
        "Take samples for which you can compute each name's gradient. What must differ: the "
        "ranks' values, their numbers of samples, the micro-batches, the calls?",
        "All ranks know all samples, if rank r's follow from r. Compute the gradient under each "
        "name, call `step` twice with the same samples, and return the name that fits.",
    ),
    debrief="Test other people's training loops like this: choose inputs for which each mistake "
    "gives another number, and compare with one process. Random inputs of equal size hide most "
    "mistakes.",
)  # fmt: skip

TASKS = [SAME_START, AVERAGE, WEIGHTED_MEAN, INDICES, BATCH_NORM, F1, DIAGNOSE]
