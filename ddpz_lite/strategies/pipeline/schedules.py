"""Schedules of a pipeline as data, and as times: who computes what when, who waits, what is kept.

A schedule is a list of actions for each rank, in the order in which the rank runs them: ("F", 3) is
the forward of micro-batch 3, ("B", 3) its backward.

    gpipe(2, 3)        F0 F1 F2 B0 B1 B2  |  F0 F1 F2 B0 B1 B2     keeps m micro-batches
    one_f_one_b(2, 3)  F0 F1 B0 F2 B1 B2  |  F0 B0 F1 B1 F2 B2     keeps min(p - stage, m)

Both wait for the same share of a step, (p - 1) / (m + p - 1).

With interleaving a rank has several chunks of the model, and an action names the chunk too:
("F", 3, 1), written F3b. Chunk c of rank r is stage c * p + r of the model. The wait becomes
shorter, by the number of chunks; the messages become more.

A zero-bubble schedule splits backward: ("B", 3) is then the gradient of the input alone, for which
the stage before waits, and ("W", 3) the gradient of the weights, which fills the wait.

    zero_bubble(2, 3)  F0 F1 B0 W0 F2 B1 W1 B2 W2  |  F0 B0 F1 B1 W0 F2 B2 W1 W2     keeps min(p, m)

Sources: Huang et al., "GPipe", 2019, section 2; Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2; Qi et al., "Zero Bubble
Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Action = tuple[Any, ...]  # ("F", "B" or "W", micro-batch), with interleaving (..., chunk)
Schedule = Sequence[Sequence[Action]]  # by rank


def read(line: str) -> list[Action]:
    """The actions of a rank from a line: "F0 F1 B0 B1"; with chunks "F0a F0b B0b B0a"."""
    for word in line.split():
        if not re.fullmatch(r"[FBW]\d+[a-z]?", word):
            raise ValueError(
                f"{word!r} is not an action. Fix: F3 for the forward of micro-batch 3, B3 for its "
                "backward, with spaces between."
            )
    found = (re.fullmatch(r"(.)(\d+)(.?)", word).groups() for word in line.split())
    return [(kind, int(i), *(ord(c) - ord("a") for c in chunk)) for kind, i, chunk in found]


def words(order: Iterable[Action]) -> str:
    """The line of some actions, with a letter for the chunk if they name it: "F0a F1a F0b"."""
    return " ".join(f"{a[0]}{a[1]}" + "".join(chr(ord("a") + c) for c in a[2:]) for a in order)


def gpipe(stages: int, micro_batches: int) -> list[list[Action]]:
    """All forwards, then all backwards. Source: Huang et al. 2019, section 2.3."""
    return [[(kind, i) for kind in "FB" for i in range(micro_batches)] for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Action]]:
    """A backward as soon as one can run. Source: Narayanan et al. 2021, section 2.2.1."""
    schedule = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)  # forwards until the first gradient is near
        order = [("F", i) for i in range(ahead)]
        for i in range(ahead, micro_batches):
            order += [("F", i), ("B", i - ahead)]
        order += [("B", i) for i in range(micro_batches - ahead, micro_batches)]
        schedule.append(order)
    return schedule


def interleaved(ranks: int, micro_batches: int, chunks: int) -> list[list[Action]]:
    """1F1B with several chunks on each rank. Source: Narayanan et al. 2021, section 2.2.2.

    Micro-batches go in groups as large as the pipeline, and a group passes all ranks once for each
    chunk. Raises ValueError if the ranks do not divide the micro-batches.
    """
    if micro_batches % ranks:
        raise ValueError(
            f"interleaved: {micro_batches} micro-batches over {ranks} ranks. They go in groups as "
            f"large as the pipeline. Fix: a multiple of {ranks}."
        )

    def at(number: int, kind: str) -> Action:
        group, place = divmod(number, ranks * chunks)
        chunk = place // ranks
        return kind, group * ranks + place % ranks, chunk if kind == "F" else chunks - 1 - chunk

    schedule, total = [], micro_batches * chunks
    for rank in range(ranks):
        ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
        order = [at(i, "F") for i in range(ahead)]
        for i in range(total - ahead):
            order += [at(ahead + i, "F"), at(i, "B")]
        schedule.append(order + [at(i, "B") for i in range(total - ahead, total)])
    return schedule


def zero_bubble(stages: int, micro_batches: int) -> list[list[Action]]:
    """ZB-H1: 1F1B whose weight gradients wait, so that input gradients leave earlier.

    Stage s delays W by s micro-batches. So each stage keeps min(p, m) micro-batches, the number
    that 1F1B keeps on its first, and the bubble is a third of 1F1B's where F, B and W take equally
    long. Source: Qi et al. 2023, section 2.1 and figure 3.
    """
    schedule = []
    for stage, before in enumerate(one_f_one_b(stages, micro_batches)):
        order: list[Action] = []
        for kind, i in before:
            order.append((kind, i))
            if kind == "B" and i >= stage:
                order.append(("W", i - stage))
        late = range(max(micro_batches - stage, 0), micro_batches)
        schedule.append(order + [("W", i) for i in late])
    return schedule


def kinds_of(schedule: Schedule) -> str:
    """ "FB", or "FBW" for a schedule that splits backward."""
    return "FBW" if any(action[0] == "W" for order in schedule for action in order) else "FB"


def chunks_of(schedule: Schedule) -> int:
    """How many chunks of the model each rank has."""
    return 1 + max((chunk for action in schedule[0] for chunk in action[2:]), default=0)


def check(schedule: Schedule) -> None:
    """Raise ValueError unless all ranks run all micro-batches, in one order of F and one of B."""
    if not schedule or not schedule[0]:
        raise ValueError("the schedule is empty. Fix: one_f_one_b(stages, micro_batches)")
    for stage, order in enumerate(schedule):
        for action in order:
            if not _is_action(action):
                raise ValueError(
                    f"stage {stage} has {action!r} in its schedule, which is not an action. Fix: "
                    'tuples such as ("F", 0), as one_f_one_b(stages, micro_batches) has them.'
                )
    counts = [1 + max(numbers) for numbers in zip(*(a[1:] for a in schedule[0]), strict=False)]
    kinds = kinds_of(schedule)
    every = sorted(product(kinds, *map(range, counts)))
    for stage, order in enumerate(schedule):
        if sorted(order) != every:
            raise ValueError(
                f"stage {stage} must run {' and '.join(kinds)} of each micro-batch 0 to "
                f"{counts[0] - 1} once, as stage 0 does; it runs {words(order)}"
            )
        for kind in "FB":
            here, first = ([a for a in s if a[0] == kind] for s in (order, schedule[0]))
            if here != first:
                raise ValueError(
                    f"stage {stage} runs {words(here)}, stage 0 {words(first)}: messages have no "
                    "names, so each would take another's. Fix: the same order on all stages."
                )


def _is_action(action: object) -> bool:
    if not isinstance(action, tuple) or len(action) not in (2, 3) or action[0] not in tuple("FBW"):
        return False
    return all(isinstance(number, int) for number in action[1:])


# -- times


@dataclass(frozen=True)
class Bar:
    """One action of a stage, with its time."""

    stage: int
    kind: str
    micro: int
    chunk: int
    start: float
    end: float


def play(schedule: Schedule, forward: float | Sequence[float] = 1.0) -> list[Bar]:
    """The actions with their times, if messages take none.

    An action starts when its stage is free and what it needs is there. forward: the time of a
    stage's forward, one for all stages or one each, in any unit. Its backward takes twice that, and
    where it is split each half once; a chunk takes its share. Raises ValueError for a schedule that
    cannot run: an action is missing, stages take micro-batches in different orders, or all stages
    wait forever.
    """
    check(schedule)
    stages, chunks = len(schedule), chunks_of(schedule)
    cost = {"F": 1, "B": 1, "W": 1} if kinds_of(schedule) == "FBW" else {"F": 1, "B": 2}
    seconds = [forward] * stages if isinstance(forward, int | float) else list(forward)
    todo, free = [list(order) for order in schedule], [0.0] * stages
    ended: dict[tuple[str, int, int], float] = {}  # by kind, micro-batch, stage of the model
    bars: list[Bar] = []

    def needs(kind: str, micro: int, place: int) -> set[tuple[str, int, int]]:
        before = {("F", micro, place - 1)} if place else set()
        after = {("B", micro, place + 1)} if place < stages * chunks - 1 else set()
        if kind == "W":
            return {("B", micro, place)}
        return before if kind == "F" else {("F", micro, place)} | after

    while any(todo):
        played = len(bars)
        for stage, order in enumerate(todo):
            while order:
                kind, micro, chunk = (*order[0], 0)[:3]
                place = chunk * stages + stage
                needed = needs(kind, micro, place)
                if not needed <= ended.keys():
                    break
                start = max(free[stage], *(ended[need] for need in needed), 0.0)
                end = start + seconds[stage] * cost[kind] / chunks
                free[stage] = ended[kind, micro, place] = end
                bars.append(Bar(stage, kind, micro, chunk, start, end))
                order.pop(0)
        if len(bars) == played:
            waits = "; ".join(f"stage {s} for {words(o[:1])}" for s, o in enumerate(todo) if o)
            raise ValueError(
                f"the schedule cannot run: all stages wait forever ({waits}). Fix: a backward "
                "comes after its forward, and after the same backward on the next stage."
            )
    return bars


def length(bars: Sequence[Bar]) -> float:
    """The time until the last action ends."""
    return max(bar.end for bar in bars)


def idle(bars: Sequence[Bar]) -> float:
    """The share of all stages' time in which they wait."""
    stages = 1 + max(bar.stage for bar in bars)
    return 1 - sum(bar.end - bar.start for bar in bars) / (stages * length(bars))


def live(bars: Sequence[Bar]) -> list[float]:
    """For each stage the most micro-batches that it keeps at once, a chunk as its share of one.

    A micro-batch is kept from its forward to its backward; where that is split, to W.
    """
    chunks = 1 + max(bar.chunk for bar in bars)
    last = "W" if any(bar.kind == "W" for bar in bars) else "B"
    now = [0] * (1 + max(bar.stage for bar in bars))
    most = list(now)
    for bar in bars:  # those of a stage are in order
        now[bar.stage] += (bar.kind == "F") - (bar.kind == last)
        most[bar.stage] = max(most[bar.stage], now[bar.stage])
    return [count / chunks for count in most]
