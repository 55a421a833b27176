"""Offload: what crosses between host and device in a step is what its model says.

No GPU is needed: torch's fake tensors have a device and a shape, and no memory.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpz_lite.meter import HostTraffic
from ddpz_lite.placement import offload_moved
from ddpz_lite.strategies import optim
from ddpz_lite.strategies.parallelize import parallelize


@pytest.fixture
def fake_gpu(monkeypatch):
    """Four ranks with a GPU each, as one of them sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(optim, "check_elementwise", lambda *_: None)  # it looks at values
    with FakeTensorMode():
        yield
    dist.destroy_process_group()


def layers() -> nn.Module:
    """Three layers of 8 x 8 on a GPU; fake numbers have no generator."""
    module = nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(3)))
    for layer in module:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(torch.empty(param.shape, device="cuda")))
    return module


@pytest.mark.parametrize("stage", [1, 2, 3, (0, 3), (1, 3)])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_between_host_and_device_are_the_model(fake_gpu, stage, half, micro_batches):
    mesh = dist.init_device_mesh("cpu", (2, 2)) if isinstance(stage, tuple) else None
    options = {"mesh": mesh, "mixed_precision": half, "offload": True, "lr": 0.1}
    model, optimizer = parallelize(layers(), torch.optim.SGD, stage, **options)
    x = torch.empty(2, 8, device="cuda")
    with HostTraffic() as moved:
        for _ in range(micro_batches):
            model(x).sum().backward()
        optimizer.step()
    world = (2, 2) if mesh is not None else 4
    padded = sum(flat.layout.padded for flat in model.flats)
    model_says = offload_moved(padded, world, stage, 2 if half else 4, micro_batches)
    reductions = model_says["down"] / offload_moved(padded, world, stage)["down"]
    flags = 4 * sum(len(flat.params) for flat in model.flats)
    assert moved.up == model_says["up"]
    assert moved.down == model_says["down"] + flags * reductions


def test_the_model_by_hand():
    """A rank's part of 800 parameters on 4 ranks is 200: 4 bytes down, 2 up, 28 in the update."""
    assert offload_moved(800, 4, 1) == {"down": 800, "up": 400, "update": 5600}
    assert offload_moved(800, 4, 2, micro_batches=3) == {"down": 2400, "up": 400, "update": 5600}
    assert offload_moved(800, 4, 3) == {"down": 800, "up": 800, "update": 5600}
    assert offload_moved(800, 4, 3, resharded=False)["up"] == 400
    assert offload_moved(800, (2, 2), (1, 3), micro_batches=3) == offload_moved(800, 4, 1)
