"""The full state dict of an optimizer against torch's own and FSDP2's; averages of weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, groups, raised, rank_losses
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddpz_lite as dz
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import one_f_one_b

CASE = CASES["gpt"]
RECIPE = Recipe(steps=2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, after: Any = None) -> None:
    losses = rank_losses(model, CASE, RECIPE)
    for step in range(RECIPE.steps):
        for loss in losses(step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of two optimizer state dicts; inf for other names, shapes, dtypes."""
    if ours["state"].keys() != theirs["state"].keys():
        return float("inf")
    if _plain(ours["param_groups"]) != _plain(theirs["param_groups"]):
        return float("inf")
    largest = 0.0
    for name, wanted in theirs["state"].items():
        found = ours["state"][name]
        if found.keys() != wanted.keys():
            return float("inf")
        for key, value in wanted.items():
            if (found[key].shape, found[key].dtype) != (value.shape, value.dtype):
                return float("inf")
            largest = max(largest, (found[key] - value.cpu()).abs().max().item())
    return largest


def _plain(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group | {"params": sorted(group["params"])} for group in param_groups]


def compared_with_torch() -> dict[Any, float]:
    """Differences from FSDP2, by stage; and after loading into the next stage."""
    torch.set_num_threads(1)
    options, found = StateDictOptions(full_state_dict=True), {}
    peer = build(CASE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in peer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(peer, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(peer), lr=0.01)
    steps(peer, optimizer)
    theirs = get_optimizer_state_dict(peer, optimizer, options=options)
    theirs["state"] = {
        name: {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
        for name, state in theirs["state"].items()
    }
    for stage in (0, 1, 2, 3):
        model, optimizer = sharded(stage)
        steps(model, optimizer)
        ours = dz.full_optimizer_state_dict(model, optimizer)
        found["FSDP2", stage] = difference(ours, theirs)
        other, second = sharded((stage + 1) % 4)
        for group in second.param_groups:
            group["lr"] = 0.5
        dz.load_full_optimizer_state_dict(other, second, ours)
        found["loaded", stage] = difference(dz.full_optimizer_state_dict(other, second), ours)
        dz.load_full_optimizer_state_dict(other, second, theirs)
        found["FSDP2's, loaded", stage] = difference(
            dz.full_optimizer_state_dict(other, second), theirs
        )
    return found


def sharded(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return parallelize(
        build(CASE), torch.optim.AdamW, stage, bucket_mb=0.001, param_groups=groups, lr=0.01
    )


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.rest), 3])
def test_it_is_that_of_fsdp2(world):
    for found in dz.launch(compared_with_torch, world, record=False):
        assert len(found) == 12
        for (what, stage), gap in found.items():
            assert gap <= (1e-6 if what == "FSDP2" else 0), (what, stage)


def shared_state(stage: int, kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The state dict at this world size, after steps on the same batch on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    model, optimizer = parallelize(module, kind, stage, **options)
    for _ in range(2):
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dz.full_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "stage", "options"),
    [
        (torch.optim.AdamW, 3, {"lr": 0.1}),
        (torch.optim.AdamW, 2, {"lr": 0.1}),
        (torch.optim.Adafactor, 1, {"lr": 0.1}),  # rows' and columns' means, owned whole
        (torch.optim.Muon, 2, {"lr": 0.1}),
    ],
)
def test_it_is_that_of_torchs_optimizer_at_any_world(kind, stage, options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    optimizer = kind(module.parameters(), **options)
    for _ in range(2):
        module(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = get_optimizer_state_dict(module, optimizer)
    for ours in dz.launch(shared_state, 3, args=(stage, kind, options), record=False):
        assert difference(ours, wanted) <= 2e-3


def on_axis(kind: str) -> dict[Any, float]:
    """Differences from one process with the model cut over `kind`; and after loading."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", kind))
    config = dz.GPTConfig(vocab_size=12, context=5, layers=2, heads=2, width=8)
    tokens = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))
    x, y = tokens[:, :-1], tokens[:, 1:]

    def built(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = dz.GPT(config)
        if kind == "tensor":
            model = dz.tensor_parallel(model, mesh[kind])
        else:
            model = dz.Pipeline(gpt_stages(model, 2), one_f_one_b(2, 2), mesh[kind])
        return parallelize(model, torch.optim.AdamW, stage, mesh=mesh, lr=0.01, eps=1e-3)

    torch.manual_seed(0)
    plain = dz.GPT(config)
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    for _ in range(2):
        dz.next_token_loss(plain(x), y).backward()
        alone.step()
        alone.zero_grad()
    exact, found = get_optimizer_state_dict(plain, alone), {}
    for stage in (0, 1, 2, 3):
        model, optimizer = built(stage)
        for _ in range(2):
            if kind == "tensor":
                dz.next_token_loss(model(x), y).backward()
            else:
                model.step(x, y, dz.next_token_loss)
            optimizer.step()
            optimizer.zero_grad()
        ours = dz.full_optimizer_state_dict(model, optimizer)
        found["one process", stage] = difference(ours, exact)
        other, second = built((stage + 1) % 4)
        dz.load_full_optimizer_state_dict(other, second, exact)
        found["loaded", stage] = difference(dz.full_optimizer_state_dict(other, second), exact)
    return found


@pytest.mark.parametrize("kind", ["tensor", "pipe"])
def test_it_is_that_of_one_process_on_other_axes(kind):
    for found in dz.launch(on_axis, 2, args=(kind,), record=False):
        for (what, stage), gap in found.items():
            assert gap <= (1e-5 if what == "one process" else 0), (what, stage)


def wrong_states() -> list[str]:
    model, optimizer = sharded(3)
    steps(model, optimizer)
    given = dz.full_optimizer_state_dict(model, optimizer)
    other, shorter = copy.deepcopy(given), copy.deepcopy(given)
    other["state"]["stranger"] = other["state"].pop("head.weight", {"step": torch.ones(())})
    first = next(n for n, s in shorter["state"].items() if s["exp_avg"].ndim == 2)
    shorter["state"][first]["exp_avg"] = torch.ones(3, 7)
    return [
        raised(dz.load_full_optimizer_state_dict, model, optimizer, wrong)
        for wrong in (other, shorter)
    ]


def test_a_state_dict_of_another_model_is_refused():
    for name, shape in dz.launch(wrong_states, 2, record=False):
        assert "stranger" in name
        assert "exp_avg of" in shape
        assert "[3, 7]" in shape


# -- averages


def averages(half: torch.dtype | None) -> dict[int, dict[str, Any]]:
    """Beside torch's AveragedModel over a DDP in one precision, by stage."""
    torch.set_num_threads(1)
    found = {}
    decay = get_ema_multi_avg_fn(0.9)
    for stage in (0, 1, 2, 3):
        options = {"lr": 0.01, "bucket_mb": 0.001, "mixed_precision": half}
        model, optimizer = parallelize(build(CASE), torch.optim.AdamW, stage, **options)
        plain = build(CASE)  # follows the master weights
        expected = AveragedModel(plain, multi_avg_fn=decay)
        average = dz.AveragedModel(model, multi_avg_fn=decay)

        def follow(model=model, plain=plain, expected=expected, average=average):
            plain.load_state_dict(dz.full_state_dict(model))
            expected.update_parameters(plain)
            average.update_parameters(model)

        steps(model, optimizer, follow)
        before = dz.full_state_dict(model)
        with average.applied(model):
            inside = dz.full_state_dict(model)
            x, _ = CASE.inputs(1)
            output = model(x)
        wanted = expected.module.state_dict()
        held = sum(p.numel() * p.element_size() for p in average.parameters())
        found[stage] = {
            "inside": all(torch.equal(inside[n], wanted[n]) for n in wanted),
            "moved": any(not torch.equal(inside[n], before[n]) for n in wanted),
            "restored": same(before, dz.full_state_dict(model)),
            "output": (output - expected(x)).abs().max().item(),
            "held": held / (4 * sum(p.numel() for p in plain.parameters())),
            "forward": raised(average, x),
        }
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_an_average_is_torchs_at_every_stage(half):
    for found in dz.launch(averages, 2, args=(half,), record=False):
        for stage, out in found.items():
            assert out["inside"], stage
            assert out["moved"], stage
            assert out["restored"], stage
            assert out["output"] < (0.1 if half else 1e-6), stage
            assert "average.applied(model)" in out["forward"]
            if stage == 3 or (half and stage):
                assert out["held"] < 0.55, stage  # shards only


def saved_average(path: str, stage: int, load: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model, optimizer = parallelize(build(CASE), torch.optim.SGD, stage, lr=0.1)
    average = dz.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if load:
        with average.applied(model):
            count = dz.load_checkpoint(path, model)["n_averaged"]
            average.n_averaged.copy_(count)
        assert count == RECIPE.steps
    else:
        steps(model, optimizer, lambda: average.update_parameters(model))
        with average.applied(model):
            dz.save_checkpoint(path, model, n_averaged=average.n_averaged)
    start = build(CASE).state_dict()
    assert same(dz.full_state_dict(model), start) == load  # the model's own weights are its own
    with average.applied(model):
        return dz.full_state_dict(model)


def test_an_average_is_saved_and_loaded_at_another_world(tmp_path):
    first = dz.launch(saved_average, 2, args=(str(tmp_path), 3, False), record=False)[0]
    for stage, world in ((3, 3), (1, 1)):
        for found in dz.launch(
            saved_average, world, args=(str(tmp_path), stage, True), record=False
        ):
            assert same(found, first)


def test_torchs_average_of_a_sharded_model_names_ours():
    model = dz.ZeRO3(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"dz.AveragedModel\(model\)"):
        AveragedModel(model)
