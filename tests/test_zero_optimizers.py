"""ZeRO-1 and ZeRO-2 as optimizers: which classes, what state, groups, closures, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, distance, reference, train
from torch import nn

import ddpz_lite as dz
from ddpz_lite.optim import check_elementwise
from ddpz_lite.parallel import parallelize
from ddpz_lite.zero1 import ZeRO1
from ddpz_lite.zero2 import ZeRO2

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
            assert out["grads"] == [name == "ZeRO2"] * len(out["grads"])
            assert out["reloaded"] == out["state"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("LBFGS", {}), ("Adafactor", {"lr": 0.1}), ("Muon", {"lr": 0.1}), ("SparseAdam", {"lr": 0.1})],
)
def test_optimizers_that_mix_elements_are_named(name, options):
    with pytest.raises((TypeError, ValueError), match="element"):
        check_elementwise(getattr(torch.optim, name), options)
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises((TypeError, ValueError), match=name):
        parallelize(model, getattr(torch.optim, name), 2, **options)


def test_whole_parameters_take_any_optimizer():
    model, optimizer = parallelize(nn.Linear(4, 4, bias=False), torch.optim.Muon, 0, lr=0.1)
    before = model.module.weight.clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.module.weight)


def test_wrong_use_names_the_cure():
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
