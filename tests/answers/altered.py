"""Answers that are the solution with a few words changed, or with something around it."""

from __future__ import annotations

import functools
from pathlib import Path

from ddpz_lite.course.check import notebooks

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"


@functools.cache
def solution(task: str) -> str:
    """The solution's answer cell."""
    (path,) = SOLUTIONS.glob(f"{task.partition('.')[0]}_*.ipynb")
    return notebooks.program(notebooks.read(path), task)[-1][1]


def altered(task: str, *changes: tuple[str, str]) -> str:
    """The solution with each text replaced, which must stand in it exactly once."""
    source = solution(task)
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{task}: {old!r} stands {source.count(old)} times in the solution")
        source = source.replace(old, new)
    return source


def wrapped(task: str, name: str, body: str) -> str:
    """The solution as `solution`, and after it an answer of the same name that may call it."""
    return f"{solution(task)}\n\nsolution = {name}\n\n\n{body}"
