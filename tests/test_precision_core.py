"""bf16 and fp16: fp32 masters, the same result at every stage, and an inf on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, distance, reference, train
from torch import nn

import ddpz_lite as dz
from ddpz_lite.comm import Comm
from ddpz_lite.parallel import parallelize
from ddpz_lite.precision import LossScale

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def every_stage() -> dict[tuple[str, str, int], tuple[float, float, bool]]:
    """(distance to fp32 in one process, distance to ZeRO-1, whether masters are fp32)."""
    found = {}
    for case in ("gpt", "dropout"):  # smooth: a ReLU may flip where fp16 rounds
        for name, half in HALVES.items():
            recipe = Recipe(micro_batches=2, no_sync=True)
            alone = reference(CASES[case], recipe, dist.get_world_size())
            for reduce_dtype in (None, torch.float32):
                states = {}
                for stage in (0, 1, 2, 3):
                    options = {"mixed_precision": half, "reduce_dtype": reduce_dtype}
                    if half is torch.float16:
                        options["loss_scale"] = LossScale(256.0)
                    states[stage], _, optimizer = train(CASES[case], recipe, stage, **options)
                    masters = {p.dtype for p in optimizer.pieces()} == {torch.float32}
                    far, near = distance(states[stage], alone), states.get(1, states[stage])
                    key = case, f"{name} {reduce_dtype or ''}", stage
                    found[key] = far, distance(states[stage], near), masters
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_half_precision_at_every_stage(world):
    for found in dz.launch(every_stage, world, record=False):
        for (case, kind, stage), (far, near, masters) in found.items():
            assert far < (0.02 if "bf16" in kind else 0.003), (case, kind, stage, far)
            assert masters
            if stage >= 2:
                assert near == 0.0, (case, kind, stage, near)


class Exploding(nn.Module):
    """One element of its gradient is nan when asked: one rank's shard has it and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.spike = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, explode: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.spike * torch.tensor(float("nan") if explode else 0.0, dtype=x.dtype)


def inf_on_one_rank(clip: bool) -> dict[int, tuple]:
    out = {}
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model, optimizer = parallelize(
            Exploding(),
            torch.optim.SGD,
            stage,
            lr=0.1,
            mixed_precision=torch.float16,
            loss_scale=LossScale(scale=1024.0, interval=2),
        )
        seen = []
        for step in range(4):
            before = [p.detach().clone() for p in optimizer.pieces()]
            explode = step == 1 and dist.get_rank() == dist.get_world_size() - 1
            model(torch.ones(2, 4), explode).sum().backward()
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved = [
                not torch.equal(a, b)
                for a, b in zip(before, optimizer.pieces(), strict=True)
                if a.numel()
            ]
            finite = all(torch.isfinite(p).all() for p in optimizer.pieces())
            seen.append((any(moved), finite, optimizer.loss_scale.scale))
        out[stage] = (*seen, optimizer.loss_scale.skipped)
    return out


@pytest.mark.parametrize("clip", [False, True])
def test_inf_on_one_rank_skips_the_step_on_all(clip):
    for out in dz.launch(inf_on_one_rank, 3, args=(clip,), record=False):
        for stage, (*steps, skipped) in out.items():
            assert [finite for _, finite, _ in steps] == [True] * 4, stage
            assert [scale for _, _, scale in steps] == [1024.0, 512.0, 512.0, 1024.0], stage
            assert steps[1][0] is False and skipped == 1, stage
            assert steps[3][0], stage


def test_small_gradients_survive_only_with_a_scale():
    for scale, survives in ((1.0, False), (2.0**16, True)):
        module = nn.Linear(1, 1, bias=False)
        model, optimizer = parallelize(
            module,
            torch.optim.SGD,
            3,
            lr=1.0,
            mixed_precision=torch.float16,
            loss_scale=LossScale(scale),
        )
        (model(torch.ones(1, 1)).sum() * 1e-9).backward()
        before = [p.detach().clone() for p in optimizer.pieces()]
        optimizer.inner.param_groups[0]["lr"] = 1.0
        optimizer.param_groups[0]["lr"] = 1e6
        optimizer.step()
        after = [p.detach() for p in optimizer.pieces()]
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == survives


def test_scale_grows_after_good_steps():
    scale, alone = LossScale(scale=8.0, interval=3), Comm.alone()
    for _ in range(3):
        assert scale.unscale_([torch.full((2,), 16.0)], alone, torch.device("cpu"))
    assert scale.scale == 16.0
    grads = [torch.full((2,), 16.0), torch.tensor([1.0, float("nan")])]
    assert not scale.unscale_(grads, alone, torch.device("cpu"))
    assert (scale.scale, scale.skipped, grads[0].tolist()) == (8.0, 1, [1.0, 1.0])
