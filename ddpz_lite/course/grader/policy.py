"""What a teacher decides besides the points: deadlines, grace days, overrides, comments.

Both files are the teacher's and are only read here, so a re-run applies them again. The files in
grades/ keep what was measured.

policy.toml:

    grace_days = 3          # per student, for all exercises together
    penalty = 10            # percent of an exercise's points per day that no grace day covers

    [deadlines]
    03 = 2026-10-12T23:59:00+02:00

    [extensions."Ada Lovelace"]
    03 = 2                  # days

notes.csv has the columns student, task, points, comment, submitted. `task` is an exercise (03) or a
task (03.weighted_mean). `points` replaces the task's points. `submitted` is when the exercise came,
with a time zone, for example 2026-10-13T08:00:00+02:00.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from ddpz_lite.course.check.score import Finding, Verdict
from ddpz_lite.course.grader.batch import Grade
from ddpz_lite.course.grader.people import folded

COLUMNS = ("student", "task", "points", "comment", "submitted")
DAY = timedelta(days=1)
Key = tuple[str, str]  # student, exercise


class BadPolicy(ValueError):
    """A policy or notes that cannot be used: why, and the fix."""


@dataclass(frozen=True)
class Policy:
    """Deadlines and what lateness costs."""

    deadlines: Mapping[str, datetime] = field(default_factory=dict)  # by exercise
    grace_days: int = 0
    penalty: float = 100.0
    extensions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by folded name


@dataclass(frozen=True)
class Note:
    """A row of notes.csv."""

    student: str
    task: str
    points: float | None = None
    comment: str = ""
    submitted: datetime | None = None

    @property
    def lesson(self) -> str:
        return self.task.partition(".")[0]


# ---- the files ----


def load_policy(path: Path) -> Policy:
    """The policy in a file; none if there is no file. Raises BadPolicy."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Policy()
    except (OSError, ValueError) as error:
        raise BadPolicy(f"{path} cannot be read: {error}") from None
    known = {"deadlines", "grace_days", "penalty", "extensions"}
    if unknown := sorted(set(tree) - known):
        raise BadPolicy(f"{path}: unknown key {unknown[0]}. Fix: use {', '.join(sorted(known))}")
    for lesson, at in tree.get("deadlines", {}).items():
        if not isinstance(at, datetime) or at.tzinfo is None:
            raise BadPolicy(
                f"{path}: the deadline of {lesson} has no time zone. "
                "Fix: write it as 2026-10-12T23:59:00+02:00"
            )
    extensions = {folded(name): days for name, days in tree.pop("extensions", {}).items()}
    return Policy(extensions=extensions, **tree)


def load_notes(path: Path, tasks: Iterable[str]) -> list[Note]:
    """The notes in a file; none if there is no file. tasks: all there are. Raises BadPolicy."""
    tasks = set(tasks)
    known = tasks | {task.partition(".")[0] for task in tasks}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise BadPolicy(f"{path} cannot be read: {error}") from None
    rows = csv.DictReader(text.splitlines())
    if unknown := sorted(set(rows.fieldnames or ()) - set(COLUMNS)):
        raise BadPolicy(f"{path}: unknown column {unknown[0]}. Fix: use {', '.join(COLUMNS)}")
    return [_note(path, rows.line_num, row, known) for row in rows]


def _note(path: Path, line: int, row: Mapping[str, str | None], known: set[str]) -> Note:
    value = {name: (row.get(name) or "").strip() for name in COLUMNS}
    where = f"{path}, line {line}"
    if value["task"] not in known:
        raise BadPolicy(f"{where}: there is no task {value['task']!r}")
    if value["points"] and "." not in value["task"]:
        raise BadPolicy(f"{where}: points are set per task. Fix: name one, as 03.weighted_mean")
    try:
        points = float(value["points"]) if value["points"] else None
        at = datetime.fromisoformat(value["submitted"]) if value["submitted"] else None
    except ValueError as error:
        raise BadPolicy(f"{where}: {error}") from None
    if at is not None and at.tzinfo is None:
        raise BadPolicy(f"{where}: {value['submitted']} has no time zone. Fix: append +02:00")
    return Note(value["student"], value["task"], points, value["comment"], at)


# ---- what counts ----


def apply(
    grades: Sequence[Grade],
    policy: Policy,
    notes: Sequence[Note],
    times: Mapping[Key, datetime],
    late: set[Key],
) -> list[Grade]:
    """The grades with overrides, comments and what lateness takes off.

    times: when submissions came, as far as a platform says it. late: submissions that a platform
    marks as late without a time.
    """
    by_key: dict[Key, list[Note]] = {}
    for note in notes:
        by_key.setdefault((folded(note.student), note.lesson), []).append(note)
    left: dict[str, int] = {}  # grace days by student
    done: dict[Key, Grade] = {}
    for grade in sorted(grades, key=lambda grade: _due(policy, grade)):
        own = by_key.get((folded(grade.student), grade.lesson), [])
        marked = _marked(grade, own)
        handed_in = [note.submitted for note in own if note.submitted]
        at = handed_in[-1] if handed_in else times.get((grade.student, grade.lesson))
        days = _days(policy, grade, at, (grade.student, grade.lesson) in late)
        days_left = left.setdefault(grade.student, policy.grace_days)
        used = min(days, days_left)
        left[grade.student] = days_left - used
        done[grade.student, grade.lesson] = _taken_off(marked, policy, at, days, used, days_left)
    return [done[grade.student, grade.lesson] for grade in grades]


def _due(policy: Policy, grade: Grade) -> float:
    """Grace days are used in the order of deadlines."""
    deadline = policy.deadlines.get(grade.lesson)
    return deadline.timestamp() if deadline else math.inf


def _days(policy: Policy, grade: Grade, at: datetime | None, late: bool) -> int:
    """Days after the student's own deadline, counted up; one where only a platform says late."""
    deadline = policy.deadlines.get(grade.lesson)
    if deadline is None:
        return 0
    if at is None:
        return int(late)
    extension = policy.extensions.get(folded(grade.student), {}).get(grade.lesson, 0)
    local = at if at.tzinfo else at.replace(tzinfo=deadline.tzinfo)
    return max(0, math.ceil((local - deadline - extension * DAY) / DAY))


def _taken_off(
    grade: Grade, policy: Policy, at: datetime | None, days: int, used: int, left: int
) -> Grade:
    """The grade with the points that lateness costs, and the sentence for the student."""
    if not days:
        return grade
    when = "Your platform marks this as late" if at is None else f"Handed in {_count(days)} late"
    sentence = f"{when}: {_count(used, 'grace day')} used, {left - used} left."
    lost = min(100.0, policy.penalty * (days - used))
    if lost:
        sentence += f" {lost:g}% of the points are taken off."
    taken = round(grade.points * lost / 100, 2)
    return replace(grade, late=_number(-taken), notes=(*grade.notes, sentence))


def _count(number: int, noun: str = "day") -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _marked(grade: Grade, notes: Sequence[Note]) -> Grade:
    """The grade with a teacher's points and comments."""
    by_task = {note.task: note for note in notes}
    verdicts = [
        _overridden(verdict, by_task[verdict.task]) if verdict.task in by_task else verdict
        for verdict in grade.verdicts
    ]
    words = [f"Your teacher: {n.comment}" for n in notes if n.comment and n.task == n.lesson]
    return replace(grade, verdicts=tuple(verdicts), notes=(*grade.notes, *words))


def _overridden(verdict: Verdict, note: Note) -> Verdict:
    """A verdict with one more finding: the teacher's points and comment."""
    points = verdict.points if note.points is None else note.points
    gain = points - verdict.points
    says = "your teacher's comment" if note.points is None else "set by your teacher"
    outcome = "fail" if gain < 0 else "pass" if gain > 0 else "not judged"
    found = Finding(says, _number(gain), 0, outcome, note.comment)
    return replace(verdict, findings=(*verdict.findings, found))


def _number(value: float) -> float:
    """A whole number as an int, so that reports show it without a point."""
    return int(value) if value == int(value) else value


def unused(notes: Sequence[Note], grades: Sequence[Grade]) -> list[Note]:
    """Notes whose student or exercise was not graded: perhaps a misspelt name."""
    there = {(folded(grade.student), grade.lesson) for grade in grades}
    return [note for note in notes if (folded(note.student), note.lesson) not in there]
