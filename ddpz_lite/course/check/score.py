"""From what was observed of an answer to points, a status and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpz_lite.course.check.task import Case, Criterion, Observed, Task

NO_FORM = (
    "What came back does not have the form that the task asks for: its docstring names types and "
    "shapes."
)
NO_END = "not judged: the run reported above did not come to its end"

STATUS = {  # by outcome, the first that applies
    "refused": "refused",
    "unsolved": "not attempted",
    "died": "crashed",
    "stuck": "timeout",
    "mismatch": "wrong",
    "raised": "wrong",
}


@dataclass(frozen=True)
class Finding:
    """What became of one criterion."""

    says: str
    points: int  # given
    out_of: int
    outcome: str  # "pass", "fail", "not judged"
    sentence: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of one task: status is "ok" or says why not."""

    task: str
    status: str
    findings: tuple[Finding, ...]
    sentence: str = ""  # about the answer as a whole, where no criterion can say it

    @property
    def points(self) -> int:
        return sum(finding.points for finding in self.findings)

    @property
    def out_of(self) -> int:
        return sum(finding.out_of for finding in self.findings)

    @property
    def solved(self) -> bool:
        return self.status == "ok"


def score(task: Task, seen: Sequence[Observed]) -> Verdict:
    """Judge each criterion over the cases that it looks at.

    A case in which the answer did not come to its end fails the criteria that look at it. Its
    sentence is given once, at the first of them; the others are not judged.
    """
    if not seen:
        raise ValueError(f"{task.id}: nothing was observed; a verdict needs at least one case")
    judging = Judging(task, [observed.case for observed in seen])
    for index, observed in enumerate(seen):
        judging.add(index, observed)
    return judging.verdict()


class Judging:
    """An answer's way to its verdict, case by case: it says which case it needs next.

    A criterion fails at the first of its cases that fails it, and once the first one has failed
    nothing else counts: what is not looked at cannot change the verdict.
    """

    def __init__(self, task: Task, cases: Sequence[Case]) -> None:
        self.task, self.cases = task, cases
        self.seen: dict[int, Observed] = {}
        self._sentences: dict[tuple[str, int], str | None] = {}  # by criterion and case

    def add(self, index: int, observed: Observed) -> None:
        """What the answer did in the case of that number."""
        self.seen[index] = observed

    def observed(self) -> list[Observed]:
        """What has been seen, in the order of the cases."""
        return [self.seen[index] for index in sorted(self.seen)]

    def wanted(self) -> int | None:
        """The number of the next case to run; None when none can change the verdict any more."""
        if any(observed.outcome == "unsolved" for observed in self.seen.values()):
            return None
        for criterion in self.task.criteria:
            for index in self._looked_at(criterion):
                if index not in self.seen:
                    return index
                if self._sentence(criterion, index) is not None:
                    if criterion is self.task.criteria[0]:
                        return None
                    break
        return None

    def failed(self) -> dict[str, str]:
        """{what a criterion says: its sentence} for all that fail in what has been seen."""
        found = ((a.says, self._sentence(a, i)) for a in self.task.criteria for i in self._seen(a))
        return {says: sentence for says, sentence in found if sentence is not None}

    def verdict(self) -> Verdict:
        """Points and sentences, from what has been seen."""
        task, seen = self.task, self.observed()
        if all(observed.outcome in ("unsolved", "refused") for observed in seen):
            first = seen[0]
            blank = tuple(Finding(a.says, 0, a.points, "not judged") for a in task.criteria)
            return Verdict(task.id, STATUS[first.outcome], blank, first.sentence)
        findings: list[Finding] = []
        reported: set[str] = set()
        ends: set[str] = set()  # of the cases that criteria failed in
        for criterion in task.criteria:
            if findings and findings[0].outcome == "fail":
                found = Finding(criterion.says, 0, criterion.points, "not judged")
            else:
                found = self._find(criterion, reported, ends)
            findings.append(found)
        solved = all(finding.outcome == "pass" for finding in findings)
        status = next((word for end, word in STATUS.items() if end in ends), "wrong")
        return Verdict(task.id, "ok" if solved else status, tuple(findings))

    def _find(self, criterion: Criterion, reported: set[str], ends: set[str]) -> Finding:
        if not self._looked_at(criterion):
            raise ValueError(f"no case has a kind that the criterion {criterion.says!r} looks at")
        for index in self._seen(criterion):
            sentence = self._sentence(criterion, index)
            if sentence is None:
                continue
            ends.add(self.seen[index].outcome)
            if sentence in reported and self.seen[index].outcome != "ok":
                return Finding(criterion.says, 0, criterion.points, "not judged", NO_END)
            where = "as above" if sentence in reported else f"{sentence} ({self.cases[index].says})"
            reported.add(sentence)
            return Finding(criterion.says, 0, criterion.points, "fail", where)
        if self._seen(criterion) != self._looked_at(criterion):
            return Finding(criterion.says, 0, criterion.points, "not judged")
        return Finding(criterion.says, criterion.points, criterion.points, "pass")

    def _seen(self, criterion: Criterion) -> list[int]:
        return [index for index in self._looked_at(criterion) if index in self.seen]

    def _looked_at(self, criterion: Criterion) -> list[int]:
        kinds = criterion.on
        return [i for i, case in enumerate(self.cases) if not kinds or case.kind in kinds]

    def _sentence(self, criterion: Criterion, index: int) -> str | None:
        if (criterion.says, index) not in self._sentences:
            seen = self.seen[index]
            sentence = _judge(criterion, seen) if seen.outcome == "ok" else seen.sentence
            self._sentences[criterion.says, index] = sentence
        return self._sentences[criterion.says, index]


def _judge(criterion: Criterion, observed: Observed) -> str | None:
    """The criterion's sentence, or None.

    An answer can return anything: a judge that trips over what it did not expect has found it
    wrong.
    """
    try:
        return criterion.judge(observed)
    except Exception:  # its own words would be about the judge
        return NO_FORM
