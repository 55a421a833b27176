"""A roster from a file: what a platform exported, or a plain list of names."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ddpz_lite.course.grader.people import BadRoster, Roster, Student, folded, full_name, keys
from ddpz_lite.course.grader.platforms import of_roster
from ddpz_lite.course.grader.text import clean, in_path

NAME_COLUMNS = ("student", "name", "full name")  # of a list that no platform wrote
IDENTIFIER = re.compile(r"\b(id|e-?mail|mail|login|user|user ?name|number)\b")


def load(path: Path) -> Roster:
    """The roster in a file that a platform exported, or in a plain list. Raises BadRoster.

    A plain list has one name per line, or is a CSV (commas, semicolons or tabs) with the names in a
    column `student` or in the first one.
    """
    titles, rows = table(path)
    platform = of_roster({folded(title) for title in titles})
    if platform is None:
        return _plain(path, titles, rows)
    students = [platform.student(row) for row in _records(titles, rows)]
    columns = [title for title in titles if platform.carries(folded(title))]
    known = [student for student in students if student is not None]
    return _checked(path, Roster(platform.NAME, tuple(columns), tuple(titles), _apart(known)))


def table(path: Path) -> tuple[list[str], list[list[str]]]:
    """(the first row, the others) of a CSV file. Raises BadRoster."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadRoster(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadRoster(f"{path} is not UTF-8 text. Fix: save it as CSV UTF-8") from None
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(row)]
    first = [title.strip() for title in rows[0]] if rows else []
    return first, rows[1:]


def _records(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[dict[str, str]]:
    """Rows as {column: value}; each value also under the column's folded name."""
    named = [*titles, *map(folded, titles)]
    return [dict(zip(named, [*_padded(row, titles)] * 2, strict=True)) for row in rows]


def _padded(row: Sequence[str], titles: Sequence[str]) -> list[str]:
    return [row[index].strip() if index < len(row) else "" for index in range(len(titles))]


def _plain(path: Path, titles: list[str], rows: list[list[str]]) -> Roster:
    low = [folded(title) for title in titles]
    at = next((low.index(name) for name in NAME_COLUMNS if name in low), None)
    if at is None:
        titles, rows, at = ["student"], [titles[:1], *rows] if titles else [], 0
    students = []
    for row in (_padded(row, titles) for row in rows):
        name = clean(full_name(row[at])) if row[at] else ""
        if name:
            others = [v for title, v in zip(low, row, strict=False) if IDENTIFIER.search(title)]
            record = dict(zip(titles, row, strict=True))
            students.append(Student(name, keys(row[at], row[at], *others), record))
    columns = [title for index, title in enumerate(titles) if index != at]
    return _checked(path, Roster("", tuple(columns), tuple(titles), tuple(students)))


def _apart(students: Sequence[Student]) -> tuple[Student, ...]:
    """Students whose names differ: to one of two that share a name, its identifier is added."""
    names = [student.name.casefold() for student in students]
    return tuple(
        student
        if names.count(student.name.casefold()) == 1
        else replace(student, name=clean(f"{student.name} {_identifier(student)}"))
        for student in students
    )


def _identifier(student: Student) -> str:
    return min(key.rpartition(":")[2] for key in student.keys if not key.startswith("name:"))


def _checked(path: Path, roster: Roster) -> Roster:
    if not roster.students:
        raise BadRoster(
            f"{path} has no names. Fix: write one name per line, or a CSV with a column student"
        )
    names = [student.name.casefold() for student in roster.students]
    if twice := [one.name for one in roster.students if names.count(one.name.casefold()) > 1]:
        raise BadRoster(
            f"{path} has {in_path(twice[0])} twice. Fix: make the names differ, for example by "
            "numbers"
        )
    return roster
