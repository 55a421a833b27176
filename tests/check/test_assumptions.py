"""Answers that assume what no text allows: none of them passes, but those that are right."""

from __future__ import annotations

import pytest
from answers import assumptions

from ddpz_lite.course.check.task import find, lessons, tasks

SAMPLED = ("02.tree_broadcast", "07.largest_rate", "17.estimate")  # of one or two cheap launches


@pytest.mark.parametrize("task_id", SAMPLED)
def test_no_argument_of_a_sampled_task_can_be_assumed(task_id):
    names, alive = assumptions.survivors(find(task_id))
    assert len(names) > 1 and not alive


@pytest.mark.extra
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lesson", lessons())
def test_only_assumptions_that_are_listed_as_right_pass(lesson):
    for task in tasks(lesson):
        _, alive = assumptions.survivors(task)
        assert set(alive) == set(assumptions.allowed(task)), task.id
