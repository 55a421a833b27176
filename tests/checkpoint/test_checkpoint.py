"""Checkpoints: any stage and world to any other, a kill at any moment, damage, other models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, Recipe, build, gpt, groups, loop, rank_losses
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.checkpoint.save_load import load_checkpoint, save_checkpoint
from ddpz_lite.data import RankSampler
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.trainer.recipe import Recipe as TrainRecipe
from ddpz_lite.trainer.saving import Saver, complete


def make(case: str, stage: int, **options):
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return parallelize(
        build(CASES[case]),
        torch.optim.AdamW,
        stage,
        lr=0.01,
        bucket_mb=0.001,
        param_groups=groups,
        **options,
    )


def steps(case: str, model, optimizer) -> None:
    recipe = Recipe(torch.optim.AdamW, (), steps=2)
    loop(
        model,
        optimizer,
        lambda: None,
        recipe,
        rank_losses(model, CASES[case], recipe),
        model.no_sync,
    )


def train_and_save(path: str, case: str) -> dict[int, dict]:
    out = {}
    for stage in (0, 1, 2, 3):
        model, optimizer = make(case, stage)
        steps(case, model, optimizer)
        optimizer.param_groups[1]["lr"] = 0.005
        save_checkpoint(
            f"{path}/{stage}", model, optimizer, epoch=7, sampler={"at": [1, 2]}, t=torch.ones(2)
        )
        out[stage] = full_state_dict(model)
        random_numbers = torch.rand(3), random.random()
        steps(case, model, optimizer)
        out[stage, "later"] = full_state_dict(model)
        out[stage, "random"] = random_numbers
    return out


def load_everywhere(path: str, case: str, saved_world: int) -> dict[tuple[int, int], object]:
    out = {}
    for source in (0, 1, 2, 3):
        for target in (0, 1, 2, 3):
            model, optimizer = make(case, target)
            extra = load_checkpoint(f"{path}/{source}", model, optimizer)
            random_numbers = torch.rand(3), random.random()
            state = full_state_dict(model)
            rates = [g["lr"] for g in optimizer.param_groups]
            steps(case, model, optimizer)
            out[source, target] = state, extra, rates, full_state_dict(model), random_numbers
    return out


@pytest.mark.parametrize(
    ("case", "save_world", "load_world"),
    [  # fewer ranks, more with buffers, and as many; the weekly ones have other numbers
        ("gpt", 3, 2),
        ("cnn", 2, 3),
        pytest.param("gpt", 2, 2, marks=pytest.mark.rest),
        *(
            pytest.param(case, *worlds, marks=pytest.mark.extra)
            for case, *worlds in [
                ("gpt", 2, 3),
                ("gpt", 1, 4),
                ("cnn", 2, 2),
                ("cnn", 3, 2),
                ("cnn", 1, 4),
            ]
        ),
    ],
)
def test_any_stage_to_any_stage(tmp_path, save_world, load_world, case):
    saved = dz.launch(train_and_save, save_world, args=(str(tmp_path), case), record=False)
    loaded = dz.launch(
        load_everywhere, load_world, args=(str(tmp_path), case, save_world), record=False
    )
    for rank, found in enumerate(loaded):
        for (source, target), (state, extra, rates, later, numbers) in found.items():
            first = saved[0][source]
            assert all(torch.equal(state[n], first[n]) for n in first), (source, target)
            assert (
                extra["epoch"] == 7
                and extra["sampler"] == {"at": [1, 2]}
                and extra["t"].tolist() == [1, 1]
            )
            assert rates == [0.01, 0.005]
            if save_world == load_world and source == target and rank == 0:
                # resumed bit for bit: parameters after two more steps, and the random generators
                exact = saved[rank][source, "later"]
                assert all(torch.equal(later[n], exact[n]) for n in exact), (source, target)
                torch_numbers, python_number = saved[rank][source, "random"]
                assert torch.equal(numbers[0], torch_numbers) and numbers[1] == python_number
            elif save_world == load_world and rank == 0:
                exact = saved[rank][source, "later"]
                assert all(torch.allclose(later[n], exact[n], atol=1e-5) for n in exact), (
                    source,
                    target,
                )


def mixed(path: str) -> float:
    model, optimizer = make("gpt", 2, mixed_precision=torch.bfloat16)
    steps("gpt", model, optimizer)
    save_checkpoint(path, model, optimizer)
    other, second = make("gpt", 3, mixed_precision=torch.float16)
    second.loss_scale.scale = 3.0
    load_checkpoint(path, other, second)
    a, b = full_state_dict(model), full_state_dict(other)
    assert {v.dtype for v in a.values()} == {torch.float32}
    third, _ = make("gpt", 1)
    load_checkpoint(path, third)  # without an optimizer
    return max(
        max((a[n] - s[n]).abs().max().item() for n in a) for s in (b, full_state_dict(third))
    )


def test_master_precision_is_what_is_saved(tmp_path):
    assert list(dz.launch(mixed, 2, args=(str(tmp_path),), record=False)) == [0.0, 0.0]


def test_in_one_process_and_with_plain_torch(tmp_path):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.zeros(1, 6, dtype=torch.int)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    sharded, zero = parallelize(gpt(), torch.optim.AdamW, 3, lr=0.2)
    load_checkpoint(tmp_path, sharded, zero)
    state = full_state_dict(sharded)
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
    assert zero.param_groups[0]["lr"] == 0.1
    assert {float(s["step"]) for s in zero.state.values()} == {1.0}


def export(path: str) -> dict[int, dict[str, torch.Tensor]]:
    out = {}
    for stage in (0, 1, 2, 3):
        model, optimizer = make("gpt", stage, mixed_precision=torch.bfloat16)
        steps("gpt", model, optimizer)
        dz.save_safetensors(f"{path}/{stage}.safetensors", model)
        out[stage] = full_state_dict(model)
    return out


def test_safetensors_hold_the_full_state(tmp_path):
    (tmp_path / "2.safetensors").write_text("an old one")
    for stage, state in dz.launch(export, 2, args=(str(tmp_path),), record=False)[0].items():
        found = load_file(tmp_path / f"{stage}.safetensors")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
        gpt().load_state_dict(found)
    assert {p.name for p in tmp_path.iterdir()} == {f"{s}.safetensors" for s in range(4)}


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_load_what_was_exported(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=5, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=tied
    )
    module = transformers.GPT2LMHeadModel(config)
    model, optimizer = parallelize(module, torch.optim.SGD, 3, lr=0.1)
    ids = torch.arange(5)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    dz.save_safetensors(tmp_path / "model.safetensors", model)
    config.save_pretrained(tmp_path)
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path, local_files_only=True, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-6)


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x + self.bias


def scalars(path: str) -> list[bool]:
    found = []
    for source, target in ((0, 3), (3, 0), (1, 2)):
        model, optimizer = parallelize(Scalars(), torch.optim.NAdam, source, lr=0.1)
        other, second = parallelize(Scalars(), torch.optim.NAdam, target, lr=0.1)

        def step(model, optimizer) -> dict[str, torch.Tensor]:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            return full_state_dict(model)

        step(model, optimizer)
        save_checkpoint(path, model, optimizer)
        load_checkpoint(path, other, second)
        a, b = step(model, optimizer), step(other, second)
        found += [torch.equal(a[name], b[name]) for name in a]
    return found


def test_scalar_parameters(tmp_path):
    for found in dz.launch(scalars, 2, args=(str(tmp_path),), record=False):
        assert found == [True] * 6


@pytest.mark.parametrize("sharded", [False, True])
def test_state_in_another_shape_than_its_parameter(tmp_path, sharded):
    """Adafactor keeps a mean for each row and each column of a matrix."""

    def adafactor() -> tuple[nn.Module, torch.optim.Optimizer]:
        if sharded:
            return parallelize(gpt(), torch.optim.Adafactor, 0, lr=0.1)
        model = gpt()
        return model, torch.optim.Adafactor(model.parameters(), lr=0.1)

    model, optimizer = adafactor()
    model(torch.zeros(1, 6, dtype=torch.int)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)
    other, second = adafactor()
    load_checkpoint(tmp_path, other, second)
    before, after = (o.state_dict()["state"] for o in (optimizer, second))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def means_of_a_part(path: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    cut = dz.tensor_parallel(gpt(), mesh["tensor"])
    with pytest.raises(TypeError, match="Adafactor needs whole parameters, and tensor_parallel"):
        parallelize(cut, torch.optim.Adafactor, 0, mesh=mesh, lr=0.1)
    unknown = lambda params, **options: torch.optim.Adafactor(params, **options)  # noqa: E731
    model, optimizer = parallelize(cut, unknown, 0, mesh=mesh, lr=0.1)
    model(torch.zeros(1, 6, dtype=torch.int)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match=r"keeps row_var of shape .* for a part of blocks.0"):
        save_checkpoint(path, model, optimizer)


def test_state_that_each_rank_has_of_its_own_part_is_refused(tmp_path):
    dz.launch(means_of_a_part, 2, args=(str(tmp_path),), record=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_group_may_have_no_parameters(tmp_path, stage):
    def with_none(module: nn.Module) -> list[dict]:
        return [{"params": list(module.parameters()), "lr": 0.1}, {"params": [], "lr": 0.2}]

    model, optimizer = parallelize(gpt(), torch.optim.AdamW, stage, param_groups=with_none)
    save_checkpoint(tmp_path, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.3
    load_checkpoint(tmp_path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]


@pytest.fixture
def saved(tmp_path) -> Path:
    model, optimizer = parallelize(gpt(), torch.optim.SGD, 1, lr=0.1, momentum=0.9)
    save_checkpoint(tmp_path / "c", model, optimizer)
    return tmp_path / "c"


def reload(path, **options) -> None:
    model, optimizer = parallelize(gpt(**options), torch.optim.SGD, 1, lr=0.1, momentum=0.9)
    load_checkpoint(path, model, optimizer)


def test_wrong_use_names_the_fix(saved, tmp_path):
    reload(saved)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        reload(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"of another model: blocks.2.norm1.weight has shape none there"
    ):
        reload(saved, layers=3)
    with pytest.raises(TypeError, match="state_dict"):
        save_checkpoint(saved, gpt(), None, sampler=object())
    reload(saved)  # the refused save left the old one


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_another_class_of_optimizer_is_refused_before_anything_changes(tmp_path, stage):
    """Its lr, betas and exp_avg would be taken over, and mean nothing to SGD."""
    model, optimizer = parallelize(gpt(), torch.optim.AdamW, 1, lr=0.5)
    save_checkpoint(tmp_path / "c", model, optimizer, step=7)
    if stage is None:
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        model, optimizer = parallelize(gpt(), torch.optim.SGD, stage, lr=0.1, momentum=0.9)
    before = full_state_dict(model)
    with pytest.raises(ValueError, match=r"has the state of AdamW, and the optimizer here is SGD"):
        load_checkpoint(tmp_path / "c", model, optimizer)
    assert all(torch.equal(v, before[n]) for n, v in full_state_dict(model).items())
    assert load_checkpoint(tmp_path / "c", model) == {"step": 7}  # the model alone: as asked
    assert optimizer.param_groups[0]["lr"] == 0.1 and "betas" not in optimizer.param_groups[0]


def test_every_damaged_file_is_found(saved):
    folder = saved / (saved / "CURRENT").read_text()
    files = json.loads((folder / "manifest.json").read_text())["sha256"]
    assert {"extra.pt", "rng-0.pt", ".metadata"} < set(files)
    for name in files:
        whole = (folder / name).read_bytes()
        for damaged in (whole[:-1], whole[:5] + bytes([whole[5] ^ 1]) + whole[6:]):
            (folder / name).write_bytes(damaged)
            with pytest.raises(ValueError, match="is damaged"):
                reload(saved)
        (folder / name).write_bytes(whole)
    extra, rng = folder / "extra.pt", folder / "rng-0.pt"
    swapped = rng.read_bytes(), extra.read_bytes()
    for contents in (swapped, swapped[::-1]):
        extra.write_bytes(contents[0])
        rng.write_bytes(contents[1])
        if contents is swapped:
            with pytest.raises(ValueError, match=r"extra.pt is damaged: its SHA-256 is not"):
                reload(saved)
    reload(saved)  # all is as it was
    extra.unlink()
    with pytest.raises(ValueError, match="is damaged"):
        reload(saved)


def rolled_back(path: str) -> list[bool]:
    """Whether training again from a checkpoint of the first step is the same training."""
    found = []
    for stage in (0, 1, 2, 3):
        model, optimizer = make("gpt", stage)
        save_checkpoint(path, model, optimizer)
        states = []
        for _ in range(2):
            load_checkpoint(path, model, optimizer)
            steps("gpt", model, optimizer)
            states.append(full_state_dict(model))
        found.append(all(torch.equal(states[0][n], states[1][n]) for n in states[0]))
    return found


def test_a_state_that_was_not_saved_is_gone_after_loading(tmp_path):
    assert dz.launch(rolled_back, 2, args=(str(tmp_path),), record=False)[0] == [True] * 4


def while_whole(path: str) -> bool:
    model, optimizer = make("gpt", 3, reshard_after_forward=False)
    model(torch.zeros(1, 6, dtype=torch.int))  # modules show whole parameters now
    save_checkpoint(path, model, optimizer)
    before = full_state_dict(model)
    load_checkpoint(path, model, optimizer)
    after = full_state_dict(model)
    return all(torch.equal(before[n], after[n]) for n in before)


def test_saved_and_loaded_while_units_are_unsharded(tmp_path):
    assert list(dz.launch(while_whole, 2, args=(str(tmp_path),), record=False)) == [True, True]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_full_state_reaches_parameters_that_are_not_contiguous(stage):
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model, _ = parallelize(module, torch.optim.SGD, stage, lr=0.1)
    sevens = {name: torch.full_like(v, 7.0) for name, v in full_state_dict(model).items()}
    dz.load_full_state_dict(model, sevens)
    state = full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in sevens.items())


def test_buffers_of_another_model_are_named(tmp_path):
    def norm(width: int) -> nn.Module:
        return nn.BatchNorm1d(width, affine=False)

    save_checkpoint(tmp_path, nn.Sequential(nn.Linear(2, 2), norm(3)))
    with pytest.raises(ValueError, match=r"buffer/1.running_mean has shape \[3\] there and \[4\]"):
        load_checkpoint(tmp_path, nn.Sequential(nn.Linear(2, 2), norm(4)))


def test_the_newest_checkpoint_has_the_highest_step_however_many_digits(tmp_path):
    for name in ("step-99999999", "step-100000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "CURRENT").touch()
    assert [folder.name for folder in complete(tmp_path)] == ["step-100000000", "step-99999999"]


def test_a_run_resumed_before_damaged_saves_keeps_its_own(tmp_path):
    model, optimizer = parallelize(gpt(), torch.optim.SGD, 1, lr=0.1)
    text = SimpleNamespace(tokens=torch.zeros(1, dtype=torch.uint8))
    recipe = TrainRecipe(checkpoint=str(tmp_path))
    saver = Saver(recipe, text, model, optimizer, RankSampler(4, rank=0, world_size=1))
    for step in (100, 200, 300, 120, 140, 160):  # 200 and 300 could not be loaded
        saver.save(step)
    kept = ["step-00000300", "step-00000200", "step-00000160", "step-00000140"]
    assert [folder.name for folder in complete(tmp_path)] == kept
