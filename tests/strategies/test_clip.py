"""Norms of a gradient that lies on several ranks, against torch's norm of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpz_lite as dz
from ddpz_lite.strategies.clip import clip_grad_norm_
from ddpz_lite.strategies.comm import Comm

NORMS = (2.0, 1.0, 3.0, float("inf"))


def sharded_norms() -> dict[float, tuple[float, list[float]]]:
    comm, out = Comm(), {}
    for norm_type in NORMS:
        unsharded = torch.arange(1.0, 13.0).sub_(5.5)
        param = nn.Parameter(torch.zeros(12 // comm.world))
        param.grad = comm.shard(unsharded).clone()
        if dist.get_rank() == 0 and comm.world > 1:
            nothing = nn.Parameter(torch.zeros(0))  # a rank may hold nothing of a parameter
            norm = clip_grad_norm_([param, nothing], 2.0, norm_type, comm)
        else:
            norm = clip_grad_norm_([param], 2.0, norm_type, comm)
        out[norm_type] = norm.item(), param.grad.tolist()
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_norm_is_the_norm_of_the_whole(world):
    ranks = list(dz.launch(sharded_norms, world))
    for norm_type in NORMS:
        param = nn.Parameter(torch.zeros(12))
        param.grad = torch.arange(1.0, 13.0).sub_(5.5)
        exact = nn.utils.clip_grad_norm_([param], 2.0, norm_type).item()
        assert {rank[norm_type][0] for rank in ranks} == {
            ranks[0][norm_type][0]
        }  # equal, bit for bit
        assert ranks[0][norm_type][0] == pytest.approx(exact, rel=1e-6)
        clipped = [value for rank in ranks for value in rank[norm_type][1]]
        assert clipped == pytest.approx(param.grad.tolist(), rel=1e-5)


def test_no_gradients_and_bad_numbers():
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm_([], -1.0)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clip_grad_norm_([], 1.0, 0.0)


def large_and_exact() -> dict[str, object]:
    comm, out = Comm(), {}
    param = nn.Parameter(torch.zeros(1, dtype=torch.double))
    param.grad = torch.full((1,), 1 + 2.0**-40, dtype=torch.double)
    norm = clip_grad_norm_([param], 1.0, float("inf"), comm)
    out["float64"] = norm.dtype is torch.double and norm.item() == 1 + 2.0**-40
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.full((1,), 2.0**65)  # its square is more than fp32 has
    norm = clip_grad_norm_([param], 1.0, 2.0, comm)
    out["large"] = norm.item() == pytest.approx(2.0**65 * comm.world**0.5)
    out["clipped"] = param.grad.item() == pytest.approx(comm.world**-0.5)
    param = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    param.grad = torch.tensor([3j, 4.0][comm.rank]).to(torch.complex64).view(1)
    norm = clip_grad_norm_([param], 1.0, 2.0, comm)
    out["complex"] = norm.dtype is torch.float32 and norm.item() == pytest.approx(5.0)
    out["complex, clipped"] = param.grad.abs().item() == pytest.approx([3, 4][comm.rank] / 5)
    return out


def test_norms_of_float64_of_complex_numbers_and_above_the_root_of_fp32():
    for out in dz.launch(large_and_exact, 2, record=False):
        assert all(out.values()), out
