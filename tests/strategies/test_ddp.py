"""DDP beyond parity: what its gradients are, its errors, its hook, recovery from an exception."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from core_jobs import CASES, build, raised
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpz_lite as dz
from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.reducer import buckets_of


class Reentrant(nn.Module):
    """Checkpoints whose backward is a second one inside the first; the last may be one, too."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.unused, self.with_last = nn.Linear(3, 3), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=True)
        return checkpoint(self.last, x, use_reentrant=True) if self.with_last else self.last(x)


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

    twice = Reentrant()
    twice.first = twice.inner  # used inside of the inner backward and outside
    shared = DDP(twice)
    out["reentrant"] = raised(lambda: shared(torch.ones(1, 3)).sum().backward())
    out["shapes"] = raised(DDP, nn.Linear(2, 1 + rank // 2))
    out["world"] = world
    return out


BATCHES = [[3, 1, 2], [2]]  # samples of each batch, by rank: rank 1 has one batch only


def uneven_batches() -> list[float]:
    """Distance to one process that sees all samples of a turn, by stage."""
    rank, found = dist.get_rank(), []
    torch.manual_seed(0)
    data = [[torch.randn(n, 3) for n in counts] for counts in BATCHES]
    for stage in (0, 1, 2, 3):
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model, optimizer = parallelize(copy.deepcopy(plain), torch.optim.SGD, stage, lr=0.5)
        alone = torch.optim.SGD(plain.parameters(), lr=0.5)
        for turn in range(3):
            local = data[rank]
            x = local[min(turn, len(local) - 1)]  # run out: the last one again, with no weight
            count = len(x) if turn < len(local) else 0
            (model(x).mean() * model.batch_weight(count)).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain(torch.cat([d[turn] for d in data if turn < len(d)])).mean().backward()
            alone.step()
            alone.zero_grad()
        state, exact = full_state_dict(model), plain.state_dict()
        found.append(max((state[n] - exact[n]).abs().max().item() for n in exact))
    return [*found, raised(model.batch_weight, 0)]


def test_uneven_batches_and_a_rank_that_runs_out_give_the_global_mean():
    for *gaps, without in dz.launch(uneven_batches, 2):
        assert max(gaps) < 1e-6
        assert "end the loop when no rank has a batch left" in without


def reentrant() -> dict[tuple[int, bool], tuple[float, bool]]:
    """Distance to one process, and whether what nothing used has no gradient."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    x = torch.randn(2 * world, 3, generator=torch.Generator().manual_seed(1))
    for stage, last in itertools.product((0, 1, 2, 3), (False, True)):
        torch.manual_seed(0)
        plain = Reentrant(last)
        options = {"lr": 0.5, "bucket_mb": 1e-5}
        model, optimizer = parallelize(copy.deepcopy(plain), torch.optim.SGD, stage, **options)
        alone = torch.optim.SGD(plain.parameters(), lr=0.5)
        for part in (x, x + 1):
            plain(part).square().mean().backward()
            model(part[rank::world]).square().mean().backward()
            optimizer.finalize_grads()
            unused = [p.grad for n, p in model.named_parameters() if "unused" in n]
            alone.step()
            optimizer.step()
            optimizer.zero_grad()
            alone.zero_grad()
        state, exact = full_state_dict(model), plain.state_dict()
        far = max((state[n] - exact[n]).abs().max().item() for n in exact)
        found[stage, last] = far, unused == [None, None]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_inside_a_backward_is_part_of_it(world):
    for found in dz.launch(reentrant, world):
        assert {k: v for k, v in found.items() if not (v[0] < 1e-6 and v[1])} == {}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_backward_after_one_that_raised_does_not_take_what_that_left(stage):
    model, _ = parallelize(nn.Linear(2, 1), torch.optim.SGD, stage, lr=0.1)
    weight, bias = model.module.weight, model.module.bias
    hook = weight.register_hook(lambda _: _stop())
    terms = weight.sum(), bias.sum()  # autograd takes the last first, so the bias has a gradient
    with contextlib.suppress(KeyError):
        sum(terms).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) after an exception in backward"):
        weight.sum().backward()


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
        assert "Fix: set requires_grad before wrapping" in out["frozen"]
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


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle of backward")


def after_an_exception() -> list[float]:
    """Distance from one process after a backward that raised with a reduction in flight."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model = DDP(copy.deepcopy(plain), bucket_mb=1e-5)  # a bucket for each parameter
    x = torch.arange(8.0).view(2, 4)
    distances = []
    for _ in range(5):
        with pytest.raises(ArithmeticError):
            model.module[2](
                model.module[1](Breaks.apply(model.module[0](100 * x)))
            ).sum().backward()
        model.zero_grad()
        plain.zero_grad()
        model(x).sum().backward()
        plain(x).sum().backward()
        pairs = zip(model.module.parameters(), plain.parameters(), strict=True)
        distances.append(max((a.grad - b.grad).abs().max().item() for a, b in pairs))
    return distances


def test_a_retry_does_not_meet_the_reductions_of_a_backward_that_raised():
    slow = dz.Network(latency=0.02, bandwidth=1e9)
    for distances in dz.launch(after_an_exception, 2, network=slow):
        assert max(distances) < 1e-5


def two_forwards() -> float:
    """Gradient of two forwards and one backward, with buffers that the compute reads."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, x = DDP(copy.deepcopy(plain)), torch.arange(15.0).view(5, 3).cos()
    for one in (model, plain):
        (one(x).square().sum() + one(2 * x).square().sum()).backward()
    pairs = zip(model.module.parameters(), plain.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def test_two_forwards_before_one_backward_with_buffers():
    assert max(dz.launch(two_forwards, 2, record=False)) < 1e-4


def test_a_graph_of_the_gradient():
    model = DDP(nn.Linear(3, 1))
    model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    plain(torch.ones(2, 3)).square().sum().backward()
    assert torch.equal(model.module.weight.grad, plain.weight.grad)


def test_complex_gradients_travel_whole_whatever_the_reduce_dtype():
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

        def forward(self) -> torch.Tensor:
            return self.weight.abs().square().sum()

    for stage in (0, 1, 2):
        model, optimizer = parallelize(
            Turns(), torch.optim.SGD, stage, lr=0.25, reduce_dtype=torch.float32
        )
        model().backward()  # the gradient is twice the weight
        optimizer.step()
        assert torch.equal(model.module.weight.detach(), torch.tensor([0.5 + 1j, 1.5 - 0.5j]))


class Counts(nn.Module):
    """Adds its buffer, which every rank changes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.seen.sum()


def buffers_seen() -> list[list[float]]:
    """The buffer after a forward in training and one in evaluation, for each stage and option."""
    found = []
    for stage in range(4):
        for sends in (True, False):
            model, _ = dz.parallelize(
                Counts(), torch.optim.SGD, stage, lr=0.1, broadcast_buffers=sends
            )
            after = []
            for mode in (model.train, model.eval):
                mode()
                model.module.seen.fill_(dist.get_rank() + 1)
                model(torch.ones(1, 2))
                after.append(model.module.seen[0].item())
            found.append(after)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_buffers_are_rank_0s_in_training_and_own_ones_without_the_option(world):
    for rank, found in enumerate(dz.launch(buffers_seen, world)):
        assert found == [[1.0, rank + 1.0], [rank + 1.0, rank + 1.0]] * 4
