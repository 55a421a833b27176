"""Answers to the tasks: wrong ones that people really give, and right ones in another style.

lessonNN.py has WRONG: task id -> list of Wrong, and RIGHT: task id -> list of (what is different
from the solution, the answer cell).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """One wrong answer to a task.

    name    what the mistake is, in a few words
    source  the answer cell with the mistake; the exercise's given cells run before it
    says    part of the sentence that it must receive, its own among the task's
    loses   the criteria (their `says`) that must fail; by default the task's first
    """

    name: str
    source: str
    says: str
    loses: tuple[str, ...] = ()
