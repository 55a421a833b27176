"""Communication behind computation: what starts while something computes, and the time it saves.

The order is exact and needs one process. For the time each layer sleeps in forward and backward,
and each bucket or unit travels for about as long on a slow network.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.parallelize import parallelize

NAP, LAYERS, WIDTH = 0.03, 6, 100
BYTES = WIDTH * WIDTH * 4  # of a layer


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        nap()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        nap()
        return grad


def nap() -> None:
    time.sleep(NAP)


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
    """What of the communication time is not hidden behind backward: least and most of three turns.

    A stall while it communicates adds to a share, a stall while it does not takes away.
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


@pytest.mark.extra  # it measures time
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


@pytest.mark.extra  # it measures time
def test_prefetch_beats_no_prefetch():
    """A gather takes one nap and a half, beside two naps of compute: 3.5 instead of 2, or more."""
    network = dz.Network(latency=0.0, bandwidth=BYTES / 2 / (1.5 * NAP))
    ratios = list(dz.launch(step_times, 2, network=network))
    assert all(ratio > 1.3 for ratio in ratios), ratios


@pytest.fixture
def log(monkeypatch):
    """Naps and the starts of transitions, in order, of one process."""
    seen: list[str] = []
    monkeypatch.setitem(globals(), "nap", lambda: seen.append("compute"))

    def logged(name):
        method = getattr(Comm, name)

        def started(comm, *args):
            seen.append(name)
            return method(comm, *args)

        return started

    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        monkeypatch.setattr(Comm, name, logged(name))
    return seen


@pytest.mark.parametrize(("stage", "reduction"), [(0, "all_reduce"), (2, "reduce_scatter")])
def test_a_bucket_goes_while_backward_still_runs(log, stage, reduction):
    model, _ = parallelize(build(), torch.optim.SGD, stage, lr=0.1, bucket_mb=BYTES / 1e6)
    loss = model(torch.randn(1, WIDTH)).sum()
    log.clear()
    loss.backward()
    layer = ["compute", reduction, "compute"]  # the gradient comes between its two naps
    assert log == layer * (LAYERS - 1) + layer[:2]  # the input needs no gradient


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_next_unit_is_on_its_way_while_one_computes(log, prefetch):
    model, _ = parallelize(build(), torch.optim.SGD, 3, lr=0.1, prefetch=prefetch)
    x = torch.randn(1, WIDTH)
    model(x).sum().backward()  # the first forward is the schedule
    for run in (lambda: model(x), lambda: model(x).sum().backward()):
        log.clear()
        run()
        steps = [name for name in log if name in ("compute", "all_gather")][: 3 * LAYERS]
        gathers = [steps[:at].count("all_gather") for at in range(len(steps))]
        firsts = [n for n, name in zip(gathers, steps, strict=True) if name == "compute"][::2]
        ahead = 2 if prefetch else 1
        assert firsts == [min(layer + ahead, LAYERS) for layer in range(LAYERS)]
