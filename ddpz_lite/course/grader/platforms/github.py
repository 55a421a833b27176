"""GitHub Classroom: its roster. Repositories are called `assignment-username`."""

from __future__ import annotations

from ddpz_lite.course.grader.people import Sender, Student, full_name, keys
from ddpz_lite.course.grader.text import clean

NAME = "github"
IDENTITY = ("identifier", "github_username", "name")


def fits(titles: set[str]) -> bool:
    return {"identifier", "github_username"} <= titles


def carries(title: str) -> bool:
    return title in IDENTITY


def student(row: dict[str, str]) -> Student | None:
    name, user = row.get("name") or row["identifier"], row["github_username"].casefold()
    found = keys(name, row["identifier"], user) | ({f"{NAME}:{user}"} if user else set())
    return Student(clean(full_name(name)), found, row) if name else None


def sender(name: str) -> Sender | None:
    return None
