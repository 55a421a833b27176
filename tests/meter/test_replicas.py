"""A drifted replica is found by its bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.meter import checksums, drifted
from ddpz_lite.model import CNN, MLP


def test_checksums_are_of_bits_dtype_and_shape():
    zeros = torch.zeros(6)
    same = checksums({"a": zeros, "b": torch.zeros(12)[::2], "c": torch.zeros(6)})
    assert len(set(same.values())) == 1 and all(len(digits) == 16 for digits in same.values())
    other = {"shape": zeros.view(2, 3), "dtype": zeros.int(), "sign": -zeros, "none": zeros[:0]}
    other |= {"bf16": zeros.bfloat16(), "bool": zeros.bool(), "one": torch.tensor(0.0)}
    assert len({same["a"], *checksums(other).values()}) == 8
    model = CNN()
    wanted = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert checksums(model).keys() == wanted


def drifting():
    torch.manual_seed(0)
    model, rank, found = MLP([3, 4, 2]), dist.get_rank(), []
    found.append(drifted(model))
    with torch.no_grad():
        if rank == dist.get_world_size() - 1:
            model.blocks[0][0].weight[1, 2] += 1e-6
    found.append(drifted(model))
    found.append(drifted({"local": torch.tensor(rank), "ours": torch.ones(2)}))
    found.append(drifted({f"of {rank}": torch.ones(1)}))
    pair = dist.new_group([0, 1])
    found.append(drifted({"x": torch.tensor(rank)}, pair) if rank < 2 else None)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_rank_that_drifted_is_named(world):
    run = dz.launch(drifting, world)
    same, one, each, names, _ = run[0]
    last = world - 1
    assert same == {} and one == {"blocks.0.0.weight": (last,)}
    assert each == {"local": tuple(range(1, world))}  # no two alike: rank 0's counts as right
    assert names.keys() == {f"of {rank}" for rank in range(world)}
    assert all(found[:4] == run[0][:4] for found in run)
    assert run[0][4] == run[1][4] == {"x": (1,)}
