"""The judge of 16.capstone trains the learner's steps again, and disturbs nothing."""

import pytest
import torch
from answers import lesson16

import ddpz_lite as dz
from ddpz_lite.course.check.progress import own_seed
from ddpz_lite.course.check.score import score
from ddpz_lite.course.check.task import Case, Observed
from ddpz_lite.course.tasks.lesson16 import page
from ddpz_lite.course.tasks.lesson16.page import CAPSTONE, MODEL, TEXT, replay
from ddpz_lite.trainer.loop import train
from ddpz_lite.trainer.recipe import Recipe


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_has_the_losses_of_two_ranks_at_any_stage(stage):
    recipe = Recipe(text=str(TEXT), stage=stage, steps=8, validate=0, sample=0, seed=5, **MODEL)
    ranks = dz.launch(train, 2, args=(recipe,), record=False)
    assert ranks[0]["losses"] == pytest.approx(replay(2, 8, 5).losses, rel=1e-5)


def test_another_seed_is_further_away_than_the_tolerances():
    one, other = replay(2, 20, 4711), replay(2, 20, 4712)
    apart = [abs(a - b) / b for a, b in zip(one.losses, other.losses, strict=True)]
    assert max(apart) > 5 * page.ROUNDING
    assert abs(one.weights[0] - other.weights[0]) > 100 * page.DRIFT * one.weights[1]


def test_the_notebooks_random_numbers_and_threads_stay_as_they_are():
    before = torch.get_rng_state(), torch.get_num_threads()
    replay.cache_clear()
    replay(2, 2, 5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def judged(source, own=None):
    """The verdict on a page; own: the seed of the learner whose notebook checks it."""
    scope = {}
    exec(source, scope)
    case = Case("the page", [{} if own is None else {"seed": own}])
    return score(CAPSTONE, [Observed(case, "ok", data=[{"page": scope["page"]()}])])


def test_a_page_counts_for_the_learner_with_its_seed_and_for_no_other():
    assert judged(lesson16.page(), own=4711).points == CAPSTONE.points
    copied = judged(lesson16.page(), own=99)
    assert copied.points == 0
    assert "seed 4711, another learner's. Yours is 99" in copied.findings[0].sentence
    assert judged(lesson16.page()).points == CAPSTONE.points  # a grader does not know whose it is


FORGED = [wrong for wrong in lesson16.WRONG["16.capstone"] if wrong.loses == lesson16.EVIDENCE]


@pytest.mark.parametrize("wrong", FORGED, ids=lambda wrong: wrong.name)
def test_a_page_without_evidence_gets_nothing(wrong):
    verdict = judged(wrong.source)
    assert verdict.points == 0 and wrong.says in verdict.findings[0].sentence


def test_no_field_of_a_page_can_be_nan_or_left_out():
    scope = {}
    exec(lesson16.page(), scope)
    for part, fields in page.PARTS.items():
        for field in fields:
            for value in (float("nan"), "apple pear plum", None):
                right = scope["page"]()
                right[part][field] = value
                case = Case("the page", [{}])
                verdict = score(CAPSTONE, [Observed(case, "ok", data=[{"page": right}])])
                assert verdict.points == 0, (part, field, value)


def test_a_seed_is_drawn_once_for_each_home_and_is_not_the_lessons(tmp_path, monkeypatch):
    seeds = []
    for name in ("ada", "grace"):
        monkeypatch.setenv("DDPZ_HOME", str(tmp_path / name))
        seeds.append(own_seed())
        assert seeds[-1] == own_seed() == dz.check.seed()
    assert len(set(seeds)) == 2 and page.LESSON not in seeds
    (tmp_path / "ada" / "seed").write_text("apple")
    monkeypatch.setenv("DDPZ_HOME", str(tmp_path / "ada"))
    with pytest.raises(ValueError, match="does not hold a seed"):
        own_seed()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ranks": 10**6}, "plan: 1000000 ranks, and this check can follow 16 at most."),
        ({"steps": 10**6}, "plan: 1000000 steps, and this check trains 60 again at most."),
    ],
)
def test_a_plan_that_is_too_large_is_refused_and_not_trained(change, sentence):
    plan = {"seed": 1, "nodes": 2, "ranks": 2, "stage": 2, "steps": 20, "save_every": 4, "kill": 9}
    assert page._sizes(plan | change, {}) == sentence
