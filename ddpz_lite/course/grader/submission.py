"""What intake returns: a submission, or the reason why there is nothing to grade."""

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
    late: bool = False  # by the platform's word


@dataclass(frozen=True)
class NotGraded:
    """What has no grade: the student ("" for none), where it is, why, and the fix."""

    student: str
    where: str
    reason: str


class NotTaken(Exception):
    """Why something that was handed in is not taken, in one line."""
