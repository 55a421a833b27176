"""A GPT with parts of its windows on several ranks, under each strategy: as in one process."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import one_f_one_b

CONFIG = dz.GPTConfig(vocab_size=11, context=24, layers=2, heads=4, width=8, tied=True)
BATCH, STEPS, CLIP = 4, 3, 0.5  # CLIP is below every norm of these steps
ADAM = {"lr": 0.01, "eps": 1e-3}  # the gradient of the keys' bias is all rounding: keep it small


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(11, (BATCH, 25), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def gpt() -> dz.GPT:
    torch.manual_seed(0)
    return dz.GPT(CONFIG)


def alone(first: int = 0, model: Any = None, optimizer: Any = None) -> tuple[Any, list[float]]:
    """One process on whole windows: the state after the steps, and norms before clipping."""
    model = model or gpt()
    optimizer, norms = optimizer or torch.optim.AdamW(model.parameters(), **ADAM), []
    for step in range(first, STEPS):
        x, y = batch_of(step)
        dz.next_token_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def trained(model: Any, optimizer: Any, data: Any, first: int = 0, last: int = STEPS) -> list:
    norms = []
    for step in range(first, last):
        x, y = (t.chunk(data.size())[data.get_local_rank()] for t in batch_of(step))
        dz.next_token_loss(model(x), model.module.order.of(y)).backward()
        norms.append(optimizer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def on_mesh(shape: tuple[int, int], kind: str, stages: tuple[int, ...], folder: str = "") -> dict:
    """{stage: (state, norms)}; with a folder, each saved after two steps."""
    found = {}
    for stage in stages:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))
        model = dz.context_parallel(gpt(), mesh["context"], kind)
        model, optimizer = dz.parallelize(model, torch.optim.AdamW, stage, mesh=mesh, **ADAM)
        assert model.comm.world == prod(shape) and not model.comm.axes
        norms = trained(model, optimizer, mesh["data"], last=2)
        if folder:
            dz.save_checkpoint(f"{folder}/{stage}", model, optimizer)
        norms += trained(model, optimizer, mesh["data"], first=2)
        found[stage] = dz.full_state_dict(model), norms
    return found


def check(run: Any) -> None:
    state, norms = alone()
    for found in (result for results in run for result in results.values()):
        torch.testing.assert_close(found[1], norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(found[0], state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "kind", "stages"),
    [
        ((2, 2), "ring", (0, 1, 2, 3)),
        pytest.param((2, 1), "ring", (0,), marks=pytest.mark.rest),
        pytest.param((1, 3), "ring", (3,), marks=pytest.mark.rest),
        pytest.param((1, 2), "ulysses", (0, 3), marks=pytest.mark.rest),
        pytest.param((1, 4), "ulysses", (3,), marks=pytest.mark.rest),
        pytest.param((1, 4), "gather", (3,), marks=pytest.mark.rest),
    ],
)
def test_every_stage_trains_as_one_process(shape, kind, stages):
    check(dz.launch(on_mesh, prod(shape), args=(shape, kind, stages), record=False))


@pytest.mark.rest
def test_a_checkpoint_of_a_mesh_continues_in_one_process(tmp_path):
    check(dz.launch(on_mesh, 4, args=((2, 2), "ring", (0, 3), str(tmp_path)), record=False))
    state, norms = alone()
    for stage in ("0", "3"):
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        dz.load_checkpoint(tmp_path / stage, model, optimizer)
        continued, last = alone(2, model, optimizer)
        torch.testing.assert_close(last, norms[2:], rtol=1e-5, atol=0)
        torch.testing.assert_close(continued, state, rtol=1e-5, atol=1e-6)


def hybrid() -> dict[int, tuple[Any, list[float]]]:
    """ZeRO-3 over the ranks that share a sequence, which are replicas of other such ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = dz.context_parallel(gpt(), mesh["shard"])
    model, optimizer = dz.parallelize(model, torch.optim.AdamW, 3, mesh=mesh, **ADAM)
    norms = trained(model, optimizer, mesh["replicate"])
    return {3: (dz.full_state_dict(model), norms)}


@pytest.mark.rest
def test_shards_over_the_sequence_and_replicas_outside():
    check(dz.launch(hybrid, 4, record=False))


def with_other_axes(axis: str) -> dict[int, tuple[Any, list[float]]]:
    """context x tensor, or context x pipe, at stage 1."""
    names = ("data", "pipe", "context", "tensor")
    shape = tuple(2 if name in (axis, "context") else 1 for name in names)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = dz.tensor_parallel(gpt(), mesh["tensor"])
    model = dz.context_parallel(model, mesh["context"])
    order, stages = model.order, gpt_stages(model, mesh["pipe"].size())
    pipe = dz.Pipeline(stages, one_f_one_b(len(stages), 2), mesh["pipe"])
    pipe, optimizer = dz.parallelize(pipe, torch.optim.AdamW, 1, mesh=mesh, **ADAM)
    norms = []
    for step in range(STEPS):
        pipe.step(*batch_of(step), lambda out, y: dz.next_token_loss(out, order.of(y)))
        norms.append(optimizer.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return {1: (dz.full_state_dict(pipe), norms)}


@pytest.mark.rest
@pytest.mark.parametrize("axis", ["tensor", "pipe"])
def test_context_with_another_axis(axis):
    check(dz.launch(with_other_axes, 4, args=(axis,), record=False))


def in_bf16() -> float:
    """Distance of the gradients' norm under ring attention in bf16 to one process in bf16."""
    found = []
    for parallel in (False, True):
        model = dz.context_parallel(gpt()) if parallel else gpt()
        order, half = model.order, torch.bfloat16
        mesh = None if parallel else Comm.alone()
        model, optimizer = dz.parallelize(
            model, torch.optim.AdamW, 3, mesh=mesh, mixed_precision=half, **ADAM
        )
        x, y = batch_of(0)
        dz.next_token_loss(model(x).float(), order.of(y) if order else y).backward()
        found.append(optimizer.clip_grad_norm_(CLIP).item())
    return abs(found[1] / found[0] - 1)


def test_bf16_over_zero3():
    assert max(dz.launch(in_bf16, 2, record=False)) < 0.01


def activations(ranks: int, tokens: int) -> int:
    """Bytes that autograd keeps for backward, without parameters, on this rank."""
    model = dz.GPT(dz.GPTConfig(context=tokens, layers=2, heads=4, width=64, vocab_size=64))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    if ranks > 1:
        model = dz.context_parallel(model)
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(torch.zeros(1, tokens, dtype=torch.int64)).sum()
    return sum(size for _, size in kept.values())


def test_activations_shrink_with_the_ranks_of_the_sequence():
    full = activations(1, 512)
    for world in (2, 4):
        for held in dz.launch(activations, world, args=(world, 512), record=False):
            assert held == pytest.approx(full / world, rel=0.02)
