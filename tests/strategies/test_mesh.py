"""A mesh (replicate, shard): each axis a row of the table, DDP or ZeRO-1 outside, any stage inside.

Like one process, like torch's HSDP, with the bytes of the formulas: held, inside a node, across.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from core_jobs import (
    CASES,
    Recipe,
    build,
    distance,
    gpt,
    loop,
    raised,
    rank_losses,
    reference,
    train,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.costs import MIXED, elements_moved, zero_memory
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.precision import LossScale

ROWS = [(0, 3), (1, 1), (1, 2), (1, 3)]
ADAMW = Recipe(torch.optim.AdamW, (("lr", 0.01),))
RECIPES = {
    "plain": Recipe(),
    "micro_batches": Recipe(micro_batches=3),
    "no_sync": Recipe(micro_batches=3, no_sync=True),
    "clip": Recipe(clip=0.05),
    "groups": Recipe(grouped=True),
    "zeros": Recipe(set_to_none=False),
}
NODES = dz.Network(latency=0.0, bandwidth=1e12, nodes=2)


def mesh(replicas: int = 2) -> dist.DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def parity() -> dict[tuple, float]:
    """Distance to one process, by case, recipe and stage."""
    torch.set_num_threads(1)
    found, world = {}, dist.get_world_size()
    work = [("gpt", recipe) for recipe in RECIPES]
    for case, recipe in [*work, ("awkward", "micro_batches"), ("checkpointed", "plain")]:
        alone = reference(CASES[case], RECIPES[recipe], world)
        for stage in ROWS:
            state, *_ = train(CASES[case], RECIPES[recipe], stage, mesh=mesh())
            found[case, recipe, stage] = distance(state, alone)
    return found


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.extra)])
def test_every_pair_of_rows_equals_one_process(world):
    for found in dz.launch(parity, world, record=False, timeout=200):
        assert {key: d for key, d in found.items() if not d < 2e-6} == {}


def peers() -> dict[tuple, float]:
    """Distance to torch's HSDP."""
    case, module = CASES["gpt"], build(CASES["gpt"])
    for block in [*module.blocks, module]:
        fully_shard(block, mesh=mesh())
    optimizer = torch.optim.AdamW(module.parameters(), **dict(ADAMW.options))
    loop(module, optimizer, lambda: None, ADAMW, rank_losses(module, case, ADAMW))
    theirs = {name: value.full_tensor() for name, value in module.state_dict().items()}
    return {stage: distance(train(case, ADAMW, stage, mesh=mesh())[0], theirs) for stage in ROWS}


def test_hybrid_equals_hsdp_bit_for_bit():
    for found in dz.launch(peers, 4, record=False):
        assert found == dict.fromkeys(ROWS, 0.0)


def with_options() -> dict[tuple, float]:
    """Distance of ZeRO-1 outside to DDP outside, with the same options."""
    found, case = {}, CASES["gpt"]
    fp16 = {"mixed_precision": torch.float16, "reduce_dtype": torch.float32}
    for name, options in {
        "offload": {"offload": True},
        "kept": {"reshard_after_forward": False},
        "bf16": {"mixed_precision": torch.bfloat16, "reduce_dtype": torch.float32},
        "bf16, offload": {"mixed_precision": torch.bfloat16, "offload": True},
        "fp16": fp16 | {"loss_scale": LossScale(256.0)},
    }.items():
        recipe = Recipe(micro_batches=2, no_sync=True)
        one, two = (
            train(case, recipe, stage, mesh=mesh(), **copy.deepcopy(options))[0]
            for stage in ((0, 3), (1, 3))
        )
        found[name] = distance(one, two)
    return found


def test_options_on_a_mesh():
    for found in dz.launch(with_options, 4, record=False):
        rounded = found.pop("bf16, offload")  # across it rounds once more
        assert rounded < 2e-3
        assert {name: d for name, d in found.items() if not d < 1e-6} == {}


# -- bytes


@pytest.fixture
def fake_world(request) -> Iterator[tuple[int, int]]:
    """A mesh of any size in this one process: collectives move nothing."""
    replicas, shards = request.param
    store, world = FakeStore(), replicas * shards
    dist.init_process_group("fake", store=store, rank=world - 1, world_size=world)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("fake_world", [(2, 4), (4, 2), (1, 3)], indirect=True)
@pytest.mark.parametrize("stage", ROWS)
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_held_bytes_are_the_formula(fake_world, stage, half):
    torch.manual_seed(0)
    module = gpt(tied=False, layers=6)
    psi, count = sum(p.numel() for p in module.parameters()), len(list(module.parameters()))
    options = {"mesh": mesh(fake_world[0]), "mixed_precision": half, "bucket_mb": 0.01}
    model, optimizer = parallelize(module, torch.optim.AdamW, stage, lr=1e-3, **options)
    x, y = CASES["gpt"].inputs(2)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        held = dz.memory(model, optimizer)
        optimizer.step()
    sizes = (4, 4, 8)
    if half is not None:  # with one replica the master copies are the shards
        cut = stage[0] == 1 and fake_world[0] > 1
        sizes = MIXED[stage if cut and stage == (1, 3) else stage[1]]
    expected = zero_memory(psi, fake_world, stage, *sizes)
    slots = fake_world[0] * fake_world[1]  # padding, flags and step counters as in test_memory
    slack = sum(4 * (4 * slots + len(flat.params)) for flat in model.flats) + 4 * count
    assert abs(sum(held.values()) - held["buffers"] - expected) <= 0.01 * expected + slack
    assert held["transient"] == 0


def one_step(stage, shape: tuple[int, int], micro_batches: int = 1, **options) -> dict[str, int]:
    """Two steps, the second between two marks in the ledger: sends of one float64 element."""
    torch.manual_seed(0)
    model, optimizer = parallelize(
        gpt(layers=3),
        torch.optim.AdamW,
        stage,
        lr=1e-3,
        bucket_mb=0.005,
        mesh=dist.init_device_mesh("cpu", shape),
        **options,
    )
    mark = torch.zeros(1, dtype=torch.float64)
    for _ in range(2):
        dist.all_reduce(mark)
        for _ in range(micro_batches):
            x, y = CASES["gpt"].inputs(2)
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "padded": sum(flat.layout.padded for flat in model.flats),
        "flags": sum(len(flat.params) for flat in model.flats),
    }


def traffic(stage, shape: tuple[int, int], *args, **options) -> tuple[dict[str, int], int, int]:
    """(facts, bytes to other nodes, bytes inside) of rank 0's second step."""
    world = shape[0] * shape[1]
    run = dz.launch(one_step, world, args=(stage, shape, *args), kwargs=options, network=NODES)
    local = [record for record in run.ledger if record.rank == 0]
    step = local[max(i for i, r in enumerate(local) if r.dtype == "float64") + 1 :]
    far = sum(r.bytes_far for r in step)
    return run[0], far, sum(r.bytes_sent for r in step) - far


@pytest.mark.parametrize("stage", ROWS)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=pytest.mark.extra)])
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((2, 3), marks=pytest.mark.extra)])
def test_bytes_across_and_inside_are_the_formula(stage, shape, micro_batches):
    facts, far, near = traffic(stage, shape, micro_batches)
    across, inside = elements_moved(facts["padded"], shape, stage, micro_batches)
    times = micro_batches if stage[1] > 1 else 1  # how often flags travel inside
    flags = facts["flags"]
    assert near == 4 * (inside + times * flags * (shape[1] - 1))
    assert far == pytest.approx(4 * (across + flags * (times if stage[0] == 0 else 1)), abs=32)


def test_one_row_sends_most_bytes_far():
    """The same ranks as one axis: what the mesh saves."""
    facts, far, _ = traffic(3, (1, 4))
    _, less, _ = traffic((1, 3), (2, 2))
    assert far > 1.5 * facts["padded"] * 4 and less < 0.6 * facts["padded"] * 4


# -- gradients between backward and step


def gradients() -> dict[str, object]:
    out: dict[str, object] = {}
    plain = build(CASES["gpt"])
    model, optimizer = parallelize(
        copy.deepcopy(plain), torch.optim.SGD, (1, 3), lr=0.1, mesh=mesh()
    )
    x, y = CASES["gpt"].inputs(2)  # equal on all ranks, as the seed is

    def backward(model: nn.Module) -> None:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()

    def same(factor: float = 1.0) -> bool:
        exact = nn.utils.get_total_norm([p.grad for p in plain.parameters()]) * factor
        parts = [p.grad.as_subclass(torch.Tensor).square().sum() for p in model.parameters()]
        total = torch.stack(parts).sum()
        dist.all_reduce(total)
        return torch.allclose(total.sqrt(), exact, rtol=1e-5)

    torch.manual_seed(5)
    backward(plain)
    torch.manual_seed(5)
    backward(model)
    out["waits"] = all(flat.partial is not None for flat in model.flats)
    first = next(model.parameters())
    out["reads alone"] = dist.get_rank() > 0 or bool(first.grad.norm() >= 0)  # no collective
    out["refused"] = "Fix: optimizer.finalize_grads()" in raised(lambda: first.grad.mul_(2))
    optimizer.finalize_grads()
    out["final"] = same()
    out["waits no more"] = all(flat.partial is None for flat in model.flats)
    backward(model)
    optimizer.finalize_grads()
    out["added"] = same(2.0)  # to what was final
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    exact = 2 * nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    out["torch's clipping"] = torch.allclose(norm, exact, rtol=1e-5)
    optimizer.zero_grad()
    backward(model)
    for param in model.parameters():
        param.grad = None
    out["dropped"] = all(param.grad is None for param in model.parameters())
    backward(model)
    model.zero_grad()
    out["zeroed"] = all(param.grad is None for param in model.parameters())
    backward(model)
    optimizer.zero_grad(set_to_none=False)
    zeros = [p.grad for p in model.parameters() if p.grad is not None]
    out["zeros"] = len(zeros) == len(list(model.parameters())) and not any(g.any() for g in zeros)
    backward(model)
    norms = torch.stack([optimizer.clip_grad_norm_(0.01)])
    out["norm"] = torch.allclose(norms[0] * 2, exact, rtol=1e-5)
    everyone = [torch.empty_like(norms) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, norms)
    out["equal"] = all(torch.equal(one, norms) for one in everyone)
    with model.summon(writeback=True) as unsharded, torch.no_grad():
        unsharded.norm.bias.fill_(3.0)
    out["written"] = dz.full_state_dict(model)["norm.bias"].tolist() == [3.0] * 10
    with model.summon() as unsharded:
        out["seen by all"] = unsharded.norm.bias.tolist() == [3.0] * 10
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    out["reported"] = "changed outside of a step" in raised(lambda: model(x))
    optimizer.publish()
    with model.summon() as unsharded:
        out["published"] = all((param == 2.0).all() for param in unsharded.parameters())
    copied = copy.deepcopy(next(model.parameters()))
    out["copied"] = type(copied) is nn.Parameter
    return out


def test_a_gradient_that_waits_is_final_when_it_is_read():
    for out in dz.launch(gradients, 4, record=False):
        assert {name: result for name, result in out.items() if result is not True} == {}


class Exploding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, explode: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * (float("nan") if explode else 1.0)


def inf_on_one_rank(stage, where: int) -> list[tuple[bool, float]]:
    """(whether a weight of this rank moved, the scale) after each of three steps."""
    torch.manual_seed(0)
    half = {"mixed_precision": torch.float16, "loss_scale": LossScale(1024.0)}
    model, optimizer = parallelize(Exploding(), torch.optim.SGD, stage, mesh=mesh(), lr=0.1, **half)
    seen = []
    for step in range(3):
        before = [p.detach().clone() for p in optimizer.shards()]
        model(torch.ones(2, 4), step == 1 and dist.get_rank() == where).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        pairs = list(zip(before, optimizer.shards(), strict=True))
        assert all(torch.isfinite(after).all() for _, after in pairs)
        moved = any(not torch.equal(a, b) for a, b in pairs if a.numel())
        seen.append((moved, optimizer.loss_scale.scale))
    return seen


@pytest.mark.parametrize("stage", ROWS)
def test_inf_on_one_rank_of_a_mesh_skips_the_step_on_all(stage):
    for seen in dz.launch(inf_on_one_rank, 4, args=(stage, 2), record=False):
        assert seen == [(True, 1024.0), (False, 512.0), (True, 512.0)]


# -- checkpoints


def saved(path: str, full: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Train, save, and give the state of the step after that."""
    state, model, optimizer = train(CASES["gpt"], ADAMW, (1, 3), mesh=mesh())
    dz.save_checkpoint(path, model, optimizer)
    dz.save_in_background(f"{path}-too", model, optimizer).wait()
    return state | {"next": torch.cat([v.flatten() for v in one_more(model, optimizer).values()])}


def one_more(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x, y = CASES["gpt"].inputs(2)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    return dz.full_state_dict(model)


def loaded(path: str, stages: list) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    found = []
    for stage in stages:
        options = {"mesh": mesh()} if isinstance(stage, tuple) else {}
        module = build(CASES["gpt"])
        nn.init.zeros_(module.norm.weight)
        model, optimizer = parallelize(module, torch.optim.AdamW, stage, lr=0.01, **options)
        dz.load_checkpoint(path, model, optimizer)
        state = dz.full_state_dict(model)
        after = one_more(model, optimizer)
        found.append((state, torch.cat([v.flatten() for v in after.values()])))
    return found


@pytest.mark.rest
def test_saved_on_a_mesh_and_loaded_elsewhere(tmp_path):
    [first, *_] = dz.launch(saved, 4, args=(str(tmp_path / "a"),), record=False)
    after = first.pop("next")
    for name, world, stages in [
        ("a", 4, [(1, 3), (0, 3), 3, (1, 1)]),
        ("a-too", 4, [(1, 3)]),
        ("a", 2, [3, 0, (1, 2)]),
        ("a", 1, [3]),
    ]:
        for found in dz.launch(loaded, world, args=(str(tmp_path / name), stages), record=False):
            for state, next_state in found:
                assert all(torch.equal(state[key], value) for key, value in first.items())
                assert torch.allclose(next_state, after, atol=1e-6)


def half_of_the_world(path: str) -> list[bool]:
    """Two models, each on a mesh of four of eight ranks."""
    rank = dist.get_rank()
    halves = [dist.DeviceMesh("cpu", torch.arange(4).view(2, 2) + 4 * half) for half in range(2)]
    model, optimizer = parallelize(
        nn.Linear(3, 5), torch.optim.SGD, (1, 3), lr=0.1, mesh=halves[rank // 4]
    )
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank // 4)
    dz.save_checkpoint(f"{path}/{rank // 4}", model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    dz.load_checkpoint(f"{path}/{rank // 4}", model, optimizer)
    return [value.eq(rank // 4).all().item() for value in dz.full_state_dict(model).values()]


@pytest.mark.extra
def test_meshes_of_a_part_of_the_world(tmp_path):
    assert list(dz.launch(half_of_the_world, 8, args=(str(tmp_path),))) == [[True, True]] * 8


# -- wrong use


def refusals() -> dict[str, str]:
    square, line = mesh(), dist.init_device_mesh("cpu", (4,))
    given = {
        "one axis": ((1, 3), line),
        "no mesh": ((0, 3), None),
        "outside": ((3, 3), square),
        "inside": ((1, 0), square),
        "three": ((1, 2, 3), square),
        "unknown": ((0, 4), square),
    }
    return {
        name: raised(parallelize, nn.Linear(2, 2), torch.optim.SGD, stage, mesh=on, lr=0.1)
        for name, (stage, on) in given.items()
    } | {"cut": str(Comm.of(square, cut=True).shards)}


def test_wrong_pairs_name_the_cure():
    for result in dz.launch(refusals, 4, record=False):
        assert "2 dimensions, a stage for each (replicate, shard), got 1" in result["one axis"]
        assert "init_device_mesh(device, (replicas, shards))" in result["no mesh"]
        assert "outside it must be 0 (DDP) or 1 (ZeRO-1)" in result["outside"]
        assert "stage=(0, 1) on a mesh with its axes exchanged" in result["inside"]
        assert "a number or two of them" in result["three"]
        assert "stage must be 0 (DDP), 1, 2 or 3 (ZeRO), got 4" in result["unknown"]
        assert result["cut"] == "4"
