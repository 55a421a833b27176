"""Right answers that look different from the solution get full points, too.

A good student must never be told that a right answer is wrong. It is general: a new answer in
tests/answers needs no line here.
"""

from __future__ import annotations

import importlib

import pytest
from answers import trying

from ddpz_lite.grade.task import find, tasks

ANSWERS = {
    lesson: importlib.import_module(f"answers.lesson{lesson}").RIGHT for lesson in trying.lessons()
}
QUICK = ("01", "08")  # one process for each case; the others start several


def each():
    for lesson, of_task in ANSWERS.items():
        marks = () if lesson in QUICK else pytest.mark.slow
        for task, answers in of_task.items():
            for name, source in answers:
                yield pytest.param(task, source, id=f"{task}-{name}", marks=marks)


@pytest.mark.parametrize("lesson", trying.lessons())
def test_every_task_has_a_right_answer_in_another_style(lesson):
    assert list(ANSWERS[lesson]) == [task.id for task in tasks(lesson)]
    for answers in ANSWERS[lesson].values():
        names = [name for name, _ in answers]
        assert names and len(set(names)) == len(names)


@pytest.mark.parametrize(("task_id", "source"), list(each()))
def test_a_right_answer_in_another_style_gets_full_points(task_id, source):
    task = find(task_id)
    verdict = trying.judge(task, trying.master(task.lesson), source)
    assert verdict.solved and verdict.points == task.points, trying.sentences(verdict)
