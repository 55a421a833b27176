"""Canvas: a flat zip of submissions, and the gradebook's CSV in both directions.

A file of the zip is called `lovelaceada_LATE_4711_90001_03_data_parallel-2.ipynb`: the name
(last name first, letters only), LATE or nothing, the user's id, the id of the uploaded file, the
student's own file name, and from the second attempt on its number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpz_lite.course.grader.people import Roster, Sender, Student, full_name, keys
from ddpz_lite.course.grader.text import clean

if TYPE_CHECKING:
    from ddpz_lite.course.grader.report import Report

NAME = "canvas"
IDENTITY = ("student", "id", "sis user id", "sis login id", "section")
FILE = re.compile(r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<user>\d+)_(?P<upload>\d+)_(?P<file>.+)")
ATTEMPT = re.compile(r"-(\d+)(?:\.\w+)?$")
TEST_STUDENT = "Student, Test"  # Canvas adds one to every course


def fits(titles: set[str]) -> bool:
    return {"student", "id", "section"} <= titles


def carries(title: str) -> bool:
    return title in IDENTITY


def student(row: dict[str, str]) -> Student | None:
    """None for the rows that Canvas adds: "Points Possible", posting policies, the test student."""
    name, number = row["student"], row["id"]
    if not number.isdigit() or name == TEST_STUDENT:
        return None
    others = (row.get("sis user id", ""), row.get("sis login id", ""))
    last_first = name.replace(",", " ")  # as in the names of files: `lovelaceada`
    found = keys(name, *others) | keys(last_first) | {f"{NAME}:{number}"}
    return Student(clean(full_name(name)), found, row)


def sender(name: str) -> Sender | None:
    found = FILE.fullmatch(name)
    if found is None:
        return None
    attempt = ATTEMPT.search(found["file"])
    order = int(found["upload"]), int(attempt[1]) if attempt else 0
    return Sender(NAME, found["name"], found["user"], bool(found["late"]), order)


def feedback(name: str) -> str:
    """What to call a student's feedback so that Canvas attaches it to the submission `name`."""
    return name[: FILE.fullmatch(name).start("file")] + "feedback.html"


def marks(report: Report, roster: Roster) -> list[list[object]]:
    """The gradebook with a column per exercise; other assignments stay as they are in Canvas.

    A column of the roster that begins with the exercise's number is the assignment; otherwise
    Canvas offers to make a new one. Students who handed in nothing keep an empty cell.
    """
    titles = {lesson: _assignment(lesson, head, roster) for lesson, head in report.heads.items()}
    rows: list[list[object]] = [[*roster.columns, *titles.values()]]
    possible = [report.possible[lesson] for lesson in titles]
    rows.append(["    Points Possible", *[""] * (len(roster.columns) - 1), *possible])
    for one in roster.students:
        points = report.marks_of(one.name)
        identity = [one.row[column] for column in roster.columns]
        rows.append([*identity, *(points.get(lesson, "") for lesson in titles)])
    return rows


def _assignment(lesson: str, head: str, roster: Roster) -> str:
    others = [title for title in roster.titles if title not in roster.columns]
    return next((title for title in others if re.match(rf"0*{lesson.lstrip('0')}\b", title)), head)
