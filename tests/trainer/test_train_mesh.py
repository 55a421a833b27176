"""`ddpz train --mesh`: the numbers of one process, and checkpoints that go on at another shape."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from train_state import write_text

import ddpz_lite as dz
from ddpz_lite.course.cli import main
from ddpz_lite.trainer.loop import train
from ddpz_lite.trainer.recipe import Recipe

# 61 windows: an epoch ends with a batch in which one data rank has less, or nothing.
TINY = {"context": 16, "layers": 2, "heads": 2, "width": 8, "batch": 2, "accumulate": 2}


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    text = write_text(tmp_path / "text", length=1090)
    return Recipe(text=text, **TINY, steps=12, lr=0.01, warmup=2, validate=6, sample=8)


def results(recipe: Recipe) -> tuple[list[float], str]:
    result = train(recipe)
    return [*result["losses"], *result["validation"].values()], result["sample"]


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ("2x2x1", 2),
        ("1x2x2", 0),
        ("data=2,context=2", 3),
        pytest.param("context=2,data=2", 0, marks=pytest.mark.rest),
        pytest.param("context=2,pipe=2", 1, marks=pytest.mark.rest),
        pytest.param("tensor=2,context=2", 2, marks=pytest.mark.rest),
        pytest.param("2x2x2", 1, marks=pytest.mark.extra),
    ],
)
def test_a_mesh_trains_as_one_process_on_all_batches(recipe, mesh, stage):
    many = replace(recipe, mesh=mesh, stage=stage)
    numbers, sample = results(replace(recipe, batch=2 * many.axes["data"]))
    assert len(numbers) == 14 and numbers[-3] < numbers[0]
    run = dz.launch(results, prod(many.axes.values()), args=(many,), record=False)
    for found, text in run:
        assert (found, text) == run[0]
        assert found == pytest.approx(numbers, abs=2e-4)
        assert len(text) == len(sample) > 0


@pytest.mark.parametrize(
    ("mesh", "ranks", "stage", "steps", "balance"),
    [
        ("data=2,expert=2", 4, 3, 12, 0.0),
        ("expert=2", 2, 2, 3, 0.1),
        pytest.param("expert=2", 2, 0, 12, 0.0, marks=pytest.mark.rest),
        pytest.param("expert=4", 4, 2, 12, 0.0, marks=pytest.mark.rest),
        pytest.param("data=4", 4, 1, 12, 0.0, marks=pytest.mark.rest),
        pytest.param("expert=2,pipe=2", 4, 1, 3, 0.1, marks=pytest.mark.rest),
        pytest.param("expert=2,context=2", 4, 3, 3, 0.1, marks=pytest.mark.rest),
        pytest.param(None, 2, 3, 3, 0.1, marks=pytest.mark.rest),
    ],
)
def test_experts_train_as_in_one_process(recipe, mesh, ranks, stage, steps, balance):
    """Balanced in the first steps: at an epoch's end ranks have other numbers of tokens."""
    recipe = replace(recipe, steps=steps, validate=steps, experts=4, balance=balance)
    many = replace(recipe, mesh=mesh, stage=stage)
    readers = many.axes["data"] * many.axes["expert"] if mesh else ranks
    numbers, sample = results(replace(recipe, batch=2 * readers))
    if balance:
        assert results(replace(recipe, batch=2 * readers, balance=0.0))[0] != numbers
    for found, text in dz.launch(results, ranks, args=(many,), record=False):
        assert found == pytest.approx(numbers, abs=1e-5)
        assert len(text) == len(sample) > 0


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb"])
def test_a_schedule_changes_only_the_order(recipe, schedule):
    deep = replace(recipe, layers=4, steps=3, validate=3)
    numbers, sample = results(deep)
    run = dz.launch(results, 2, args=(replace(deep, mesh="1x2x1", schedule=schedule),))
    for found, text in run:
        assert found == pytest.approx(numbers, abs=2e-4) and text == sample
    order = [span.name for span in run.spans if span.rank == 0]
    assert any("W0" in name for name in order) == (schedule == "zb"), order
    assert any("F0b" in name for name in order) == (schedule == "interleaved"), order


@pytest.mark.parametrize(
    ("shapes", "experts"),
    [
        ([("1x2x1", 0), ("2x1x2", 3), ("data=2,context=2", 1)], 0),
        pytest.param(
            [("data=2,expert=2", 3), ("expert=4", 1), ("pipe=2,expert=2", 0)],
            4,
            marks=pytest.mark.rest,
        ),
    ],
)
def test_a_run_continues_on_another_mesh(recipe, tmp_path, shapes, experts):
    """Three jobs, each from the checkpoint of the one before, at another shape and stage."""
    kept = replace(recipe, validate=0, sample=0, experts=experts, balance=0.0)
    found, alone = [], []
    for number, (mesh, stage) in enumerate(shapes, 1):
        now = replace(kept, steps=4 * number)
        one = replace(now, batch=4, checkpoint=str(tmp_path / "one"), resume=True)
        alone += train(one)["losses"]
        many = replace(now, mesh=mesh, stage=stage, checkpoint=str(tmp_path / "many"), resume=True)
        many = replace(many, batch=4 // (many.axes["data"] * many.axes["expert"]))
        run = dz.launch(train, prod(many.axes.values()), args=(many,), record=False)
        assert all(result["losses"] == run[0]["losses"] for result in run)
        found += run[0]["losses"]
    assert len(found) == 12
    assert found == pytest.approx(alone, abs=2e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mesh", "2x2"], "--mesh takes DxPxT, as 2x2x2 for 8 ranks, or names"),
        (["--mesh", "2x0x2"], "--mesh takes DxPxT"),
        (["--mesh", "data=2,rows=2"], "The names are data, pipe, expert, context, tensor."),
        (["--mesh", "data=2,data=2"], "as data=2,context=2; not 'data=2,data=2'"),
        (["--mesh", "context=3"], "--mesh context=3 cuts windows into 6 chunks"),
        (["--mesh", "context=2", "--dropout", "0.1"], "context=2 cuts windows, and needs"),
        (["--mesh", "context=2", "--ranks", "3"], "--mesh context=2 has 2 ranks, and --ranks"),
        (["--mesh", "1x3x1"], "--mesh 1x3x1 has 3 stages for --layers 2"),
        (["--mesh", "1x1x3"], "--mesh 1x1x3: --heads 2 do not divide by 3"),
        (["--mesh", "1x1x2", "--dropout", "0.1"], "--mesh 1x1x2 cuts heads, and needs --dropout 0"),
        (["--mesh", "expert=2"], "--experts 0 do not divide by it. Fix: --experts 8, say"),
        (["--mesh", "expert=2", "--experts", "3"], "--experts 3 do not divide by it"),
        (["--experts", "4", "--survive"], "--survive and --experts cannot be combined: the ranks"),
        (["--experts", "4", "--top-k", "5"], "--top-k 5 is more than --experts 4"),
        (["--experts", "4", "--mesh", "1x1x2"], "--mesh 1x1x2 cuts MLPs, and --experts 4 has none"),
        (["--schedule", "zb"], "--schedule zb is for stages. Fix: --mesh 1x2x1"),
        (["--mesh", "1x2x1", "--schedule", "interleaved"], "has 4 stages for --layers 2"),
        (["--mesh", "1x1x2", "--ranks", "3"], "--mesh 1x1x2 has 2 ranks, and --ranks says 3"),
    ],
)
def test_a_wrong_mesh_is_one_line_before_any_rank_starts(recipe, options, words, capsys):
    small = ["--layers", "2", "--heads", "2", "--width", "8", "--text", recipe.text]
    assert main(["train", *small, "--context", "16", *options]) == 2
    assert words in capsys.readouterr().err


def test_ranks_that_others_started_must_fill_the_mesh(recipe):
    with pytest.raises(dz.RankFailed, match="--mesh 2x2x1 needs 4 ranks, and there are 2"):
        dz.launch(train, 2, args=(replace(recipe, mesh="2x2x1"),), record=False)
