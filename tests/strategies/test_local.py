"""Local SGD and DiLoCo: when ranks meet, what they send then, what they come to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import ddpz_lite as dz
from ddpz_lite.strategies.local import DiLoCo, LocalSGD

STEPS = 7
OPTIONS = {"lr": 0.7, "momentum": 0.9}


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batches_of(rank: int) -> torch.Tensor:
    return torch.randn(STEPS, 4, 3, generator=torch.Generator().manual_seed(rank))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(model: nn.Module, optimizer: object, after: object = None) -> torch.Tensor:
    for x in batches_of(dist.get_rank()):
        model(x).square().mean().backward()
        optimizer.step()
        if after is not None:
            after()
        optimizer.zero_grad()
    if isinstance(optimizer, LocalSGD):
        optimizer.synchronise()
        optimizer.synchronise()  # the second time there is nothing to do
    return flat(model)


def local(every: int, inner: type = torch.optim.SGD) -> torch.Tensor:
    model = model_of(dist.get_rank())  # rank 0's weights win
    options = {"lr": 0.1} | ({"momentum": 0.9} if inner is torch.optim.SGD else {})
    return trained(model, LocalSGD(inner(model.parameters(), **options), every))


def outer(every: int, **options: float) -> torch.Tensor:
    model = model_of()
    return trained(model, DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every, **options))


def many_things() -> dict[str, object]:
    out: dict[str, object] = {}
    for every in (1, 3, 100):
        with dz.span(f"every {every}"):
            out[f"every {every}"] = local(every)
    out["adam"] = local(1, torch.optim.Adam)

    for inner in (torch.optim.SGD, torch.optim.Adam):
        model = dz.DDP(model_of())
        options = {"lr": 0.1} | ({"momentum": 0.9} if inner is torch.optim.SGD else {})
        out[f"DDP, {inner.__name__}"] = trained(model, inner(model.parameters(), **options))

    model = model_of()
    averager = PeriodicModelAverager(3, warmup_steps=2)  # torch meets before its first period
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    out["torch"] = trained(
        model, optimizer, lambda: averager.average_parameters(model.parameters())
    )
    ours = model_of()
    every_3 = LocalSGD(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), 3)
    for x in batches_of(dist.get_rank()):
        ours(x).square().mean().backward()
        every_3.step()
        every_3.zero_grad()
    out["next to torch"] = flat(ours)  # both with one step alone at the end

    with dz.span("outer"):
        out["outer"] = outer(3, **OPTIONS)
    out["outer, plain"] = outer(3, lr=1.0, momentum=0.0)
    plain = model_of()
    out["plain"] = trained(plain, LocalSGD(torch.optim.SGD(plain.parameters(), lr=0.1), 3))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)])
    both = LocalSGD(torch.optim.SGD(mixed.parameters(), lr=0.1), 1)
    sum(p.sum().double() for p in mixed.parameters()).mul(dist.get_rank() + 1).backward()
    before = flat(mixed[1])
    both.step()
    out["mixed"] = before - flat(mixed[1])
    return out


def outer_by_hand(world: int) -> torch.Tensor:
    """DiLoCo's algorithm 1 in one process, with a meeting after steps 3, 6 and 7."""
    start = model_of()
    momentum = [torch.zeros_like(p) for p in start.parameters()]
    batches = [batches_of(rank) for rank in range(world)]
    for begin, end in ((0, 3), (3, 6), (6, 7)):
        ways = [torch.zeros_like(p) for p in start.parameters()]
        for rank in range(world):
            model = model_of()
            model.load_state_dict(start.state_dict())
            for x in batches[rank][begin:end]:
                grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p -= 0.1 * g
            for way, s, p in zip(ways, start.parameters(), model.parameters(), strict=True):
                way += (s - p).detach() / world
        with torch.no_grad():
            for p, m, way in zip(start.parameters(), momentum, ways, strict=True):
                m.mul_(OPTIONS["momentum"]).add_(way)
                p -= OPTIONS["lr"] * (way + OPTIONS["momentum"] * m)
    return flat(start)


def calls_in(run: dz.Run, name: str, rank: int) -> list[int]:
    """Elements of the all-reduces that this rank made in a span."""
    span = next(s for s in run.spans if (s.rank, s.name) == (rank, name))
    records = [r for r in run.ledger if (r.rank, r.op) == (rank, "all_reduce")]
    return [r.elements for r in records if span.started <= r.started <= span.finished]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_when_ranks_meet_and_what_they_come_to(world):
    run = dz.launch(many_things, world)
    numel = len(flat(model_of()))
    for rank, out in enumerate(run):
        for name in ("every 1", "every 3", "every 100", "outer"):
            assert torch.equal(out[name], run[0][name]), name
        torch.testing.assert_close(out["every 1"], out["DDP, SGD"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(out["next to torch"], out["torch"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(out["outer"], outer_by_hand(world), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(out["outer, plain"], out["plain"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            out["mixed"], torch.full((6,), 0.1 * (world + 1) / 2, dtype=torch.float64)
        )
        if world > 1:
            assert not torch.allclose(out["every 1"], out["every 3"], atol=1e-4)
            assert not torch.allclose(out["adam"], out["DDP, Adam"], atol=1e-3)
            wanted = {"every 1": 7, "every 3": 3, "every 100": 1, "outer": 3}
            for name, meetings in wanted.items():
                assert calls_in(run, name, rank) == [numel] * meetings


def test_every_must_be_a_number_of_steps():
    optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="a whole number of steps"):
            LocalSGD(optimizer, every)


def unused_on_one_rank() -> torch.Tensor:
    """Momentum of the second layer exists on rank 1 only."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    every_step = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 1)
    for layer in (model[0], model[dist.get_rank()]):
        layer(torch.ones(1, 2)).sum().backward()
        every_step.step()
        every_step.zero_grad()
    return flat(model)


def test_a_parameter_may_be_unused_on_one_rank():
    first, second = dz.launch(unused_on_one_rank, 2)
    assert torch.equal(first, second)
