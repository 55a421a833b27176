"""Gradescope: its roster, and marks in the columns of its own "Download Grades" CSV.

Submissions reach the grader there one at a time, by an autograder; see `formats.gradescope`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpz_lite.course.grader.people import Roster, Sender, Student, full_name, keys
from ddpz_lite.course.grader.text import clean

if TYPE_CHECKING:
    from ddpz_lite.course.grader.report import Report

NAME = "gradescope"
IDENTITY = ("first name", "last name", "name", "sid", "email", "section", "sections")


def fits(titles: set[str]) -> bool:
    return {"sid", "email"} <= titles and bool(titles & {"name", "last name"})


def carries(title: str) -> bool:
    return title in IDENTITY


def student(row: dict[str, str]) -> Student | None:
    if row.get("role", "Student").casefold() not in ("student", ""):
        return None
    name = row.get("name") or f"{row.get('first name', '')} {row.get('last name', '')}".strip()
    return Student(clean(full_name(name)), keys(name, row["sid"], row["email"]), row)


def sender(name: str) -> Sender | None:
    return None


def marks(report: Report, roster: Roster) -> list[list[object]]:
    """A row per student: identity, then for each exercise the points and the most there are."""
    heads = [title for head in report.heads.values() for title in (head, f"{head} - Max Points")]
    rows: list[list[object]] = [[*roster.columns, *heads]]
    for one in roster.students:
        points = report.marks_of(one.name)
        cells = [(points.get(lesson, ""), report.possible[lesson]) for lesson in report.heads]
        identity = [one.row[column] for column in roster.columns]
        rows.append([*identity, *(value for pair in cells for value in pair)])
    return rows
