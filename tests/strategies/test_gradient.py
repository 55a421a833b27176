"""Between backward and step, at every stage: torch's clipping, a GradScaler, loops over `p.grad`.

Whatever a script does to gradients, or to parameters, must end where it ends in one process.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from core_jobs import raised
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import ddpz_lite as dz
from ddpz_lite.checkpoint.parts import local_parameters
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.gradient import Gradient
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.zero3 import ZeRO3

STAGES = (0, 1, 2, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)
    )


def by_hand(model: nn.Module) -> None:
    norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.div_(10 * norm)


def one_by_one(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        if number == 1:
            p.grad = None
        elif number == 2:
            p.grad.zero_()
        elif number == 3:
            p.grad = p.grad * 0.25
        else:
            p.grad /= 2
            p.grad.mul_(0.5)


def by_foreach(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters()]
    torch._foreach_mul_(grads, 0.5 / torch.stack(torch._foreach_norm(grads)).max())


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda m: clip_grad_norm_(m.parameters(), 0.01),
    "inf norm": lambda m: clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")),
    "clip_grad_value_": lambda m: clip_grad_value_(m.parameters(), 0.003),
    "zero_grad": lambda m: m.zero_grad(),
    "zeros": lambda m: m.zero_grad(set_to_none=False),
    "by hand": by_hand,
    "one by one": one_by_one,
    "foreach": by_foreach,
}


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in b)


def changed_between() -> dict[tuple[str, int], float]:
    """Distance to one process after three steps, two backwards each, by change and stage."""
    torch.set_num_threads(1)
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    data = torch.randn(6, 2 * world, 5, generator=torch.Generator().manual_seed(5))
    for name, change in CHANGES.items():
        plain = net()
        alone = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        pairs = {
            s: parallelize(net(), torch.optim.AdamW, s, lr=1e-2, bucket_mb=1e-4) for s in STAGES
        }
        for first in range(0, 6, 2):
            for x in data[first : first + 2]:
                for r in range(world):
                    (plain(x[r::world]).square().mean() / world).backward()
            change(plain)
            alone.step()
            alone.zero_grad()
            for stage, (model, optimizer) in pairs.items():
                for x in data[first : first + 2]:
                    model(x[rank::world]).square().mean().backward()
                change(model if stage == 3 else model.module)
                optimizer.step()
                optimizer.zero_grad()
        for stage, (model, _) in pairs.items():
            found[name, stage] = far(dz.full_state_dict(model), plain.state_dict())
    return found


@pytest.mark.parametrize("world", [1, 3, pytest.param(2, marks=pytest.mark.extra)])
def test_what_a_script_does_to_gradients_is_done(world):
    for found in dz.launch(changed_between, world, record=False):
        assert {key: d for key, d in found.items() if not d < 1e-6} == {}


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.clamp_(-0.01, 0.01)
        p.grad *= 2


def own_scale() -> tuple[dict[tuple[str, int], float], dict[int, object]]:
    """fp16: distance to one process in fp32, as a part of what it moved, by change and stage; what
    is said to an assignment, by stage."""
    torch.set_num_threads(1)
    rank, world, found, said, seen = dist.get_rank(), dist.get_world_size(), {}, {}, []
    data = torch.randn(6, 2 * world, 5, generator=torch.Generator().manual_seed(5))
    for name, change in CHANGES.items():
        plain = net()
        alone = torch.optim.SGD(plain.parameters(), lr=0.5)
        options = {"lr": 0.5, "mixed_precision": torch.float16, "bucket_mb": 1e-4}
        pairs = {s: parallelize(net(), torch.optim.SGD, s, **options) for s in STAGES}
        for stage in (0, 1, 3):  # hooks that look; at stage 2 the gradient has gone already
            first = next(pairs[stage][0].parameters())
            first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
        if name == "one by one":  # p.grad = ...
            for stage, (model, _) in pairs.items():
                model(data[0][rank::world]).sum().backward()
                said[stage] = raised(lambda m=model: one_by_one(m))
            continue
        for first in range(0, 6, 2):
            for x in data[first : first + 2]:
                for r in range(world):
                    (plain(x[r::world]).square().mean() / world).backward()
                clamp(plain)  # between two backwards, too
            change(plain)
            alone.step()
            alone.zero_grad()
            for stage, (model, optimizer) in pairs.items():
                user = model if stage == 3 else model.module
                for x in data[first : first + 2]:
                    model(x[rank::world]).square().mean().backward()
                    clamp(user)
                change(user)
                optimizer.step()
                [p.grad.norm() for p in user.parameters() if p.grad is not None]  # for a log
                optimizer.zero_grad()
        moved = far(net().state_dict(), plain.state_dict())
        for stage, (model, _) in pairs.items():
            off = far(dz.full_state_dict(model), plain.state_dict())
            found[name, stage] = off / moved if moved else off
    assert seen
    return found, said


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.extra)])
def test_under_fp16_gradients_are_seen_and_changed_without_the_loss_scale(world):
    for found, said in dz.launch(own_scale, world, record=False):
        assert {key: d for key, d in found.items() if not d < 0.02} == {}
        assert all("Fix: after backward p.grad.copy_(g)" in said.pop(s) for s in (0, 1, 2))
        assert not said.pop(3), "a shard is assigned as it was read: without the scale"


def left_by_no_sync() -> dict[tuple[int, str], float]:
    """Distance to one process where the last backward was under no_sync, by stage and reader."""
    out, rank, world = {}, dist.get_rank(), dist.get_world_size()
    x = torch.randn(2 * world, 5, generator=torch.Generator().manual_seed(5))
    for reader in ("step", "clip"):
        for stage in (0, 1, 2):
            plain, exact = net(), None
            alone = torch.optim.SGD(plain.parameters(), lr=0.5)
            model, optimizer = parallelize(net(), torch.optim.SGD, stage, lr=0.5)
            for part in (x, x / 2):
                plain(part).square().mean().backward()
                with model.no_sync():
                    model(part[rank::world]).square().mean().backward()
            if reader == "clip":
                clip_grad_norm_(plain.parameters(), 0.01)
                optimizer.clip_grad_norm_(0.01)
            alone.step()
            optimizer.step()
            exact = plain.state_dict()
            out[stage, reader] = far(dz.full_state_dict(model), exact)
    return out


def test_what_no_sync_has_left_is_reduced_by_the_step():
    for out in dz.launch(left_by_no_sync, 2, record=False):
        assert all(d < 1e-6 for d in out.values()), out


def read_and_refused() -> dict[str, object]:
    rank, world, out = dist.get_rank(), dist.get_world_size(), {}
    for stage in (1, 2):
        model, optimizer = parallelize(net(), torch.optim.SGD, stage, lr=0.1)
        ddp = DDP(net())
        x = torch.full((2, 5), rank + 1.0)
        for one in (model, ddp):
            one(x).sum().backward()
        p, exact = model.module[0].weight, ddp.module[0].weight.grad
        assert isinstance(p.grad, Gradient) and "Gradient(size=(7, 5), here=" in repr(p.grad)
        out[f"whole {stage}"] = torch.equal(p.grad.clone(), exact)
        out[f"sum {stage}"] = torch.equal(p.grad.abs().sum(), exact.abs().sum())
        plain = exact.clone()
        out[f"in {stage}"] = torch.equal(plain.add_(p.grad), 2 * exact)
        p.grad.mul_(exact > 0)  # a mask in the shape of the parameter
        p.grad.add_(torch.ones(5))
        out[f"masked {stage}"] = torch.equal(p.grad.clone(), exact.clamp(min=0) + 1)
        torch.mul(exact, 3, out=p.grad)
        out[f"out {stage}"] = torch.equal(p.grad.clone(), 3 * exact)
        p.grad.copy_(exact)
        out[f"copied {stage}"] = torch.equal(p.grad.clone(), exact)
        out[f"view {stage}"] = raised(lambda p=p: p.grad[0].zero_())
        out[f"index {stage}"] = raised(lambda p=p: p.grad.index_fill_(0, torch.tensor([0]), 0.0))
        with model.no_sync():  # left behind: reduced in the step
            optimizer.zero_grad()
            model(x).sum().backward()
        optimizer.step()
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        out[f"left {stage}"] = far(dz.full_state_dict(model), ddp.module.state_dict()) < 1e-6
        other = copy.deepcopy(model.module)
        file = io.BytesIO()
        torch.save(model.module, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        out[f"copies {stage}"] = all(
            type(q) is nn.Parameter and torch.equal(p, q)
            for m in (other, again)
            for p, q in zip(model.module.parameters(), m.parameters(), strict=True)
        )
    model = ZeRO3(net())
    model(torch.ones(2, 5)).sum().backward()
    local = torch.cat([p.grad.flatten() for p in model.parameters()])
    whole = (dist.all_gather_object(parts := [None] * world, local.tolist()), parts)[1]
    norm = get_total_norm([p.grad / 2 for p in model.parameters()])
    out["norm 3"] = torch.allclose(norm * 2, torch.tensor([x for one in whole for x in one]).norm())
    out["none 3"] = [p.grad is None for p in model.parameters()].count(True)
    out["saved 3"] = type(copy.deepcopy(next(model.parameters()).grad)) is Tensor
    return out


def test_a_gradient_in_shards_is_read_whole_and_has_no_views():
    for out in dz.launch(read_and_refused, 2, record=False):
        for stage in (1, 2):
            assert "p.grad.clone()" in out.pop(f"view {stage}")
            assert "p.grad.clone()" in out.pop(f"index {stage}")
        assert out.pop("none 3") == 0
        assert all(out.values()), out


class Spike(nn.Module):
    """One element of one gradient overflows when asked: one shard has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spike = net(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.net(x) + (self.spike - 1).sum() * factor


def scaled() -> dict[tuple[int, bool, int], tuple]:
    """By stage, whether unscale_ is called, the rank that overflows: distance to one process, and
    the scales after each step."""
    torch.set_num_threads(1)
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    data = torch.randn(4, 2 * world, 5, generator=torch.Generator().manual_seed(5))
    for stage in STAGES:
        for unscale in (False, True):
            torch.manual_seed(0)
            plain = Spike()
            alone = torch.optim.SGD(plain.parameters(), lr=0.1)
            model, optimizer = parallelize(
                copy.deepcopy(plain), torch.optim.SGD, stage, lr=0.1, bucket_mb=1e-4
            )
            options = {"init_scale": 2.0**10, "growth_interval": 2}
            one, ours = (torch.amp.GradScaler("cpu", **options) for _ in range(2))
            scales = []
            for step, x in enumerate(data):
                for r in range(world):
                    factor = float("inf") if (step, r) == (1, world - 1) else 1.0
                    one.scale(plain(x[r::world], factor).square().mean() / world).backward()
                factor = float("inf") if (step, rank) == (1, world - 1) else 1.0
                ours.scale(model(x[rank::world], factor).square().mean()).backward()
                for scaler, o, m in ((one, alone, plain), (ours, optimizer, model)):
                    if unscale:
                        scaler.unscale_(o)
                        clip_grad_norm_(m.parameters(), 0.5)
                    scaler.step(o)
                    scaler.update()
                    o.zero_grad()
                scales.append((one.get_scale(), ours.get_scale()))
            found[stage, unscale] = far(dz.full_state_dict(model), plain.state_dict()), scales
    return found


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.extra)])
def test_a_grad_scaler_skips_and_scales_on_all_ranks_alike(world):
    for found in dz.launch(scaled, world, record=False):
        for key, (distance, scales) in found.items():
            assert distance < 1e-6, key
            assert all(one == ours for one, ours in scales), (key, scales)
            assert any(b < a for (a, _), (b, _) in pairwise(scales)), key


def edited() -> dict[tuple[int, str], object]:
    """Parameters changed through .data, or in place, by stage, under bf16."""
    out, half = {}, {"mixed_precision": torch.bfloat16, "lr": 0.0}
    for stage in STAGES:
        for how in ("data", "in place"):
            model, optimizer = parallelize(net(), torch.optim.SGD, stage, **half)
            before = dz.full_state_dict(model)
            with torch.no_grad():
                for p in model.parameters():
                    (p.data if how == "data" else p).clamp_(-0.25, 0.25)  # bf16 has these
            parts = [
                here.part.tensor for here in local_parameters(model).values()
            ]  # a checkpoint's
            now = dz.full_state_dict(model)
            out[stage, how] = all(torch.equal(now[n], before[n].clamp(-0.25, 0.25)) for n in now)
            out[stage, how] &= all((part.abs() <= 0.25).all() for part in parts)
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()  # lr 0
            now = dz.full_state_dict(model)
            out[stage, how] &= all(torch.equal(now[n], before[n].clamp(-0.25, 0.25)) for n in now)
            kept = [p.data for p in model.parameters()]  # seen once, changed later
            optimizer.step()
            for data in kept:
                data.zero_()
            optimizer.step()
            out[stage, how] &= not any(v.any() for v in dz.full_state_dict(model).values())
    model, _ = parallelize(net(), torch.optim.SGD, 3, **half)
    before = dz.full_state_dict(model)
    with model.summon(writeback=True) as module:
        with model.summon():  # within another it ends nothing
            pass
        module[0].bias.data.fill_(0.5)
    now = dz.full_state_dict(model)
    out["summon"] = torch.equal(now.pop("0.bias"), torch.full((7,), 0.5))
    out["kept"] = all(torch.equal(now[name], before[name]) for name in now)
    return out


def test_parameters_that_are_edited_under_mixed_precision():
    for out in dz.launch(edited, 2, record=False):
        assert all(out.values()), out


def mean_in_fp32() -> dict[int, bool]:
    """Whether masters got the fp32 mean of the ranks' bf16 gradients: 1 and 1 + 2**-7, say."""
    out, rank = {}, dist.get_rank()
    for stage in STAGES:
        options = {"mixed_precision": torch.bfloat16, "reduce_dtype": torch.float32}
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        model, optimizer = parallelize(module, torch.optim.SGD, stage, lr=1.0, **options)
        for _ in range(2):  # the second adds up
            model(torch.full((1, 1), 1 + rank * 2.0**-7)).sum().backward()
        optimizer.step()
        out[stage] = dz.full_state_dict(model)["weight"].item() == -2 * (1 + 2.0**-8)
    return out


def test_the_mean_in_fp32_reaches_the_masters_as_it_is():
    assert [*dz.launch(mean_in_fp32, 2, record=False)] == [dict.fromkeys(STAGES, True)] * 2


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = nn.Parameter(self.first.weight)  # a new Parameter on the same memory


def test_parameters_that_share_memory_are_refused():
    parallelize(Twins(), torch.optim.SGD, 0, lr=0.1)
    for stage in (1, 2, 3):
        with pytest.raises(ValueError, match="share memory but are two parameters"):
            parallelize(Twins(), torch.optim.SGD, stage, lr=0.1)
    with pytest.raises(ValueError, match="share memory"):
        parallelize(Twins(), torch.optim.SGD, 0, lr=0.1, mixed_precision=torch.bfloat16)
    flat = torch.arange(12.0)  # one storage, but no element twice: as cuDNN's weights
    module = nn.ParameterList([nn.Parameter(flat[:6]), nn.Parameter(flat[6:])])
    parallelize(module, torch.optim.SGD, 2, lr=0.1)
