"""What judges must not take for the property: answers that want its points without it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from answers import trying
from attacks.student import CHEATS

from ddpz_lite.course.check.score import Verdict, score
from ddpz_lite.course.check.task import find
from ddpz_lite.course.grader import Limits, SandboxPool, observe_in_sandbox, probe
from ddpz_lite.course.grader.exercise import Pristine, pristine

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(not probe().ok, reason="no sandbox can be had here"),
]


@pytest.fixture(scope="module", autouse=True)
def pool():
    with SandboxPool():
        yield


@cache
def exercise_of(lesson: str) -> Pristine:
    (path,) = SOLUTIONS.glob(f"{lesson}_*.ipynb")
    return pristine(path)


def verdict(task_id: str, source: str) -> Verdict:
    """Of an answer that is graded in the sandbox."""
    task = find(task_id)
    exercise = exercise_of(task.lesson)
    given = [(name, text) for name, text, of in exercise.cells if of is None]
    name = next(name for name, of in exercise.answers.items() if of == task_id)
    cases = task.cases(torch.Generator().manual_seed(5))
    seen = observe_in_sandbox(task, [*given, (name, source)], cases, Limits(timeout_factor=3))
    return score(task, seen)


def by_name():
    """One cheat of each lesson for `make test`; the others try the same in other words."""
    tried = set()
    for cheat in CHEATS:
        lesson = cheat.task.partition(".")[0]
        marks = [pytest.mark.extra] if lesson in tried else []
        tried.add(lesson)
        yield pytest.param(cheat, id=f"{cheat.task}-{cheat.name}", marks=marks)


@pytest.mark.parametrize("cheat", [*by_name()])
def test_an_answer_without_the_property_does_not_get_its_points(cheat):
    found = verdict(cheat.task, cheat.source)
    assert found.points <= cheat.points, trying.sentences(found)
