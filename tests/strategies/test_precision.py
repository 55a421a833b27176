"""bf16 and fp16: fp32 masters, the same result at every stage, and an inf on one rank."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, distance, reference, train
from torch import nn

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.precision import LossScale

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def every_stage() -> dict[tuple[str, str, int], tuple[float, float, bool]]:
    """(distance to fp32 in one process, distance to ZeRO-1, whether masters are fp32)."""
    found = {}
    torch.set_num_threads(1)  # the models are too small for more
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
                    masters = {p.dtype for p in optimizer.shards()} == {torch.float32}
                    far, near = distance(states[stage], alone), states.get(1, states[stage])
                    key = case, f"{name} {reduce_dtype or ''}", stage
                    found[key] = far, distance(states[stage], near), masters
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_half_precision_at_every_stage(world):
    for found in dz.launch(every_stage, world, record=False):
        for (case, kind, stage), (far, near, masters) in found.items():
            assert far < (0.02 if "bf16" in kind else 0.003), (case, kind, stage, far)
            assert masters
            if stage >= 2:
                assert near == 0.0, (case, kind, stage, near)


def batch_statistics() -> dict[tuple[str, int], tuple[float, float, set]]:
    """(distance to fp32 in one process, distance to ZeRO-1, dtypes that BatchNorm computes in)."""
    found, case = {}, CASES["cnn"]
    for name, half in HALVES.items():
        recipe, states = Recipe(micro_batches=2, no_sync=True), {}
        alone = reference(case, recipe, dist.get_world_size())
        for stage in (0, 1, 2, 3):
            options = {"loss_scale": LossScale(256.0)} if half is torch.float16 else {}
            states[stage], model, _ = train(case, recipe, stage, mixed_precision=half, **options)
            norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
            dtypes = {t.dtype for m in norms for t in (m.weight, m.bias, m.running_mean)}
            far, near = distance(states[stage], alone), states.get(1, states[stage])
            found[name, stage] = far, distance(states[stage], near), dtypes
    return found


def test_batch_statistics_stay_fp32_at_every_stage():
    for found in dz.launch(batch_statistics, 2, record=False):
        for key, (far, near, dtypes) in found.items():
            assert far < 0.05 and near < 1e-5, (key, far, near)
            assert dtypes == {torch.float32}, key


class PartlyFrozen(nn.Module):
    """A frozen linear layer and a frozen BatchNorm below one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).requires_grad_(False)
        self.free = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.free(self.frozen(x))


def frozen_ones(path: str) -> dict[int, list[bool]]:
    out = {}
    torch.manual_seed(0)
    exact = PartlyFrozen().state_dict()
    names = ["frozen.0.weight", "frozen.0.bias", "frozen.1.weight"]
    for stage in (0, 1, 2, 3):
        torch.manual_seed(10 * dist.get_rank())  # rank 0 has the seed of `exact`, others differ
        options = {"lr": 0.1, "mixed_precision": torch.bfloat16}
        model, optimizer = parallelize(PartlyFrozen(), torch.optim.SGD, stage, **options)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        state = dz.full_state_dict(model)
        out[stage] = [torch.equal(state[name], exact[name]) for name in names]
        dz.save_checkpoint(path, model, optimizer)
        other, second = parallelize(PartlyFrozen(), torch.optim.SGD, 3 - stage, **options)
        dz.load_checkpoint(path, other, second)
        state = dz.full_state_dict(other)
        out[stage] += [torch.equal(state[name], exact[name]) for name in names]
        changed = {name: value + 1 for name, value in exact.items()}
        dz.load_full_state_dict(model, changed)
        state = dz.full_state_dict(model)
        out[stage] += [torch.equal(state[name], changed[name]) for name in names]
        if stage < 3:  # compute uses what was loaded; masters are sharded, as the meter tells
            weight = model.module.frozen[0].weight
            out[stage].append(torch.equal(weight, changed[names[0]].bfloat16()))
            masters = sum(flat.shard.numel() for flat in model.masters)
            out[stage].append(masters == (5 * 7 + 7) // dist.get_world_size())
    return out


def test_frozen_parameters_keep_their_precision(tmp_path):
    for out in dz.launch(frozen_ones, 2, args=(str(tmp_path),), record=False):
        for stage, found in out.items():
            assert all(found), (stage, found)


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
            before = [p.detach().clone() for p in optimizer.shards()]
            explode = step == 1 and dist.get_rank() == dist.get_world_size() - 1
            model(torch.ones(2, 4), explode).sum().backward()
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            moved = [
                not torch.equal(a, b)
                for a, b in zip(before, optimizer.shards(), strict=True)
                if a.numel()
            ]
            finite = all(torch.isfinite(p).all() for p in optimizer.shards())
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
        before = [p.detach().clone() for p in optimizer.shards()]
        optimizer.inner.param_groups[0]["lr"] = 1.0
        optimizer.param_groups[0]["lr"] = 1e6
        optimizer.step()
        after = [p.detach() for p in optimizer.shards()]
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == survives


def test_scale_grows_after_good_steps():
    scale, alone = LossScale(scale=8.0, interval=3), Comm.alone()
    for _ in range(3):
        assert scale.update([torch.full((2,), 16.0)], alone, torch.device("cpu"))
    assert scale.scale == 16.0
    grads = [torch.full((2,), 16.0), torch.tensor([1.0, float("nan")])]
    assert not scale.update(grads, alone, torch.device("cpu"))
    assert (scale.scale, scale.skipped, grads[0].tolist()) == (8.0, 1, [16.0, 16.0])


def through_two_models() -> list[float]:
    """Relative distance to fp32 of gradients that pass through a second model's input, by stage."""
    found = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        plain = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
        pairs = [
            parallelize(
                copy.deepcopy(module),
                torch.optim.SGD,
                stage,
                lr=1.0,
                mixed_precision=torch.float16,
                loss_scale=LossScale(64.0),
            )
            for module in plain
        ]
        inputs = [torch.ones(2, 6, requires_grad=True) for _ in range(2)]
        (first, optimizer), (second, _) = pairs
        second(first(inputs[0])).square().mean().backward()
        plain[1](plain[0](inputs[1])).square().mean().backward()
        optimizer.step()
        torch.optim.SGD(plain[0].parameters(), lr=1.0).step()
        state, exact = dz.full_state_dict(first), plain[0].state_dict()
        found.append(max((state[n] - exact[n]).abs().max().item() for n in exact))
        found.append((inputs[0].grad - inputs[1].grad).abs().max().item())
    return found


def test_the_loss_scale_of_one_model_does_not_reach_another_or_an_input():
    for found in dz.launch(through_two_models, 2, record=False):
        assert max(found) < 1e-3  # a scale too many: 0.1 and more


class Hides(nn.Module):
    """Its output is an object of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> object:
        return SimpleNamespace(logits=self.layer(x))


def test_an_output_in_which_no_tensor_is_found():
    half = {"mixed_precision": torch.float16, "lr": 0.1}
    model, _ = parallelize(Hides(), torch.optim.SGD, 0, **half)
    with pytest.raises(TypeError, match="a SimpleNamespace, so its gradient would not be scaled"):
        model(torch.ones(1, 2))


def test_a_group_that_is_added_later_has_its_master_in_the_full_state():
    half = {"mixed_precision": torch.bfloat16, "lr": 0.1}
    model, optimizer = parallelize(nn.Linear(2, 3), torch.optim.SGD, 1, **half)
    late = torch.full((3,), 1.001)  # 1 in bf16
    model.module.late = nn.Parameter(late.clone())
    optimizer.add_param_group({"params": [model.module.late]})
    assert model.module.late.dtype is torch.bfloat16
    assert torch.equal(dz.full_state_dict(model)["late"], late)


class Dot(nn.Module):
    """Its gradient is its input, rounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(500))

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        return (self.weight * c).sum()


def rounded_sums(m: int) -> dict[int, tuple[float, float]]:
    """By stage: the largest error of m micro-batches' gradient, over two bounds of it.

    u is half the distance from 1 to the next bf16. The first bound is one rounding per micro-batch,
    u sum |g_k|; the second adds one for each running sum, u sum |G_k|.
    """
    u, world, found = torch.finfo(torch.bfloat16).eps / 2, dist.get_world_size(), {}
    g = torch.rand(world, m, 500, generator=torch.Generator().manual_seed(1)) + 0.5
    once = u * g.sum(1).mean(0)  # (500,)
    sums = once + u * g.cumsum(1)[:, 1:].sum(1).mean(0)
    for stage in (1, 2):
        options = {"lr": 1.0, "mixed_precision": torch.bfloat16}
        model, optimizer = parallelize(Dot(), torch.optim.SGD, stage, **options)
        for micro_batch in g[dist.get_rank()]:
            model(micro_batch).backward()
        optimizer.step()
        off = (dz.full_state_dict(model)["weight"].double() + g.double().sum(1).mean(0)).abs()
        found[stage] = (off / once).max().item(), (off / sums).max().item()
    return found


def test_bf16_micro_batches_round_each_gradient_and_at_zero1_each_running_sum():
    for found in dz.launch(rounded_sums, 3, args=(6,)):
        assert found[1][0] > 1.2  # so one rounding per micro-batch is no bound here
        assert found[1][1] < 1.01  # of second order in u
        assert found[2][0] < 1.01
