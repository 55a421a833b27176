"""Experts on several ranks: as one process, in exact bytes, and each gradient once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ddpz_lite as dz

C, T, E = 12, 24, 8  # width, tokens of all ranks, experts
FULL = 1e9  # a capacity that drops nothing


def rest(*values: object):
    return pytest.param(*values, marks=pytest.mark.rest)


def layer(top_k: int, **options) -> dz.MoE:
    torch.manual_seed(0)
    return dz.MoE(C, E, top_k, **options)


def shards(expert_ranks: int | None = None):
    """A mesh (replicas, ranks of an expert group)."""
    world = dist.get_world_size()
    size = expert_ranks or world
    return init_device_mesh("cpu", (world // size, size))


def forward_backward(top_k: int, expert_ranks: int | None, factor: float | None, mine=None):
    """[output, gradients of x and router, then of all experts by number] of this rank's tokens."""
    moe = layer(top_k, capacity_factor=factor)
    mesh = shards(expert_ranks)
    model = dz.DDP(dz.expert_parallel(moe, mesh))
    torch.manual_seed(1)
    x, scale = torch.randn(T, C), torch.randn(T, C)
    parts = torch.arange(T).chunk(dist.get_world_size())
    part = parts[dist.get_rank()] if mine is None else torch.arange(T)[mine[dist.get_rank()]]
    own = x[part].requires_grad_()
    y = model(own)
    (y * scale[part]).sum().backward()  # gradients are means over ranks
    grads = {name: p.grad * dist.get_world_size() for name, p in moe.named_parameters()}
    return part, y.detach(), own.grad, grads


def alone(top_k: int):
    moe = layer(top_k)
    torch.manual_seed(1)
    x, scale = torch.randn(T, C, requires_grad=True), torch.randn(T, C)
    y = moe(x)
    (y * scale).sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in moe.named_parameters()}


def check_parity(run, top_k):
    y, of_x, wanted = alone(top_k)
    near, seen = {"rtol": 1e-5, "atol": 1e-6}, set()
    for part, own_y, own_grad, grads in run:
        torch.testing.assert_close(own_y, y[part], **near)
        torch.testing.assert_close(own_grad, of_x[part], **near)
        torch.testing.assert_close(grads, {name: wanted[name] for name in grads}, **near)
        seen |= grads.keys()
    assert seen == wanted.keys()


@pytest.mark.parametrize(
    "world, expert_ranks, top_k, factor",
    [(2, 2, 2, None), (4, 4, 1, FULL), (4, 2, 2, None), rest(1, 1, 2, None), rest(4, 1, 1, None)],
)
def test_values_and_gradients_of_one_process(world, expert_ranks, top_k, factor):
    run = dz.launch(forward_backward, world, args=(top_k, expert_ranks, factor), record=False)
    check_parity(run, top_k)


def test_a_rank_without_tokens():
    mine = [slice(0, 20), slice(20, 20), slice(20, 24), slice(24, 24)]
    run = dz.launch(forward_backward, 4, args=(2, 4, None, mine), record=False)
    check_parity(run, 2)


def counted(top_k: int):
    moe = layer(top_k)
    dz.expert_parallel(moe)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6 * (1 + dist.get_rank()), C, requires_grad=True)
    with dz.span("layer"):
        moe(x).sum().backward()
    return moe.counts.view(dist.get_world_size(), -1).sum(1).tolist()


@pytest.mark.parametrize("world", [2, rest(4)])
def test_bytes_are_those_of_the_counts(world):
    run = dz.launch(counted, world, args=(2,))
    rows = list(run)  # rows[a][b]: from rank a to rank b
    for rank in range(world):
        calls = [r for r in run.ledger if r.rank == rank and r.op == "all_to_all"]
        out = 4 * C * sum(rows[rank][r] for r in range(world) if r != rank)
        back = 4 * C * sum(rows[r][rank] for r in range(world) if r != rank)
        wanted = [8 * E * (world - 1) // world, out, back, out, back]  # gradients: as the results
        assert [r.bytes_sent for r in calls] == wanted


def chosen_by_bias(experts: list[int], factor: float | None):
    moe = layer(len(experts), capacity_factor=factor)
    for expert in experts:
        moe.bias[expert] = 10.0
    return moe


def test_a_hot_expert_fills_its_capacity_and_drops_the_last():
    moe = chosen_by_bias([3], 2.0)
    y = moe(torch.randn(T, C))
    places = 2 * T // E
    assert moe.dropped == T - places and moe.counts[3] == T
    assert (y[:places] != 0).any(1).all() and (y[places:] == 0).all()
    assert chosen_by_bias([3], None)(torch.randn(T, C)).ne(0).any(1).all()


def balance_losses():
    moe = chosen_by_bias([dist.get_rank()], None)
    dz.expert_parallel(moe)
    torch.manual_seed(dist.get_rank())
    moe(torch.randn(T, C))
    own = E * (moe.counts / moe.counts.sum() * moe._mean_probability).sum().item()
    loss = moe.balance_loss()
    moe.update_bias(1.0)
    return own, loss.item(), moe._mean_probability.tolist(), moe.bias.tolist()


def test_balance_is_that_of_the_global_batch():
    own, losses, shares, biases = zip(*dz.launch(balance_losses, 2, record=False), strict=True)
    means = torch.tensor(shares).mean(0)
    assert sum(losses) / 2 == pytest.approx(E * (means[0] + means[1]).item() / 2)
    assert abs(sum(own) / 2 - sum(losses) / 2) > 1e-4
    assert [b - 10 * (i == 0) for i, b in enumerate(biases[0])] == [-1, -1, 1, 1, 1, 1, 1, 1]


def wrong_cut(experts: int, times: int, half: bool):
    mesh = dist.new_group([0]) if half and dist.get_rank() == 0 else None
    if half and dist.get_rank():
        dist.new_group([0])
        return
    moe = dz.MoE(C, experts)
    for _ in range(times):
        dz.expert_parallel(moe, mesh)


@pytest.mark.parametrize("case", [(3, 1, False), (8, 2, False), (8, 1, True), (8, 1, None)])
def test_wrong_cuts_are_refused(case):
    with pytest.raises(dz.RankFailed, match="Fix:"):
        if case[2] is None:  # other weights on each rank
            dz.launch(different, 2, record=False)
        else:
            dz.launch(wrong_cut, 2, args=case, record=False)
    with pytest.raises(ValueError, match="top_k"):
        dz.MoE(C, 2, 3)
    with pytest.raises(ValueError, match="no MoE"):
        dz.expert_parallel(torch.nn.Linear(2, 2))


def different():
    torch.manual_seed(dist.get_rank())
    dz.expert_parallel(torch.nn.Sequential(dz.MoE(C, E)))
