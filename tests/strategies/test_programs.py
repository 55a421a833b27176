"""Random programs: what a script may combine, drawn by seed, against one process and plain torch.

PROGRAMS=1000 python -m pytest tests/strategies/test_programs.py
PROGRAMS=417:418 ...    the one that failed
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Case, Recipe, distance, groups, loop, rank_losses, reference
from core_jobs import build as build_module
from third_party import ScheduleFree
from torch import nn

import ddpz_lite as dz
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.precision import LossScale

WORLDS = (1, 2, 3)
HALVES = {None: 5e-6, torch.bfloat16: 0.04, torch.float16: 0.01}  # and how far each may be
OPTIMIZERS = (
    (torch.optim.SGD, (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.1))),
    (torch.optim.RMSprop, (("lr", 1e-3), ("eps", 0.1), ("momentum", 0.5))),
    (ScheduleFree, (("lr", 1e-2), ("eps", 0.1))),
)


@dataclass(frozen=True)
class Program:
    """One draw. clip: by our optimizer, by torch's norm, or by torch's values."""

    case: str
    recipe: Recipe
    stage: int
    world: int
    clip: str
    options: dict[str, Any]
    frozen: str | None = None  # parameters with this in their name

    @property
    def model(self) -> Case:
        case = CASES[self.case]
        return case if self.frozen is None else replace(case, build=lambda: self._built(case))

    def _built(self, case: Case) -> nn.Module:
        module = case.build()
        for name, param in module.named_parameters():
            param.requires_grad_(self.frozen not in name)
        return module


def drawn(seed: int) -> Program:
    pick = random.Random(seed).choice
    half, stage, clip = pick([*HALVES]), pick(range(4)), pick(("none", "ours", "norm", "value"))
    smooth = ("mlp", "gpt", "checkpointed", "dropout", "awkward")
    case = pick(("gpt", "dropout") if half else smooth)
    kind, values = pick(OPTIMIZERS)
    recipe = Recipe(
        kind,
        values,
        steps=2,
        micro_batches=pick((1, 1, 2, 3)),
        no_sync=pick((False, True)),
        clip={"none": None, "value": 0.01}.get(clip, 0.05),
        norm_type=pick((2.0, 2.0, float("inf"))),
        grouped=pick((False, True)),
        set_to_none=pick((True, True, False)) or case == "awkward",
    )
    options: dict[str, Any] = {"mixed_precision": half}
    if half is torch.float16:
        options["loss_scale"] = 256.0
    if half:
        options["reduce_dtype"] = pick((None, torch.float32))
    if stage < 3:
        options["bucket_mb"] = pick((1e-4, 1e-3, 8.0))
    else:
        options["reshard_after_forward"], options["prefetch"] = (
            pick((True, False)),
            pick((True, False)),
        )
    if stage > 0:
        options["offload"] = pick((False, False, True))
    world = pick(WORLDS)
    frozen = None if case == "awkward" else pick((None, None, "bias", "blocks.0."))
    return Program(case, recipe, stage, world, clip, options, frozen)


def clip_by(program: Program, model: nn.Module, optimizer: Any) -> None:
    recipe = program.recipe
    if program.clip == "ours" and optimizer is not None:
        optimizer.clip_grad_norm_(recipe.clip, recipe.norm_type)
    elif program.clip == "value":
        if optimizer is not None:
            optimizer.finalize_grads()
        nn.utils.clip_grad_value_(model.parameters(), recipe.clip)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type)


def run_program(program: Program) -> str:
    """What is wrong on this rank; nothing if it is right."""
    case, recipe, options = program.model, program.recipe, dict(program.options)
    alone = reference(case, recipe, program.world, lambda model: clip_by(program, model, None))
    if "loss_scale" in options:
        options["loss_scale"] = LossScale(options["loss_scale"])
    model, optimizer = parallelize(
        build_module(case),
        recipe.optimizer,
        program.stage,
        param_groups=groups if recipe.grouped else None,
        **options,
        **dict(recipe.options),
    )
    losses = rank_losses(model, case, recipe)
    loop(
        model, optimizer, lambda: clip_by(program, model, optimizer), recipe, losses, model.no_sync
    )
    state = dz.full_state_dict(model)
    everyone: list[Any] = [None] * program.world
    dist.all_gather_object(everyone, [float(v.double().sum()) for v in state.values()])
    if any(sums != everyone[0] for sums in everyone):
        return "the ranks differ"
    far = distance(state, alone)
    return "" if far < HALVES[options["mixed_precision"]] else f"{far:.1e} from one process"


def run_all(seeds: list[int]) -> dict[int, str]:
    torch.set_num_threads(1)  # the models are too small for more
    return {seed: wrong for seed in seeds if (wrong := run_program(drawn(seed)))}


def seeds() -> range:
    first, _, stop = os.environ.get("PROGRAMS", "50").rpartition(":")
    return range(int(first or 0), int(stop))


@pytest.mark.timeout(0 if "PROGRAMS" in os.environ else 300)
@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(world):
    own = [seed for seed in seeds() if drawn(seed).world == world]
    run = dz.launch(run_all, world, args=(own,), record=False, timeout=60 + 4 * len(own))
    for rank, wrong in enumerate(run):
        failures = {seed: (text, drawn(seed)) for seed, text in wrong.items()}
        assert not failures, f"rank {rank}: {failures}"
