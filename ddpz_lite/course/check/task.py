"""What a task is, and what is seen of an answer to it.

A task draws cases. Each case runs the answer once, on as many ranks as it says, next to a job that
hands it its inputs and returns data (`tasks.lessonNN.job`). What came back and what the wire saw is
an `Observed`. Criteria judge it (`tasks.lessonNN.judge`): each looks at one property and gives a
sentence where the property is missing.
"""

from __future__ import annotations

import importlib
import pkgutil
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ddpz_lite.wire import Network, Record, Span

TASKS = f"{__package__.rpartition('.')[0]}.tasks"  # a folder for each lesson


@dataclass(frozen=True)
class Case:
    """One run of an answer.

    inputs   for each rank, the keyword arguments of the job: data only, see `grade.data`. A rank
             is sent its own and no other's.
    kind     which criteria look at this case, see `Criterion.on`
    network  a slower network, for what is judged by a timeline
    timeout  seconds until an answer that is stuck is ended
    """

    says: str  # "3 ranks with 2, 5 and 1 samples": how sentences name this case
    inputs: Sequence[dict[str, Any]]  # one per rank
    kind: str = ""
    network: Network | None = None
    timeout: float = 10.0

    @property
    def world(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Observed:
    """What an answer did in one case.

    outcome: "ok", or how it ended: "unsolved" (the stub), "raised", "stuck", "mismatch", "died",
    "refused". Where it is not "ok", `sentence` says what happened and data, ledger may be partial.
    """

    case: Case
    outcome: str
    sentence: str = ""
    data: Sequence[Any] = ()  # by rank: what the job returned
    ledger: Sequence[Record] = ()
    spans: Sequence[Span] = ()

    def span(self, rank: int, name: str) -> Span:
        """The span that the job named, on this rank; the last one of that name."""
        return self._named.get((rank, name), [])[-1]

    def calls(self, rank: int, during: str | None = None) -> list[Record]:
        """What this rank asked of the network, in order; during: only what it issued in a span."""
        records = self._issued.get(rank, [])
        if during is None:
            return list(records)
        named = sorted((s.started, s.finished) for s in self._named.get((rank, during), []))
        begun = [started for started, _ in named]
        ends = list(accumulate((finished for _, finished in named), max))  # of all begun so far
        return [r for r in records if (i := bisect(begun, r.started)) and r.started <= ends[i - 1]]

    # A rank may make thousands of calls and hundreds of spans: each is looked at once.
    @cached_property
    def _issued(self) -> dict[int, list[Record]]:
        by_rank: dict[int, list[Record]] = defaultdict(list)
        for record in self.ledger:
            by_rank[record.rank].append(record)
        return by_rank

    @cached_property
    def _named(self) -> dict[tuple[int, str], list[Span]]:
        by_name: dict[tuple[int, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            by_name[span.rank, span.name].append(span)
        return by_name

    def sent(self, rank: int, during: str | None = None, op: str | None = None) -> int:
        """Bytes that this rank sent."""
        return sum(r.bytes_sent for r in self.calls(rank, during) if op in (None, r.op))

    def ops(self, rank: int, during: str | None = None) -> list[str]:
        """The names of this rank's calls, in order: ["all_reduce", "send"]."""
        return [r.op for r in self.calls(rank, during)]


@dataclass(frozen=True)
class Criterion:
    """One property of an answer.

    judge   (Observed) -> None where the property holds, else the sentence that says what is wrong.
            It may trust that the outcome is "ok", and nothing about the data: an answer can
            return anything.
    on      kinds of cases that it looks at; empty: all
    A criterion after a task's first counts only if the first passed: without the right result the
    cost proves nothing.
    """

    says: str  # "one collective per step"
    points: int
    judge: Callable[[Observed], str | None]
    on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One task of an exercise.

    cases draws its inputs from the generator, so that a seed gives the same cases again.
    """

    id: str  # "03.weighted_mean"
    title: str  # "A mean that counts every sample once"
    answer: str  # the name that the learner defines: "weighted_mean"
    job: str  # the function of a `job.py` that runs it: "lesson03.weighted_mean"
    minutes: int
    cases: Callable[[torch.Generator], list[Case]]
    criteria: tuple[Criterion, ...]
    hints: tuple[str, str, str]  # a question, a nudge, a sketch
    debrief: str  # shown after success: what production does differently
    own: Callable[[], dict[str, Any]] | None = None  # inputs that only a learner's own check has
    uses_own: bool = True  # ready-made strategies are refused while it runs; see `guard`

    @property
    def lesson(self) -> str:
        return self.id.partition(".")[0]

    @property
    def points(self) -> int:
        return sum(criterion.points for criterion in self.criteria)


def lessons() -> list[str]:
    """The numbers of the lessons that have tasks, as their folders say: ["01", "02"]."""
    folder = importlib.import_module(TASKS).__path__
    names = [module.name for module in pkgutil.iter_modules(folder)]
    return sorted(name.removeprefix("lesson") for name in names if name.startswith("lesson"))


def tasks(lesson: str) -> list[Task]:
    """The tasks of a lesson, in order. Raises KeyError for a lesson without tasks."""
    if lesson not in lessons():
        raise KeyError(f"lesson {lesson!r} has no tasks; these have: {', '.join(lessons())}")
    return list(importlib.import_module(f"{TASKS}.lesson{lesson}.judge").TASKS)


def find(task_id: str) -> Task:
    """The task of that name. Raises KeyError that lists the lesson's tasks."""
    lesson = task_id.partition(".")[0]
    found = {task.id: task for task in tasks(lesson)}
    if task_id not in found:
        raise KeyError(f"there is no task {task_id!r}; lesson {lesson} has {', '.join(found)}")
    return found[task_id]
