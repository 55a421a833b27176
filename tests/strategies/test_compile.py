"""torch.compile at every stage: of each block, of the model, and in place, recorded or not."""

from __future__ import annotations

import copy

import pytest
import torch
from core_jobs import distance
from torch import Tensor, nn

import ddpz_lite as dz

pytestmark = pytest.mark.rest

WAYS = ("blocks", "blocks before", "torch.compile", "model.compile")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain


class Model(nn.Module):
    """Buffers that are sent, and a parameter of a block that the root reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.blocks[1].gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(way: str, stage: int, backend: str) -> float:
    """How far two steps are from one process that compiles nothing, on equal batches."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain, options = Model(), {"backend": backend}
    module = copy.deepcopy(plain)
    if way == "blocks before":
        for block in module.blocks:
            block.compile(**options)
    ours, optimizer = dz.parallelize(module, torch.optim.SGD, stage, lr=0.05)
    if way == "blocks":
        for block in module.blocks:
            block.compile(**options)
    if way == "model.compile":
        ours.compile(**options)
    called = torch.compile(ours, **options) if way == "torch.compile" else ours
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model, stepper in ((plain, by_hand), (called, optimizer)):
            model(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        return float("inf")  # nothing was compiled
    return distance(dz.full_state_dict(ours), dict(plain.state_dict()))


def compile_all(ways: list[str], stages: list[int], backend: str) -> dict[tuple[str, int], float]:
    torch.set_num_threads(1)
    return {(way, stage): compiled(way, stage, backend) for way in ways for stage in stages}


EVERY, EXTRA = [0, 1, 2, 3], pytest.mark.extra


@pytest.mark.parametrize(
    ("ways", "stages", "backend", "record"),
    [
        pytest.param(["blocks", "torch.compile"], [3], "eager", True, id="stage 3, recorded"),
        pytest.param(WAYS, EVERY, "aot_eager", True, id="all, recorded", marks=EXTRA),
        pytest.param(WAYS, EVERY, "aot_eager", False, id="all", marks=EXTRA),
        pytest.param(["blocks"], [3], "inductor", True, id="inductor", marks=EXTRA),
    ],
)
def test_what_is_compiled_trains_as_what_is_not(ways, stages, backend, record):
    options = {"args": (ways, stages, backend), "record": record, "timeout": 280}
    for found in dz.launch(compile_all, 2, **options):
        assert {key: gap for key, gap in found.items() if not gap < 2e-6} == {}
