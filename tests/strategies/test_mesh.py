"""Data x pipeline x tensor on one mesh: the numbers of one process, norms and checkpoints too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.strategies.pipeline import gpt_stages, one_f_one_b

AXES = ("data", "pipe", "tensor")
CONFIG = dz.GPTConfig(vocab_size=11, context=5, layers=3, heads=2, width=8, tied=True)
BATCH, MICRO_BATCHES, STEPS = 6, 3, 3
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


def reference(steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms after training in one process."""
    model, norms = gpt(), []
    optimizer = torch.optim.AdamW(groups(model), **ADAM)
    for step in range(steps):
        x, y = batch_of(step)
        dz.next_token_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def built(shape: tuple[int, int, int], stage: int, **options: Any) -> tuple[Any, Any, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    model = dz.tensor_parallel(gpt(), mesh["tensor"])
    pipe = dz.Pipeline(
        gpt_stages(model, shape[1]), one_f_one_b(shape[1], MICRO_BATCHES), mesh["pipe"]
    )
    options = {"param_groups": groups, **ADAM} | options
    return *dz.parallelize(pipe, torch.optim.AdamW, stage, mesh=mesh, **options), mesh


def trained(pipe: Any, optimizer: Any, mesh: Any, steps: range) -> list[float]:
    norms, data = [], mesh["data"]
    for step in steps:
        x, y = (t.chunk(data.size())[data.get_local_rank()] for t in batch_of(step))
        pipe.step(x, y, dz.next_token_loss)
        norms.append(optimizer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def on_mesh(shape: tuple[int, int, int], stages: tuple[int, ...], folder: str) -> dict[Any, Any]:
    """Train at each ZeRO stage; save in the middle, and go on from there."""
    out = {}
    for stage in stages:
        pipe, optimizer, mesh = built(shape, stage)
        norms = trained(pipe, optimizer, mesh, range(2))
        dz.save_checkpoint(f"{folder}/{stage}", pipe, optimizer, done=2)
        norms += trained(pipe, optimizer, mesh, range(2, STEPS))
        out[stage] = dz.full_state_dict(pipe), norms
        # the next one in the row loads what this one has saved, and ends at the same weights
        other, steps, mesh = built(shape, STAGES[stage - 1])
        assert dz.load_checkpoint(f"{folder}/{stage}", other, steps) == {"done": 2}
        trained(other, steps, mesh, range(2, STEPS))
        out["from", stage] = dz.full_state_dict(other), norms
    return out


def check(run: Any) -> None:
    weights, norms = reference()
    for state, found in (result for results in run for result in results.values()):
        assert list(state) == list(weights)
        torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(state, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_eight_ranks_train_as_one_process(tmp_path):
    check(dz.launch(on_mesh, 8, args=((2, 2, 2), (1,), str(tmp_path))))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 1, 2)])
def test_zero_along_data_with_one_other_axis(shape, tmp_path):
    check(dz.launch(on_mesh, 4, args=(shape, STAGES, str(tmp_path))))
