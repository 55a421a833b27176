"""The page of options: each row for torch is run here, one assertion about what the option does.

A row of settings.json that says "run" has a job and a check in ROWS; the page prints the row's
sentence, so a sentence that is not true of the installed torch fails here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.course.show import settings

pytestmark = pytest.mark.rest

OPTIONS = {row["what"]: row for row in settings.stored()["options"]}
ROWS: dict[str, Callable[[], None]] = {}
WIDTH, LAYERS = 16, 3
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)


def row(what: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(test: Callable[[], None]) -> Callable[[], None]:
        ROWS[what] = test
        return test

    return add


# ---- a model of three layers, and steps of it under FSDP2 ----


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def sharded(**options: Any) -> nn.Module:
    """Each layer a unit, and the root."""
    from torch.distributed.fsdp import fully_shard  # importing it takes a second

    model = layers()
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(seed: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return torch.randn(4, WIDTH, generator=generator)


def backward(model: nn.Module) -> None:
    """One micro-batch, in the span "step"."""
    with dz.span("step"):
        model(batch()).square().mean().backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(tensors: Any) -> int:
    return sum(local(t).numel() for t in tensors)


def calls(run: dz.Run, op: str, rank: int = 0) -> list[Any]:
    return [r for r in run.ledger if (r.rank, r.op) == (rank, op)]


def two(job: Callable[..., Any], *args: Any, ranks: int = 2) -> dz.Run:
    return dz.launch(job, ranks, args=args)


# ---- the rows ----


def zero_redundancy() -> tuple[int, int]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    state = [s["momentum_buffer"] for s in optimizer.optim.state.values()]
    return held(model.parameters()), held(state)


@row("shard the optimizer state")
def test_each_rank_has_a_part_of_the_state() -> None:
    found = list(two(zero_redundancy))
    assert [params for params, _ in found] == [NUMEL, NUMEL]
    assert sum(state for _, state in found) == NUMEL and all(state < NUMEL for _, state in found)


def shard_all() -> tuple[int, int, int]:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    state = [s["momentum_buffer"] for s in optimizer.state.values()]
    return held(model.parameters()), held(p.grad for p in model.parameters()), held(state)


@row("shard parameters, gradients and state")
def test_each_rank_has_half_of_all_three() -> None:
    assert list(two(shard_all)) == [(NUMEL // 2,) * 3] * 2


def keeps(reshard: bool | int) -> None:
    backward(sharded(reshard_after_forward=reshard))


@row("keep unsharded from forward to backward")
def test_a_unit_is_gathered_once_and_not_twice() -> None:
    assert len(calls(two(keeps, False), "all_gather")) == LAYERS
    assert len(calls(two(keeps, True), "all_gather")) == 2 * LAYERS


def in_types(reduce_dtype: torch.dtype | None) -> set[torch.dtype]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = sharded(mp_policy=policy)
    backward(model)
    return {p.dtype for p in model.parameters()}


@row("compute in 16 bits")
def test_gathers_have_16_bits_and_shards_32() -> None:
    run = two(in_types, None)
    assert {r.dtype for r in calls(run, "all_gather")} == {"bfloat16"}
    assert run[0] == {torch.float32}


@row("type in which gradients travel")
def test_gradients_travel_in_the_reduce_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        run = two(in_types, dtype)
        types = {f"torch.{r.dtype}" for r in calls(run, "reduce_scatter")}
        assert types == {str(dtype)}


def scale_after(infinite_on: int) -> float:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(batch()).square().mean()).backward()
    if dist.get_rank() == infinite_on:
        local(next(model.parameters()).grad)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@row("loss scale of fp16")
def test_an_inf_on_one_rank_halves_the_scale_of_all() -> None:
    assert list(two(scale_after, 1)) == [512.0, 512.0]
    assert list(two(scale_after, -1)) == [1024.0, 1024.0]


def norms() -> tuple[float, float]:
    model = sharded()
    backward(model)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor().item(), held_norm(model)


def held_norm(model: nn.Module) -> float:
    """The norm of the full gradient after clipping."""
    square = sum(local(p.grad).square().sum() for p in model.parameters())
    dist.all_reduce(square)
    return square.sqrt().item()


@row("clip by the global norm")
def test_the_norm_is_that_of_all_ranks() -> None:
    model = layers()
    for rank in range(2):
        (model(batch_of(rank)).square().mean() / 2).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for found, after in two(norms):
        assert found == pytest.approx(norm, rel=1e-5) and after == pytest.approx(0.01, rel=1e-3)


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))


def on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    backward(sharded(mesh=mesh))


@row("hybrid: replicas of shards")
def test_gathers_stay_in_the_row_and_shards_cross() -> None:
    run = two(on_a_mesh, ranks=4)
    for op, group in (("all_gather", (0, 1)), ("reduce_scatter", (0, 1)), ("all_reduce", (0, 2))):
        assert {tuple(r.group) for r in calls(run, op)} == {group}, op


@row("a second copy inside the node")
def test_backward_gathers_in_the_smaller_group() -> None:
    groups = [len(r.group) for r in calls(two(keeps, 2, ranks=4), "all_gather")]
    assert groups == [4] * LAYERS + [2] * LAYERS


class _Own:
    """What a comm of our own needs: buffers."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Int8Gather(_Own):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        world, scale = dist.get_world_size(group), input_tensor.abs().max() / 127
        steps = (input_tensor / scale).round().to(torch.int8)
        every, scales = [[torch.empty_like(t) for _ in range(world)] for t in (steps, scale)]
        dist.all_gather(every, steps, group=group)
        dist.all_gather(scales, scale, group=group)
        parts = zip(output_tensor.chunk(world), every, scales, strict=True)
        for part, got, its_scale in parts:
            part.copy_(got * its_scale)


class _Bf16Reduce(_Own):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        rows = input_tensor.bfloat16()
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        world = dist.get_world_size(group)
        total = received.view(world, -1).float().sum(0)
        output_tensor.copy_(total / world if op == dist.ReduceOp.AVG else total)


def with_comm(which: str) -> torch.Tensor:
    model = sharded()
    for unit in model:
        if which == "gather":
            unit.set_custom_all_gather(_Int8Gather())
        elif which == "reduce":
            unit.set_custom_reduce_scatter(_Bf16Reduce())
    backward(model)
    return torch.cat([local(p.grad).flatten() for p in model.parameters()])


@row("gathers in 8 bits")
def test_a_comm_of_ones_own_gathers_in_int8() -> None:
    plain, run = two(with_comm, ""), two(with_comm, "gather")
    large = [r for r in calls(run, "all_gather") if r.elements > 100]
    assert {r.dtype for r in large} == {"int8"} and len(large) == 2 * LAYERS
    assert torch.allclose(run[0], plain[0], atol=0.05 * plain[0].abs().max().item())


@row("gradients in fewer bits")
def test_a_comm_of_ones_own_reduces_in_bf16() -> None:
    plain, run = two(with_comm, ""), two(with_comm, "reduce")
    assert {r.dtype for r in calls(run, "all_to_all")} == {"bfloat16"}
    assert not calls(run, "reduce_scatter")
    assert torch.allclose(run[0], plain[0], atol=0.01 * plain[0].abs().max().item())


def prefetches(ahead: bool) -> bool:
    """Whether the second layer's gather has begun when the first layer computes."""
    model = sharded()
    if ahead:
        model[0].set_modules_to_forward_prefetch([model[1]])
    begun = []

    def computes(*_: Any) -> None:
        begun.append(model[1]._get_fsdp_state()._fsdp_param_group._all_gather_result is not None)

    model[0].register_forward_pre_hook(computes)  # runs after FSDP2's own, which was there first
    backward(model)
    return begun[0]


@row("prefetch")
def test_the_next_gather_begins_before_the_layer_computes() -> None:
    assert list(two(prefetches, True)) == [True, True]
    assert list(two(prefetches, False)) == [False, False]


def ignores() -> tuple[torch.Tensor, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    bias = model[0].bias
    fully_shard(model, ignored_params={bias})
    backward(model)
    return bias.grad.clone(), model[1].bias.grad.full_tensor()


@row("small parameters stay unsharded")
def test_gradients_of_ignored_parameters_are_not_reduced() -> None:
    run = two(ignores)
    (left, others), (right, same) = run
    assert not torch.allclose(left, right), "each rank has its own gradient, so replicas drift"
    assert torch.equal(others, same)


def grouped(together: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for unit in ([*model],) if together else model:
        fully_shard(unit)
    backward(fully_shard(model))


@row("how much goes into one message")
def test_a_message_is_what_one_call_was_given() -> None:
    assert len(calls(two(grouped, False), "reduce_scatter")) == LAYERS
    assert len(calls(two(grouped, True), "reduce_scatter")) == 1


def offloaded(goes: bool) -> tuple[set[str], torch.Tensor]:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    policy = CPUOffloadPolicy(pin_memory=False) if goes else OffloadPolicy()
    model = sharded(offload_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    states = [s["exp_avg"] for s in optimizer.state.values()]
    where = {local(t).device.type for t in [*model.parameters(), *states]}
    return where, torch.cat([local(p).detach().flatten() for p in model.parameters()])


@row("offload the optimizer and the shards")
def test_shards_and_states_are_on_the_host_and_weights_stay_the_same() -> None:
    (where, gone), (_, stayed) = two(offloaded, True)[0], two(offloaded, False)[0]
    assert where == {"cpu"} and torch.equal(gone, stayed)


class _Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool | None) -> None:
    from torch.distributed.fsdp import fully_shard

    units = [fully_shard(layer) for layer in layers()]
    if reentrant is not None:
        units = [_Checkpointed(unit, reentrant) for unit in units]
    model = fully_shard(nn.Sequential(*units))
    with dz.span("step"):
        model(batch().requires_grad_()).square().mean().backward()


@row("activation checkpointing")
def test_checkpointing_costs_no_further_gather() -> None:
    for reentrant in (None, False, True):
        assert len(calls(two(checkpointed, reentrant), "all_gather")) == 2 * LAYERS


def accumulates(sync: bool) -> int:
    model = sharded()
    model.set_requires_gradient_sync(sync)
    backward(model)
    units = [unit._get_fsdp_state()._fsdp_param_group for unit in model]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for param in (param for unit in units for param in unit.fsdp_params):
        kept = param.unsharded_accumulated_grad
        kept = param._unsharded_param.grad if kept is None else kept
        gradients += [] if kept is None else [kept]
    return held(gradients)


@row("accumulate without reducing")
def test_full_gradients_are_kept_and_nothing_is_reduced() -> None:
    on, off = two(accumulates, True), two(accumulates, False)
    assert len(calls(on, "reduce_scatter")) == LAYERS and not calls(off, "reduce_scatter")
    assert (on[0], off[0]) == (NUMEL // 2, NUMEL)


def from_meta() -> tuple[set[str], int, bool]:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    before = {p.device.type for p in model.parameters()}
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    backward(model)
    return before, held(model.parameters()), bool(local(model[0].weight).isfinite().all())


@row("a model that never was unsharded")
def test_only_shards_get_memory() -> None:
    assert list(two(from_meta)) == [({"meta"}, NUMEL // 2, True)] * 2


# ---- the table, and the page that is made of it ----


def test_the_rows_that_say_run_are_run_here_and_no_others() -> None:
    assert ROWS.keys() == {what for what, one in OPTIONS.items() if one.get("run")}


def page() -> str:
    path = Path(__file__).resolve().parents[2] / "book/options.py"
    spec = importlib.util.spec_from_file_location("book_options", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_the_page_has_every_row_and_says_what_was_run_and_what_was_read() -> None:
    text = page()
    for what, one in OPTIONS.items():
        assert f"\n## {what[0].upper()}{what[1:]}\n" in text
        for framework in settings.stored()["frameworks"]:
            assert all(f"`{settings.short(name)}`" in text for name in one[framework])
    assert text.count("**Run:**") == len(ROWS)
    versions = [facts["version"] for facts in settings.stored()["frameworks"].values()]
    assert all(version in text for version in versions)
