"""ZeRO-1 and ZeRO-2 as optimizers: which classes, what state, groups, closures, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, distance, raised, reference, train
from third_party import ClipsWithin, GlobalNorm, Lion, Prodigy, ScheduleFree
from torch import nn

import ddpz_lite as dz
from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.strategies.guards.elementwise import check_elementwise
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.precision import LossScale
from ddpz_lite.strategies.zero1 import ZeRO1
from ddpz_lite.strategies.zero2 import ZeRO2

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD fused": {"lr": 0.1, "momentum": 0.9, "fused": True},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.001, "momentum": 0.5, "centered": True},
    "Adam": {"lr": 0.001, "amsgrad": True},
    "AdamW": {"lr": 0.001, "foreach": True},
    "AdamW fused": {"lr": 0.001, "fused": True},
    "Adadelta": {"lr": 0.1},
    "Adamax": {"lr": 0.001},
    "NAdam": {"lr": 0.001},
    "RAdam": {"lr": 0.001},
}


def every_optimizer() -> dict[tuple[str, int], float]:
    found = {}
    for name, options in OPTIMIZERS.items():
        cls = getattr(torch.optim, name.split()[0])
        recipe = Recipe(cls, tuple(options.items()))
        alone = reference(CASES["mlp"], recipe, dist.get_world_size())
        for stage in (0, 1, 2, 3):
            found[name, stage] = distance(train(CASES["mlp"], recipe, stage)[0], alone)
    return found


def test_every_elementwise_optimizer():
    for found in dz.launch(every_optimizer, 3, record=False):
        assert {key: d for key, d in found.items() if not d < 2e-5} == {}


def as_optimizers() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, object] = {}
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    for zero in (ZeRO1, ZeRO2):
        torch.manual_seed(rank)
        model, late = build(CASES["mlp"]), nn.Parameter(torch.full((5,), float(rank)))
        options = {"lr": 0.1, "momentum": 0.9}
        optimizer = zero(model.parameters(), torch.optim.SGD, bucket_mb=1e-4, **options)
        optimizer.add_param_group({"params": [late], "lr": 0.5})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

        def closure(model=model, optimizer=optimizer, late=late):
            optimizer.zero_grad()
            loss = model(x).square().mean() + late.sum() * (rank + 1)
            loss.backward()
            return loss.item()

        first = optimizer.step(closure)
        scheduler.step()
        optimizer.step(closure)
        mean = (world + 1) / 2
        expected = -0.5 * mean - 0.05 * (0.9 * mean + mean)  # rank 0's value was 0
        out[zero.__name__] = {
            "loss": isinstance(first, float),
            "late": torch.allclose(late, torch.full((5,), expected)),
            "equal": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
            "lr": [g["lr"] for g in optimizer.inner.param_groups],
            "state": sum(t.numel() for s in optimizer.state.values() for t in s.values()),
            "psi": sum(p.numel() for p in model.parameters()) + 5,
            "is": isinstance(optimizer, torch.optim.Optimizer),
            "grads": [p.grad is None for p in model.parameters()],
        }
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        out[zero.__name__]["reloaded"] = sum(
            t.numel() for s in optimizer.state.values() for t in s.values()
        )
    return out


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_a_torch_optimizer(world):
    ranks = list(dz.launch(as_optimizers, world))
    for name in ("ZeRO1", "ZeRO2"):
        states = [out[name]["state"] for out in ranks]
        assert sum(states) == ranks[0][name]["psi"]  # each element's momentum on one rank
        assert max(states) <= ranks[0][name]["psi"] / world + 12
        for out in (out[name] for out in ranks):
            assert out["loss"] and out["late"] and out["is"]
            assert out["equal"] == ranks[0][name]["equal"]
            assert out["lr"] == pytest.approx([0.01, 0.05])
            assert not any(out["grads"])
            assert out["reloaded"] == out["state"]


THIRD_PARTY = {ScheduleFree: (0, 1, 2, 3), Lion: (0, 1, 2, 3), Prodigy: (0,)}


def third_party() -> dict[tuple[str, int], dict[str, object]]:
    """Beside one process that adds up the halves of the batch: parameters in training and in
    evaluation, and the options of the groups."""
    torch.set_num_threads(1)
    rank, world, case, found = dist.get_rank(), dist.get_world_size(), CASES["mlp"], {}
    torch.manual_seed(7)
    data = [case.inputs(2 * world) for _ in range(4)]
    for kind, stages in THIRD_PARTY.items():
        for stage in stages:
            plain, equal = build(case), []
            alone = kind(plain.parameters())
            model, optimizer = parallelize(build(case), kind, stage, bucket_mb=1e-4)
            for step, (x, y) in enumerate(data):
                for o in (alone, optimizer):
                    getattr(o, "train", int)()
                for r in range(world):
                    (case.loss(plain(x[r::world]), y[r::world]) / world).backward()
                case.loss(model(x[rank::world]), y[rank::world]).backward()
                more = {"factor": 0.5} if kind is Lion and step == 1 else {}
                for o in (alone, optimizer):
                    o.step(**more)
                    o.zero_grad()
                equal.append(same(dz.full_state_dict(model), plain.state_dict()))
                for o in (alone, optimizer):
                    getattr(o, "eval", int)()
                equal.append(same(dz.full_state_dict(model), plain.state_dict()))
                equal.append(torch.equal(model(x), plain(x)))  # what is whole is new, too
            options = [
                {k: v for k, v in o.param_groups[0].items() if k != "params"}
                for o in (alone, optimizer)
            ]
            found[kind.__name__, stage] = {"equal": all(equal), "options": options}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def test_optimizers_that_count_in_their_groups_equal_one_process():
    for found in dz.launch(third_party, 2, record=False):
        for key, got in found.items():
            assert got["equal"], key
            alone, ours = got["options"]
            assert ours.keys() == alone.keys(), key
            for name, value in alone.items():  # BLAS sums by the memory's alignment
                value = pytest.approx(value) if isinstance(value, float) else value
                assert ours[name] == value, (key, name)
        assert found["ScheduleFree", 2]["options"][1]["k"] == 4
        assert found["Prodigy", 0]["options"][1]["d"] > 1e-2


@pytest.mark.parametrize("kind", [GlobalNorm, ClipsWithin, Prodigy])
def test_optimizers_that_mix_parameters_are_refused(kind):
    for stage in (1, 2, 3):
        with pytest.raises(TypeError, match=f"{kind.__name__} cannot step on a shard"):
            parallelize(nn.Linear(2, 2), kind, stage, lr=0.1)


def test_hooks_of_the_state_dict_run():
    for stage in (0, 2):
        seen, model = [], nn.Linear(2, 2)
        _, optimizer = parallelize(model, torch.optim.SGD, stage, lr=0.1, momentum=0.9)
        optimizer.register_state_dict_pre_hook(seen.append)
        optimizer.register_state_dict_post_hook(lambda o, state: state | {"more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda o, state: {k: v for k, v in state.items() if k != "more"}
        )
        optimizer.register_load_state_dict_post_hook(seen.append)
        state = optimizer.state_dict()
        assert state.pop("more") == 1
        optimizer.load_state_dict(state | {"more": 2})
        assert seen == [optimizer, optimizer]
        with pytest.raises(AttributeError, match="no attribute 'eval'"):
            optimizer.eval()


@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_scheduler_sets_is_saved_and_outlives_a_new_group(stage):
    _, optimizer = parallelize(nn.Linear(2, 2), torch.optim.SGD, stage, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.05
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = 0.025
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.2]


def test_param_groups_may_be_plain_parameters():
    for given in (lambda m: m.parameters(), lambda m: [{"params": m.weight}, {"params": [m.bias]}]):
        _, optimizer = parallelize(nn.Linear(2, 2), torch.optim.SGD, 1, lr=0.1, param_groups=given)
        assert sum(len(g["params"]) for g in optimizer.param_groups) == 2


def sparse_rows() -> dict[str, object]:
    """Embeddings with sparse gradients under DDP against one process; at other stages refused."""
    rank, world, out = dist.get_rank(), dist.get_world_size(), {}
    rows = torch.tensor([[0, 1, 1], [1, 4, 0]])
    for kind in (torch.optim.SparseAdam, torch.optim.SGD):
        torch.manual_seed(0)
        plain = nn.Embedding(6, 3, sparse=True)
        model, optimizer = parallelize(copy.deepcopy(plain), kind, 0, lr=0.1)
        alone = kind(plain.parameters(), lr=0.1)
        for _ in range(2):
            for r in range(world):
                (plain(rows[r]).square().sum() / world).backward()
            model(rows[rank]).square().sum().backward()
            out["sparse"] = model.module.weight.grad.is_sparse
            for o in (alone, optimizer):
                o.step()
                o.zero_grad()
        out[kind.__name__] = torch.allclose(model.module.weight, plain.weight, atol=1e-7)
    model, _ = parallelize(nn.Embedding(6, 3, sparse=True), torch.optim.SGD, 2, lr=0.1)
    out["refused"] = "sparse=False" in raised(lambda: model(rows[rank]).sum().backward())
    return out


def test_sparse_gradients_under_ddp():
    for out in dz.launch(sparse_rows, 2, record=False):
        assert all(out.values()), out


@pytest.mark.parametrize(
    ("name", "options"),
    [("LBFGS", {}), ("Adafactor", {"lr": 0.1}), ("Muon", {"lr": 0.1}), ("SparseAdam", {"lr": 0.1})],
)
def test_optimizers_that_mix_elements_are_named(name, options):
    with pytest.raises((TypeError, ValueError), match="element"):
        check_elementwise(getattr(torch.optim, name), options)
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises((TypeError, ValueError), match=name):
        parallelize(model, getattr(torch.optim, name), 3, **options)


def test_whole_parameters_take_any_optimizer():
    model, optimizer = parallelize(nn.Linear(4, 4, bias=False), torch.optim.Muon, 0, lr=0.1)
    before = model.module.weight.clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.module.weight)


def test_wrong_use_names_the_fix():
    with pytest.raises(ValueError, match="stage must be 0"):
        parallelize(nn.Linear(2, 2), torch.optim.SGD, 4, lr=0.1)
    with pytest.raises(ValueError, match="requires_grad=True to train"):
        parallelize(nn.Linear(2, 2).requires_grad_(False), torch.optim.SGD, 1, lr=0.1)
    with pytest.raises(ValueError, match=r"1 trainable parameters are in no group, bias"):
        parallelize(
            nn.Linear(2, 2),
            torch.optim.SGD,
            3,
            lr=0.1,
            param_groups=lambda m: [{"params": [m.weight]}],
        )
    with pytest.raises(ValueError, match="no parameter of the module"):
        parallelize(
            nn.Linear(2, 2),
            torch.optim.SGD,
            0,
            lr=0.1,
            param_groups=lambda m: [{"params": [nn.Parameter(torch.ones(3))]}],
        )
    with pytest.raises(ValueError, match="mixed_precision must be"):
        parallelize(nn.Linear(2, 2), torch.optim.SGD, 0, lr=0.1, mixed_precision=torch.int8)
    with pytest.raises(ValueError, match="loss_scale needs"):
        parallelize(nn.Linear(2, 2), torch.optim.SGD, 0, lr=0.1, loss_scale=object())


def dropped() -> list[float]:
    """Distance to one process after gradients, some kept under no_sync, were dropped, by stage and
    by who drops them.
    """
    case, world, found = CASES["mlp"], dist.get_world_size(), []
    x, y = case.inputs(2 * world)
    dist.broadcast(x, 0)
    dist.broadcast(y, 0)
    local = x[dist.get_rank() :: world], y[dist.get_rank() :: world]
    for stage in (0, 1, 2, 3):
        for of_model in (False, True):
            plain = build(case)
            model, optimizer = parallelize(build(case), torch.optim.SGD, stage, lr=0.1)
            zero_grad = model.zero_grad if of_model else optimizer.zero_grad
            with model.no_sync():
                case.loss(100 * model(local[0]), local[1]).backward()
            zero_grad()
            case.loss(100 * model(local[0]), local[1]).backward()
            zero_grad()
            case.loss(model(local[0]), local[1]).backward()
            optimizer.step()
            case.loss(plain(x), y).backward()
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            found.append(distance(full_state_dict(model), plain.state_dict()))
    return found


def test_zero_grad_of_optimizer_and_model_drops_all_gradients():
    for found in dz.launch(dropped, 2, record=False):
        assert max(found) < 2e-6


def test_a_module_with_gradient_hooks_is_refused():
    for stage in (0, 2):
        module = nn.Linear(2, 2)
        parallelize(module, torch.optim.SGD, stage, lr=0.1)
        with pytest.raises(ValueError, match="weight has a gradient hook: of an earlier"):
            parallelize(module, torch.optim.SGD, 3, lr=0.1)
    hooked = nn.Linear(2, 2)
    hooked.bias.register_hook(torch.neg)
    parallelize(hooked, torch.optim.SGD, 1, lr=0.1)  # whole parameters call it
    hooked = nn.Linear(2, 2)
    hooked.bias.register_hook(torch.neg)
    with pytest.raises(ValueError, match="bias has a gradient hook"):
        parallelize(hooked, torch.optim.SGD, 3, lr=0.1)


def moved(stage: int, change: str) -> None:
    """A step after a parameter was taken away from the optimizer."""
    module = nn.Linear(4, 3)
    model, optimizer = parallelize(module, torch.optim.SGD, stage, lr=0.1)
    if change == "cast":
        module.double()
    else:
        module.weight.data = torch.ones(3, 4)
    model(torch.ones(2, 4, dtype=module.weight.dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("change", ["cast", "data"])
def test_a_parameter_that_the_optimizer_no_longer_sees(stage, change):
    with pytest.raises(RuntimeError, match="moved or cast"):
        moved(stage, change)


def clipped_twice(precision: torch.dtype | None) -> dict[int, float]:
    """Distance to one process where a backward follows clipping, by stage."""
    out, rank, world = {}, dist.get_rank(), dist.get_world_size()
    x = torch.randn(2 * world, 4, generator=torch.Generator().manual_seed(5))
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        plain = nn.Linear(4, 3)
        options = {"lr": 0.1, "mixed_precision": precision}
        if precision is not None:
            options["loss_scale"] = LossScale(64.0)
        model, optimizer = parallelize(copy.deepcopy(plain), torch.optim.SGD, stage, **options)
        for _ in range(2):
            plain(x).square().sum().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            (model(x[rank::world]).square().sum() * world).backward()
            optimizer.clip_grad_norm_(1.0)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        optimizer.step()
        state = dz.full_state_dict(model)
        out[stage] = max((state[n] - v).abs().max().item() for n, v in plain.state_dict().items())
    return out


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_a_backward_after_clipping_adds_up(precision):
    for out in dz.launch(clipped_twice, 2, args=(precision,), record=False):
        assert all(d < (1e-3 if precision else 1e-6) for d in out.values()), out


def test_frozen_parameters_that_are_not():
    for kind in (ZeRO1, ZeRO2):
        module = nn.Linear(4, 3)
        module.bias.requires_grad_(False)
        optimizer = kind(module.parameters(), torch.optim.SGD, lr=0.1)
        module.bias.requires_grad_(True)
        module(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=r"shape \(3,\) was frozen"):
            optimizer.step()
