"""ZeRO-3 beyond parity: units, meta device, access to whole parameters, evaluation, errors."""

from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, distance, gpt, raised, reference, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpz_lite as dz
from ddpz_lite.checkpoint.full_state import full_state_dict, load_full_state_dict
from ddpz_lite.model import MLP
from ddpz_lite.strategies.forwards import tensors_in
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.unit_choice import split
from ddpz_lite.strategies.units import Unit
from ddpz_lite.strategies.zero3 import ZeRO3


class Branch(nn.Module):
    """Two blocks of equal size; `skip` leaves out the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for block in self.blocks[skip:]:
            x = torch.tanh(block(x))
        return x


class Nested(nn.Module):
    """A unit inside a unit, a module used twice, an RNN, and a region of two units recomputed at
    once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 5, batch_first=True)
        self.outer = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5)))
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.rnn(x[:, None])
        x = self.outer(torch.tanh(x))
        x = checkpoint(
            lambda t: self.blocks[1](torch.tanh(self.blocks[0](t))), x, use_reentrant=False
        )
        return self.blocks[2](torch.tanh(self.blocks[2](x)))[:, 0]


def options_do_not_change_results() -> dict[str, float]:
    world = dist.get_world_size()
    recipe, found = Recipe(steps=3), {}
    case = CASES["gpt"]
    alone = reference(case, recipe, world)
    for name, options in {
        "kept": {"reshard_after_forward": False},
        "no prefetch": {"prefetch": False},
        "linears": {"units": (nn.Linear, nn.Embedding, nn.LayerNorm)},
        "offload": {"offload": True},
    }.items():
        found[name] = distance(train(case, recipe, 3, **options)[0], alone)
    nested = copy.copy(CASES["mlp"])
    object.__setattr__(nested, "build", Nested)
    object.__setattr__(nested, "inputs", lambda n: (torch.randn(n, 5), torch.randn(n, 5)))
    alone = reference(nested, recipe, world)
    wanted = {"rnn", "outer", "outer.1", "blocks.0", "blocks.1", "blocks.2"}
    for name, options in {
        "nested": {"units": lambda name, module: name in wanted},
        "nested, default": {},
        "nested, kept": {"units": lambda name, _: name in wanted, "reshard_after_forward": False},
    }.items():
        found[name] = distance(train(nested, recipe, 3, **options)[0], alone)
    if world == 4:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for stage in (0, 1, 2, 3):
            alone = reference(case, Recipe(clip=0.05), world)
            found[f"hybrid {stage}"] = distance(
                train(case, Recipe(clip=0.05), stage, mesh=mesh)[0], alone
            )
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.extra)])
def test_options_do_not_change_results(world):
    for found in dz.launch(options_do_not_change_results, world, record=False):
        assert {k: d for k, d in found.items() if not d < 2e-6} == {}


def init(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.fill_(0.5)


def many_things() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, object] = {}

    torch.manual_seed(rank)
    plain = gpt(layers=3)
    tokens = torch.randint(0, 19, (2, 6), generator=torch.Generator().manual_seed(5))
    model = ZeRO3(copy.deepcopy(plain))
    out["shards"] = sum(p.numel() for p in model.parameters())
    out["psi"] = sum(p.numel() for p in plain.parameters())
    out["names"] = [n for n, _ in model.module.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    state = full_state_dict(model)
    if rank == 0:
        plain.load_state_dict(state)  # plain names and shapes
        out["same"] = all(torch.equal(state[n], v) for n, v in plain.state_dict().items())
        out["tied"] = "head.weight" in state and "tokens.weight" in state
    plain.load_state_dict(state)

    # evaluation, before and after training, and under no_grad
    with torch.no_grad():
        out["eval"] = torch.allclose(model(tokens), plain(tokens), atol=1e-6)
    out["freed"] = all(f.full.untyped_storage().size() == 0 for f in model.flats)
    logits = model(tokens)
    out["held in forward"] = [f.full.untyped_storage().size() > 0 for f in model.flats]
    logits.sum().backward()
    out["after backward"] = all(f.full.untyped_storage().size() == 0 for f in model.flats)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    plain(tokens).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    out["stepped"] = distance_to(model, plain)

    # a forward without backward, then a step by hand: nothing stale is used
    model(tokens)
    optimizer.step()
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0.1 * p.grad
        out["not stale"] = torch.allclose(model(tokens), plain(tokens), atol=1e-4)

    kept = ZeRO3(copy.deepcopy(plain), reshard_after_forward=False)
    kept(tokens).sum().backward()
    kept(tokens)
    torch.optim.SGD(kept.parameters(), lr=0.1).step()
    with torch.no_grad():
        stepped = full_state_dict(kept)
        fresh = gpt(layers=3)
        fresh.load_state_dict(stepped)
        out["kept, not stale"] = torch.allclose(kept(tokens), fresh(tokens), atol=1e-5)
        out["kept, stepped"] = not torch.equal(stepped["norm.bias"], plain.norm.bias)

    with model.summon(writeback=True) as whole:
        out["whole"] = [p.shape for p in whole.parameters()] == [
            p.shape for p in plain.parameters()
        ]
        with torch.no_grad():
            whole.norm.bias.fill_(3.0)
    out["written"] = full_state_dict(model)["norm.bias"].tolist() == [3.0] * 10
    load_full_state_dict(model, plain.state_dict())
    out["loaded"] = distance_to(model, plain)
    out["of another"] = raised(load_full_state_dict, model, gpt(layers=2).state_dict())

    # an exception in backward leaves a model that trains on
    logits = model(tokens)
    logits.register_hook(_stop)
    with contextlib.suppress(KeyError):
        logits.sum().backward()
    optimizer.zero_grad()
    plain.zero_grad()
    model(tokens).sum().backward()
    plain(tokens).sum().backward()
    norms = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    dist.all_reduce(norms)
    exact = sum(p.grad.square().sum() for p in plain.parameters())
    out["after an exception"] = torch.allclose(norms, exact, rtol=1e-4)

    # meta device
    with torch.device("meta"):
        empty = gpt(layers=3)
    built = ZeRO3(empty, init_fn=init)
    out["meta"] = all(v.eq(0.5).all().item() for v in full_state_dict(built).values())
    with torch.device("meta"):
        empty = MLP([3, 4, 2])
    out["meta default"] = all(
        torch.isfinite(v).all() for v in full_state_dict(ZeRO3(empty)).values()
    )
    with torch.device("meta"):
        empty = nn.Module()
        empty.weight = nn.Parameter(torch.zeros(3))
    out["meta error"] = raised(ZeRO3, empty)

    # wrong use
    module = nn.Linear(3, 3)
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    late = ZeRO3(module)
    late(torch.ones(1, 3)).sum().backward()
    out["built before"] = raised(early.step)
    out["no units"] = raised(ZeRO3, nn.Linear(2, 2), units=[nn.Conv2d])
    out["nothing"] = raised(ZeRO3, nn.ReLU())
    out["a list"] = raised(ZeRO3, Branch(), units=[nn.ModuleList])
    branch = ZeRO3(Branch())
    branch(torch.ones(1, 4)).sum().backward()
    out["skipped"] = raised(branch, torch.ones(1, 4), skip=True)  # all ranks: caught by each
    free = ZeRO3(Branch(), prefetch=False)
    for skip in (False, True, False):
        free(torch.ones(1, 4), skip=skip).sum().backward()
    out["world"] = world
    return out


def distance_to(model: ZeRO3, plain: nn.Module) -> float:
    return distance(full_state_dict(model), dict(plain.state_dict()))


def _stop(_):
    raise KeyError("stopped on purpose")


@pytest.mark.parametrize("world", [1, 3])
def test_many_things(world):
    ranks = list(dz.launch(many_things, world, record=False))
    assert ranks[0]["same"] and ranks[0]["tied"]
    assert sum(out["shards"] for out in ranks) == ranks[0]["psi"]
    for out in ranks:
        assert out["shards"] <= out["psi"] / world + 4
        for key in (
            "names",
            "eval",
            "freed",
            "after backward",
            "not stale",
            "kept, not stale",
            "whole",
            "written",
        ):
            assert out[key], key
        assert not any(out["held in forward"])
        assert out["stepped"] < 2e-6 and out["loaded"] == 0.0
        assert out["after an exception"] and out["meta"] and out["meta default"]
        assert "Fix: pass init_fn" in out["meta error"]
        assert "blocks.2.norm1.weight has shape none there" in out["of another"]
        assert "built before sharding: it holds" in out["built before"]
        assert "no module of Linear fits" in out["no units"]
        assert "nothing to shard" in out["nothing"]
        assert "blocks is a ModuleList, which is never called" in out["a list"]
        assert "runs unit 'blocks.1' where the first forward had 'blocks.0'" in out["skipped"]


def one_rank_skips(at: int) -> None:
    torch.manual_seed(0)
    model = ZeRO3(Branch())
    for step in range(2):
        model(torch.ones(1, 4), skip=step == at and dist.get_rank() == 1).sum().backward()


def test_a_rank_that_skips_a_unit_is_named():
    with pytest.raises(
        dz.RankFailed, match=r"rank 1 runs unit 'blocks.1' where the first"
    ) as caught:
        dz.launch(one_rank_skips, 3, args=(1,), timeout=20)
    assert caught.value.rank == 1


class Ends(Branch):
    """`skip` leaves out the last block."""

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for block in self.blocks[: 3 - skip]:
            x = torch.tanh(block(x))
        return x


def first_forward_differs() -> list[str]:
    one = dist.get_rank() == 1
    messages = [raised(ZeRO3(cls()), torch.ones(1, 4), skip=one) for cls in (Branch, Ends)]
    model = ZeRO3(Branch())
    with contextlib.suppress(RuntimeError):
        model(torch.ones(1, 4), skip=one)
    model(torch.ones(1, 4)).sum().backward()  # nothing is left of it
    return messages


def test_a_rank_that_skips_a_unit_in_the_first_forward_is_named_on_all():
    for rank, (first, last) in enumerate(dz.launch(first_forward_differs, 3, timeout=20)):
        at = "blocks.1" if rank == 1 else "blocks.0"
        assert f"rank {rank} is at '{at}' in the first forward" in first
        assert "2 at 'blocks.0', 1 at 'blocks.1'; units are gathered by all ranks" in first
        assert "2 at 'blocks.2', 1 at the end of forward" in last


def test_units_of_models():
    assert list(split(gpt(layers=3))) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert list(split(build(CASES["cnn"]))) == ["", "blocks.0", "blocks.1"]
    tied = split(gpt(layers=1, tied=True))[""]
    assert [slot.name for slots in tied.values() for slot in slots if "weight" in slot.name] == [
        "tokens.weight",
        "head.weight",
        "positions.weight",
        "norm.weight",
    ]
    shared = split(build(CASES["awkward"]))
    names = [slot.name for slots in shared[""].values() for slot in slots]
    assert {"first.weight", "blocks.1.tied"} <= set(names)
    transformer = nn.Transformer(8, 2, 2, 2, 16)
    assert list(split(transformer))[1:] == [
        f"{s}.layers.{i}" for s in ("encoder", "decoder") for i in (0, 1)
    ]


def half_gone() -> int:
    model, _ = parallelize(build(CASES["gpt"]), torch.optim.AdamW, 3, lr=1e-3)
    with torch.no_grad():
        return sum(f.full.untyped_storage().size() for f in model.flats)


def test_nothing_is_whole_at_rest():
    assert list(dz.launch(half_gone, 2)) == [0, 0]


class Rotary(nn.Module):
    """A module without parameters whose buffer matters, as rotary embeddings have it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(6))
        self.reset_parameters()

    def reset_parameters(self):
        self.angles.copy_(torch.arange(6.0))

    def forward(self, x):
        return x + self.angles


def meta_and_summoned():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 6), Rotary(), nn.Linear(6, 6))
    model = ZeRO3(module, units=(nn.Linear,))
    x = torch.ones(2, 6)
    outside = model(x)
    with torch.no_grad(), model.summon(writeback=True) as whole:
        inside = model(x)
        shapes = [tuple(p.shape) for p in whole.parameters()]
    return module[1].angles, outside.detach(), inside, model(x).detach(), shapes


def test_buffers_without_parameters_are_filled_and_a_forward_inside_summon_frees_nothing():
    for angles, outside, inside, after, shapes in dz.launch(meta_and_summoned, 2):
        assert torch.equal(angles, torch.arange(6.0))
        assert torch.equal(outside, inside) and torch.equal(outside, after)
        assert shapes == [(6, 6), (6,), (6, 6), (6,)]


class Noise(nn.Module):
    """A module whose buffer is drawn at random."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.empty(6))

    def reset_parameters(self):
        self.noise.uniform_()

    def forward(self, x):
        return x + self.noise


class Normed(nn.Linear):
    """Parameters and a buffer in one module."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("scale", torch.empty(6))

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "scale"):
            self.scale.uniform_()


def meta_buffers():
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = nn.Sequential(Normed(), Noise(), nn.BatchNorm1d(6), Normed())
    ZeRO3(module, units=(nn.Linear,))
    return dict(module.named_buffers())  # before a forward, which would send rank 0's


def test_buffers_built_on_the_meta_device_are_those_of_rank_0():
    first, *others = dz.launch(meta_buffers, 3)
    assert {"0.scale", "1.noise", "2.running_mean", "2.num_batches_tracked"} < first.keys()
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


class Tied(nn.Module):
    """Two units that share a weight and have biases of their own; one is set by its module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def tied_on_meta():
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = Tied()
    calls = []

    def init(module):
        calls.append(module)
        module.reset_parameters()

    model = ZeRO3(module, init_fn=init)
    model(torch.ones(1, 4)).sum().backward()
    state = full_state_dict(model)
    plain = Tied()
    plain.load_state_dict(state)
    same = torch.allclose(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    return state, same, len(calls), [len(unit.flats[0].params) for unit in model.units]


def test_a_parameter_tied_across_units_can_start_on_the_meta_device():
    first, *_ = ranks = list(dz.launch(tied_on_meta, 2))
    for state, same, calls, sizes in ranks:
        assert same and calls == 3 and sizes == [1, 1, 2, 1]
        assert torch.equal(state["blocks.0.weight"], state["blocks.2.weight"])
        for name, value in state.items():
            assert torch.equal(value, first[0][name])
            assert 0 < value.abs().max() <= 0.5  # what Linear(4, 4) draws


def test_only_a_first_zero3_hooks_all_optimizers():
    program = """
import torch, ddpz_lite as dz
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
dz.ZeRO3
before = len(hooks)
for _ in range(2):
    dz.ZeRO3(torch.nn.Linear(2, 2))
print(before, len(hooks))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=400
    )
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_a_copy_and_a_second_derivative_are_refused():
    model = ZeRO3(Branch())
    for copied in (model, model.module, model.module.blocks[0], nn.ModuleList([model])):
        assert "cannot be copied" in raised(copy.deepcopy, copied)
    x = torch.ones(1, 4, requires_grad=True)
    out = model(x).sum()
    assert "Fix: stage 2" in raised(torch.autograd.grad, out, x, create_graph=True)
    model(torch.ones(1, 4)).sum().backward()  # nothing is left of it


def held_by_a_frozen_trunk() -> list[bool]:
    module = Branch()
    module.blocks[:2].requires_grad_(False)
    held, forward = [], module.blocks[2].forward

    def look(x: torch.Tensor) -> torch.Tensor:
        held.extend(unit.flats[0].full.untyped_storage().size() > 0 for unit in model.units[1:])
        return forward(x)

    module.blocks[2].forward = look
    model = ZeRO3(module)
    model(torch.ones(1, 4)).sum().backward()
    return held


def test_a_frozen_unit_that_backward_does_not_pass_is_freed_after_forward():
    assert list(dz.launch(held_by_a_frozen_trunk, 2)) == [[False, False, True]] * 2


@pytest.mark.parametrize("prefetch", [True, False])
def test_shards_changed_after_a_forward_without_backward_are_what_the_next_one_has(prefetch):
    module = nn.Sequential(Branch(), nn.Linear(4, 4))
    model = ZeRO3(module, units=[Branch], reshard_after_forward=False, prefetch=prefetch)
    assert model(torch.ones(1, 4)).abs().sum() > 0
    with torch.no_grad():
        for shard in model.parameters():
            shard.zero_()
    assert model(torch.ones(1, 4)).abs().sum() == 0


@dataclass
class Made:
    tensor: torch.Tensor


def test_a_class_that_is_passed_to_a_unit_is_not_looked_into():
    x = torch.ones(1)
    assert tensors_in(({"kind": Made}, Made(x))) == [x]


def test_a_backward_looks_at_each_unit_a_constant_number_of_times(monkeypatch):
    calls = {}
    whole = Unit.is_done.fget
    for blocks in (8, 64):
        model = ZeRO3(nn.Sequential(*(nn.Linear(2, 2) for _ in range(blocks))))
        count = itertools.count()
        monkeypatch.setattr(Unit, "is_done", property(lambda u, c=count: (next(c), whole(u))[1]))
        model(torch.ones(1, 2)).sum().backward()
        calls[blocks] = next(count)
    assert calls[64] <= 3 * 64 and calls[8] <= 3 * 8, calls
