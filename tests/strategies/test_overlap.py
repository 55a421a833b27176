"""Communication behind computation: what starts while something computes, and the time it saves.

The order is exact and needs one process. For the time each layer sleeps in forward and backward,
and each bucket or unit travels for about as long on a slow network.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

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
