"""DDP beyond parity: what its gradients are, its errors, its hook, recovery from an exception."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, build, raised
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpz_lite as dz
from ddpz_lite.ddp import DDP, buckets_of


class Reentrant(nn.Module):
    """A checkpoint whose backward is a second one inside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=True))


def many_things() -> dict[str, object]:
    rank, world = dist.get_rank(), dist.get_world_size()
    out: dict[str, object] = {}

    torch.manual_seed(rank)  # ranks start differently; rank 0 wins
    model = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), bucket_mb=1e-5)
    out["start"] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    model(torch.randn(5, 3)).sum().backward()
    out["grads"] = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()
    out["views"] = all(
        p.grad is view
        for bucket in model.buckets
        for p, view in zip(bucket.params, bucket.views, strict=True)
    )
    model(torch.randn(5, 3))
    out["buffers"] = model.module[1].running_mean.tolist()

    model = DDP(build(CASES["awkward"]))
    out["unused"] = []
    for use in (rank == 0, False):
        model.zero_grad()
        model(torch.ones(2, 5), use=use)["out"].sum().backward()
        out["unused"].append((model.module.sometimes.grad is None, model.module.never.grad is None))
    out["frozen"] = raised(
        lambda: (model.module.blocks[0].frozen.weight.requires_grad_(True), model(torch.ones(2, 5)))
    )

    linear = DDP(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)
    linear(x).sum().backward()
    linear(x).sum().backward()  # no zero_grad between: the means add up
    out["twice"] = linear.module.weight.grad.tolist()
    linear.zero_grad()
    (linear(x) + linear(2 * x)).sum().backward()  # two forwards, one backward
    out["two forwards"] = linear.module.weight.grad.tolist()
    linear.zero_grad()
    with linear.no_sync():
        linear(x).sum().backward()
    out["no_sync"] = linear.module.weight.grad.tolist()

    linear.zero_grad()
    count = rank + 1  # uneven batches: rank r has r + 1 samples, each equal to r
    loss = linear(torch.full((count, 2), float(rank))).mean() * linear.batch_weight(count)
    loss.backward()
    out["weighted"] = linear.module.weight.grad.tolist()

    model = DDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), bucket_mb=1e-5)
    y = model(torch.ones(1, 2))
    y.register_hook(lambda g: g / 0 if False else _stop())
    with contextlib.suppress(KeyError):
        y.sum().backward()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    out["after an exception"] = all(p.grad is not None for p in model.parameters())

    halved = DDP(nn.Linear(2, 1), comm_hook=lambda g, comm: comm.all_reduce(g.div_(2 * comm.size)))
    halved(torch.ones(1, 2)).sum().backward()
    out["hook"] = halved.module.weight.grad.tolist()

    reentrant = DDP(Reentrant())
    out["reentrant"] = raised(lambda: reentrant(torch.ones(1, 3)).sum().backward())
    out["shapes"] = raised(DDP, nn.Linear(2, 1 + rank // 2))
    out["world"] = world
    return out


def _stop():
    raise KeyError("stopped on purpose")


@pytest.mark.parametrize("world", [1, 3])
def test_many_things(world):
    ranks = list(dz.launch(many_things, world))
    for out in ranks:
        assert out["start"] == ranks[0]["start"]
        assert out["grads"] == ranks[0]["grads"]
        assert out["views"] and out["after an exception"]
        assert out["unused"] == [(False, True), (True, True)]
        assert "Cure: set requires_grad before wrapping" in out["frozen"]
        mean = (world + 1) / 2
        assert out["twice"] == [[2 * mean] * 2]
        assert out["two forwards"] == [[3 * mean] * 2]
        samples = [r for r in range(world) for _ in range(r + 1)]
        assert out["weighted"][0] == pytest.approx([sum(samples) / len(samples)] * 2)
        assert out["hook"] == [[0.5, 0.5]]
        assert "use_reentrant=False" in out["reentrant"]
        assert ("rank 0 has weight (1, 2)" in out["shapes"]) == (world == 3)
    assert [out["no_sync"] for out in ranks] == [[[r + 1.0] * 2] for r in range(world)]
    assert ranks[0]["buffers"] != ranks[-1]["buffers"] or world == 1


def test_buckets_are_in_reverse_order_and_of_one_kind():
    params = [
        nn.Parameter(torch.zeros(n, dtype=d))
        for n, d in [(9, torch.float32)] * 3 + [(4, torch.float64)]
    ]
    params.append(nn.Parameter(torch.zeros(100)))
    params.append(nn.Parameter(torch.zeros(5), requires_grad=False))
    sizes = [[p.numel() for p in bucket] for bucket in buckets_of(params, 8e-5)]
    assert sizes == [[100], [4], [9, 9], [9]]
    with pytest.raises(ValueError, match="bucket_mb must be positive"):
        buckets_of(params, 0)
