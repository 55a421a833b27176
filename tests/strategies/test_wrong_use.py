"""Programs that would train something else than they say: each gets one sentence with its fix."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import raised
from torch import Tensor, nn

import ddpz_lite as dz
from ddpz_lite.strategies.guards.modules import KnownModules

STAGES = (0, 1, 2, 3)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


# -- modules that change after wrapping


def assign(module: nn.Module) -> None:
    module.load_state_dict(net().state_dict(), assign=True)


def replace(module: nn.Module) -> None:
    module[2] = nn.Linear(7, 1)


def add(module: nn.Module) -> None:
    module[1].gain = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("change", "name"),
    [(assign, "0.weight"), (replace, "2.weight"), (add, "1.gain")],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_the_optimizer_does_not_have(stage, change, name):
    model, _ = dz.parallelize(net(), torch.optim.SGD, stage, lr=0.1)
    if (stage, change) == (3, assign):  # refused where it happens
        with pytest.raises(RuntimeError, match="was set, replaced or removed after sharding"):
            model.module.load_state_dict(model.module.state_dict(), assign=True)
        return
    change(model.module)
    with pytest.raises(RuntimeError, match=rf"{name} was set or .* Fix: change the module before"):
        model(torch.ones(2, 5))


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_may_be_left_out(stage):
    model, _ = dz.parallelize(net(), torch.optim.SGD, stage, lr=0.1)
    del model.module[2]
    model(torch.ones(2, 5)).sum().backward()
    assert model.module[0].weight.grad is not None


@pytest.mark.parametrize("stage", STAGES)
def test_modules_without_parameters_may_come_and_values_may_be_loaded(stage):
    model, optimizer = dz.parallelize(net(), torch.optim.SGD, stage, lr=0.1)
    model.module.add_module("metric", nn.Identity())
    model.module[1] = nn.Tanh()
    if stage < 3:
        model.module.load_state_dict(model.module.state_dict())
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()


def test_the_check_does_not_walk_over_the_tree_in_a_forward(monkeypatch):
    model, _ = dz.parallelize(net(), torch.optim.SGD, 0, lr=0.1)
    known, learned = KnownModules._learn, []
    monkeypatch.setattr(KnownModules, "_learn", lambda s, m: (learned.append(m), known(s, m)))
    monkeypatch.setattr(nn.Module, "named_modules", lambda *_: pytest.fail("a walk"))
    model(torch.ones(2, 5)).sum().backward()
    assert learned == []


# -- another rank's optimizer state


def of_rank_0() -> dict[int, list[Any]]:
    """What loading its own state and rank 0's says, and whether torch's optimizer loads it."""
    out = {}
    for stage in STAGES:
        # on three ranks, 3 * 4 elements are cut into parts of one size
        model, optimizer = dz.parallelize(nn.Linear(4, 3, False), torch.optim.AdamW, stage, lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        own = optimizer.state_dict()
        first = [own]
        dist.broadcast_object_list(first)
        file = io.BytesIO()
        torch.save(own, file)
        file.seek(0)
        plain = torch.optim.AdamW(optimizer.shards(), lr=1.0)
        plain.load_state_dict(torch.load(file))
        moments = [s["exp_avg"] for s in plain.state.values()]
        out[stage] = [
            raised(optimizer.load_state_dict, own),
            raised(optimizer.load_state_dict, first[0]),
            all(
                torch.equal(a, b["exp_avg"])
                for a, b in zip(moments, own["state"].values(), strict=True)
            ),
            raised(optimizer.load_state_dict, torch.optim.AdamW(optimizer.shards()).state_dict()),
        ]
    return out


def test_each_rank_loads_its_own_part_of_the_optimizer_state():
    for rank, out in enumerate(dz.launch(of_rank_0, 3)):
        for stage, (own, first, loaded, plain) in out.items():
            assert (own, loaded, plain) == ("", True, ""), (stage, rank)
            if stage == 0 or rank == 0:
                assert first == ""
            else:
                assert f"is part 0 of 3 along 'data', and this rank steps on part {rank}" in first
                assert "Fix: load on each rank what its own state_dict() returned" in first


# -- arguments


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_in_place_of_its_class(stage):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"is an instance of SGD.* Fix: pass the class"):
        dz.parallelize(module, optimizer, stage)


def test_a_stage_that_is_a_boolean():
    with pytest.raises(ValueError, match=r"stage must be .*, got True"):
        dz.parallelize(net(), torch.optim.SGD, stage=True, lr=0.1)


# -- an output that no gradient reaches


class Detached(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.how = net(), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.net(x))


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_a_detached_output(stage):
    model, optimizer = dz.parallelize(Detached(Tensor.detach), torch.optim.SGD, stage, lr=0.1)
    other = torch.ones(1, requires_grad=True)
    (model(torch.ones(2, 5)).sum() + other.sum()).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) was called.* Fix: "):
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_outputs_that_need_no_gradient_for_good_reasons(stage):
    how = [lambda y: y, Tensor.detach, lambda y: y.argmax(-1)]
    module = Detached(lambda y: how[0](y))
    model, optimizer = dz.parallelize(module, torch.optim.SGD, stage, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    for _ in range(2):  # a teacher's output, and tokens, while the gradient is there
        how.pop(0)
        model(torch.ones(2, 5))
    optimizer.step()
