"""Data x pipeline x tensor on one mesh: the numbers of one process, norms and checkpoints too."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.gradient import own_grad
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import one_f_one_b

AXES = ("data", "pipe", "tensor")
CONFIG = dz.GPTConfig(vocab_size=11, context=5, layers=3, heads=2, width=8, tied=True)
BATCH, MICRO_BATCHES, STEPS = 12, 2, 3
CLIP = 0.5  # below every norm of these steps
ADAM = {"lr": 0.01, "eps": 1e-3}  # the gradient of the keys' bias is all rounding: keep it small
STAGES = (0, 1, 2, 3)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (BATCH, T) of all data ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (BATCH, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gpt() -> dz.GPT:
    torch.manual_seed(0)
    return dz.GPT(CONFIG)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def one_process() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = gpt()
    return model, torch.optim.AdamW(groups(model), **ADAM), []


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on whole batches; returns the norms before clipping."""
    norms = []
    for step in steps:
        x, y = batch_of(step)
        dz.next_token_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def built(shape: tuple[int, int, int], stage: int, **options: Any) -> tuple[Any, Any, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    model = dz.tensor_parallel(gpt(), mesh["tensor"])
    pipe = dz.Pipeline(
        gpt_stages(model, shape[1]), one_f_one_b(shape[1], MICRO_BATCHES), mesh["pipe"]
    )
    options = {"param_groups": groups, **ADAM} | options
    return *dz.parallelize(pipe, torch.optim.AdamW, stage, mesh=mesh, **options), mesh


def trained(pipe: Any, optimizer: Any, mesh: Any, steps: range) -> list[float]:
    """Two steps of the pipeline for an update, each with micro-batches of unequal size."""
    norms, data = [], mesh["data"]
    for step in steps:
        local = (t.chunk(data.size())[data.get_local_rank()] for t in batch_of(step))
        for x, y in zip(*(t.chunk(2) for t in local), strict=True):
            pipe.step(x, y, lambda out, y: dz.next_token_loss(out, y) / 2)
        norms.append(optimizer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def on_mesh(shape: tuple[int, int, int], stages: tuple[int, ...], folder: str) -> dict[Any, Any]:
    """Train at each ZeRO stage, saving in the middle; and from where one process has saved."""
    out = {}
    for stage in stages:
        pipe, optimizer, mesh = built(shape, stage)
        norms = trained(pipe, optimizer, mesh, range(2))
        dz.save_checkpoint(f"{folder}/{stage}", pipe, optimizer, done=2)
        saving = dz.save_in_background(f"{folder}/{stage} behind", pipe, optimizer, done=2)
        norms += trained(pipe, optimizer, mesh, range(2, STEPS))
        saving.wait()
        dz.save_safetensors(f"{folder}/{stage}.safetensors", pipe)
        full = dz.full_state_dict(pipe)

        other, steps, mesh = built(shape, stage)
        assert dz.load_checkpoint(f"{folder}/alone", other, steps) == {"done": 2}
        last = trained(other, steps, mesh, range(2, STEPS))
        out[stage] = full, norms
        out[stage, "loaded"] = dz.full_state_dict(other), [*norms[:2], *last]

        dz.load_full_state_dict(other, full)
        again = dz.full_state_dict(other)
        assert all(torch.equal(again[name], value) for name, value in full.items())
    return out


def check(shape: tuple[int, int, int], stages: tuple[int, ...], folder: Path) -> None:
    model, optimizer, before = one_process()
    before += step_alone(model, optimizer, range(2))
    dz.save_checkpoint(folder / "alone", model, optimizer, done=2)
    norms = before + step_alone(model, optimizer, range(2, STEPS))
    weights = model.state_dict()
    run = dz.launch(on_mesh, prod(shape), args=(shape, stages, str(folder)))
    for state, found in (result for results in run for result in results.values()):
        assert list(state) == list(weights)
        torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(state, weights, rtol=1e-5, atol=1e-6)
    for stage in stages:  # what the mesh has saved, in one process
        for name in (f"{stage}", f"{stage} behind"):
            model, optimizer, _ = one_process()
            assert dz.load_checkpoint(folder / name, model, optimizer) == {"done": 2}
            step_alone(model, optimizer, range(2, STEPS))
            torch.testing.assert_close(model.state_dict(), weights, rtol=1e-5, atol=1e-6)
        exported = load_file(folder / f"{stage}.safetensors")
        torch.testing.assert_close(exported, dict(weights), rtol=1e-5, atol=1e-6)


@pytest.mark.rest
def test_eight_ranks_train_as_one_process(tmp_path):
    check((2, 2, 2), (1,), tmp_path)


@pytest.mark.parametrize("shape", [(2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.rest)])
def test_zero_along_data_with_one_other_axis(shape, tmp_path):
    check(shape, STAGES, tmp_path)


@pytest.mark.extra
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_eight_ranks_at_other_stages(stage, tmp_path):
    check((2, 2, 2), (stage,), tmp_path)


def in_half_precision(dtype: torch.dtype) -> tuple[float, int]:
    """The norm of a first step; and how many were skipped after one rank had an inf in the next."""
    pipe, optimizer, mesh = built((1, 2, 2), 1, mixed_precision=dtype)
    norm = trained(pipe, optimizer, mesh, range(1))[0]
    if optimizer.loss_scale is None:
        return norm, 0
    before = dz.full_state_dict(pipe)
    pipe.step(*batch_of(1), dz.next_token_loss)
    if dist.get_rank() == 3:
        own_grad(next(pipe.parameters())).fill_(torch.inf)  # as backward may leave it
    optimizer.step()
    after = dz.full_state_dict(pipe)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return norm, optimizer.loss_scale.skipped


def test_half_precision_and_an_inf_on_one_rank_of_a_mesh():
    model, optimizer, _ = one_process()
    [first] = step_alone(model, optimizer, range(1))
    for dtype, skipped in ((torch.bfloat16, 0), (torch.float16, 1)):
        run = dz.launch(in_half_precision, 4, args=(dtype,))
        assert set(run) == {(run[0][0], skipped)}
        assert run[0][0] == pytest.approx(first, rel=0.02)


def averaged_over_the_wrong_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = dz.tensor_parallel(gpt(), mesh)
    dz.parallelize(model, torch.optim.SGD, mesh=mesh, lr=0.1)


def test_a_cut_model_is_not_averaged_over_its_own_parts():
    with pytest.raises(dz.RankFailed, match="no mesh with an axis 'tensor'"):
        dz.launch(averaged_over_the_wrong_ranks, 2)


def taken_for_the_whole(folder: str) -> None:
    """A model whose parts lie on several ranks is not saved or loaded as if this one's were all."""
    cut = dz.tensor_parallel(gpt())
    pipe = dz.Pipeline(gpt_stages(gpt(), 2), one_f_one_b(2, 2))
    wrapped = dz.DDP(dz.tensor_parallel(gpt()), mesh=Comm.alone())
    for model, axis in ((cut, "tensor"), (wrapped, "tensor"), (pipe, "pipe")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for call, *args in (
            (dz.save_checkpoint, folder, model, optimizer),
            (dz.save_in_background, folder, model, optimizer),
            (dz.save_safetensors, f"{folder}/model.safetensors", model),
            (dz.load_checkpoint, folder, model, optimizer),
            (dz.full_state_dict, model),
            (dz.load_full_state_dict, model, gpt().state_dict()),
        ):
            with pytest.raises(ValueError, match=f"no mesh with an axis '{axis}'.* Fix: "):
                call(*args)


def test_a_part_is_not_saved_or_loaded_as_the_whole(tmp_path):
    dz.launch(taken_for_the_whole, 2, args=(str(tmp_path),))
    assert not list(tmp_path.iterdir())
