"""Communication behind computation, on a slow network and with layers that take time but no
processor.

Each layer sleeps in forward and backward, each bucket or unit travels for about as long, and all
numbers of a test come from one job; so the ratios hold on a busy machine.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz
from ddpz_lite.strategies.parallelize import parallelize

pytestmark = pytest.mark.slow

NAP, LAYERS, WIDTH = 0.03, 6, 100
BYTES = WIDTH * WIDTH * 4  # of a layer


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(NAP)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(NAP)
        return grad


class Sleepy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(self.linear(_Nap.apply(x)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Sleepy() for _ in range(LAYERS)))


def backward_time(model: nn.Module, loss: torch.Tensor) -> float:
    dist.barrier()
    start = time.monotonic()
    loss.backward()
    return time.monotonic() - start


def exposed_share(stage: int) -> tuple[float, float]:
    """What of the communication time is not hidden behind backward: the least and the most of three
    turns. A stall while it communicates adds to a share, a stall while it does not takes away.
    """
    model, optimizer = parallelize(build(), torch.optim.SGD, stage, lr=0.1, bucket_mb=BYTES / 1e6)
    x, shares = torch.randn(1, WIDTH), []
    for _ in range(3):
        with model.no_sync():
            alone = backward_time(model, model(x).sum())
        optimizer.zero_grad()
        together = backward_time(model, model(x).sum())
        optimizer.zero_grad()
        shares.append((together - alone) / (LAYERS * 2 * NAP))
    return min(shares), max(shares)


@pytest.mark.parametrize("stage", [0, 2])
def test_at_most_a_quarter_is_exposed(stage):
    """Communication takes as long as backward: two naps for each of the layers."""
    sent = BYTES if stage == 0 else BYTES / 2  # 2 (N-1)/N or (N-1)/N, at two ranks
    network = dz.Network(latency=0.0, bandwidth=sent / (2 * NAP))
    shares = list(dz.launch(exposed_share, 2, args=(stage,), network=network))
    assert all(least < 0.25 and most > 0 for least, most in shares), shares


def step_times() -> float:
    """Time without prefetch over time with it."""
    x, ratios = torch.randn(1, WIDTH), []
    models = [
        parallelize(build(), torch.optim.SGD, 3, lr=0.1, prefetch=p)[0] for p in (False, True)
    ]
    for _ in range(3):
        times = []
        for model in models:
            dist.barrier()
            start = time.monotonic()
            model(x).sum().backward()
            times.append(time.monotonic() - start)
        ratios.append(times[0] / times[1])
    return max(ratios[1:])


def test_prefetch_beats_no_prefetch():
    """A gather takes one nap and a half, beside two naps of compute: 3.5 in place of 2, or little
    more.
    """
    network = dz.Network(latency=0.0, bandwidth=BYTES / 2 / (1.5 * NAP))
    ratios = list(dz.launch(step_times, 2, network=network))
    assert all(ratio > 1.3 for ratio in ratios), ratios
