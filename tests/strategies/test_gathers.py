"""What ZeRO-3's gathers send: in 8 bits, from neighbours' second copy, and under checkpointing."""

from __future__ import annotations

import copy
from collections import Counter
from statistics import fmean, stdev

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, distance, gpt, loop, raised, rank_losses, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ddpz_lite as dz
from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.quantised import BLOCK, dequantise, quantise, rounded
from ddpz_lite.strategies.zero3 import ZeRO3

INT8 = {"gather_dtype": torch.int8}
ADAMW = Recipe(torch.optim.AdamW, (("lr", 0.01),))
NODES = dz.Network(latency=0.0, bandwidth=1e12, nodes=2)
MARK = "float64"  # in the ledger: a step begins


def begin() -> None:
    dist.all_reduce(torch.zeros(1, dtype=torch.float64))


def step_of(run: dz.Run, rank: int = 0) -> list:
    """The records of a rank after the last mark."""
    own_records = [record for record in run.ledger if record.rank == rank]
    return own_records[max(i for i, r in enumerate(own_records) if r.dtype == MARK) + 1 :]


def backward(model: nn.Module) -> None:
    x, y = CASES["gpt"].inputs(2)
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()


# -- in 8 bits


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_number_comes_back_within_half_a_step(scale):
    torch.manual_seed(0)
    values = torch.randn(3, 4 * BLOCK) * scale
    values[1, :BLOCK] = 0
    values[2, 0] *= 1000  # an outlier coarsens its own block
    steps = values.view(3, 4, BLOCK).abs().amax(-1, keepdim=True) / 127
    packed = quantise(values)
    error = (dequantise(packed) - values).view(3, 4, BLOCK).abs()
    assert packed.dtype is torch.int8 and packed.shape == (3, 4 * (BLOCK + 4))
    assert (error <= steps * 0.5001).all()
    assert torch.equal(
        rounded(values[0, :7]), dequantise(quantise(F.pad(values[0, :7], (0, 249))))[:7]
    )


def in_int8(stage, mesh_shape: tuple[int, ...]) -> dict[str, object]:
    """Against plain training whose gradients are taken with what the ranks have gathered."""
    out: dict[str, object] = {}
    mesh = dist.init_device_mesh("cpu", mesh_shape)
    plain = build(CASES["gpt"])
    seen = copy.deepcopy(plain)
    options = {"lr": 0.1, "momentum": 0.9}
    model, optimizer = parallelize(
        copy.deepcopy(plain), torch.optim.SGD, stage, mesh=mesh, **INT8, **options
    )
    exact = torch.optim.SGD(plain.parameters(), **options)
    for step in range(4):
        before = full_state_dict(model)
        with model.summon(writeback=True) as full:  # changes nothing, so writes nothing
            seen.load_state_dict(full.state_dict())
        digest = torch.cat([value.flatten() for value in seen.state_dict().values()])
        first = digest.clone()
        dist.broadcast(first, 0)
        out[f"all see the same {step}"] = torch.equal(first, digest)
        gap = distance(dict(seen.state_dict()), before)
        out[f"rounded {step}"] = 0 < gap < 1 / 127
        torch.manual_seed(step)
        backward(model)
        out[f"master {step}"] = distance(full_state_dict(model), before) == 0
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(step)
        seen.zero_grad()
        backward(seen)
        for param, other in zip(plain.parameters(), seen.parameters(), strict=True):
            param.grad = other.grad
        exact.step()
        plain_state = {name: value.clone() for name, value in plain.state_dict().items()}
        out[f"stepped {step}"] = distance(full_state_dict(model), plain_state) < 2e-6
    with model.summon(writeback=True) as full, torch.no_grad():
        full.norm.bias[0] = 3.0
    state, changed = full_state_dict(model), {n: v.clone() for n, v in plain_state.items()}
    changed["norm.bias"][0] = 3.0
    out["one is written"] = distance(state, changed) < 2e-6
    return out


@pytest.mark.parametrize(
    ("stage", "shape"),
    [(3, (1,)), (3, (2,)), (3, (3,)), (3, (4,)), ((0, 3), (2, 2)), ((1, 3), (2, 2))],
)
def test_compute_sees_rounded_parameters_and_the_step_exact_ones(stage, shape):
    world = torch.Size(shape).numel()
    for out in dz.launch(in_int8, world, args=(stage, shape), record=False):
        wrong = {name for name, result in out.items() if result is not True}
        assert wrong == (set() if world > 1 else {f"rounded {step}" for step in range(4)})


def bytes_gathered(options: dict) -> list[int]:
    model, optimizer = parallelize(gpt(layers=3), torch.optim.AdamW, 3, lr=1e-3, **options)
    for _ in range(2):
        begin()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return [flat.local.numel() for flat in model.flats]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_of_gathers_in_int8(world):
    run = dz.launch(bytes_gathered, world, args=(INT8,))
    gathers = [r for r in step_of(run) if r.op == "broadcast"]
    packed = [-(-numel // BLOCK) * (BLOCK + 4) for numel in run[0]]  # padded to whole blocks
    assert {r.dtype for r in gathers} == {"int8"}
    assert sum(r.bytes_sent for r in gathers) == 2 * (world - 1) * sum(packed)
    plain = [
        r for r in step_of(dz.launch(bytes_gathered, world, args=({},))) if r.op == "broadcast"
    ]
    assert sum(r.bytes_sent for r in plain) == 8 * (world - 1) * sum(run[0])


def losses(steps: int, options: dict) -> list[float]:
    from ddpz_lite.data import corpus

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = dz.GPTConfig(context=32, layers=2, heads=2, width=64)
    model, optimizer = parallelize(dz.GPT(config), torch.optim.AdamW, 3, lr=3e-3, **options)
    windows, found = corpus(None).windows(32, "train"), []
    picks = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        some = torch.randint(len(windows), (8,), generator=picks).tolist()
        x, y = map(torch.stack, zip(*(windows[i] for i in some), strict=True))
        loss = dz.next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / dist.get_world_size())
    return found


@pytest.mark.extra
def test_the_loss_of_sixty_steps_in_int8_is_that_in_fp32():
    plain, int8 = (
        dz.launch(losses, 2, args=(60, options), record=False, timeout=200)[0]
        for options in ({}, INT8)
    )
    assert plain[0] == pytest.approx(int8[0], abs=0.02)
    mean = [fmean(found[-10:]) for found in (plain, int8)]
    scatter = stdev(plain[-10:])  # from batch to batch
    assert mean[0] < plain[0] - 1.5 and mean[1] == pytest.approx(mean[0], abs=scatter)


def test_gather_dtype_is_refused_where_nothing_is_gathered():
    with pytest.raises(ValueError, match="is for parameters that are gathered to compute with"):
        parallelize(nn.Linear(2, 2), torch.optim.SGD, 2, lr=0.1, **INT8)
    with pytest.raises(ValueError, match=r"gather_dtype must be None or torch\.int8"):
        ZeRO3(nn.Linear(2, 2), gather_dtype=torch.float16)


# -- a second copy among neighbours


def second_copy() -> dict[str, object]:
    out: dict[str, object] = {}
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for case in ("gpt", "awkward", "checkpointed"):
        there, _, _ = train(CASES[case], ADAMW, 3)
        here, model, _ = train(CASES[case], ADAMW, 3, reshard_after_forward=2)
        out[case] = distance(here, there)
    out["mesh"] = distance(
        train(CASES["gpt"], ADAMW, (1, 3), mesh=mesh, reshard_after_forward=1)[0],
        train(CASES["gpt"], ADAMW, (1, 3), mesh=mesh)[0],
    )
    model, optimizer = parallelize(
        gpt(layers=3), torch.optim.SGD, 3, lr=0.1, reshard_after_forward=2
    )
    wanted = [flat.layout.padded // 2 for flat in model.flats]
    x, y = CASES["gpt"].inputs(2)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    kept = [0 if flat.secondary is None else flat.secondary.numel() for flat in model.flats]
    out["kept"] = kept == wanted
    out["counted"] = dz.memory(model, optimizer)["transient"] == 4 * sum(wanted)
    loss.backward()
    out["gone"] = all(flat.secondary is None for flat in model.flats)
    with torch.no_grad():
        model(x)
    out["not without gradients"] = all(flat.secondary is None for flat in model.flats)
    model(x)  # without backward: after the step it is stale
    optimizer.step()
    with torch.no_grad():
        plain = gpt(layers=3)
        plain.load_state_dict(full_state_dict(model))
        out["not stale"] = torch.allclose(model(x), plain(x), atol=1e-6)
    for n in (0, 3, 8, -2, 2.0):
        out[f"refused {n}"] = "a number of ranks that divides the 4" in raised(
            ZeRO3, nn.Linear(2, 2), reshard_after_forward=n
        )
    return out


def test_a_second_copy_changes_no_result_and_is_kept_until_backward():
    for out in dz.launch(second_copy, 4, record=False):
        gaps = {name: out.pop(name) for name in ("gpt", "awkward", "checkpointed", "mesh")}
        assert gaps == dict.fromkeys(gaps, 0.0)
        assert {name: result for name, result in out.items() if result is not True} == {}


def far_and_near(options: dict) -> int:
    model, optimizer = parallelize(gpt(layers=3), torch.optim.AdamW, 3, lr=1e-3, **options)
    for _ in range(2):
        x, y = CASES["gpt"].inputs(2)
        begin()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        begin()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(flat.layout.padded for flat in model.flats)


def gathered_in_backward(options: dict) -> tuple[int, int, int]:
    """(bytes that rank 0 sends, bytes that all send to the other node, padded parameters)."""
    run = dz.launch(far_and_near, 4, args=(options,), network=NODES)
    ranks = [[r for r in step_of(run, rank) if r.op == "broadcast"] for rank in range(4)]
    far = sum(record.bytes_far for records in ranks for record in records)
    return sum(record.bytes_sent for record in ranks[0]), far, run[0]


def test_backward_gathers_nothing_from_afar():
    sent, far, padded = gathered_in_backward({})
    assert sent == 4 * padded * 3 // 4 and far > 4 * padded  # at least once into each node
    sent, far, padded = gathered_in_backward({"reshard_after_forward": 2})
    assert sent == 4 * padded // 2 and far == 0  # half of the parameters, to the neighbour
    assert gathered_in_backward(INT8 | {"reshard_after_forward": 2}) == (sent, 0, padded)


def peer(n: int) -> float:
    """Distance to FSDP2 with the same `reshard_after_forward`."""
    case, module = CASES["gpt"], build(CASES["gpt"])
    for block in [*module.blocks, module]:
        fully_shard(block, reshard_after_forward=n)
    optimizer = torch.optim.AdamW(module.parameters(), **dict(ADAMW.options))
    loop(module, optimizer, lambda: None, ADAMW, rank_losses(module, case, ADAMW))
    theirs = {name: value.full_tensor() for name, value in module.state_dict().items()}
    return distance(train(case, ADAMW, 3, reshard_after_forward=n)[0], theirs)


def test_equals_fsdp2_with_the_same_number():
    assert max(dz.launch(peer, 4, args=(2,), record=False)) < 1e-5


# -- under checkpointing


def gathers_of(case: str, ours: bool) -> None:
    module = build(CASES[case])
    if ours:
        model, optimizer = parallelize(module, torch.optim.SGD, 3, lr=0.1)
    else:
        blocks = module.gpt.blocks if case == "checkpointed" else module.blocks
        for block in [*blocks, module]:
            fully_shard(block, reshard_after_forward=True)
        model, optimizer = module, torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        begin()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ours", [True, False])
def test_recomputation_finds_its_unit_whole_and_gathers_no_third_time(ours):
    """Backward gathers a unit when the gradient of its output is there, before it is recomputed."""
    ops = [
        Counter(r.op for r in step_of(dz.launch(gathers_of, 2, args=(case, ours))))
        for case in ("gpt", "checkpointed")
    ]
    assert ops[0] == ops[1]
    assert ops[0]["broadcast" if ours else "all_gather"] == (2 * 2 * 3 if ours else 2 * 3)
