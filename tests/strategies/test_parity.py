"""Every stage trains as one process would: all worlds, awkward models, all the ways to step.

One job per world runs all combinations, for starting ranks costs more than training these models.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, distance, reference, train

import ddpz_lite as dz

CLOSE = 2e-6  # fp32 rounding after three steps
STAGES = (0, 1, 2, 3)

RECIPES = {
    "plain": Recipe(),
    "micro_batches": Recipe(micro_batches=3),
    "no_sync": Recipe(micro_batches=3, no_sync=True),
    "clip": Recipe(clip=0.05),
    "clip_1": Recipe(clip=0.5, norm_type=1.0),
    "clip_inf": Recipe(clip=0.01, norm_type=float("inf")),
    "groups": Recipe(grouped=True),
    "zeros": Recipe(set_to_none=False),
}
WORK = [(case, "plain") for case in CASES] + [
    (case, recipe) for case in ("gpt", "awkward") for recipe in RECIPES if recipe != "plain"
]


def compare_all() -> dict[tuple[str, str, int], tuple[float, float]]:
    """{case, recipe, stage: (distance to one process, distance to ZeRO-2)}."""
    found = {}
    torch.set_num_threads(1)  # the models are too small for more
    for case, recipe in WORK:
        if case == "awkward" and recipe == "zeros":
            continue  # zeros are gradients: weight decay then moves unused parameters
        alone = reference(CASES[case], RECIPES[recipe], dist.get_world_size())
        states = {s: train(CASES[case], RECIPES[recipe], s)[0] for s in STAGES}
        for stage, state in states.items():
            found[case, recipe, stage] = distance(state, alone), distance(state, states[2])
    return found


def adds_in_the_same_order(recipe: str, stage: int, world: int) -> bool:
    """Whether a stage must equal ZeRO-2 bit for bit."""
    if recipe.startswith("clip"):
        return stage == 2  # the norm is summed shard by shard
    if recipe == "micro_batches":
        return stage >= 2  # DDP and ZeRO-1 add the micro-batches up before the ranks
    return stage > 0 or world <= 2  # the ranks of an all-reduce add in another order from three on


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.extra)])
def test_every_stage_equals_one_process(world):
    for rank, found in enumerate(dz.launch(compare_all, world, record=False, timeout=110)):
        far = {key: d for key, (d, _) in found.items() if not d < CLOSE}
        assert not far, f"rank {rank}: {far}"
        unequal = {
            (case, recipe, stage): d
            for (case, recipe, stage), (_, d) in found.items()
            if adds_in_the_same_order(recipe, stage, world) and d != 0
        }
        assert not unequal, f"rank {rank}: {unequal}"
