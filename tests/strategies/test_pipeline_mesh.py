"""A pipeline in parallelize: frozen stages, all schedules, no_sync, evaluation, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.schedules import interleaved, one_f_one_b, zero_bubble
from ddpz_lite.strategies.precision import LossScale

STAGES, STEPS, CLIP, T = (0, 1, 2, 3), 2, 0.05, 5
CONFIG = dz.GPTConfig(vocab_size=11, context=T, layers=4, heads=2, width=8, tied=True)
ADAM = {"lr": 0.01, "eps": 1e-3}
SCHEDULES = {
    "1f1b": (lambda p, m: one_f_one_b(p, m), 1),
    "interleaved": (lambda p, m: interleaved(p, m, 2), 2),
    "zero bubble": (lambda p, m: zero_bubble(p, m), 1),
}


class Scale(nn.Module):
    """A stage without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def layers(frozen: int | None, parameterless: int | None = None) -> list[nn.Module]:
    """Three stages: names as in the whole, a Sequential."""
    torch.manual_seed(0)
    stages = []
    for index in range(3):
        layer = nn.Sequential()
        layer.add_module(f"linear{index}", nn.Linear(4, 4))
        layer.add_module(f"norm{index}", nn.LayerNorm(4))
        stages.append(Scale() if index == parameterless else layer)
        stages[-1].requires_grad_(index != frozen)
    return stages


def batches(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, generator=generator), torch.randn(12, 4, generator=generator)


def alone(stages: list[nn.Module]) -> tuple[dict[str, Tensor], list[float]]:
    model, norms = nn.Sequential(*stages), []
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, **ADAM)
    for step in range(STEPS):
        x, y = batches(step)
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(trainable, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return {n.partition(".")[2]: v.detach() for n, v in model.state_dict().items()}, norms


def frozen_stage(which: int, has_parameters: bool, folder: str) -> None:
    given = (which, None) if has_parameters else (None, which)
    right, norms = alone(layers(*given))
    for stage in STAGES:
        for half in (None, torch.float16) if stage in (0, 2) else (None,):
            mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("data", "pipe"))
            pipe = dz.Pipeline(layers(*given), one_f_one_b(3, 4), mesh["pipe"])
            scale = {} if half is None else {"loss_scale": LossScale(64.0)}
            pipe, optimizer = dz.parallelize(
                pipe, torch.optim.AdamW, stage, mesh=mesh, mixed_precision=half, **scale, **ADAM
            )
            for step in range(STEPS):
                pipe.step(*batches(step), nn.functional.mse_loss)
                if step:  # torch's takes part where there is nothing to train, too
                    optimizer.finalize_grads()
                    norm = nn.utils.clip_grad_norm_(pipe.parameters(), CLIP)
                else:
                    norm = optimizer.clip_grad_norm_(CLIP)
                assert abs(norm.item() / norms[step] - 1) < (1e-5 if half is None else 0.02)
                optimizer.step()
                optimizer.zero_grad()
            assert pipe.batch_weight(3) == 1.0
            state = dz.full_state_dict(pipe)
            assert state.keys() == right.keys()
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if half is None else {"rtol": 0, "atol": 0.01}
            torch.testing.assert_close(state, right, **tolerance)
            if half is None:
                dz.save_checkpoint(f"{folder}/{stage}", pipe, optimizer)
                dz.load_checkpoint(f"{folder}/{stage}", pipe, optimizer)
                assert all(torch.equal(v, state[n]) for n, v in dz.full_state_dict(pipe).items())


def bare_pipeline(which: int, has_parameters: bool) -> None:
    """The same without parallelize: torch's optimizer and torch's clipping."""
    given = (which, None) if has_parameters else (None, which)
    right, norms = alone(layers(*given))
    pipe = dz.Pipeline(layers(*given), one_f_one_b(3, 4))
    optimizer = torch.optim.AdamW(pipe.parameters(), **ADAM)
    for step in range(STEPS):
        pipe.step(*batches(step), nn.functional.mse_loss)
        norm = nn.utils.clip_grad_norm_(pipe.parameters(), CLIP)
        assert abs(norm.item() / norms[step] - 1) < 1e-5
        optimizer.step()
        optimizer.zero_grad()
    for name, value in pipe.module.state_dict().items():
        torch.testing.assert_close(value, right[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("which", "has_parameters"), [(None, True), (1, True), (1, False)])
def test_torchs_clipping_counts_all_stages_of_a_pipeline_alone(which, has_parameters):
    dz.launch(bare_pipeline, 3, args=(which, has_parameters))


@pytest.mark.parametrize("has_parameters", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_stage_may_be_frozen_or_without_parameters(which, has_parameters, tmp_path):
    dz.launch(frozen_stage, 3, args=(which, has_parameters, str(tmp_path)))


class Sometimes(nn.Linear):
    """A layer that some steps do without."""

    used = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.used else 2 * x


def scaled_stages(kind: str) -> list[nn.Module]:
    """As `layers`; the middle one has parameters without gradients."""
    stages = layers(1 if kind == "frozen" else None, 1 if kind == "parameterless" else None)
    if kind == "unused":
        stages[1] = nn.Sequential()
        stages[1].add_module("linear1", Sometimes(4, 4))
    return stages


def without_gradients(kind: str, stage: int | None) -> tuple[list[float], ...]:
    """Four steps with torch's scaler and clipping, one with an inf: scales and norms."""
    torch.set_num_threads(1)
    plain, stages = nn.Sequential(*scaled_stages(kind)), scaled_stages(kind)
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("data", "pipe"))
    pipe = dz.Pipeline(stages, one_f_one_b(3, 4), mesh["pipe"])
    if stage is None:
        optimizer = torch.optim.AdamW(pipe.parameters(), **ADAM)
    else:
        pipe, optimizer = dz.parallelize(pipe, torch.optim.AdamW, stage, mesh=mesh, **ADAM)
    alone, found = torch.optim.AdamW(plain.parameters(), **ADAM), ([], [])
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(4):
        for module in (*plain.modules(), *stages[1].modules()):
            module.used = step in (0, 3)
        x, y = batches(step)
        y = y / 0 if step == 2 else y
        scalers[0].scale(nn.functional.mse_loss(plain(x), y)).backward()
        scalers[1].scale(torch.zeros(()))
        pipe.step(x, y, lambda out, y: scalers[1].scale(nn.functional.mse_loss(out, y)))
        pairs = zip(scalers, (alone, optimizer), (plain, pipe), found, strict=True)
        for scaler, stepper, model, seen in pairs:
            scaler.unscale_(stepper)
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
            seen += [scaler.get_scale(), 0.0 if step == 2 else norm]
    right = {n.partition(".")[2]: v for n, v in plain.state_dict().items()}
    held = pipe.module.state_dict() if stage is None else dz.full_state_dict(pipe)
    for name, value in held.items():
        torch.testing.assert_close(value, right[name], rtol=1e-5, atol=1e-6)
    return found


def all_without_gradients(kind: str) -> list[tuple[list[float], ...]]:
    return [without_gradients(kind, stage) for stage in (None, *STAGES)]


@pytest.mark.parametrize("kind", ["frozen", "parameterless", "unused"])
def test_torchs_scaler_and_clipping_where_a_stage_has_no_gradient(kind):
    for runs in dz.launch(all_without_gradients, 3, args=(kind,)):
        for exact, ours in runs:
            assert ours == pytest.approx(exact, rel=1e-4)
            assert exact[4] == 32.0  # the step with an inf halves the scale


def gpt() -> dz.GPT:
    torch.manual_seed(0)
    return dz.GPT(CONFIG)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    found = torch.randint(11, (8, T + 1), generator=torch.Generator().manual_seed(step))
    return found[:, :-1], found[:, 1:]


def one_process() -> tuple[dict[str, Tensor], Tensor]:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        x, y = tokens(step)
        dz.next_token_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {n: v.detach() for n, v in model.state_dict().items()}, model(tokens(9)[0]).detach()


def documented_use(folder: str) -> None:
    """On data x pipe = 2 x 2: two steps for an update, one of them in no_sync; then evaluation."""
    right, logits = one_process()
    for name, (make, chunks) in SCHEDULES.items():
        for stage in STAGES:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
            stages = gpt_stages(gpt(), 2 * chunks)
            pipe = dz.Pipeline(stages, make(2, 2), mesh["pipe"])
            before = pipe.module
            pipe, optimizer = dz.parallelize(pipe, torch.optim.AdamW, stage, mesh=mesh, **ADAM)
            assert pipe.module is before
            assert pipe.batch_weight(1 + 2 * mesh.get_local_rank("data")) in (0.5, 1.5)
            for step in range(STEPS):
                rank = mesh.get_local_rank("data")
                parts = [t.chunk(2)[rank].chunk(2) for t in tokens(step)]
                (a, b), (c, d) = parts
                half = lambda out, y: dz.next_token_loss(out, y) / 2  # noqa: E731
                with pipe.no_sync():
                    pipe.step(a, c, half)
                pipe.step(b, d, half)
                optimizer.clip_grad_norm_(CLIP)
                optimizer.step()
                optimizer.zero_grad()
            state = dz.full_state_dict(pipe)
            torch.testing.assert_close(
                state, right, rtol=1e-4, atol=1e-5, msg=lambda m, n=(name, stage): f"{n}: {m}"
            )
            out = pipe(tokens(9)[0])
            assert (out is None) == (mesh.get_local_rank("pipe") == 0)
            assert out is None or torch.allclose(out, logits, atol=1e-4)
            assert out is None or not out.requires_grad
            dz.save_checkpoint(f"{folder}/{name} {stage}", pipe, optimizer)
            dz.load_checkpoint(f"{folder}/{name} {stage}", pipe, optimizer)
            assert all(torch.equal(v, state[n]) for n, v in dz.full_state_dict(pipe).items())


def test_the_use_that_parallelize_documents(tmp_path):
    dz.launch(documented_use, 4, args=(str(tmp_path),), timeout=120)


def wrong_loss(what: str) -> None:
    losses: dict[str, Any] = {
        "tuple": lambda out, y: (nn.functional.mse_loss(out, y), out),
        "float": lambda out, y: nn.functional.mse_loss(out, y).item(),
        "rows": lambda out, y: (out - y).square(),
    }
    x, y = batches(0)
    dz.Pipeline(layers(None)[: dist.get_world_size()], one_f_one_b(2, 2)).step(x, y, losses[what])


@pytest.mark.parametrize(
    ("what", "complaint"),
    [("tuple", "(tensor"), ("float", "3.32"), ("rows", "a tensor of shape (6, 4)")],
)
def test_a_loss_that_is_not_one_number_is_refused(what, complaint):
    with pytest.raises(dz.RankFailed, match=r"loss_fn returned .*one number as a tensor") as caught:
        dz.launch(wrong_loss, 2, args=(what,))
    assert complaint in str(caught.value)
