"""The judge of 16.capstone trains the learner's steps again, and disturbs nothing."""

import pytest
import torch

import ddpz_lite as dz
from ddpz_lite.course.tasks.lesson16 import page
from ddpz_lite.course.tasks.lesson16.page import MODEL, TEXT, replay
from ddpz_lite.trainer.loop import train
from ddpz_lite.trainer.recipe import Recipe


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_has_the_losses_of_two_ranks_at_any_stage(stage):
    recipe = Recipe(text=str(TEXT), stage=stage, steps=8, validate=0, sample=0, **MODEL)
    ranks = dz.launch(train, 2, args=(recipe,), record=False)
    _, losses = replay(2, 8)
    assert losses == pytest.approx(ranks[0]["losses"], rel=1e-5)


def test_the_notebooks_random_numbers_and_threads_stay_as_they_are():
    before = torch.get_rng_state(), torch.get_num_threads()
    replay.cache_clear()
    replay(2, 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_a_plan_of_too_many_ranks_is_refused_and_not_trained():
    parts = {name: {field: kind() for field, kind in of.items()} for name, of in page.PARTS.items()}
    parts["plan"] |= {"nodes": 2, "ranks": 10**6}
    sentence = page._sizes(parts["plan"], parts["measurement"])
    assert sentence == "plan: 1000000 ranks, and this check can follow 16 at most."
