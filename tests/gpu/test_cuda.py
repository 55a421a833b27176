"""Parity, memory and checkpoints on CUDA: the tests that `make gpu` runs on a machine with GPUs.

Each job also runs on the CPU, so that its code is known to work before a GPU runs it.
"""

from __future__ import annotations

import gc
import subprocess
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz
from ddpz_lite.meter import MemoryTimeline, memory
from ddpz_lite.model import GPT, MLP, GPTConfig, next_token_loss
from ddpz_lite.strategies.costs import MIXED, zero_memory

pytestmark = pytest.mark.rest

GPUS = torch.cuda.device_count()
CONFIG = GPTConfig(vocab_size=19, context=6, layers=2, heads=2, width=10)
# A stage and its options, and how far from plain torch it may end: fp32 rounding, or bf16's.
WAYS = [
    *((stage, {}, 1e-5) for stage in range(4)),
    *((stage, {"offload": True}, 1e-5) for stage in (1, 2, 3)),
    *((stage, {"mixed_precision": torch.bfloat16}, 2e-2) for stage in (0, 3)),
]


def on_gpus(*values, count=1):
    """A parameter of a test that needs so many GPUs."""
    reason = "needs an NVIDIA GPU" if count == 1 else f"needs {count} NVIDIA GPUs"
    marks = (pytest.mark.gpu, pytest.mark.skipif(count > GPUS, reason=reason))
    return pytest.param(*values, marks=marks)


def build(device):
    torch.manual_seed(3)
    return GPT(CONFIG).to(device)  # drawn on the CPU: the same on every device


def batches():
    generator = torch.Generator().manual_seed(7)
    shape = (3, 2 * dist.get_world_size(), CONFIG.context + 1)  # steps, samples, tokens
    return torch.randint(CONFIG.vocab_size, shape, generator=generator)


def train(model, optimizer, clip, tokens):
    """The plain loop. SGD: Adam would make a whole step of a gradient that is nothing but noise."""
    for x in tokens:
        next_token_loss(model(x[:, :-1]), x[:, 1:]).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def distances(device, reference):
    """By way, the largest distance to one process of plain torch that has the whole batch."""
    options = {"lr": 0.1, "momentum": 0.9}
    plain, tokens, found = build(reference), batches(), {}
    optimizer = torch.optim.SGD(plain.parameters(), **options)
    clip = lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.5)  # noqa: E731
    train(plain, optimizer, clip, tokens.to(reference))
    local = tokens[:, dist.get_rank() :: dist.get_world_size()].to(device)
    for stage, more, _ in WAYS:
        module = build(device)
        model, ours = dz.parallelize(module, torch.optim.SGD, stage, **more, **options)
        train(model, ours, lambda ours=ours: ours.clip_grad_norm_(0.5), local)
        assert {p.device.type for p in model.parameters()} <= {device, "cpu"}
        state = dz.full_state_dict(model)
        gaps = ((state[n].cpu() - p.cpu()).abs().max() for n, p in plain.state_dict().items())
        found[stage, *more] = max(gaps).item()
    return found


@pytest.mark.parametrize(
    ("device", "reference", "world", "backend"),
    [
        ("cpu", "cpu", 2, "gloo"),
        on_gpus("cuda", "cuda", 1, "auto"),
        on_gpus("cuda", "cuda", 1, "nccl"),
        on_gpus("cuda", "cpu", 2, "gloo"),  # one GPU is shared
        on_gpus("cuda", "cuda", 2, "nccl", count=2),
        on_gpus("cuda", "cuda", 4, "auto", count=4),
    ],
)
def test_every_stage_equals_plain_torch(device, reference, world, backend):
    run = dz.launch(distances, world, args=(device, reference), backend=backend, record=False)
    for found in run:
        far = {way: d for (way, d), (*_, most) in zip(found.items(), WAYS, strict=True) if d > most}
        assert len(found) == len(WAYS) and not far


def saved_and_loaded(device, folder):
    """Saved by ZeRO-2, loaded by ZeRO-3: the distance between the two, and of the next step."""
    states, tokens = [], batches()[:, dist.get_rank() :: dist.get_world_size()].to(device)
    model, optimizer = dz.parallelize(build(device), torch.optim.AdamW, 2, lr=1e-3)
    train(model, optimizer, int, tokens)
    dz.save_checkpoint(folder, model, optimizer)
    later = dz.parallelize(build(device), torch.optim.AdamW, 3, lr=1e-3)
    dz.load_checkpoint(folder, *later)
    for pair in ((model, optimizer), later):
        states.append(dz.full_state_dict(pair[0]))
    return max((a - b).abs().max().item() for a, b in zip(*map(dict.values, states), strict=True))


@pytest.mark.parametrize(("device", "world"), [("cpu", 2), on_gpus("cuda", 1), on_gpus("cuda", 2)])
def test_a_checkpoint_goes_from_one_stage_to_another(device, world):
    with tempfile.TemporaryDirectory() as folder:
        run = dz.launch(saved_and_loaded, world, args=(device, f"{folder}/step"), record=False)
        assert list(run) == [0.0] * world


LARGE = GPTConfig(vocab_size=4096, context=64, layers=8, heads=8, width=512)  # 27 M parameters


def peaks(config, dtype, device):
    """By stage, the peak bytes of model state while the optimizer steps; None on the CPU.

    The window opens after backward, when the activations are freed, and closes after the step.
    """
    found = {}
    for stage in range(4):
        gc.collect()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        model, optimizer = dz.parallelize(
            GPT(config).to(device), torch.optim.AdamW, stage, mixed_precision=dtype, fused=True
        )
        x = torch.ones(1, config.context + 1, dtype=torch.long, device=device)
        for _ in range(2):
            next_token_loss(model(x[:, :-1]), x[:, 1:]).backward()
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
                found[stage] = torch.cuda.max_memory_allocated() - before
            optimizer.zero_grad()
        found.setdefault(stage, None)
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("device", "config", "world"),
    [
        ("cpu", CONFIG, 2),
        on_gpus("cuda", LARGE, 1),
        on_gpus("cuda", LARGE, 2),
        on_gpus("cuda", LARGE, 4, count=4),
    ],
)
def test_the_allocators_peak_is_the_formula(device, config, world, dtype):
    with torch.device("meta"):
        psi = GPT(config).num_params()
    for found in dz.launch(peaks, world, args=(config, dtype, device), record=False):
        for stage, peak in found.items():
            sizes = MIXED[stage] if dtype else (4, 4, 8)  # bytes per parameter, with Adam
            formula = zero_memory(psi, world, stage, *sizes)
            assert peak is None if device == "cpu" else peak == pytest.approx(formula, rel=0.02)


def timeline_on(device):
    torch.manual_seed(0)
    model = MLP([16, 8, 2]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with MemoryTimeline(model, optimizer) as timeline:
        model(torch.ones(4, 16, device=device)).sum().backward()
        optimizer.step()
    return timeline.peak > 0, memory(model, optimizer)


@pytest.mark.parametrize("device", ["cpu", on_gpus("cuda")])
def test_a_timeline_sees_the_same_bytes_on_every_device(device):
    assert timeline_on(device) == timeline_on("cpu")


def test_every_test_marked_gpu_is_in_this_folder(root):
    mark = "pytest.mark." + "gpu"
    found = {p.parent.name for p in (root / "tests").rglob("*.py") if mark in p.read_text()}
    assert found == {"gpu"}


def test_make_gpu_names_what_is_missing(root):
    command = ["make", "gpu", "PYTHON=/no/such/python"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode and "Fix: " in done.stdout


def test_make_gpu_runs_these_tests_the_lessons_and_the_bench(root):
    done = subprocess.run(["make", "-n", "gpu"], cwd=root, capture_output=True, text=True)
    for command in ("pytest", "ddpz_lite lessons", "ddpz_lite bench --peers"):
        assert f"-m {command} " in done.stdout
