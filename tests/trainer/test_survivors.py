"""Survivors go on with N - 1 ranks, bit for bit as if these had begun at that step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors_ranks import CASES, HIT, STEPS, build, found, update
from torch import nn

import ddpz_lite as dz

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("survivors_ranks.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> dict[str, dict[int, Any]]:
    """By case and rank, what those who were left have written."""
    folder = tmp_path_factory.mktemp("survivors")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], env=env, check=True, timeout=600)
    return {
        name: {
            rank: torch.load(path, weights_only=False)
            for rank in range(case.world)
            if (path := folder / f"{name}-{rank}.pt").exists()
        }
        for name, case in CASES.items()
    }


def steps_of(options: dict, states: list[dict] | None, first: int, last: int) -> dict[str, Any]:
    """Steps `first` to `last` by ranks that begin with these states, or from scratch."""
    torch.set_num_threads(1)  # as there: a rank that is alone would have all
    model, optimizer = build(**options)
    torch.manual_seed(100 + dist.get_rank())
    if states is not None:
        own = states[dist.get_rank()]
        dz.load_full_state_dict(model, own["model"])
        optimizer.load_state_dict(own["optimizer"])
        torch.set_rng_state(own["random"])
        if own["scale"]:
            vars(optimizer.loss_scale).update(own["scale"])
    for step in range(first, last):
        update(model, optimizer, step, lambda _: None)
    return found(model, optimizer)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


WHOLE = [name for name, case in CASES.items() if case.victims and "stage" not in case.options]


@pytest.mark.parametrize("name", WHOLE)
def test_survivors_end_as_fewer_ranks_from_that_step_would(left, name):
    case, here = CASES[name], left[name]
    members = [rank for rank in range(case.world) if rank not in case.victims]
    assert list(here) == members
    worlds = here[members[-1]]["worlds"]
    by_all = max(step for step, world in worlds if world == case.world)  # the last that they began
    counted = [step for step, world in worlds if world == len(members)]
    boundary = counted[0]  # the first by those who are left
    assert counted == list(range(boundary, STEPS)) and boundary in (by_all, by_all + 1)
    if case.place in ("forward", "backward"):
        assert boundary == HIT  # no rank can have done it
    if case.place == "after the step":
        assert boundary == HIT + 1  # all ranks have taken part in it
    args = case.options, None, 0, boundary
    before = dz.launch(steps_of, case.world, args=args, record=False)
    states = [before[rank] for rank in members]
    if case.behind is not None:  # its running statistics are those of the rank that was ahead
        ahead = next(rank for rank in members if rank != case.behind)
        states[members.index(case.behind)]["model"] = before[ahead]["model"]
    after = dz.launch(
        steps_of, len(members), args=(case.options, states, boundary, STEPS), record=False
    )
    for place, rank in enumerate(members):
        assert here[rank]["members"] == members
        for key, value in after[place].items():
            assert same(here[rank][key], value), (rank, key)


def test_state_that_is_lost_is_refused_with_a_fix(left):
    for name in ("stage 1", "stage 2", "stage 3", "hybrid"):
        assert list(left[name]) == list(range(CASES[name].world - 1))
        for of_rank in left[name].values():
            assert of_rank["error"].startswith("a rank is lost, and its shard of the state")
            assert "Fix: start the remaining ranks again and load_check" in of_rank["error"]


def test_a_rank_that_comes_too_late_gets_an_error(left):
    assert left["late"][0]["members"] == left["late"][1]["members"] == [0, 1]
    assert "rank 2 came too late: ranks [0, 1] continued" in left["late"][2]["error"]


def test_other_errors_are_not_taken_for_a_death():
    team = dz.Survivors(dist.HashStore(), 0, 1)
    model, optimizer = dz.parallelize(nn.Linear(2, 1), torch.optim.SGD, lr=0.1)

    def fails(error: Exception) -> None:
        raise error

    for error in (RuntimeError("shapes do not fit"), ValueError("Connection closed by peer")):
        with pytest.raises(type(error), match=str(error)):
            team.attempt(lambda: fails(error), model, optimizer, 0)  # noqa: B023
    assert team.attempt(optimizer.step, model, optimizer, 4) == 5
    assert not optimizer._optimizer_step_post_hooks and team.generation == 0
    dist.destroy_process_group()
