"""Random programs on meshes of data, pipe and tensor, drawn by seed, compared with one process.

PROGRAMS=1000 python -m pytest tests/strategies/test_programs_mesh.py
PROGRAMS=417:418 ...    the one that failed
"""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import distance
from test_programs import seeds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from ddpz_lite.strategies.tensor.vocabulary import vocabulary_loss

WORLD, V, T, ROWS, STEPS = 4, 12, 4, 16, 2
SHAPES = ((2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4))  # data, pipe, tensor
OPTIMIZERS = (
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01}),
)
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero bubble": zero_bubble,
    "interleaved": lambda p, m: interleaved(p, m, 2),
}


@dataclass(frozen=True)
class Program:
    """One draw. clip: by the norm, ours and then torch's, or by torch's values."""

    shape: tuple[int, int, int]
    schedule: str
    stage: int
    cut: dict[str, bool]
    config: dz.GPTConfig
    frozen: str | None  # parameters with this in their name
    optimizer: Any
    clip: str
    half: torch.dtype | None
    micro_batches: int
    no_sync: bool
    evaluates: bool

    def model(self) -> dz.GPT:
        torch.manual_seed(3)
        model = dz.GPT(self.config)
        for name, param in model.named_parameters():
            param.requires_grad_(self.frozen is None or self.frozen not in name)
        return model


def drawn(seed: int) -> Program:
    pick = random.Random(seed).choice
    shape = pick(SHAPES)
    return Program(
        shape=shape,
        schedule=pick([*SCHEDULES]),
        stage=pick(range(4)),
        cut={"sequence": pick((False, True)), "vocabulary": pick((False, True))},
        config=dz.GPTConfig(
            vocab_size=V,
            context=T,
            layers=pick((8, 9)),
            heads=4,
            width=8,
            tied=pick((False, True)),
        ),
        frozen=pick((None, None, "tokens", "bias", "blocks.0.", "blocks.7.", "norm")),
        optimizer=pick(OPTIMIZERS),
        clip=pick(("none", "norm", "value")),
        half=pick((None, None, None, torch.bfloat16)),
        micro_batches=4,
        no_sync=pick((False, True)),
        evaluates=pick((False, True)),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (ROWS, T + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def alone(program: Program) -> tuple[dict[str, Tensor], Tensor]:
    model = program.model()
    params = [p for p in model.parameters() if p.requires_grad]
    kind, options = program.optimizer
    optimizer = kind(params, **options)
    for step in range(STEPS):
        x, y = batch(step)
        dz.next_token_loss(model(x), y).backward()
        if program.clip == "norm":
            nn.utils.clip_grad_norm_(params, 0.05)
        elif program.clip == "value":
            nn.utils.clip_grad_value_(params, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {n: v.detach() for n, v in model.state_dict().items()}, model(batch(9)[0]).detach()


def run_program(program: Program) -> str:
    """What is wrong on this rank; nothing if it is right."""
    mesh = init_device_mesh("cpu", program.shape, mesh_dim_names=("data", "pipe", "tensor"))
    pipes = program.shape[1]
    chunks = 2 if program.schedule == "interleaved" else 1
    model = dz.tensor_parallel(program.model(), mesh["tensor"], **program.cut)
    schedule = SCHEDULES[program.schedule](pipes, program.micro_batches)
    pipe = dz.Pipeline(gpt_stages(model, pipes * chunks), schedule, mesh["pipe"])
    kind, options = program.optimizer
    pipe, optimizer = dz.parallelize(
        pipe, kind, program.stage, mesh=mesh, mixed_precision=program.half, **options
    )
    is_cut = program.cut["vocabulary"] and program.shape[2] > 1
    group = mesh["tensor"].get_group()

    def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
        loss = vocabulary_loss(logits, y, group) if is_cut else dz.next_token_loss(logits, y)
        return loss / 2

    data, rank = program.shape[0], mesh.get_local_rank("data")
    for step in range(STEPS):
        halves = zip(*(t.chunk(data)[rank].chunk(2) for t in batch(step)), strict=True)
        for index, (x, y) in enumerate(halves):
            with pipe.no_sync() if program.no_sync and index == 0 else nullcontext():
                pipe.step(x, y, loss_fn)
        if program.clip == "norm" and step == 0:
            optimizer.clip_grad_norm_(0.05)
        elif program.clip == "norm":
            nn.utils.clip_grad_norm_(pipe.parameters(), 0.05)
        elif program.clip == "value":
            optimizer.finalize_grads()
            nn.utils.clip_grad_value_(pipe.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    state, (right, logits) = dz.full_state_dict(pipe), alone(program)
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, [float(v.double().sum()) for v in state.values()])
    if any(sums != everyone[0] for sums in everyone):
        return "the ranks differ"
    bound = 2e-5 if program.half is None else 0.04
    if not distance(state, right) < bound:
        return f"{distance(state, right):.1e} from one process"
    if program.evaluates and (out := pipe(batch(9)[0])) is not None:
        if is_cut:
            logits = logits.chunk(program.shape[2], -1)[mesh.get_local_rank("tensor")]
        far = (out - logits).abs().max().item()
        return "" if far < (1e-4 if program.half is None else 0.1) else f"outputs off by {far:.1e}"
    return ""


def run_all(seeds: list[int]) -> dict[int, str]:
    torch.set_num_threads(1)
    return {seed: wrong for seed in seeds if (wrong := run_program(drawn(seed)))}


@pytest.mark.rest
@pytest.mark.timeout(0 if "PROGRAMS" in os.environ else 300)
def test_random_programs_on_meshes():
    chosen = list(seeds())
    run = dz.launch(run_all, WORLD, args=(chosen,), record=False, timeout=60 + 4 * len(chosen))
    for rank, wrong in enumerate(run):
        failures = {seed: (text, drawn(seed)) for seed, text in wrong.items()}
        assert not failures, f"rank {rank}: {failures}"
