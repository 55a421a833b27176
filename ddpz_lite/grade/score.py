"""From what was observed of an answer to points, a status and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .task import Aspect, Observed, Task

LONGEST = 300  # characters of a sentence about what came back

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
    sentence is given once, at the first of them.
    """
    if not seen:
        raise ValueError(f"{task.id}: nothing was observed; a verdict needs at least one case")
    if all(observed.outcome in ("unsolved", "refused") for observed in seen):
        whole = seen[0]
        blank = tuple(Finding(a.says, 0, a.points, "not judged") for a in task.aspects)
        return Verdict(task.id, STATUS[whole.outcome], blank, whole.sentence)
    findings: list[Finding] = []
    told: set[str] = set()
    for aspect in task.aspects:
        if findings and findings[0].outcome != "pass":
            found = Finding(aspect.says, 0, aspect.points, "not judged")
        else:
            found = _find(aspect, seen, told)
        findings.append(found)
    solved = all(finding.outcome == "pass" for finding in findings)
    ends = {observed.outcome for observed in seen}
    status = next((word for end, word in STATUS.items() if end in ends), "wrong")
    return Verdict(task.id, "ok" if solved else status, tuple(findings))


def _find(aspect: Aspect, seen: Sequence[Observed], told: set[str]) -> Finding:
    looked_at = [o for o in seen if not aspect.on or o.case.kind in aspect.on]
    for observed in looked_at:
        sentence = _judge(aspect, observed) if observed.outcome == "ok" else observed.sentence
        if sentence is None:
            continue
        new = sentence not in told
        told.add(sentence)
        where = f"{sentence} ({observed.case.says})" if new else "as above"
        return Finding(aspect.says, 0, aspect.points, "fail", where)
    if not looked_at:
        raise ValueError(f"no case has a kind that the aspect {aspect.says!r} looks at")
    return Finding(aspect.says, aspect.points, aspect.points, "pass")


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
