"""From what was observed of an answer to points, a status and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .task import Aspect, Case, Observed, Task

LONGEST = 300  # characters of a sentence about what came back
NO_END = "not judged: the run told above did not come to its end"

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
    """What became of one aspect."""

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
    sentence: str = ""  # about the whole, where no aspect can say it

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
    """Judge each aspect over the cases that it looks at.

    A case in which the answer did not come to its end fails the aspects that look at it. Its
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

    An aspect fails at the first of its cases that fails it, and once the first aspect has failed
    nothing else counts: what is not looked at cannot change the verdict.
    """

    def __init__(self, task: Task, cases: Sequence[Case]) -> None:
        self.task, self.cases = task, cases
        self.seen: dict[int, Observed] = {}
        self._said: dict[tuple[str, int], str | None] = {}  # what a judge said of a case

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
        for aspect in self.task.aspects:
            for index in self._looked_at(aspect):
                if index not in self.seen:
                    return index
                if self._sentence(aspect, index) is not None:
                    if aspect is self.task.aspects[0]:
                        return None
                    break
        return None

    def verdict(self) -> Verdict:
        """Points and sentences, from what has been seen."""
        task, seen = self.task, self.observed()
        if all(observed.outcome in ("unsolved", "refused") for observed in seen):
            whole = seen[0]
            blank = tuple(Finding(a.says, 0, a.points, "not judged") for a in task.aspects)
            return Verdict(task.id, STATUS[whole.outcome], blank, whole.sentence)
        findings: list[Finding] = []
        told: set[str] = set()
        ends: set[str] = set()  # of the cases that aspects failed in
        for aspect in task.aspects:
            if findings and findings[0].outcome != "pass":
                found = Finding(aspect.says, 0, aspect.points, "not judged")
            else:
                found = self._find(aspect, told, ends)
            findings.append(found)
        solved = all(finding.outcome == "pass" for finding in findings)
        status = next((word for end, word in STATUS.items() if end in ends), "wrong")
        return Verdict(task.id, "ok" if solved else status, tuple(findings))

    def _find(self, aspect: Aspect, told: set[str], ends: set[str]) -> Finding:
        looked_at = [index for index in self._looked_at(aspect) if index in self.seen]
        if not looked_at:
            raise ValueError(f"no case has a kind that the aspect {aspect.says!r} looks at")
        for index in looked_at:
            sentence = self._sentence(aspect, index)
            if sentence is None:
                continue
            ends.add(self.seen[index].outcome)
            if sentence in told and self.seen[index].outcome != "ok":
                return Finding(aspect.says, 0, aspect.points, "not judged", NO_END)
            where = "as above" if sentence in told else f"{sentence} ({self.cases[index].says})"
            told.add(sentence)
            return Finding(aspect.says, 0, aspect.points, "fail", where)
        return Finding(aspect.says, aspect.points, aspect.points, "pass")

    def _looked_at(self, aspect: Aspect) -> list[int]:
        kinds = aspect.on
        return [i for i, case in enumerate(self.cases) if not kinds or case.kind in kinds]

    def _sentence(self, aspect: Aspect, index: int) -> str | None:
        if (aspect.says, index) not in self._said:
            seen = self.seen[index]
            said = _judge(aspect, seen) if seen.outcome == "ok" else seen.sentence
            self._said[aspect.says, index] = said
        return self._said[aspect.says, index]


def _judge(aspect: Aspect, observed: Observed) -> str | None:
    """The aspect's sentence, or None.

    An answer can return anything: a judge that trips over what it did not expect has found it
    wrong.
    """
    try:
        return aspect.judge(observed)
    except Exception as error:
        form = f"What came back does not have the form that the task asks for ({error!r})."
        return form[:LONGEST]
