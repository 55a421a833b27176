"""On CUDA as on the CPU: parity, memory, checkpoints. What `make gpu` runs on a machine with GPUs.

Each job also runs on the CPU, where it is cheap, so that a test which needs a GPU is known to work
before there is one.
"""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz
from ddpz_lite.course.bench import gpu
from ddpz_lite.meter import MemoryTimeline, memory
from ddpz_lite.model import GPT, MLP, GPTConfig, next_token_loss

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
    mine = tokens[:, dist.get_rank() :: dist.get_world_size()].to(device)
    for stage, more, _ in WAYS:
        module = build(device)
        model, ours = dz.parallelize(module, torch.optim.SGD, stage, **more, **options)
        train(model, ours, lambda ours=ours: ours.clip_grad_norm_(0.5), mine)
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


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("world", [on_gpus(1), on_gpus(2), on_gpus(4, count=4)])
def test_what_the_allocator_gave_out_is_the_formula(world, half):
    figures = gpu.memory(gpu.REAL.steps.config, half, world)
    assert len(figures) == 4 and not [figure for figure in figures if not figure.met]


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
