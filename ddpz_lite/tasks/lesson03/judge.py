"""Tasks of lesson 03: data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...grade.compare import close, differs, number
from ...grade.task import Aspect, Case, Observed, Task
from ...grade.vocabulary import world_name

SHAPES = ((3, 5), (7,), (2, 1, 2))


def _one_collective(most: Callable[[Case], int], hint: str) -> Callable[[Observed], str | None]:
    """A judge that wants one collective on each rank, of no more elements than `most` says."""

    def judge(seen: Observed) -> str | None:
        limit = most(seen.case)
        for rank in range(seen.case.world):
            calls = seen.calls(rank)  # of the whole case: an answer can end the job's span
            if len(calls) != 1:
                made = ", ".join(call.op for call in calls) or "none"
                return f"Rank {rank} made {len(calls)} calls ({made}), and one is enough: {hint}"
            if calls[0].elements > limit:
                return (
                    f"Rank {rank} called {calls[0].op} on {calls[0].elements} elements, and "
                    f"{limit} are enough: {hint}"
                )
        return None

    return judge


# -- 03.same_start ---------------------------------------------------------------------------------

BUFFERS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
STATE = {
    "0.weight": (6, 4),
    "0.bias": (6,),
    "1.weight": (6,),
    "1.bias": (6,),
    "1.running_mean": (6,),
    "1.running_var": (6,),
    "1.num_batches_tracked": (),
    "2.weight": (6, 6),
    "2.bias": (6,),
    "3.weight": (6, 6),
    "3.bias": (6,),
}
STATE_ELEMENTS = sum(torch.Size(s).numel() for name, s in STATE.items() if name != "3.weight")


def _start_cases(rng: torch.Generator) -> list[Case]:
    def state() -> dict[str, torch.Tensor]:
        drawn = {name: torch.rand(shape, generator=rng) + 0.1 for name, shape in STATE.items()}
        drawn["1.num_batches_tracked"] = torch.randint(5, 900, (), generator=rng)
        drawn["3.weight"] = drawn["2.weight"].clone()
        return drawn

    return [
        Case(world_name(world), [{"state": state()} for _ in range(world)])
        for world in (1, 2, 3, 4)
    ]


def _start_values(names: tuple[str, ...]) -> Callable[[Observed], str | None]:
    def judge(seen: Observed) -> str | None:
        begun = [rank["state"] for rank in seen.case.inputs]
        for rank, got in enumerate(seen.data):
            for name in names:
                now, right = got["state"][name], begun[0][name]
                if (wrong := differs(now, right, f"Rank {rank}'s {name}", bitwise=True)) is None:
                    continue
                if rank and close(now, begun[rank][name], bitwise=True):
                    kind = "buffers" if name in BUFFERS else "parameters"
                    return f"Rank {rank}'s {name} is its own: {kind} must come from rank 0, too."
                every = torch.stack([state[name] for state in begun]).float()
                same = type(now) is torch.Tensor and now.shape == right.shape
                if same and any(close(now.float(), mix) for mix in (every.mean(0), every.sum(0))):
                    return (
                        f"Rank {rank}'s {name} is a mix of all ranks' values. Take rank 0's as "
                        f"they "
                        "are: a mean of random weights is no random weight."
                    )
                return wrong
        return None

    return judge


def _start_tied(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["tied"] is not True:
            return (
                f"On rank {rank} two layers shared one weight, and now each has its own. Copy into "
                "the tensors that are there."
            )
        if got["trainable"] != [True] * len(got["trainable"]):
            return f"On rank {rank} some parameters no longer ask for a gradient."
    return None


def _start_sent(seen: Observed) -> str | None:
    world = seen.case.world
    for rank in range(world):
        calls = seen.calls(rank)
        total = sum(call.elements for call in calls)
        ops = sorted({call.op for call in calls})
        if world > 1 and ops not in (["broadcast"], ["send"], ["recv"], ["recv", "send"]):
            return f"Rank {rank} called {', '.join(ops) or 'nothing'}. A broadcast copies rank 0's."
        if any(call.dtype == "uint8" for call in calls):
            return (
                f"Rank {rank} sent pickled objects, {total} bytes of them. Broadcast the tensors "
                "themselves."
            )
        if ops == ["broadcast"] and total > STATE_ELEMENTS:
            return (
                f"{total} elements were broadcast, and the model has {STATE_ELEMENTS}. The shared "
                "weight needs to travel once."
            )
        received = sum(call.elements for call in calls if call.op == "recv")
        if received > STATE_ELEMENTS:
            return (
                f"Rank {rank} received {received} elements, and the model has {STATE_ELEMENTS}. "
                "Each tensor needs to travel once, the shared weight too."
            )
    return None


SAME_START = Task(
    id="03.same_start",
    title="The same start",
    answer="same_start",
    job="lesson03.same_start",
    minutes=5,
    cases=_start_cases,
    aspects=(
        Aspect(
            "parameters as on rank 0", 1, _start_values(tuple(n for n in STATE if n not in BUFFERS))
        ),
        Aspect("buffers as on rank 0", 1, _start_values(BUFFERS)),
        Aspect("shared weights stay shared", 1, _start_tied),
        Aspect("rank 0's values are sent, each once", 1, _start_sent),
    ),
    hints=(
        "What does a model hold beside its parameters? Print model.state_dict() of one with "
        "BatchNorm.",
        "model.parameters() names a shared weight once; model.buffers() has the rest. One "
        "collective "
        "copies a tensor from one rank to all.",
        "with torch.no_grad(): for t in (*model.parameters(), *model.buffers()): "
        "dist.broadcast(t, src=0)",
    ),
    debrief="DDP does this when it wraps a model, in large buckets. It never looks again: a "
    "replica "
    "that you change by hand afterwards stays different.",
)

# -- 03.average_gradients --------------------------------------------------------------------------


def _average_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, frozen: int | None = None) -> Case:
        inputs = []
        for _ in range(world):
            grads = [torch.randn(s, generator=rng) for s in SHAPES]
            if frozen is not None:
                grads[frozen] = None
            weights = [torch.randn(s, generator=rng) for s in SHAPES]
            inputs.append({"weights": weights, "gradients": grads})
        without = "" if frozen is None else ", one parameter frozen"
        return Case(world_name(world) + without, inputs, "" if frozen is None else "frozen")

    return [case(1), case(2), case(3), case(4), case(3, frozen=1)]


def _average_values(seen: Observed) -> str | None:
    world, inputs = seen.case.world, seen.case.inputs
    for rank, got in enumerate(seen.data):
        for index in range(len(SHAPES)):
            what = f"Rank {rank}'s gradient {index}"
            mine, now = inputs[rank]["gradients"][index], got["gradients"][index]
            if not close(got["weights"][index], inputs[rank]["weights"][index], bitwise=True):
                return f"Rank {rank}'s parameter {index} has changed: average its .grad."
            if mine is None:
                if now is not None:
                    return f"{what} was None, for the parameter is frozen, and is not any more."
                continue
            stack = torch.stack([r["gradients"][index] for r in inputs])
            if (wrong := differs(now, stack.mean(0), what)) is None:
                continue
            if world > 1 and close(now, stack.sum(0)):
                return f"{what} is the sum over the ranks. Divide by their number."
            if close(now, stack.sum(0) / 2):
                return f"{what} is half of the sum, on {world} ranks. Ask how many there are."
            if close(now, mine):
                return f"{what} is the rank's own: nothing was averaged, or not in place."
            return wrong
    return None


def _gradient_elements(case: Case) -> int:
    return sum(g.numel() for g in case.inputs[0]["gradients"] if g is not None)


def _average_reduced(seen: Observed) -> str | None:
    flat = "lay the gradients end to end in one buffer and all_reduce it."
    if wrong := _one_collective(_gradient_elements, flat)(seen):
        return wrong
    for rank in range(seen.case.world):
        if (op := seen.ops(rank)[0]) != "all_reduce":
            return f"Rank {rank} called {op}. An all_reduce adds on the way and sends less."
    return None


AVERAGE = Task(
    id="03.average_gradients",
    title="Average the gradients, in one collective",
    answer="average_gradients",
    job="lesson03.average_gradients",
    minutes=10,
    cases=_average_cases,
    aspects=(
        Aspect("every rank has the mean over the ranks", 2, _average_values, on=("",)),
        Aspect("a frozen parameter keeps no gradient", 1, _average_values, on=("frozen",)),
        Aspect("one all-reduce of all gradients", 2, _average_reduced),
    ),
    hints=(
        "A collective costs latency each time. How can many tensors travel as one?",
        "torch.cat of flattened gradients is one buffer. `split` and `view_as` bring back the "
        "shapes.",
        "buffer = cat of p.grad.flatten() for those with a gradient; all_reduce; buffer /= world; "
        "for "
        "each: p.grad.copy_(piece.view_as(p.grad)).",
    ),
    debrief="One buffer must wait for the last gradient. DDP takes several of 25 MB each and "
    "sends the "
    "first while backward still computes the rest (lesson 05).",
)

# -- 03.weighted_mean ------------------------------------------------------------------------------


def _mean_cases(rng: torch.Generator) -> list[Case]:
    def case(*samples: int, kind: str = "") -> Case:
        inputs = [
            {"gradients": [torch.randn(s, generator=rng) for s in SHAPES], "samples": n}
            for n in samples
        ]
        counts = ", ".join(map(str, samples))
        return Case(f"{world_name(len(samples))} with {counts} samples", inputs, kind)

    return [
        case(4),
        case(4, 4),
        case(4, 4, 4),
        case(2, 7, kind="unequal"),
        case(5, 1, 3, 6, kind="unequal"),
        case(5, 0, 3, kind="unequal"),
    ]


def _weighted(case: Case) -> list[torch.Tensor]:
    total = sum(rank["samples"] for rank in case.inputs)
    parts = [[g * (r["samples"] / total) for g in r["gradients"]] for r in case.inputs]
    return [torch.stack(same).sum(0) for same in zip(*parts, strict=True)]


def _mean_values(seen: Observed) -> str | None:
    wanted = _weighted(seen.case)
    stacks = [
        torch.stack(same) for same in zip(*(r["gradients"] for r in seen.case.inputs), strict=True)
    ]
    for rank, got in enumerate(seen.data):
        for index, (tensor, right) in enumerate(zip(got["gradients"], wanted, strict=True)):
            stack, what = stacks[index], f"Rank {rank}'s gradient {index}"
            if (wrong := differs(tensor, right, what)) is None:
                continue
            if seen.case.world > 1 and close(tensor, stack.sum(0)):
                return f"{what} is the sum over the ranks: divide by the number of samples in all."
            if close(tensor, stack.mean(0)):
                return _mean_of_means(seen.case)
            if close(tensor, stack[rank]):
                return f"{what} is what the rank began with: the result must be in place."
            return wrong
    return None


def _mean_of_means(case: Case) -> str:
    samples = [rank["samples"] for rank in case.inputs]
    few = min(range(case.world), key=lambda rank: samples[rank])
    return (
        f"Your result is the mean of the ranks' means. Rank {few} had {samples[few]} of "
        f"{sum(samples)} samples and got 1/{case.world} of the weight."
    )


def _mean_calls(seen: Observed) -> str | None:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        if len(calls) != 1:
            made = ", ".join(call.op for call in calls) or "none"
            return (
                f"Rank {rank} made {len(calls)} calls ({made}), "
                "and one is enough: lay the gradients, and what else must be added up, end to end."
            )
        if calls[0].op != "all_reduce" or calls[0].elements > numel + 1:
            return (
                f"Rank {rank} called {calls[0].op} on {calls[0].elements} elements; one all_reduce "
                f"of {numel} gradient elements and the number of samples does it."
            )
    return None


WEIGHTED_MEAN = Task(
    id="03.weighted_mean",
    title="A mean that counts every sample once",
    answer="weighted_mean",
    job="lesson03.weighted_mean",
    minutes=10,
    cases=_mean_cases,
    aspects=(
        Aspect("equal batches: the mean over all ranks", 2, _mean_values, on=("",)),
        Aspect("unequal batches: the mean over all samples", 2, _mean_values, on=("unequal",)),
        Aspect("one collective, no larger than it must be", 1, _mean_calls),
    ),
    hints=(
        "If one rank saw 7 samples and another 2, how much should each one's mean weigh?",
        "Sums can be added over ranks, means cannot. What turns your mean back into a sum?",
        "Multiply by `samples`, flatten everything into one buffer with `samples` at its end, "
        "all_reduce it, divide by the last element, copy the pieces back.",
    ),
    debrief="torch's DDP divides by the number of ranks, which is right for equal batches alone. "
    "Trainers for language models therefore add up the number of tokens over the ranks and divide "
    "the loss by it (transformers #34242).",
)

# -- 03.rank_indices -------------------------------------------------------------------------------


def _index_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, length: int, evaluate: bool) -> Case:
        seed = int(torch.randint(1000, (), generator=rng))
        inputs = [{"length": length, "seed": seed, "evaluate": evaluate} for _ in range(world)]
        word = "evaluation" if evaluate else "training"
        return Case(f"{world_name(world)}, {length} samples, {word}", inputs, word)

    return [case(1, 24, False), case(2, 40, False), case(3, 41, False), case(4, 30, False),
            case(2, 40, True), case(3, 41, True), case(4, 30, True)]  # fmt: skip


def _epochs(seen: Observed, number_: int) -> list[list[int]]:
    """What each rank got in this epoch."""
    return [rank["epochs"][number_] for rank in seen.data]


def _train_values(seen: Observed) -> str | None:
    world, length = seen.case.world, seen.case.inputs[0]["length"]
    dealt = _epochs(seen, 0)
    every = [index for rank in dealt for index in rank]
    if missing := set(range(length)) - set(every):
        if len(every) == len(set(every)) and len(missing) < world:
            return (
                f"{len(missing)} samples are never seen: repeat some instead of dropping the tail."
            )
        if world > 1 and len(set(every)) < len(every):
            return (
                f"{len(every) - len(set(every))} samples come twice and {len(missing)} never: the "
                "ranks shuffled in different orders. All must draw the same one."
            )
        return f"{len(missing)} of {length} samples are never seen."
    if set(every) - set(range(length)):
        return f"There are indices that are not among 0 to {length - 1}."
    if len({len(rank) for rank in dealt}) > 1:
        return f"The ranks got {[len(r) for r in dealt]} samples: a rank with more waits for ever."
    if len(every) > -(-length // world) * world:
        if all(len(rank) == length for rank in dealt):
            return "Every rank sees the whole data set: N times the work for the same epoch."
        return "More samples are repeated than it takes to give every rank as many."
    return None


def _shuffled(seen: Observed) -> str | None:
    first, second, again = (_epochs(seen, number_) for number_ in (0, 1, 2))
    other = [rank["other"] for rank in seen.data]  # another seed's epoch 0
    if first != again:
        return (
            "Epoch 0 was asked for twice and came in two orders. Take seed + epoch, nothing else."
        )
    for rank, indices in enumerate(first):
        if indices == sorted(indices):
            return f"Rank {rank} gets its samples in ascending order: they are not shuffled."
        if indices == second[rank]:
            return f"Rank {rank} gets the same samples in the same order in epochs 0 and 1."
        if indices == other[rank]:
            return f"Rank {rank} gets the same order from two seeds: the seed is not used."
    for words, dealt in (("Epoch 1", second), ("Another seed", other)):
        if _what_is_dealt(dealt) != _what_is_dealt(first):
            return f"{words} deals other samples, or other numbers of them, than epoch 0 did."
    if seen.case.world == 1:  # where the whole order is seen
        order = first[0]
        for words, like in (
            ("Epoch 0 is 0, 1, 2, ...", list(range(len(order)))),
            ("Epoch 1 is epoch 0", second[0]),
            ("Another seed's order is this one's", other[0]),
        ):
            if _turned(order, like):
                return f"{words}, begun elsewhere or read backwards: that is not shuffled."
    return None


def _what_is_dealt(ranks: list[list[int]]) -> tuple[set[int], list[int]]:
    """All samples, and how many each rank gets."""
    return {index for rank in ranks for index in rank}, [len(rank) for rank in ranks]


def _turned(order: list[int], other: list[int]) -> bool:
    """Whether two orders are one, but for where they begin and which way they go."""
    if len(order) != len(other):
        return False
    starts = range(len(order))
    return any(order[k:] + order[:k] in (other, other[::-1]) for k in starts)


def _eval_values(seen: Observed) -> str | None:
    length = seen.case.inputs[0]["length"]
    every = [index for rank in _epochs(seen, 0) for index in rank]
    twice = len(every) - len(set(every))
    if twice and set(every) == set(range(length)):
        return f"{twice} samples come twice: padding is counted twice in what is measured."
    if missing := set(range(length)) - set(every):
        return f"{len(missing)} of {length} samples are never evaluated."
    if sorted(every) != list(range(length)):
        return "Not each sample comes exactly once."
    counts = [len(rank) for rank in _epochs(seen, 0)]
    if max(counts) - min(counts) > 1:
        return f"The ranks got {counts} samples to evaluate: the fullest works while others wait."
    return None


def _no_trace(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if calls := seen.ops(rank):
            return f"Rank {rank} called {calls[0]}. The same seed gives the same order for nothing."
        if got["disturbed"] is not False:
            return (
                "The answer drew from torch's global generator, which dropout uses. Take a "
                "torch.Generator of its own."
            )
    return None


INDICES = Task(
    id="03.rank_indices",
    title="Deal the samples",
    answer="rank_indices",
    job="lesson03.rank_indices",
    minutes=15,
    cases=_index_cases,
    aspects=(
        Aspect("training: all samples, as many on every rank", 2, _train_values, on=("training",)),
        Aspect("a new order in each epoch, the same on all ranks", 1, _shuffled, on=("training",)),
        Aspect("evaluation: each sample exactly once", 1, _eval_values, on=("evaluation",)),
        Aspect("no collective, no trace in the global generator", 1, _no_trace),
    ),
    hints=(
        "How can all ranks know the same shuffled order without sending it?",
        "torch.randperm takes a generator. Deal its result like cards: rank r takes r, r + N, ...",
        "order = randperm(length, generator seeded with seed + epoch).tolist(); to train, append "
        "its "
        "own beginning until N divides it; return order[rank::world].",
    ),
    debrief="torch's DistributedSampler pads in both cases, so a plain evaluation loop counts "
    "samples "
    "twice; and it needs set_epoch(epoch), or every epoch has the same order.",
)

# -- 03.batch_norm ---------------------------------------------------------------------------------

CHANNELS = 3


def _norm_cases(rng: torch.Generator) -> list[Case]:
    def case(*rows: int, offset: float = 0.0, kind: str = "") -> Case:
        weight, bias = (torch.rand(CHANNELS, generator=rng) + 0.5 for _ in range(2))
        inputs = [
            {
                "x": torch.randn(n, CHANNELS, generator=rng) * (r + 1) + r + offset,
                "weight": weight,
                "bias": bias,
                "eps": 0.1,
            }
            for r, n in enumerate(rows)
        ]
        far = f", values near {offset:,.0f}" if offset else ""
        counts = ", ".join(map(str, rows))
        return Case(f"{world_name(len(rows))} with {counts} rows{far}", inputs, kind)

    return [case(8), case(6, 6), case(5, 5, 5), case(4, 9, kind="unequal"),
            case(7, 1, 4, 3, kind="unequal"), case(6, 9, offset=3000.0, kind="far")]  # fmt: skip


def _normal(case: Case, rank: int, mean: Any, var: Any, *, outside: bool = False) -> torch.Tensor:
    """What this rank would return, had it used this mean and this variance, both (channels,)."""
    own = case.inputs[rank]
    x = own["x"].double()
    scale = var.sqrt() + own["eps"] if outside else (var + own["eps"]).sqrt()
    return ((x - mean) / scale * own["weight"] + own["bias"]).float()


def _norm_values(seen: Observed) -> str | None:
    case = seen.case
    parts = [rank["x"].double() for rank in case.inputs]
    whole = torch.cat(parts)
    mean, var = whole.mean(0), whole.var(0, unbiased=False)
    # far from zero, sums of squared distances in float32 are off by up to 3e-4, E[x²] - E[x]² by
    # 6e-3 or more
    rtol = 1.5e-3 if case.kind == "far" else 2e-4
    for rank, got in enumerate(seen.data):
        wanted = _normal(case, rank, mean, var)
        if (wrong := differs(got["y"], wanted, f"Rank {rank}'s output", rtol=rtol)) is None:
            continue
        mine = parts[rank]
        means = torch.stack([part.mean(0) for part in parts])
        variances = torch.stack([part.var(0, unbiased=False) for part in parts])
        known = {
            "used its own statistics, not those of all rows": (
                mine.mean(0),
                mine.var(0, unbiased=False),
            ),
            "used the mean of the ranks' means: ranks with more rows must weigh more": (
                means.mean(0),
                (variances + means**2).mean(0) - means.mean(0) ** 2,
            ),
            "used the mean of the ranks' variances, which leaves out that their means differ": (
                mean,
                variances.mean(0),
            ),
            "divided the variance by the rows less one; BatchNorm divides by the rows": (
                mean,
                whole.var(0, unbiased=True),
            ),
        }
        for words, (m, v) in known.items():
            told = case.world > 1 or "divided" in words  # alone, the others come to the same
            if told and close(got["y"], _normal(case, rank, m, v), rtol=2e-4):
                return f"Rank {rank} {words}."
        if close(got["y"], _normal(case, rank, mean, var, outside=True), rtol=2e-4):
            return f"Rank {rank} added eps to the standard deviation; it belongs to the variance."
        if case.kind == "far":
            return (
                f"{wrong} E[x²] - E[x]² loses its digits where the mean is large: add up in "
                "float64, or send each rank's mean and squared distances from it."
            )
        return wrong
    return None


def _norm_elements(case: Case) -> int:
    return 4 * CHANNELS * case.world  # an all_gather of count, mean and squares is as good


BATCH_NORM = Task(
    id="03.batch_norm",
    title="BatchNorm over all ranks, in one collective",
    answer="batch_norm",
    job="lesson03.batch_norm",
    minutes=20,
    cases=_norm_cases,
    aspects=(
        Aspect("equal batches: statistics of all rows", 2, _norm_values, on=("",)),
        Aspect("unequal batches", 1, _norm_values, on=("unequal",)),
        Aspect("values far from zero", 1, _norm_values, on=("far",)),
        Aspect(
            "one collective of a few numbers per channel",
            2,
            _one_collective(_norm_elements, "lay count, sums and sums of squares end to end."),
        ),
    ),
    hints=(
        "Which numbers of each rank, added up, give both the mean and the variance of all rows?",
        "Rows, sum, sum of squares: 2C + 1 numbers. The variance is E[x²] - E[x]². What happens "
        "to it "
        "when the mean is 3,000 and the spread is 1?",
        "Make the three sums in float64, torch.cat, one all_reduce; mean = sum / rows, "
        "var = squares / rows - mean², then (x - mean) / sqrt(var + eps) * weight + bias in "
        "float32.",
    ),
    debrief="SyncBatchNorm gathers mean, inverse deviation and count of each rank in one "
    "all_gather, "
    "and backward has one all_reduce more. It runs on GPUs alone.",
)

# -- 03.f1 -----------------------------------------------------------------------------------------


def _f1_cases(rng: torch.Generator) -> list[Case]:
    def case(*samples: int, rate: float = 0.4, kind: str = "", never: bool = False) -> Case:
        inputs = []
        for rank, n in enumerate(samples):
            labels = torch.rand(n, generator=rng) < rate / (rank + 1)
            wrong = torch.rand(n, generator=rng) < 0.3
            predicted = torch.zeros(n, dtype=torch.bool) if never else labels ^ wrong
            inputs.append({"predicted": predicted, "labels": labels & (not never)})
        says = f"{world_name(len(samples))} with {', '.join(map(str, samples))} samples"
        return Case(says + (", no positive anywhere" if never else ""), inputs, kind)

    return [case(50), case(45, 32), case(30, 50, 20), case(60, 9, 40, 25), case(40, 0, kind="edge"),
            case(8, 9, 3, kind="edge", never=True)]  # fmt: skip


def _f1_of(predicted: torch.Tensor, labels: torch.Tensor) -> float:
    hits = int((predicted & labels).sum())
    total = int(predicted.sum()) + int(labels.sum())
    return 2 * hits / total if total else 0.0


def _f1_values(seen: Observed) -> str | None:
    ranks = seen.case.inputs
    predicted = torch.cat([rank["predicted"] for rank in ranks])
    labels = torch.cat([rank["labels"] for rank in ranks])
    right = _f1_of(predicted, labels)
    parts = [_f1_of(rank["predicted"], rank["labels"]) for rank in ranks]
    hits = int((predicted & labels).sum())
    sizes = [len(rank["labels"]) for rank in ranks]
    known = {
        "the mean of the ranks' F1 values; a mean of ratios is no ratio of sums": sum(parts)
        / len(parts),
        "a weighted mean of the ranks' F1 values; a mean of ratios is no ratio of sums": sum(
            part * size for part, size in zip(parts, sizes, strict=True)
        )
        / sum(sizes),
        "the accuracy": (predicted == labels).double().mean().item(),
        "the precision": hits / max(int(predicted.sum()), 1),
        "the recall": hits / max(int(labels.sum()), 1),
    }
    for rank, got in enumerate(seen.data):
        value = number(got["f1"])
        if value is None:
            return f"Rank {rank} returned {type(got['f1']).__name__}, and a number was expected."
        if abs(value - right) < 1e-6:
            continue
        for words, like in known.items():
            if abs(value - like) < 1e-6:
                return f"Rank {rank} returned {words}."
        if abs(value - parts[rank]) < 1e-6:
            return f"Rank {rank} returned the F1 of its own samples."
        if value != value:
            return f"Rank {rank} returned nan. Without any positive, F1 is 0 here."
        return f"Rank {rank} returned {value:.4f}, which is not the F1 of all samples."
    return None


F1 = Task(
    id="03.f1",
    title="F1 over ranks",
    answer="f1",
    job="lesson03.f1",
    minutes=10,
    cases=_f1_cases,
    aspects=(
        Aspect("the F1 of all samples", 2, _f1_values, on=("",)),
        Aspect("a rank without samples, a class without positives", 1, _f1_values, on=("edge",)),
        Aspect(
            "one collective, a few counts",
            1,
            _one_collective(
                lambda case: 4 * case.world, "counts can be added; samples need not travel."
            ),
        ),
    ),
    hints=(
        "Which numbers of each rank can be added without losing what F1 needs?",
        "F1 = 2 TP / (2 TP + FP + FN). Three counts.",
        "counts = torch.tensor([tp, fp, fn]); all_reduce; then the formula, and 0 if its divisor "
        "is 0.",
    ),
    debrief="torchmetrics keeps such counts as state with dist_reduce_fx='sum' and reduces when "
    "you "
    "ask for the value, not at every step.",
)

TASKS = [SAME_START, AVERAGE, WEIGHTED_MEAN, INDICES, BATCH_NORM, F1]
