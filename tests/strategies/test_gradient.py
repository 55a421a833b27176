"""Between backward and step, at every stage: torch's clipping, a GradScaler, loops over `p.grad`.

Reading a gradient never communicates. What torch's tools do must end where it ends in one process,
on every axis of a mesh.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import ddpz_lite as dz
from ddpz_lite.checkpoint.parts import local_parameters
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import one_f_one_b
from ddpz_lite.strategies.tensor.vocabulary import vocabulary_loss

STAGES = (0, 1, 2, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)
    )


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


def half_foreach(model: nn.Module) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


Change = Callable[[nn.Module], object]
ANY_TIME: dict[str, Change] = {
    "clip_grad_norm_": lambda m: clip_grad_norm_(m.parameters(), 0.01),
    "foreach": lambda m: clip_grad_norm_(m.parameters(), 0.01, foreach=True),
    "inf norm": lambda m: clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")),
    "halved norm": lambda m: clip_grad_norm_(next(m.parameters()), 0.01),
    "zero_grad": lambda m: m.zero_grad(),
    "zeros": lambda m: m.zero_grad(set_to_none=False),
    "half": half_foreach,
}
ONCE_FINAL: dict[str, Change] = {  # needs optimizer.finalize_grads()
    "clip_grad_value_": lambda m: clip_grad_value_(m.parameters(), 0.003),
    "one by one": one_by_one,
}


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in b)


def changed(half: torch.dtype | None, changes: tuple[str, ...]) -> dict[tuple[str, int], float]:
    """Distance to one process after three steps, two backwards each, by change and stage."""
    torch.set_num_threads(1)
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    data = torch.randn(6, 2 * world, 5, generator=torch.Generator().manual_seed(5))
    options = {"lr": 0.5, "bucket_mb": 1e-4, "mixed_precision": half}
    for name in changes:
        change = (ANY_TIME | ONCE_FINAL)[name]
        plain = net()
        alone = torch.optim.SGD(plain.parameters(), lr=0.5)
        pairs = {s: parallelize(net(), torch.optim.SGD, s, **options) for s in STAGES}
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
                if name in ONCE_FINAL:
                    optimizer.finalize_grads()
                change(model if stage == 3 else model.module)
                optimizer.step()
                optimizer.zero_grad()
        moved = far(net().state_dict(), plain.state_dict()) or 1.0
        for stage, (model, _) in pairs.items():
            found[name, stage] = far(dz.full_state_dict(model), plain.state_dict()) / moved
    return found


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.extra)])
def test_what_a_script_does_to_gradients_is_done(world):
    for found in dz.launch(changed, world, args=(None, (*ANY_TIME, *ONCE_FINAL)), record=False):
        assert {key: d for key, d in found.items() if not d < 1e-5} == {}


@pytest.mark.parametrize("world", [1, 2])
def test_under_fp16_too(world):
    names = ("clip_grad_norm_", "inf norm", "zeros", "half", "clip_grad_value_")
    for found in dz.launch(changed, world, args=(torch.float16, names), record=False):
        assert {key: d for key, d in found.items() if not d < 0.02} == {}


def read_on_rank_0() -> dict[str, Any]:
    """One backward at each stage, at world 3: rank 0 alone reads gradients."""
    out, rank = {}, dist.get_rank()
    for stage in STAGES:
        model, optimizer = parallelize(net(), torch.optim.SGD, stage, lr=0.1)
        user = model if stage == 3 else model.module
        model(torch.full((2, 5), rank + 1.0)).sum().backward()
        if rank == 0:
            for p in user.parameters():
                seen = p.grad.norm(), p.grad.mean(), p.grad.flatten().tolist(), f"{p.grad}"
                seen += (
                    p.grad.abs().max() if p.grad.numel() else 0,
                    torch.linalg.vector_norm(p.grad),
                )
        first = next(user.parameters())
        shape = tuple(first.grad.shape)
        out[f"shape {stage}"] = shape == ((7, 5) if stage < 2 else first.grad.shape[:1])
        if stage == 1:
            out["clamp"] = raised(lambda u=user: clip_grad_value_(u.parameters(), 1.0))
            out["derived"] = raised(
                lambda u=user: get_total_norm([p.grad / 2 for p in u.parameters()])
            )
        optimizer.finalize_grads()
        local = torch.cat([own.grad.flatten() for own in user.parameters()])
        norm = get_total_norm([p.grad / 2 for p in user.parameters()])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, local.tolist())
        exact = torch.tensor(
            [x for part in everyone for x in part] if stage else everyone[0]
        ).norm()
        out[f"norm {stage}"] = torch.allclose(norm * 2, exact)
        grad = first.grad
        for copied in (copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))):
            out[f"plain {stage}"] = type(copied) is Tensor and torch.equal(copied, grad.clone())
        optimizer.step()
        module, file = copy.deepcopy(model.module) if stage < 3 else nn.Linear(1, 1), io.BytesIO()
        out[f"copies {stage}"] = all(type(q) is nn.Parameter for q in module.parameters())
        if stage < 3:
            torch.save(model.module, file)
            file.seek(0)
            again = torch.load(file, weights_only=False).parameters()
            pairs = zip(model.module.parameters(), again, strict=True)
            out[f"saved {stage}"] = all(
                type(q) is nn.Parameter and torch.equal(p, q) for p, q in pairs
            )
    return out


def test_reading_a_gradient_never_communicates():
    for out in dz.launch(read_on_rank_0, 3, record=False):
        assert "this rank's own gradient" in (message := out.pop("clamp")), message
        assert "Fix: optimizer.finalize_grads()" in message
        assert "computed from a gradient that is not final" in out.pop("derived")
        assert all(out.values()), out


class Halves(nn.Module):
    """Rank 0 uses one layer, the other ranks the other: at ZeRO-1 each has gradients of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return (self.b if rank else self.a)(x)


def clipped_halves() -> dict[int, tuple[float, float]]:
    rank, world, out = dist.get_rank(), dist.get_world_size(), {}
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        plain = Halves()
        model, optimizer = parallelize(copy.deepcopy(plain), torch.optim.SGD, stage, lr=1.0)
        for r in range(world):
            (plain(torch.ones(1, 5), r).sum() / world).backward()
        model(torch.ones(1, 5), rank).sum().backward()
        exact = clip_grad_norm_(plain.parameters(), 0.5)
        norm = clip_grad_norm_(model.module.parameters(), 0.5)
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        out[stage] = (norm - exact).item(), far(dz.full_state_dict(model), plain.state_dict())
    return out


def test_a_parameter_that_only_some_ranks_used_is_clipped_with_the_rest():
    for out in dz.launch(clipped_halves, 3, record=False):
        assert all(abs(n) < 1e-5 and d < 1e-6 for n, d in out.values()), out


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


# -- other axes of a mesh: here ranks hold different parts of the model

CONFIG = dz.GPTConfig(vocab_size=12, context=5, layers=2, heads=2, width=8, tied=True)
TOKENS = torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(1))
SCALER = {"init_scale": 2.0**10, "growth_interval": 2}


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return dz.GPT(CONFIG)


def on_axes(shape: tuple[int, int], kind: str, stage: int) -> dict[str, Any]:
    """Three steps on (data, `kind`), clipped and scaled by torch; the second meets an inf."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", kind))
    unsharded, plain = gpt(), gpt()
    if kind == "tensor":
        model = dz.tensor_parallel(unsharded, mesh["tensor"])
    else:
        model = dz.Pipeline(gpt_stages(unsharded, shape[1]), one_f_one_b(shape[1], 2), mesh["pipe"])
    options = {"lr": 0.5, "mesh": mesh, "bucket_mb": 1e-3}  # stages have many buckets, not as many
    model, optimizer = parallelize(model, torch.optim.SGD, stage, **options)
    alone, out = torch.optim.SGD(plain.parameters(), lr=0.5), {}
    one, ours = (torch.amp.GradScaler("cpu", **SCALER) for _ in range(2))
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    part = [t.chunk(shape[0])[mesh.get_local_rank("data")] for t in (x, y)]
    norms, scales = [], []
    for step in range(3):
        one.scale(dz.next_token_loss(plain(x), y)).backward()
        if kind == "tensor":
            ours.scale(dz.next_token_loss(model(part[0]), part[1])).backward()
        else:
            ours.scale(torch.zeros(()))  # the stages that have no loss need the scale too
            model.step(*part, lambda out, y: ours.scale(dz.next_token_loss(out, y)))
        if step == 1:
            next(plain.parameters()).grad[0, 0] = float("inf")
            if mesh.get_local_rank(kind) == 1:  # in one rank's columns, or on one stage
                last = [p for p in model.parameters() if p.grad is not None and p.grad.numel()][-1]
                last.grad.as_subclass(Tensor).view(-1)[0] = float("inf")
        for s, o, m in ((one, alone, plain), (ours, optimizer, model)):
            s.unscale_(o)
            norms.append(clip_grad_norm_(m.parameters(), 0.1).item())
            s.step(o)
            s.update()
            o.zero_grad()
        scales.append((one.get_scale(), ours.get_scale()))
    out["norms"] = norms
    out["scales"] = all(a == b for a, b in scales)
    out["far"] = far(dz.full_state_dict(model), plain.state_dict())
    return out


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["tensor", "pipe"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_torchs_clipping_and_scaler_on_other_axes(shape, kind, stage):
    runs = [*dz.launch(on_axes, shape[0] * shape[1], args=(shape, kind, stage))]
    for out in runs:
        pairs = list(zip(out["norms"][::2], out["norms"][1::2], strict=True))
        for step, (exact, norm) in enumerate(pairs):
            assert step == 1 or norm == pytest.approx(exact, rel=1e-5), pairs
        assert out["scales"] and out["far"] < 1e-5, out


def cut_alone(sequence: bool, vocabulary: bool) -> tuple[list[float], list[float]]:
    """Norms by torch of one process and of a tensor-parallel GPT without parallelize."""
    plain, norms = gpt(), ([], [])
    cut = {"sequence": sequence, "vocabulary": vocabulary}
    model = dz.tensor_parallel(gpt(), **cut)
    x, y = TOKENS[:, :-2], TOKENS[:, 1:-1]  # 4 tokens: two on each rank
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.5)) for m in (plain, model)]
    for _ in range(3):
        for (m, optimizer), found in zip(pairs, norms, strict=True):
            logits = m(x)
            is_cut = vocabulary and m is model
            loss = vocabulary_loss(logits, y) if is_cut else dz.next_token_loss(logits, y)
            loss.backward()
            found.append(clip_grad_norm_(m.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(("sequence", "vocabulary"), [(False, False), (True, True)])
def test_torchs_clipping_counts_all_ranks_of_a_cut_model_alone(sequence, vocabulary):
    for exact, norms in dz.launch(cut_alone, 2, args=(sequence, vocabulary)):
        assert norms == pytest.approx(exact, rel=1e-5)


def stages_of_a_cut_model() -> tuple[list[float], list[float]]:
    """The same with stages of a cut model, on pipe x tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))
    plain, norms = gpt(), ([], [])
    stages = gpt_stages(dz.tensor_parallel(gpt(), mesh["tensor"]), 2)
    pipe = dz.Pipeline(stages, one_f_one_b(2, 2), mesh["pipe"])
    alone, ours = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, pipe))
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    for _ in range(3):
        dz.next_token_loss(plain(x), y).backward()
        pipe.step(x, y, dz.next_token_loss)
        for model, optimizer, found in ((plain, alone, norms[0]), (pipe, ours, norms[1])):
            found.append(clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def test_torchs_clipping_counts_both_axes_of_a_model_alone():
    for exact, norms in dz.launch(stages_of_a_cut_model, 4):
        assert norms == pytest.approx(exact, rel=1e-5)


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
