"""Moodle: a folder (or a flat file) per submission, participants or a grading worksheet.

"Download all submissions" gives folders `Ada Lovelace_4711_assignsubmission_file/`, or, without
"Download submissions in folders", files whose names begin that way. The number is the submission's,
which the grading worksheet calls "Participant 4711".
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from ddpz_lite.course.grader.people import BadRoster, Roster, Sender, Student, full_name, keys
from ddpz_lite.course.grader.text import clean

if TYPE_CHECKING:
    from ddpz_lite.course.grader.report import Report

NAME = "moodle"
FILE = re.compile(r"(?P<name>.+)_(?P<id>\d+)_assignsubmission_[a-z]+(?:_.*)?", re.DOTALL)
FOLDER = re.compile(r".+_\d+_assignsubmission_[a-z]+_?", re.DOTALL)
FIRST, LAST = ("first name",), ("last name", "surname")
IDENTIFIERS = ("id number", "email address", "username")
SUBMITTED = "last modified (submission)"  # of a grading worksheet
TIMES = ("%A, %d %B %Y, %I:%M %p", "%A, %B %d, %Y, %I:%M %p")


def fits(titles: set[str]) -> bool:
    named = titles & {*FIRST} and titles & {*LAST}
    return bool(named and titles & {*IDENTIFIERS}) or {"identifier", "full name"} <= titles


def carries(title: str) -> bool:
    return title in (*FIRST, *LAST, *IDENTIFIERS, "identifier", "full name", "groups")


def student(row: dict[str, str]) -> Student | None:
    first = next((row[title] for title in FIRST if title in row), "")
    last = next((row[title] for title in LAST if title in row), "")
    name = full_name(row.get("full name", "")) or f"{first} {last}".strip()
    if not name:
        return None
    number = re.search(r"\d+$", row.get("identifier", ""))
    found = keys(name, *(row.get(title, "") for title in IDENTIFIERS)) | keys(f"{last} {first}")
    return Student(clean(name), found | ({f"{NAME}:{number[0]}"} if number else set()), row)


def sender(name: str) -> Sender | None:
    found = FILE.fullmatch(name)
    return Sender(NAME, full_name(found["name"]), found["id"]) if found else None


def feedback(name: str) -> str:
    """The place of a student's feedback in the zip of feedback files, for the submission `name`."""
    return FOLDER.match(name)[0] + "/feedback.html"


def submitted(row: dict[str, str]) -> datetime | None:
    """When a row of a grading worksheet says that the submission came, without a time zone."""
    for form in TIMES:
        try:
            return datetime.strptime(row.get(SUBMITTED, ""), form)
        except ValueError:
            continue
    return None


def marks(report: Report, roster: Roster) -> list[list[object]]:
    """For Grades, Import: identity columns and one per exercise. A grading worksheet: filled in.

    Students who handed in nothing keep an empty cell.
    """
    if "Grade" in roster.titles:
        return _worksheet(report, roster)
    rows: list[list[object]] = [[*roster.columns, *report.heads.values()]]
    for one in roster.students:
        points = report.marks_of(one.name)
        identity = [one.row[column] for column in roster.columns]
        rows.append([*identity, *(points.get(lesson, "") for lesson in report.heads)])
    return rows


def _worksheet(report: Report, roster: Roster) -> list[list[object]]:
    if len(report.heads) > 1:
        raise BadRoster(
            "a grading worksheet is about one assignment, but several exercises were graded. "
            "Fix: add --only with the exercise's number"
        )
    rows: list[list[object]] = [[*roster.titles]]
    for one in roster.students:
        grade = next(iter(report.marks_of(one.name).values()), "")
        rows.append([grade if t == "Grade" else one.row[t] for t in roster.titles])
    return rows
