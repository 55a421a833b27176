"""`ddpz train --survive`: a rank dies; the others end as fewer ranks from there on would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from train_state import assert_same, state, write_text

import ddpz_lite as dz
from ddpz_lite.checkpoint import save_load as checkpoint
from ddpz_lite.course.cli import main
from ddpz_lite.course.cli import train as command
from ddpz_lite.data import corpus
from ddpz_lite.trainer import loop, saving
from ddpz_lite.trainer.batches import Batches
from ddpz_lite.trainer.loop import Run, train
from ddpz_lite.trainer.recipe import Recipe, flag_of
from ddpz_lite.trainer.survivors import Survivors

pytestmark = pytest.mark.rest

WORLD, STEPS, HIT = 3, 8, 4  # the step in which a rank is lost
# An epoch of 61 windows ends in step 6: 12 at once for three ranks, 8 for two.
TINY = {"context": 16, "layers": 1, "heads": 2, "width": 8, "batch": 2, "accumulate": 2}
PLACES = {  # where the victim dies: who, and how many updates count by then
    "before the update": (2, HIT - 1),
    "in backward": (0, HIT - 1),
    "after the update": (2, HIT),
    "after an update that one has missed": (2, HIT),
    "in the validation": (0, HIT),
    "in the save": (0, HIT),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    text = write_text(tmp_path_factory.mktemp("survive") / "text", length=1090)
    how = {"steps": STEPS, "validate": HIT, "save_every": HIT, "lr": 0.01, "sample": 5}
    return Recipe(text=text, **TINY, **how, report=1)


def keeping_all(recipe: Recipe) -> dict[str, Any]:
    saving.Saver._remove_old = lambda *_: None
    return train(recipe)


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """By three ranks to the end, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("undisturbed")
    saved = replace(recipe, checkpoint=str(folder), save_every=1)
    return dz.launch(keeping_all, WORLD, args=(saved,), record=False)[0], folder


def train_and_die(
    recipe: Recipe, store: str, place: str, victim: int, folder: str
) -> dict[str, Any]:
    """Train; the victim dies. Each rank writes which windows it counted, step by step."""
    me, drawn = int(os.environ["RANK"]), []
    parts = {name: getattr(Run, name) for name in ("do", "update", "after")}
    epoch, accumulate = Batches.epoch, loop.accumulate

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(batches: Batches):
        for batch in epoch(batches):
            if batches.sampler.shuffle:  # of the training split
                own = batch.inputs.tolist()[: batch.count]
                drawn.extend((batches.sampler.epoch, window) for window in own)
            yield batch

    def update(run: Run, step: int) -> None:
        drawn.clear()
        if step == HIT and len(run.team.members) == WORLD:
            prepare(run)
        parts["update"](run, step)

    def do(run: Run, number: int, part, step: int) -> None:
        parts["do"](run, number, part, step)
        if number % 2:
            Path(folder, f"seen-{me}-{step}").write_text(json.dumps(drawn))

    def miss(run: Run) -> None:
        def lose() -> None:
            del run.optimizer.step
            raise RuntimeError("Connection closed by peer")

        run.optimizer.step = lose

    def prepare(run: Run) -> None:
        if "missed" in place and me == 0:
            miss(run)
        if me != victim:
            return
        if place == "before the update":
            die()
        elif place == "in backward":
            loop.accumulate = lambda *args: (accumulate(*args), die())
        elif place.startswith("after"):
            Run.after = die
        elif place == "in the validation":
            loop.validation_loss = die
        elif place == "in the save":
            checkpoint._write = die

    Batches.epoch, Run.update, Run.do = watched, update, do
    team = Survivors(dist.FileStore(store, WORLD), me, WORLD)
    return train(recipe, team) | {"members": team.members}


@pytest.mark.parametrize("place", PLACES)
def test_survivors_continue_as_two_ranks_would_from_there(recipe, uninterrupted, tmp_path, place):
    victim, boundary = PLACES[place]
    by_three, checkpoints = uninterrupted
    here = replace(recipe, checkpoint=str(tmp_path / "runs"), survive=True)
    args = (here, str(tmp_path / "store"), place, victim, str(tmp_path))
    ranks = dz.launch(train_and_die, WORLD, args=args, record=False, survivors=True)
    left = [rank for rank in range(WORLD) if rank != victim]
    assert ranks[victim] is None and all(ranks[rank]["members"] == left for rank in left)

    there = replace(recipe, checkpoint=str(tmp_path / "two"), resume=True)
    name = f"step-{boundary:08d}"
    shutil.copytree(checkpoints / name, tmp_path / "two" / name)
    by_two = dz.launch(train, WORLD - 1, args=(there,), record=False)[0]
    assert by_two["first"] == boundary
    for rank in left:  # the same on all
        assert ranks[rank]["losses"] == by_three["losses"][:boundary] + by_two["losses"]
        assert ranks[rank]["sample"] == by_two["sample"]
        assert ranks[rank]["validation"].keys() == {HIT, STEPS}
        assert ranks[rank]["validation"][STEPS] == by_two["validation"][STEPS]
    last = f"step-{STEPS:08d}"
    ends = [state(recipe, tmp_path / way / last) for way in ("runs", "two")]
    # No dropout here, so none has used its random generator; they are those of other ranks.
    assert_same(*({k: v for k, v in end.items() if not k.startswith("rng-")} for end in ends))

    windows = sorted(x.tolist() for x, _ in corpus(recipe.text).windows(recipe.context))
    assert seen(tmp_path, 0) == windows and seen(tmp_path, 1)  # once and only once
    assert len(list(tmp_path.glob(f"seen-{victim}-*"))) == boundary


def seen(folder: Path, epoch: int) -> list[list[int]]:
    """The windows of an epoch that counted on any rank, the dead one's too."""
    recorded = [json.loads(path.read_text()) for path in folder.glob("seen-*")]
    return sorted(window for windows in recorded for number, window in windows if number == epoch)


def test_the_command_continues_and_prints_it(recipe, tmp_path, capsys, monkeypatch):
    own = command.survive

    def one_dies(recipe: Recipe, store: str) -> str | None:
        after = Run.after

        def at_three(run: Run, step: int) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            after(run, step)

        if os.environ["RANK"] == "0":
            Run.after = at_three
        return own(recipe, store)

    monkeypatch.setattr(command, "survive", one_dies)
    names = ("text", "context", "layers", "heads", "width", "batch", "steps", "report", "validate")
    options = [word for n in names for word in (flag_of(n), str(getattr(recipe, n)))]
    words = ["train", *options, "--checkpoint", str(tmp_path), "--ranks", "3", "--survive"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "[rank 0] was killed by SIGKILL" in out
    assert "step 3/8  2 ranks left to continue, with 64 tokens a step" in out
    assert re.search(r"^\[rank 1\] step 8/8  loss ", out, re.MULTILINE)
    assert saving.complete(tmp_path)[0].name == "step-00000008"

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    assert main([*words, "--resume"]) == 2
    assert "--survive is for ranks that this command starts" in capsys.readouterr().err
