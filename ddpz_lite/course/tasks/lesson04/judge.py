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
    """What was dealt in a call; a sentence where it is not lists of whole numbers."""
    dealt = [got["dealt"][call] for got in seen.data]
    for rank, batches in enumerate(dealt):
        if isinstance(batches, str):
            return f"Rank {rank} returned a {batches}, not a list of lists of ints."
        if any(whole(index) is None for index in chain(*batches)):
            return f"Rank {rank} returned lists of something else than ints."
    return [[[whole(index) for index in batch] for batch in batches] for batches in dealt]


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
    if world > 1 and all(len(set(chain(*mine))) == samples for mine in batches):
        return "every rank got all samples. Each takes its part of them."
    if missing and twice:
        return (
            f"{twice} samples came twice and {missing} never: the ranks did not deal from one and "
            "the same order. It must come from seed and epoch alone, never from the rank."
        )
    if missing:
        return f"{missing} samples never came. None may be left out, the tail neither."
    if twice:
        return f"{twice} samples came twice."
    return None


@_each_call
def _as_many(batches: Batches, lengths: list[int], budget: int) -> str | None:
    counts, world = [len(mine) for mine in batches], len(batches)
    if len(set(counts)) > 1:
        return (
            f"the ranks have {', '.join(map(str, counts))} batches. Whoever has one more waits in "
            "it for ever."
        )
    for rank, mine in enumerate(batches):
        if [] in mine:
            return f"rank {rank} has nothing in step {mine.index([])}."
    fewest = -(-sum(lengths) // (world * budget))
    if counts[0] > fewest + 1:
        each = " The budget is that of one rank, not of all." if counts[0] >= world * fewest else ""
        return (
            f"each rank has {counts[0]} batches. All tokens would fill {fewest}, and one more is "
            f"allowed.{each}"
        )
    return None


@_each_call
def _within(batches: Batches, lengths: list[int], budget: int) -> str | None:
    fewest = -(-sum(lengths) // (len(batches) * budget))
    for rank, mine in enumerate(batches):
        for step, batch in enumerate(mine):
            tokens = sum(lengths[i] for i in batch)
            if tokens > budget:
                more = (
                    " What fits on the mean rank does not fit on the fullest: look at it, and take "
                    "one step more."
                )
                return (
                    f"in step {step} rank {rank} has {tokens} tokens, and there is room for "
                    f"{budget}.{more if len(mine) <= fewest else ''}"
                )
    return None


@_each_call
def _equal_work(batches: Batches, lengths: list[int], budget: int) -> str | None:
    if len({len(mine) for mine in batches}) > 1:
        return "steps are compared when all ranks have as many batches."
    tokens = [[sum(lengths[i] for i in batch) for batch in mine] for mine in batches]
    world, samples = len(batches), [len(batch) for batch in chain(*batches)]
    for step, ranks in enumerate(zip(*tokens, strict=True)):
        most, mean = max(ranks), sum(ranks) / world
        if most <= EQUAL * mean:
            continue
        rank = ranks.index(most)
        wrong = f"in step {step} rank {rank} has {most} tokens, {most / mean:.2f} times the mean"
        if max(samples) - min(samples) <= 1:
            return f"{wrong}. All batches have as many samples; but it is tokens that take time."
        if max(map(sum, tokens)) <= EQUAL * sum(lengths) / world:
            return (
                f"{wrong}. Over the epoch the ranks have equal work, step by step they do not; and "
                "in each step the fastest waits for the slowest."
            )
        return f"{wrong}: the others wait for it."
    return None


def _pairs(batches: Batches) -> set[tuple[int, int]]:
    return {pair for batch in chain(*batches) for pair in combinations(sorted(batch), 2)}


def _mixed(seen: Observed) -> str | None:
    dealt = [_batches(seen, call) for call in range(len(EPOCHS) + 2)]  # of one budget
    if any(isinstance(batches, str) for batches in dealt):
        return next(batches for batches in dealt if isinstance(batches, str))
    first, *others, again, reseeded = dealt
    if first != again:
        return "Epoch 0 was asked for twice and came in two orders."
    before, same = _pairs(first), set(map(frozenset, chain(*first)))
    known = zip((*(f"epoch {epoch}" for epoch in EPOCHS[1:]), "another seed"), [*others, reseeded],
                strict=True)  # fmt: skip
    for words, batches in known:
        if batches == first:
            return f"Epoch 0 and {words} have the very same batches."
        if set(map(frozenset, chain(*batches))) == same:
            return (
                f"Epoch 0 and {words} have the same batches, in another order or on other ranks: "
                "samples are to meet others."
            )
        if len(before & _pairs(batches)) > PARTNERS * len(before):
            return (
                f"Of the samples that share a batch in epoch 0, most do so again in {words}: "
                "sorted by length, the same ones meet for ever. Shuffle first; sort within a step."
            )
    return None


def _no_trace(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["drew_from"]:
            return (
                f"Rank {rank} drew from the global generator of {got['drew_from'][0]}: whoever "
                "uses it next sees other numbers. Make a generator of your own."
            )
        if got["changed"]:
            return f"Rank {rank} changed {got['changed'][0]}, which was handed in to be read."
    return silent(seen, "Lengths and seed are the same everywhere: nothing has to be sent.")


TOKEN_BUCKETS = Task(
    id="04.token_buckets",
    title="Equal work in every step",
    answer="token_buckets",
    job="lesson04.token_buckets",
    minutes=20,
    cases=_bucket_cases,
    criteria=(
        Criterion("each sample once, on one rank", 2, _once),
        Criterion("as many batches on each rank, and few", 1, _as_many),
        Criterion("no batch above the budget", 1, _within),
        Criterion("in a step about as many tokens on each rank", 1, _equal_work),
        Criterion("other batches in another epoch", 1, _mixed, on=("",)),
        Criterion("nothing sent, nothing changed", 1, _no_trace),
    ),
    hints=(
        "Which sample should be placed first, if the last ones are to fill the gaps: a long or a "
        "short one?",
        "If you knew the number of steps: shuffle, cut into steps of equal tokens by the running "
        "sum, deal each out to the ranks. How many steps are the fewest that could do? And how "
        "does every rank notice that they do not?",
        "steps = -(-sum(lengths) // (budget * world)). Deal each step out, for all ranks: the "
        "longest first, each to the rank with the fewest tokens so far. While the fullest batch of "
        "any rank is above the budget, deal again with one step more. Return your own lists.",
    ),
    debrief="fairseq's max_tokens is such a limit, counted with padding: samples of similar length "
    "together. ddpz_lite's TokenBudgetSampler takes the budget for a mean: a batch may be a little "
    "above it, and all epochs have as many steps. Where texts are packed end to end, as in most "
    "pretraining, every batch has the same number of tokens by construction.",
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
            return "Every rank worked on every text. Each text is one rank's."
        for text, count in times.items():
            who = sorted({rank for rank, other in log["begun"] if other == text})
            if count > 1 and len(who) > 1:
                ranks = " and ".join(map(str, who[:2]))
                return (
                    f"Ranks {ranks} both worked on text {text}. Between one rank's reading of the "
                    "counter and its writing, the other has read it too: add() does both at once."
                )
            if count > 1:
                return f"Rank {who[0]} worked on text {text} {count} times."
        if missing := set(range(texts)) - set(times):
            return f"Nobody worked on text {min(missing)} of {texts}, counted from 0."
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
    parts = [(weighted[mine].sum(0), tokens[mine].sum().clamp(min=1)) for mine in every]
    plain = [gradients[mine].mean(0) if mine else gradients[0] * 0 for mine in every]
    means = (
        "is the mean of the ranks' means: a rank that did little counts as much as one that did a "
        "lot. Divide by the tokens of all."
    )
    texts = "is the mean over texts: a short one counts as much as a long one. Weigh by tokens."
    alone = "is of the rank's own texts alone: add up over the ranks."
    mistakes = {
        means: torch.stack([part / count for part, count in parts]).mean(0),
        f"{means} ": torch.stack(plain).mean(0),
        texts: gradients.mean(0),
        "is the sum over all tokens: divide by their number.": total,
        "is the sum over all texts, and not weighed by tokens.": gradients.sum(0),
        "is divided by the number of ranks, not by that of the tokens.": total / world,
        "is divided by the number of ranks as well.": total / tokens.sum() / world,
        alone: weighted[own].sum(0) / tokens.sum(),
        f"{alone} ": parts[rank][0] / parts[rank][1],
    }
    wrong = explain(got, total / tokens.sum(), f"Rank {rank}'s gradient", mistakes)
    return wrong and wrong.strip()


def _nobody_waits(seen: Observed) -> str | None:
    calls = zip(seen.case.inputs[0]["calls"], seen.data[-1]["log"], strict=True)
    for call, log in calls:
        busy, workers = call["busy"], _workers(seen)
        idle = set(range(workers)) - {worker for worker, _ in log["begun"]}
        if log["waiting"]:
            return (
                f"Rank {busy} was busy with one text for long. {log['waiting']} more waited "
                "for it, though the others had nothing left to do: they were dealt beforehand, or "
                "taken before the rank was done with the last one."
            )
        if log["unasked"] and workers > 1:
            rank, text = log["unasked"][0]
            return (
                f"Rank {rank} began text {text} without having asked the store since the one "
                "before: what is dealt beforehand waits for its rank, even if another is free."
            )
        if idle and len(call["tokens"]) >= 2 * workers:
            return f"Rank {min(idle)} worked on nothing, and there were texts for all."
    return None


def _one_sum(seen: Observed) -> str | None:
    """One collective of P + 1 elements a call, beside what the store takes."""
    calls, workers = seen.case.inputs[0]["calls"], _workers(seen)
    for rank in range(workers):
        own = [r for r in seen.calls(rank) if len(r.group) <= workers]
        if messages := sum(r.op in ("send", "recv") for r in own):
            return (
                f"Rank {rank} sent and received {messages} messages. Nobody has to deal: the store "
                "has the counter."
            )
        if len(own) > len(calls):
            return (
                f"Rank {rank} made {len(own)} collectives where {len(calls)} would do. Sum up your "
                "own texts, and add up over the ranks once."
            )
        for record, call in zip(own, calls, strict=False):
            most = call["gradients"].shape[1] + 1
            if record.op not in ("all_reduce", "all_gather") or (
                record.elements > (most if record.op == "all_reduce" else most * workers)
            ):
                return (
                    f"Rank {rank} called {record.op} on {record.elements} elements, and a sum of "
                    f"{most} is enough."
                )
    return _unchanged(seen)


def _unchanged(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data[:-1]):
        if got["changed"]:
            return f"Rank {rank} changed {got['changed'][0]}, which was handed in to be read."
    return None


def _few(seen: Observed) -> str | None:
    return _texts(seen) or _gradient(seen)


WORK_QUEUE = Task(
    id="04.work_queue",
    title="Whoever is free takes the next",
    answer="work_queue",
    job="lesson04.work_queue",
    minutes=15,
    cases=_queue_cases,
    criteria=(
        Criterion("each text is worked on once", 2, _texts, on=("",)),
        Criterion("the mean over all tokens, on every rank", 2, _gradient, on=("",)),
        Criterion("no text waits for a rank that is busy", 2, _nobody_waits, on=("",)),
        Criterion("one collective, and no messages", 1, _one_sum),
        Criterion("fewer texts than ranks", 1, _few, on=("few",)),
    ),
    hints=(
        "Two ranks ask at the same moment. What must the store do so that they do not hear the "
        "same number?",
        "store.add(key, 1) returns the number after adding: the first rank hears 1. When is there "
        "no text left?",
        "While the number that add gives is a text's: add tokens times gradient to the zeros. "
        "After the loop, on every rank, also on one that got no text: one all-reduce, and divide "
        "by the tokens of all texts.",
    ),
    debrief="A queue suits work whose length nobody knows beforehand, such as generating texts in "
    "reinforcement learning. Where lengths are known, a deal by tokens balances as well, asks "
    "nobody, and gives the same batches in every run.",
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
    "One wish alone ended it: it takes those of more than half.": lambda w, n: len(w[-1]) > 0,
    "Half of the ranks ended it, and it takes more than half.": lambda w, n: 2 * len(w[-1]) >= n,
    "It waited until all wished it: more than half is enough.": lambda w, n: len(w[-1]) == n,
    "It took two wishes: ask how many ranks there are.": lambda w, n: len(w[-1]) >= 2,
    "Wishes of earlier steps were counted, too: each holds for its own step.": (
        lambda w, n: 2 * len(set(chain(*w))) > n
    ),
    "Wishes of earlier steps were counted, too: each holds for its own step. ": (
        lambda w, n: 2 * len(list(chain(*w))) > n
    ),
    "It went by rank 0's wish: the others are to be heard as well.": lambda w, n: 0 in w[-1],
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
        [rank for rank, mine in enumerate(inputs) if step in mine["wish"]]
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
    taken = [[got["calls"][call]["told"].count("step") for got in seen.data] for call in calls]
    right = [_last(wishing[call], world, _majority) for call in calls]
    for call in calls:
        if len(set(taken[call])) > 1:
            steps = ", ".join(map(str, taken[call]))
            return f"All were to stop after step {right[call]}; the ranks took {steps} steps."
        if taken[call][0] != right[call]:
            return _why(wishing, [ranks[0] for ranks in taken], right, call, world)
        for rank, got in enumerate(seen.data):
            if number(got["calls"][call]["returned"]) != right[call]:
                return (
                    f"Rank {rank} returned {got['calls'][call]['returned']!r} after {right[call]} "
                    "steps. Return their number."
                )
    return None


def _why(
    wishing: list[list[list[int]]], taken: list[int], right: list[int], call: int, world: int
) -> str:
    """What was wrong with a call, by the rule that explains all of them."""
    who = wishing[call][right[call] - 1]
    asked = (
        f"the first after which {len(who)} of {world} wished to stop"
        if 2 * len(who) > world
        else "the most allowed"
    )
    wrong = f"All took {taken[call]} steps. Expected are {right[call]}, {asked}."
    if taken[call] == right[call] + 1:
        wrong += " A wish is obeyed before the next step."
    for words, rule in RULES.items():
        if taken == [_last(mine, world, rule) for mine in wishing]:
            return f"{wrong} It is as if this were the rule: {words.strip()}"
    return wrong


def _asked(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for call in got["calls"]:
            told = call["told"]
            if told != ["step", "asked"] * (len(told) // 2):
                steps, asked = told.count("step"), told.count("asked")
                return (
                    f"Rank {rank} took {steps} steps and was asked {asked} times. A wish may count "
                    "how often it is asked: ask once after each step."
                )
    return None


def _one_number(seen: Observed) -> str | None:
    world = seen.case.world
    for rank in range(world):
        steps = sum(call["told"].count("step") for call in seen.data[rank]["calls"])
        inside = {record.seq for record in seen.calls(rank, "step")}
        own = [record for record in seen.calls(rank) if record.seq not in inside]
        if len(own) > steps:
            ops = " and ".join(sorted({record.op for record in own}))
            return (
                f"Rank {rank} made {len(own)} calls beside {steps} steps ({ops}): one each will do."
            )
        for record in own:
            if record.op not in ("all_reduce", "all_gather"):
                return f"Rank {rank} called {record.op}. An all_reduce tells all how many wish it."
            if record.elements > (1 if record.op == "all_reduce" else world):
                return (
                    f"Rank {rank} called {record.op} on {record.elements} elements, and one number "
                    "from each rank is enough."
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
        "If rank 2 leaves the loop alone, in which call do the others wait for it?",
        "A wish is a number: 1 or 0. Which reduction of all ranks' numbers tells how many wish it? "
        "Of four ranks, are two more than half?",
        "After each step: a tensor of one number, 1 if this rank wishes to stop now; all_reduce "
        "adds them up; where twice the sum is more than the world size, return on every rank.",
    ),
    debrief="Lightning's EarlyStopping reduces the wish over all ranks as well before anyone obeys "
    "it; there one wish is enough. Whatever decides how the loop goes on (a NaN, a time limit, a "
    "signal) must be one decision of all.",
)

# -- 04.attention_buckets --------------------------------------------------------------------------

MORE_STEPS = 3
LONG = 10  # of so many samples one is long: a deal by tokens is not one by pairs
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
    return [[[lengths[i] for i in batch] for batch in mine] for mine in batches]


def _once_together(seen: Observed) -> str | None:
    if not (wrong := _once(seen)):
        return None
    uneven: dict[int, list[int]] = {}
    for call in range(len(seen.case.inputs[0]["calls"])):
        batches = _batches(seen, call)
        if isinstance(batches, str):
            return wrong
        counts = [len(mine) for mine in batches]
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
    counts, world = [len(mine) for mine in batches], len(batches)
    if len(set(counts)) > 1:
        return (
            f"the ranks have {', '.join(map(str, counts))} batches. A rank that has one more waits "
            "in it for ever."
        )
    tokens, pairs = budgets
    by_tokens = -(-sum(lengths) // (world * tokens))
    by_pairs = -(-_pairs_in(lengths) // (world * pairs))
    fewest = max(by_tokens, by_pairs)
    if counts[0] <= fewest + MORE_STEPS:
        empty = [(rank, mine.index([])) for rank, mine in enumerate(batches) if [] in mine]
        return f"rank {empty[0][0]} has nothing in step {empty[0][1]}." if empty else None
    every = [batch for batch in chain(*_of_batches(batches, lengths)) if batch]
    why = ""
    if all(sum(batch) ** 2 <= pairs for batch in every):
        why = (
            " The squares of the batches' sums are within the budget: a token is compared with "
            "those of its own sample, so square first, then add."
        )
    elif sum(max(batch) < 2 * min(batch) for batch in every) > len(every) / 2:
        why = " Batches of like samples use up one budget and leave the other: shuffle first."
    elif all(len(batch) * max(batch) ** 2 <= pairs for batch in every):
        why = " Nothing is padded here: each sample counts with its own length."
    elif counts[0] >= max(sum(lengths) // tokens, _pairs_in(lengths) // pairs):
        why = " The budgets are those of one rank, not of all."
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
        for rank, mine in enumerate(_of_batches(batches, lengths)):
            for step, batch in enumerate(mine):
                used = _pairs_in(batch) if which else sum(batch)
                if used <= budgets[which]:
                    continue
                more = (
                    " What fits on the mean rank does not fit on the fullest: look at it, and take "
                    "one step more."
                    if len(mine) == fewest
                    else ""
                )
                return (
                    f"in step {step} rank {rank} has {used:,} {word}, and {budgets[which]:,} are "
                    f"allowed.{more}"
                )
        return None

    return judge


@_each_call
def _equal_pairs(batches: Batches, lengths: list[int], budgets: Any) -> str | None:
    if len({len(mine) for mine in batches}) > 1:
        return "steps are compared when all ranks have as many batches."
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
    """What was dealt equally where the pairs were not."""
    world = len(pairs[0])
    if all(max(map(len, ranks)) - min(map(len, ranks)) <= 1 for ranks in steps):
        return ". All ranks have as many samples; but it is pairs that take time."
    tokens = [[sum(batch) for batch in ranks] for ranks in steps]
    if all(max(used) <= EQUAL * sum(used) / world for used in tokens):
        return (
            ". The tokens are dealt out equally; but a token of a long sample takes longer than "
            "one of a short sample."
        )
    over = [sum(used) for used in zip(*pairs, strict=True)]
    if max(over) <= EQUAL * sum(over) / world:
        return (
            ". Over the epoch the ranks have equal work, step by step they do not; and in each "
            "step the fastest waits for the slowest."
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
        Criterion("as many batches on each rank, and few", 1, _few_steps),
        Criterion("room for the tokens of each batch", 1, _below(0, "tokens")),
        Criterion("no batch above the budget of pairs", 1, _below(1, "pairs")),
        Criterion("in a step about as many pairs on each rank", 2, _equal_pairs),
        Criterion("other batches in another epoch", 1, _mixed, on=("",)),
        Criterion("nothing sent, nothing changed", 1, _no_trace),
    ),
    hints=(
        "Two batches have 1,000 tokens each: one sample, or ten. Which one takes longer, and by "
        "what factor?",
        "Which of the two quantities decides who waits? Deal by that one. The other is a limit "
        "that the finished deal has to keep.",
        "Take task 1's deal with n * n in place of n: for the cut into steps, for the order, and "
        "for the least busy rank. Begin with the larger of the two numbers of steps. While a "
        "batch breaks either budget, deal again with one step more.",
    ),
    debrief="Real time lies between the two: the layers' matrices take time by tokens, attention "
    "by pairs, and the second wins only for long samples. Trainers with very long texts deal by "
    "such a sum, or cut one sample over several ranks (context parallelism).",
)

TASKS = [TOKEN_BUCKETS, WORK_QUEUE, STOP_TOGETHER, ATTENTION_BUCKETS]
