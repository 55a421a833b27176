"""Tasks of lesson 04: feeding the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any

import torch

from ddpz_lite.course.check.compare import number, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import explain, silent, world_name

# -- 04.token_buckets ------------------------------------------------------------------------------

# By world: samples, and the steps that their tokens would fill.
UNEQUAL = {1: (163, 4), 2: (161, 4), 3: (181, 4), 4: (221, 4)}
TIGHT, ROOMY = 1.002, 1.06  # budgets, of what the tokens take in so many steps
EQUAL = 1.05  # of the mean of a step's ranks: in none more
PARTNERS = 1 / 3  # of the pairs in a batch, at most, are one again in another epoch
EPOCHS = (0, 1, 6)  # then epoch 0 again, then of another seed

Batches = list[list[list[int]]]  # by rank and step


def _bucket_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int) -> Case:
        samples, steps = UNEQUAL[world]
        lengths = (torch.randperm(900, generator=rng)[:samples] + 20).tolist()  # all different
        seed = int(torch.randint(1000, (), generator=rng))
        fewer = lengths[: samples * 3 // 4]

        def budget(of: list[int], steps: int, room: float) -> int:
            return int(room * sum(of) / (world * steps)) + 1

        tight = budget(lengths, steps, TIGHT)
        calls = [[lengths, tight, epoch, seed] for epoch in (*EPOCHS, 0)]
        calls.append([lengths, tight, 0, seed + 1000])
        calls.append([lengths, budget(lengths, steps, ROOMY), 0, seed])
        calls.append([lengths[::-1], tight, 0, seed])
        calls.append([lengths, 2 * tight, 0, seed])
        calls.append([fewer, budget(fewer, steps - 1, TIGHT), 2, seed])
        return Case(f"{world_name(world)}, {samples} samples", [{"calls": calls}] * world)

    def equal(world: int, steps: int, each: int) -> Case:
        calls = [[[7] * (world * steps * each), 7 * each, epoch, 3] for epoch in (0, 1)]
        says = f"{world_name(world)}, all of one length"
        return Case(says, [{"calls": calls}] * world, "equal")

    return [case(3), case(4), case(2), case(1), equal(3, 5, 2), equal(4, 2, 1)]


def _batches(seen: Observed, call: int) -> Batches | str:
    """What was assigned in a call; a sentence where it is not lists of whole numbers."""
    of_ranks = [got["batches"][call] for got in seen.data]
    for rank, batches in enumerate(of_ranks):
        if isinstance(batches, str):
            return f"Rank {rank} returned a {batches}, not a list of lists of ints."
        if any(whole(index) is None for index in chain(*batches)):
            return f"Rank {rank} returned lists with something other than ints."
    return [[[whole(index) for index in batch] for batch in batches] for batches in of_ranks]


def _each_call(judge: Callable[[Batches, list[int], int], str | None]):
    def over_calls(seen: Observed) -> str | None:
        for number_, (lengths, budget, epoch, _) in enumerate(seen.case.inputs[0]["calls"]):
            batches = _batches(seen, number_)
            wrong = batches if isinstance(batches, str) else judge(batches, lengths, budget)
            if wrong:
                return f"Epoch {epoch}: {wrong}"
        return None

    return over_calls


@_each_call
def _once(batches: Batches, lengths: list[int], budget: int) -> str | None:
    every = Counter(chain(*chain(*batches)))
    world, samples = len(batches), len(lengths)
    if set(every) - set(range(samples)):
        return f"some indices are not among 0 to {samples - 1}."
    missing, twice = samples - len(every), every.total() - len(every)
    if world > 1 and all(len(set(chain(*local))) == samples for local in batches):
        return "every rank got all samples. Give each rank a part of them."
    if missing and twice:
        return (
            f"{twice} samples came twice and {missing} never, because the ranks did not start from "
            "the same order. Derive the order from seed and epoch alone, never from the rank."
        )
    if missing:
        return f"{missing} samples never came. Leave none out, not even the last ones."
    if twice:
        return f"{twice} samples came twice."
    return None


@_each_call
def _as_many(batches: Batches, lengths: list[int], budget: int) -> str | None:
    counts, world = [len(local) for local in batches], len(batches)
    if len(set(counts)) > 1:
        return (
            f"the ranks have {', '.join(map(str, counts))} batches. A rank with one more waits in "
            "it forever."
        )
    for rank, local in enumerate(batches):
        if [] in local:
            return f"rank {rank} has an empty batch in step {local.index([])}."
    fewest = -(-sum(lengths) // (world * budget))
    if counts[0] > fewest + 1:
        each = (
            " The budget is for one rank, not for all together."
            if counts[0] >= world * fewest
            else ""
        )
        return (
            f"each rank has {counts[0]} batches. All tokens would fill {fewest}, and one more "
            f"is allowed.{each}"
        )
    return None


@_each_call
def _within(batches: Batches, lengths: list[int], budget: int) -> str | None:
    fewest = -(-sum(lengths) // (len(batches) * budget))
    for rank, local in enumerate(batches):
        for step, batch in enumerate(local):
            tokens = sum(lengths[i] for i in batch)
            if tokens > budget:
                more = (
                    " The mean over the ranks fits, but the fullest rank does not. Check the "
                    "fullest one, and take one more step."
                )
                return (
                    f"in step {step} rank {rank} has {tokens} tokens, but the budget is "
                    f"{budget}.{more if len(local) <= fewest else ''}"
                )
    return None


@_each_call
def _equal_work(batches: Batches, lengths: list[int], budget: int) -> str | None:
    if len({len(local) for local in batches}) > 1:
        return "steps can be compared only if all ranks have the same number of batches."
    tokens = [[sum(lengths[i] for i in batch) for batch in local] for local in batches]
    world, samples = len(batches), [len(batch) for batch in chain(*batches)]
    for step, ranks in enumerate(zip(*tokens, strict=True)):
        most, mean = max(ranks), sum(ranks) / world
        if most <= EQUAL * mean:
            continue
        rank = ranks.index(most)
        wrong = f"in step {step} rank {rank} has {most} tokens, {most / mean:.2f} times the mean"
        if max(samples) - min(samples) <= 1:
            return (
                f"{wrong}. All batches have the same number of samples, but tokens take the time."
            )
        if max(map(sum, tokens)) <= EQUAL * sum(lengths) / world:
            return (
                f"{wrong}. Over the epoch the ranks have equal work, but not in each step, and in "
                "each step all wait for the slowest."
            )
        return f"{wrong}: the others wait for it."
    return None


def _pairs(batches: Batches) -> set[tuple[int, int]]:
    return {pair for batch in chain(*batches) for pair in combinations(sorted(batch), 2)}


def _mixed(seen: Observed) -> str | None:
    assigned = [_batches(seen, call) for call in range(len(EPOCHS) + 2)]  # of one budget
    if any(isinstance(batches, str) for batches in assigned):
        return next(batches for batches in assigned if isinstance(batches, str))
    first, *others, again, reseeded = assigned
    if first != again:
        return "Epoch 0 was requested twice and gave two different results."
    before, same = _pairs(first), set(map(frozenset, chain(*first)))
    known = zip((*(f"epoch {epoch}" for epoch in EPOCHS[1:]), "another seed"), [*others, reseeded],
                strict=True)  # fmt: skip
    for words, batches in known:
        if batches == first:
            return f"Epoch 0 and {words} have exactly the same batches."
        if set(map(frozenset, chain(*batches))) == same:
            return (
                f"Epoch 0 and {words} have the same batches, in another order or on other ranks. "
                "Mix the samples, so that each shares a batch with others."
            )
        if len(before & _pairs(batches)) > PARTNERS * len(before):
            return (
                f"Of the samples that share a batch in epoch 0, most do so again in {words}. "
                "Sorted by length, the same ones share a batch in every epoch. Shuffle first, "
                "then sort within a step."
            )
    return None


def _no_trace(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["drew_from"]:
            return (
                f"Rank {rank} drew from the global generator of {got['drew_from'][0]}, so all "
                "later code sees other numbers. Make a separate generator."
            )
        if got["changed"]:
            return f"Rank {rank} changed {got['changed'][0]}, which you may only read."
    return silent(seen, "Lengths and seed are equal on all ranks, so nothing has to be sent.")


TOKEN_BUCKETS = Task(
    id="04.token_buckets",
    title="Equal work in every step",
    answer="token_buckets",
    job="lesson04.token_buckets",
    minutes=20,
    cases=_bucket_cases,
    criteria=(
        Criterion("each sample once, on one rank", 2, _once),
        Criterion("equally many batches on each rank, and few", 1, _as_many),
        Criterion("no batch above the budget", 1, _within),
        Criterion("about equal tokens on each rank in a step", 1, _equal_work),
        Criterion("other batches in another epoch", 1, _mixed, on=("",)),
        Criterion("nothing sent, nothing changed", 1, _no_trace),
    ),
    hints=(
        "The last samples should fill the gaps. Which sample do you place first, a long or a short "
        "one?",
        "If the number of steps is known, shuffle, cut into steps of equal tokens by the running "
        "sum, and assign each step to the ranks. What is the smallest possible number of steps? "
        "How does every rank notice that it is too small?",
        "steps = -(-sum(lengths) // (budget * world)). Assign each step for all ranks: the longest "
        "first, each to the rank with the fewest tokens so far. While the fullest batch of any "
        "rank is above the budget, assign again with one more step. Return your own lists.",
    ),
    debrief="fairseq's max_tokens is such a limit. It counts padding, so samples of similar length "
    "come together. For ddpz_lite's TokenBudgetSampler the budget is a mean: a batch may be a "
    "little above it, and all epochs have the same number of steps. Most pretraining packs texts "
    "end to end, so that every batch has the same number of tokens.",
)

# -- 04.work_queue ---------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64)


def _queue_cases(rng: torch.Generator) -> list[Case]:
    def case(
        workers: int,
        texts: Sequence[int],
        busy: Sequence[int | None],
        kind: str = "",
        later: int = 0,
        alike: bool = False,
    ) -> Case:
        """later: texts that the busy rank finishes before the long one. alike: all calls have the
        same shapes.
        """
        calls = []
        for number_, (count, who) in enumerate(zip(texts, busy, strict=True)):
            number_ = 0 if alike else number_
            gradients = torch.randn(count, 5 + 2 * number_, generator=rng, dtype=torch.float64)
            tokens = torch.randint(1, 60, (count,), generator=rng).tolist()
            calls.append(
                {
                    "tokens": tokens,
                    "gradients": gradients.to(DTYPES[number_ % 2]),
                    "busy": who,
                    "later": later,
                }
            )
        counts = " and ".join(map(str, texts))
        says = f"{world_name(workers)} with {counts} texts"
        return Case(says, [{"calls": calls}] * (workers + 1), kind)

    return [
        case(3, [13], [0]),
        case(3, [2], [None], "few"),
        case(4, [11], [3]),
        case(2, [9, 8], [1, 0]),
        case(2, [9, 9], [None, 1], later=2, alike=True),
        case(1, [5, 4], [None, None]),
    ]


def _workers(seen: Observed) -> int:
    return seen.case.world - 1  # the last rank keeps the store


def _texts(seen: Observed) -> str | None:
    """Whether each text was begun once."""
    calls = zip(seen.case.inputs[0]["calls"], seen.data[-1]["log"], strict=True)
    for call, log in calls:
        begun, texts = [text for _, text in log["begun"]], len(call["tokens"])
        times = Counter(begun)
        if _workers(seen) > 1 and len(times) == texts and min(times.values()) >= _workers(seen):
            return "Every rank worked on every text. Each text is for one rank."
        for text, count in times.items():
            who = sorted({rank for rank, other in log["begun"] if other == text})
            if count > 1 and len(who) > 1:
                ranks = " and ".join(map(str, who[:2]))
                return (
                    f"Ranks {ranks} both worked on text {text}. After one rank had read the "
                    "counter and before it wrote, the other read it too. add() does both at once."
                )
            if count > 1:
                return f"Rank {who[0]} worked on text {text} {count} times."
        if missing := set(range(texts)) - set(times):
            return f"No rank worked on text {min(missing)} of {texts}, counted from 0."
    return None


def _gradient(seen: Observed) -> str | None:
    for number_, call in enumerate(seen.case.inputs[0]["calls"]):
        begun = seen.data[-1]["log"][number_]["begun"]
        for rank in range(_workers(seen)):
            own = [text for worker, text in begun if worker == rank]
            got = seen.data[rank]["results"][number_]
            every = [[t for worker, t in begun if worker == r] for r in range(_workers(seen))]
            if wrong := _mean(got, call, rank, own, every):
                return wrong
    return None


def _mean(
    got: Any, call: dict[str, Any], rank: int, own: list[int], every: list[list[int]]
) -> str | None:
    """own: the texts of this rank; every: those of all ranks."""
    gradients = call["gradients"]  # (texts, P)
    tokens = torch.tensor(call["tokens"], dtype=gradients.dtype)  # (texts,)
    weighted, world = tokens[:, None] * gradients, len(every)
    total = weighted.sum(0)
    parts = [(weighted[local].sum(0), tokens[local].sum().clamp(min=1)) for local in every]
    plain = [gradients[local].mean(0) if local else gradients[0] * 0 for local in every]
    means = (
        "is the mean of the ranks' means: a rank that did little counts as much as one that did a "
        "lot. Divide by the tokens of all ranks."
    )
    texts = "is the mean over texts: a short one counts as much as a long one. Weight by tokens."
    alone = "comes from the rank's own texts only: add up over the ranks."
    mistakes = {
        means: torch.stack([part / count for part, count in parts]).mean(0),
        f"{means} ": torch.stack(plain).mean(0),
        texts: gradients.mean(0),
        "is the sum over all tokens: divide by their number.": total,
        "is the sum over all texts, and not weighted by tokens.": gradients.sum(0),
        "is divided by the number of ranks instead of the number of tokens.": total / world,
        "is divided by the number of ranks as well.": total / tokens.sum() / world,
        alone: weighted[own].sum(0) / tokens.sum(),
        f"{alone} ": parts[rank][0] / parts[rank][1],
    }
    wrong = explain(got, total / tokens.sum(), f"Rank {rank}'s gradient", mistakes)
    return wrong and wrong.strip()


def _no_text_waits(seen: Observed) -> str | None:
    calls = zip(seen.case.inputs[0]["calls"], seen.data[-1]["log"], strict=True)
    for call, log in calls:
        busy, workers = call["busy"], _workers(seen)
        idle = set(range(workers)) - {worker for worker, _ in log["begun"]}
        if log["waiting"]:
            return (
                f"Rank {busy} was busy with one text for a long time. {log['waiting']} more waited "
                "for it although the others were free: they were assigned in advance, or taken "
                "before the rank had finished the last one."
            )
        if log["unasked"] and workers > 1:
            rank, text = log["unasked"][0]
            return (
                f"Rank {rank} began text {text} without asking the store after the previous one. A "
                "text that is assigned in advance waits for its rank even if another is free."
            )
        if idle and len(call["tokens"]) >= 2 * workers:
            return f"Rank {min(idle)} worked on no text, although there were enough."
    return None


def _one_sum(seen: Observed) -> str | None:
    """One collective of P + 1 elements per call, besides the messages of the store."""
    calls, workers = seen.case.inputs[0]["calls"], _workers(seen)
    for rank in range(workers):
        own = [r for r in seen.calls(rank) if len(r.group) <= workers]
        if messages := sum(r.op in ("send", "recv") for r in own):
            return (
                f"Rank {rank} sent and received {messages} messages. The store has the counter, "
                "so no rank has to assign texts."
            )
        if len(own) > len(calls):
            return (
                f"Rank {rank} called {len(own)} collectives, and {len(calls)} are enough. Add up "
                "the gradients of a rank's texts, and then once over all ranks."
            )
        for record, call in zip(own, calls, strict=False):
            most = call["gradients"].shape[1] + 1
            if record.op not in ("all_reduce", "all_gather") or (
                record.elements > (most if record.op == "all_reduce" else most * workers)
            ):
                return (
                    f"Rank {rank} called {record.op} on {record.elements} elements, but a sum of "
                    f"{most} is enough."
                )
    return _unchanged(seen)


def _unchanged(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data[:-1]):
        if got["changed"]:
            return f"Rank {rank} changed {got['changed'][0]}, which you may only read."
    return None


def _few(seen: Observed) -> str | None:
    return _texts(seen) or _gradient(seen)


WORK_QUEUE = Task(
    id="04.work_queue",
    title="A free rank takes the next text",
    answer="work_queue",
    job="lesson04.work_queue",
    minutes=15,
    cases=_queue_cases,
    criteria=(
        Criterion("each text is worked on once", 2, _texts, on=("",)),
        Criterion("the mean over all tokens, on every rank", 2, _gradient, on=("",)),
        Criterion("no text waits for a rank that is busy", 2, _no_text_waits, on=("",)),
        Criterion("one collective, and no messages", 1, _one_sum),
        Criterion("fewer texts than ranks", 1, _few, on=("few",)),
    ),
    hints=(
        "Two ranks ask at the same moment. What must the store do so that they get different "
        "numbers?",
        "store.add(key, 1) returns the number after adding, so the first rank gets 1. When is no "
        "text left?",
        "While the number from add belongs to a text, add tokens times gradient to the zeros. "
        "After the loop call one all-reduce on every rank, also on a rank without any text, and "
        "divide by the tokens of all texts.",
    ),
    debrief="A queue suits work of unknown length, such as generating texts in reinforcement "
    "learning. If lengths are known, assigning by tokens balances as well, needs no store, and "
    "gives the same batches in every run.",
)

# -- 04.stop_together ------------------------------------------------------------------------------

# (kind, most steps, for each call of the answer: the steps after which each rank wishes to stop)
WISHES = (
    ("majority", 9, [[[6], [2, 4], [4]]]),
    ("majority", 8, [[[5, 7], [3], [5], [5]]]),
    ("majority", 7, [[[4], [4]], [[2], [2]]]),
    ("odd", 6, [[[3]], [[]], [[1]]]),
    ("odd", 8, [[[2], [1, 2], [5], [5]], [[1, 4], [2, 4], [3, 4], []], [[1], [1], [1], []]]),
    ("odd", 6, [[[1], [3], [4]], [[5, 1], [], [2, 5]]]),
    ("odd", 5, [[[2, 3], [4]], [[4], [4, 1]]]),
    ("odd", 5, [[[], [], []], [[6], [6], []]]),
)
# Rules that people give instead: of the ranks that wished after each step so far, the world.
RULES: dict[str, Callable[[list[list[int]], int], bool]] = {
    "One wish alone ended the run, but more than half are needed.": lambda w, n: len(w[-1]) > 0,
    "Half of the ranks ended the run, but more than half are needed.": lambda w, n: (
        2 * len(w[-1]) >= n
    ),
    "The run continued until all wished to stop, but more than half are enough.": lambda w, n: (
        len(w[-1]) == n
    ),
    "Two wishes ended the run. Use the number of ranks.": lambda w, n: len(w[-1]) >= 2,
    "Wishes of earlier steps were counted too, but a wish holds for one step.": (
        lambda w, n: 2 * len(set(chain(*w))) > n
    ),
    "Wishes of earlier steps were counted too, but a wish holds for one step. ": (
        lambda w, n: 2 * len(list(chain(*w))) > n
    ),
    "Only rank 0's wish counted, but all ranks have one.": lambda w, n: 0 in w[-1],
}


def _stop_cases(_: torch.Generator) -> list[Case]:
    def case(kind: str, most: int, calls: Sequence[Sequence[list[int]]]) -> Case:
        inputs = [
            {"calls": [{"wish": wishes[rank], "most": most + n} for n, wishes in enumerate(calls)]}
            for rank in range(len(calls[0]))
        ]
        return Case(f"{world_name(len(inputs))}, at most {most} steps", inputs, kind)

    return [case(*wishes) for wishes in WISHES]


def _wishing(seen: Observed, call: int) -> list[list[int]]:
    """For each step that is allowed, the ranks that wish to stop after it."""
    inputs = [rank["calls"][call] for rank in seen.case.inputs]
    return [
        [rank for rank, local in enumerate(inputs) if step in local["wish"]]
        for step in range(1, inputs[0]["most"] + 1)
    ]


def _last(wishing: list[list[int]], world: int, rule: Callable[..., bool]) -> int:
    """The step after which all stop, by a rule."""
    steps = range(1, len(wishing) + 1)
    return next((step for step in steps if rule(wishing[:step], world)), len(wishing))


def _majority(wishing: list[list[int]], world: int) -> bool:
    return 2 * len(wishing[-1]) > world


def _stopped(seen: Observed) -> str | None:
    world, calls = seen.case.world, range(len(seen.case.inputs[0]["calls"]))
    wishing = [_wishing(seen, call) for call in calls]
    taken = [[got["calls"][call]["events"].count("step") for got in seen.data] for call in calls]
    right = [_last(wishing[call], world, _majority) for call in calls]
    for call in calls:
        if len(set(taken[call])) > 1:
            steps = ", ".join(map(str, taken[call]))
            return f"All ranks should stop after step {right[call]}. They took {steps} steps."
        if taken[call][0] != right[call]:
            return _why(wishing, [ranks[0] for ranks in taken], right, call, world)
        for rank, got in enumerate(seen.data):
            if number(got["calls"][call]["returned"]) != right[call]:
                return (
                    f"Rank {rank} returned {got['calls'][call]['returned']!r} after {right[call]} "
                    "steps. Return the number of steps."
                )
    return None


def _why(
    wishing: list[list[list[int]]], taken: list[int], right: list[int], call: int, world: int
) -> str:
    """What was wrong with a call, by the rule that explains all of them."""
    who = wishing[call][right[call] - 1]
    asked = (
        f"the first step after which {len(who)} of {world} ranks wished to stop"
        if 2 * len(who) > world
        else "the largest number allowed"
    )
    wrong = f"All ranks took {taken[call]} steps. Right is {right[call]}, {asked}."
    if taken[call] == right[call] + 1:
        wrong += " Stop before the next step begins."
    for words, rule in RULES.items():
        if taken == [_last(local, world, rule) for local in wishing]:
            return f"{wrong} {words.strip()}"
    return wrong


def _asked(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for call in got["calls"]:
            events = call["events"]
            if events != ["step", "asked"] * (len(events) // 2):
                steps, asked = events.count("step"), events.count("asked")
                return (
                    f"Rank {rank} took {steps} steps and was asked {asked} times. The answer may "
                    "depend on how often you ask, so ask once after each step."
                )
    return None


def _one_number(seen: Observed) -> str | None:
    world = seen.case.world
    for rank in range(world):
        steps = sum(call["events"].count("step") for call in seen.data[rank]["calls"])
        inside = {record.seq for record in seen.calls(rank, "step")}
        own = [record for record in seen.calls(rank) if record.seq not in inside]
        if len(own) > steps:
            ops = " and ".join(sorted({record.op for record in own}))
            return (
                f"Rank {rank} made {len(own)} calls in {steps} steps ({ops}). One a step is enough."
            )
        for record in own:
            if record.op not in ("all_reduce", "all_gather"):
                return f"Rank {rank} called {record.op}. An all_reduce counts the wishes."
            if record.elements > (1 if record.op == "all_reduce" else world):
                return (
                    f"Rank {rank} called {record.op} on {record.elements} elements, but one "
                    "number per rank is enough."
                )
    return None


STOP_TOGETHER = Task(
    id="04.stop_together",
    title="Stop together",
    answer="stop_together",
    job="lesson04.stop_together",
    minutes=10,
    cases=_stop_cases,
    criteria=(
        Criterion(
            "wishes of more than half stop all, after that step", 2, _stopped, on=("majority",)
        ),
        Criterion("ties, wishes of other steps, and none", 1, _stopped, on=("odd",)),
        Criterion("each rank is asked once after each step", 1, _asked),
        Criterion("one collective of one number a step", 2, _one_number),
    ),
    hints=(
        "If only rank 2 leaves the loop, in which call do the others wait for it?",
        "A wish is a number, 1 or 0. Which reduction gives the number of ranks that wish to stop? "
        "Of four ranks, are two more than half?",
        "After each step make a tensor of one number, 1 if this rank wishes to stop now. "
        "all_reduce adds them up. If twice the sum is more than the world size, return on every "
        "rank.",
    ),
    debrief="Lightning's EarlyStopping also reduces the wish over all ranks before any rank stops. "
    "Every decision about the loop must be made together, for example after a NaN, at a time "
    "limit, or on a signal.",
)

# -- 04.attention_buckets --------------------------------------------------------------------------

MORE_STEPS = 3
LONG = 10  # of so many samples one is long: equal tokens are not equal pairs
ROOMS = ((1.1, 1.6), (1.6, 1.002), (1.15, 1.1))  # for tokens and pairs, of what steps need

# The judges of 04.token_buckets look at these calls, too: their budget is a pair here.


def _attention_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, samples: int, steps: int) -> Case:
        lengths = torch.randint(60, 140, (samples,), generator=rng).tolist()
        if world == 1:
            lengths = (torch.randperm(600, generator=rng)[:samples] + 20).tolist()
        else:
            lengths[::LONG] = torch.randint(450, 550, (samples // LONG,), generator=rng).tolist()
        seed = int(torch.randint(1000, (), generator=rng))
        fewer = lengths[: samples * 3 // 4]

        def budgets(of: list[int], steps: int, rooms: tuple[float, float]) -> list[int]:
            return [int(r * n / (world * steps)) + 1
                    for r, n in zip(rooms, (sum(of), _pairs_in(of)), strict=True)]  # fmt: skip

        scarce = [budgets(lengths, steps, rooms) for rooms in ROOMS]
        calls = [[lengths, scarce[0], epoch, seed] for epoch in (*EPOCHS, 0)]
        calls.append([lengths, scarce[0], 0, seed + 1000])
        calls += [[lengths, other, 0, seed] for other in scarce[1:]]
        calls += [[lengths, [scarce[0][0] * 2, scarce[0][1]], 0, seed],
                  [lengths, [scarce[1][0], scarce[1][1] * 2], 0, seed]]  # fmt: skip
        calls.append([lengths[::-1], scarce[1], 1, seed])
        calls.append([lengths, [5 * budget for budget in scarce[2]], 0, seed])
        calls.append([fewer, budgets(fewer, steps - 1, ROOMS[1]), 2, seed])
        return Case(f"{world_name(world)}, {samples} samples", [{"calls": calls}] * world)

    def equal(world: int, steps: int, each: int) -> Case:
        budgets = [[7 * each, 49 * each], [7 * each, 490 * each], [70 * each, 49 * each]]
        budgets += [
            [7 * each + 5, 490 * each],
            [70 * each, 49 * each + 40],
            [70 * each, 490 * each],
        ]  # not quite one more
        calls = [[[7] * (world * steps * each), pair, 1, 3] for pair in budgets]
        says = f"{world_name(world)}, all of one length"
        return Case(says, [{"calls": calls}] * world, "equal")

    return [case(3, 500, 4), case(4, 660, 4), case(2, 340, 4), case(1, 170, 4),
            equal(3, 5, 2), equal(4, 2, 1)]  # fmt: skip


def _pairs_in(lengths: Sequence[int]) -> int:
    """The pairs of tokens that attention compares."""
    return sum(n * n for n in lengths)


def _of_batches(batches: Batches, lengths: list[int]) -> list[list[list[int]]]:
    """By rank and step, the lengths of the samples."""
    return [[[lengths[i] for i in batch] for batch in local] for local in batches]


def _once_together(seen: Observed) -> str | None:
    if not (wrong := _once(seen)):
        return None
    uneven: dict[int, list[int]] = {}
    for call in range(len(seen.case.inputs[0]["calls"])):
        batches = _batches(seen, call)
        if isinstance(batches, str):
            return wrong
        counts = [len(local) for local in batches]
        if _missing(batches, seen, call):
            if len(set(counts)) == 1:
                return wrong
            uneven[call] = counts
    for call, counts in uneven.items():
        return (
            f"Epoch {seen.case.inputs[0]['calls'][call][2]}: samples never came, because the "
            f"ranks chose {', '.join(map(str, counts))} steps. A rank has to look at the batches "
            "of all ranks, so that all choose the same number."
        )
    return wrong


def _missing(batches: Batches, seen: Observed, call: int) -> set[int]:
    samples = len(seen.case.inputs[0]["calls"][call][0])
    return set(range(samples)) - set(chain(*chain(*batches)))


@_each_call
def _few_steps(batches: Batches, lengths: list[int], budgets: Any) -> str | None:
    counts, world = [len(local) for local in batches], len(batches)
    if len(set(counts)) > 1:
        return (
            f"the ranks have {', '.join(map(str, counts))} batches. A rank that has one more waits "
            "in it forever."
        )
    tokens, pairs = budgets
    by_tokens = -(-sum(lengths) // (world * tokens))
    by_pairs = -(-_pairs_in(lengths) // (world * pairs))
    fewest = max(by_tokens, by_pairs)
    if counts[0] <= fewest + MORE_STEPS:
        empty = [(rank, local.index([])) for rank, local in enumerate(batches) if [] in local]
        return f"rank {empty[0][0]} has an empty batch in step {empty[0][1]}." if empty else None
    every = [batch for batch in chain(*_of_batches(batches, lengths)) if batch]
    why = ""
    if all(sum(batch) ** 2 <= pairs for batch in every):
        why = (
            " The squares of the batches' sums are within the budget. But a token is compared only "
            "with those of its own sample, so square first, then add."
        )
    elif sum(max(batch) < 2 * min(batch) for batch in every) > len(every) / 2:
        why = " Batches of similar samples use up one budget and leave the other. Shuffle first."
    elif all(len(batch) * max(batch) ** 2 <= pairs for batch in every):
        why = " There is no padding here, so each sample counts with its own length."
    elif counts[0] >= max(sum(lengths) // tokens, _pairs_in(lengths) // pairs):
        why = " The budgets are for one rank, not for all together."
    return (
        f"each rank has {counts[0]} batches. All tokens would fill {by_tokens} and all pairs "
        f"{by_pairs}; {fewest + MORE_STEPS} are allowed.{why}"
    )


def _below(which: int, word: str) -> Callable[[Observed], str | None]:
    """Whether no batch has more than the budget: of tokens (0) or of pairs (1)."""

    @_each_call
    def judge(batches: Batches, lengths: list[int], budgets: Any) -> str | None:
        totals = [sum(lengths), _pairs_in(lengths)]
        fewest = max(-(-n // (len(batches) * b)) for n, b in zip(totals, budgets, strict=True))
        for rank, local in enumerate(_of_batches(batches, lengths)):
            for step, batch in enumerate(local):
                used = _pairs_in(batch) if which else sum(batch)
                if used <= budgets[which]:
                    continue
                more = (
                    " The mean over the ranks fits, but the fullest rank does not. Check the "
                    "fullest one, and take one more step."
                    if len(local) == fewest
                    else ""
                )
                return (
                    f"in step {step} rank {rank} has {used:,} {word}, but {budgets[which]:,} are "
                    f"allowed.{more}"
                )
        return None

    return judge


@_each_call
def _equal_pairs(batches: Batches, lengths: list[int], budgets: Any) -> str | None:
    if len({len(local) for local in batches}) > 1:
        return "steps can be compared only if all ranks have the same number of batches."
    world, steps = len(batches), list(zip(*_of_batches(batches, lengths), strict=True))
    pairs = [[_pairs_in(batch) for batch in ranks] for ranks in steps]
    for step, used in enumerate(pairs):
        most, mean = max(used), sum(used) / world
        if most > EQUAL * mean:
            return (
                f"in step {step} rank {used.index(most)} compares {most:,} pairs, "
                f"{most / mean:.2f} times the mean{_unequal(steps, pairs)}"
            )
    return None


def _unequal(steps: list[Any], pairs: list[list[int]]) -> str:
    """What is equal where the pairs are not."""
    world = len(pairs[0])
    if all(max(map(len, ranks)) - min(map(len, ranks)) <= 1 for ranks in steps):
        return ". All ranks have the same number of samples, but pairs take the time."
    tokens = [[sum(batch) for batch in ranks] for ranks in steps]
    if all(max(used) <= EQUAL * sum(used) / world for used in tokens):
        return (
            ". The tokens are equal, but a token of a long sample takes longer than one of a short "
            "sample."
        )
    over = [sum(used) for used in zip(*pairs, strict=True)]
    if max(over) <= EQUAL * sum(over) / world:
        return (
            ". Over the epoch the ranks have equal work, but not in each step, and in each step "
            "all wait for the slowest."
        )
    return ": the others wait for it."


ATTENTION_BUCKETS = Task(
    id="04.attention_buckets",
    title="When attention takes the time",
    answer="attention_buckets",
    job="lesson04.token_buckets",
    minutes=15,
    cases=_attention_cases,
    criteria=(
        Criterion("each sample once, on one rank", 1, _once_together),
        Criterion("equally many batches on each rank, and few", 1, _few_steps),
        Criterion("room for the tokens of each batch", 1, _below(0, "tokens")),
        Criterion("no batch above the budget of pairs", 1, _below(1, "pairs")),
        Criterion("about equal pairs on each rank in a step", 2, _equal_pairs),
        Criterion("other batches in another epoch", 1, _mixed, on=("",)),
        Criterion("nothing sent, nothing changed", 1, _no_trace),
    ),
    hints=(
        "Two batches have 1,000 tokens each: one sample, or ten. Which one takes longer, and by "
        "what factor?",
        "Which of the two quantities decides which rank waits? Balance this one. The other is a "
        "limit that the finished assignment has to keep.",
        "Take task 1's assignment with n * n instead of n: for the cut into steps, for the order, "
        "and for the least busy rank. Begin with the larger of the two numbers of steps. While a "
        "batch is above either budget, assign again with one more step.",
    ),
    debrief="Real time depends on both. The layers' matrices take time by tokens and attention by "
    "pairs, which dominate only in long samples. With very long texts, trainers balance such a "
    "sum, or cut one sample over several ranks (context parallelism).",
)

TASKS = [TOKEN_BUCKETS, WORK_QUEUE, STOP_TOGETHER, ATTENTION_BUCKETS]
