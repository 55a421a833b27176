"""The content of reports; `pages` and `formats` give it a form.

A student's report says what was checked, what was found and how to continue. It never says what was
expected: the sentences come from the judges, and a hint is the task's own first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ddpz_lite.course.check.score import Finding, Verdict
from ddpz_lite.course.check.task import Task
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.nbval import NbvalReport, Reports
from ddpz_lite.course.grader.people import Roster
from ddpz_lite.course.grader.submission import NotGraded

NBVAL = {"passed": "pass", "failed": "fail"}  # its words -> ours; others are not judged
NBVAL_HEAD = "What nbval says"
NBVAL_ABOUT = (
    "pytest ran the whole notebook with these answers, cell by cell, as you can: pytest "
    "--nbval-lax. This is for you to read. It is worth no points, and changes none of those above."
)
LATER = "not judged: the first must be right before it"
MISSING = "handed in nothing, or under another name"
UNLISTED = "is not in the roster, or has a name that two of it share"
NO_STUDENT = "no student"


@dataclass(frozen=True)
class Report:
    """The results of a class, or of one student."""

    grades: Sequence[Grade]
    lost: Sequence[NotGraded]
    exercises: Mapping[str, Pristine]
    terms: Terms
    nbval: Reports = field(default_factory=dict)  # by nbval
    missing: Sequence[str] = ()  # in the roster, and not here
    unlisted: Sequence[str] = ()  # here, and not in the roster
    roster: Roster | None = None
    look: Sequence[tuple[str, str]] = ()  # (student, what the teacher should look at)

    @property
    def points(self) -> float:
        return sum(grade.points for grade in self.grades)

    @property
    def out_of(self) -> int:
        return sum(grade.out_of for grade in self.grades)

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """Id -> task, of those that were graded."""
        graded = {verdict.task for grade in self.grades for verdict in grade.verdicts}
        return {
            task.id: task
            for exercise in self.exercises.values()
            for task in exercise.tasks
            if task.id in graded
        }

    @cached_property
    def students(self) -> dict[str, Report]:
        """Each student's own report, by name."""
        parts: dict[str, tuple[list[Grade], list[NotGraded]]] = {}
        for one in [*self.grades, *(one for one in self.lost if one.student)]:
            parts_of = parts.setdefault(one.student, ([], []))
            parts_of[isinstance(one, NotGraded)].append(one)
        names = sorted(parts, key=lambda name: (name.casefold(), name))
        return {
            name: Report(*parts[name], self.exercises, self.terms, self.nbval) for name in names
        }

    @property
    def heads(self) -> dict[str, str]:
        """Exercise -> its title for a platform's gradebook, of those that were graded."""
        lessons = sorted({grade.lesson for grade in self.grades})
        return {lesson: f"{lesson} {self.exercises[lesson].title}" for lesson in lessons}

    @property
    def possible(self) -> dict[str, int]:
        """Exercise -> the most points that it can give, of those that were graded."""
        return {grade.lesson: grade.out_of for grade in self.grades}

    def marks_of(self, student: str) -> dict[str, float]:
        """Exercise -> points of a student, lateness and overrides included."""
        return {g.lesson: g.points for g in self.grades if g.student == student}

    @property
    def stamp(self) -> str:
        """The line under every student's report."""
        digests = ", ".join(grade.sha256 for grade in self.grades) or "-"
        terms = self.terms
        return f"SHA-256 {digests}; checker {terms.version}; sandbox: {terms.sandbox}"

    @property
    def stamps(self) -> dict[str, Any]:
        """What every report says of the terms on which it was made.

        Only the teacher's reports have the seed, because it determines the inputs.
        """
        return {"version": self.terms.version, "sandbox": self.terms.sandbox}


def sentences(verdict: Verdict) -> list[str]:
    """The sentences about a task, for the student."""
    lines = [verdict.sentence] if verdict.sentence else []
    for found in verdict.findings:
        lines.append(f"{found.outcome}: {found.says} ({found.points} of {found.out_of})")
        lines += [f"    {found.sentence}"] if found.sentence else []
    return lines


# ---- a student's feedback, in parts that HTML and Markdown write alike ----


@dataclass(frozen=True)
class Item:
    """A line with a mark and an explanation."""

    mark: str  # "pass", "fail", "not judged"
    text: str
    says: str = ""


@dataclass(frozen=True)
class Box:
    """A task, or what nbval says. Without a title the items stand alone."""

    items: Sequence[Item]
    title: str = ""
    word: str = ""  # points and status
    solved: bool = False
    sentence: str = ""
    onward: str = ""  # a hint or a debrief


@dataclass(frozen=True)
class Chapter:
    """A notebook."""

    head: str
    notes: Sequence[str] = ()  # to look at
    about: str = ""
    boxes: Sequence[Box] = ()


def chapters(report: Report) -> Iterator[Chapter]:
    """A student's feedback, a chapter per notebook and one for each thing that was not graded."""
    for grade in report.grades:
        title = report.exercises[grade.lesson].title
        head = f"{grade.lesson} {title}: {grade.points} of {grade.out_of} points"
        notes = [*grade.notes, *(f"{_capital(text)}." for text in grade.warnings)]
        yield Chapter(head, notes, boxes=[_box(v, report.tasks[v.task]) for v in grade.verdicts])
        if found := report.nbval.get((grade.student, grade.lesson)):
            yield Chapter(NBVAL_HEAD, about=NBVAL_ABOUT, boxes=[Box(list(_nbval(found)))])
    for one in report.lost:
        yield Chapter(one.where, about=f"Not graded: {one.reason}.")


def _box(verdict: Verdict, task: Task) -> Box:
    return Box(
        title=f"{task.id}  {task.title}",
        word=f"{verdict.points} of {verdict.out_of} points, {verdict.status}",
        solved=verdict.solved,
        sentence=verdict.sentence,
        items=[_item(found, verdict) for found in _shown(verdict)],
        onward=task.debrief if verdict.solved else f"Hint: {task.hints[0]}",
    )


def _shown(verdict: Verdict) -> list[Finding]:
    """The findings to list: of a task that was not attempted, only what the teacher added."""
    if verdict.status != "not attempted":
        return list(verdict.findings)
    return [found for found in verdict.findings if not found.out_of]


def _item(found: Finding, verdict: Verdict) -> Item:
    later = found.outcome == "not judged" and found.out_of and not verdict.sentence
    later = later and not found.sentence
    points = f"{found.points} of {found.out_of}" if found.out_of else f"{found.points:+g}"
    text = f"{found.says}: {points}" + (f" ({LATER})" if later else "")
    return Item(found.outcome, text, _capital(found.sentence))


def _nbval(found: NbvalReport) -> Iterator[Item]:
    """Which cell and what became of it, with the first lines of a failure."""
    if found.trouble:
        yield Item("not judged", f"nbval gave no report: {found.trouble}")
    for cell in found.cells:
        outcome = cell.outcome or "not in the report"
        yield Item(NBVAL.get(outcome, "not judged"), f"{cell.task}: {outcome}", cell.says)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
