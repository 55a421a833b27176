"""What becomes of what was handed in: a submission, or the reason why there is nothing to grade."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Submission:
    """One notebook of one student, reduced to what counts."""

    student: str  # safe in file names, tables and pages
    lesson: str
    where: str  # what the teacher finds it by
    sha256: str
    answers: tuple[tuple[str, str], ...]  # (id of the course's cell, source), each id once
    warnings: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()  # names that cells which are not taken seem to define


@dataclass(frozen=True)
class NotGraded:
    """What has no grade: whose it is, what the teacher finds it by, why, and the cure."""

    student: str
    where: str
    reason: str


class NotTaken(Exception):
    """Why something that was handed in is not taken, in one line."""
