"""The four transitions: values on 1 to 4 ranks, and that the choice of collective pays in bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.groups import backend_of


def transitions() -> dict[str, object]:
    comm = Comm()
    world, rank, n = comm.world, comm.rank, 6
    rows = torch.arange(world * n, dtype=torch.float32).view(world, n) * (rank + 1)
    mean = comm.reduce_scatter(rows.clone(), torch.float32).wait()
    halves = comm.reduce_scatter(rows.to(torch.bfloat16), torch.float32).wait()
    full = torch.zeros(world * n)
    comm.shard(full).fill_(rank)
    total = comm.all_reduce(torch.full((3,), float(rank))).wait()
    tensors = [torch.full((2,), float(rank)), torch.full((1,), rank)]
    comm.broadcast(tensors)
    try:
        comm.check_equal("the shapes", ["a (2,)", f"b ({rank // 2},)"])
        complaint = ""
    except RuntimeError as error:
        complaint = str(error)
    return {
        "mean": mean.tolist(),
        "halves": (halves.dtype, halves.tolist()),
        "gathered": comm.all_gather(full).wait().tolist(),
        "total": total.tolist(),
        "first": [t.tolist() for t in tensors],
        "max": comm.reduce_scalar(torch.tensor(float(rank)), maximum=True).item(),
        "complaint": complaint,
    }


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_values(world):
    run = dz.launch(transitions, world)
    for rank, got in enumerate(run):
        row = torch.arange(world * 6, dtype=torch.float32).view(world, 6)[rank]
        expected = (row * (world + 1) / 2).tolist()
        assert got["mean"] == pytest.approx(expected)
        assert got["halves"][0] == torch.float32
        assert got["halves"][1] == pytest.approx(expected, rel=1e-2)
        assert got["gathered"] == [float(r) for r in range(world) for _ in range(6)]
        assert got["total"] == [world * (world - 1) / 2] * 3
        assert got["first"] == [[0.0, 0.0], [0]]
        assert got["max"] == world - 1
        if world > 2:
            assert "rank 0 has b (0,), rank 2 has b (1,)" in got["complaint"]
        else:
            assert got["complaint"] == ""


def one_of_each() -> None:
    comm = Comm()
    comm.reduce_scatter(torch.ones(comm.world, 600), torch.float32).wait()
    comm.all_gather(torch.ones(comm.world * 600)).wait()
    comm.all_reduce(torch.ones(comm.world * 600)).wait()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_are_the_optimum(world):
    """(N-1)/N of the buffer each for reduce-scatter and all-gather, twice that for all-reduce."""
    share = (world - 1) * 600 * 4
    for by_op in dz.launch(one_of_each, world).bytes_sent().values():
        sent = {op: n for op, n in by_op.items() if n}
        assert sent == {"all_to_all": share, "broadcast": share, "all_reduce": 2 * share}


def hybrid() -> tuple[list[float], list[float], float]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    comm = Comm.of(mesh)
    rank = dist.get_rank()
    rows = torch.full((2, 3), float(rank))
    tensor = torch.tensor([float(rank)])
    comm.broadcast([tensor])
    total = comm.all_reduce(torch.ones(1)).wait()
    return comm.reduce_scatter(rows, torch.float32).wait().tolist(), tensor.tolist(), total.item()


def test_two_dimensional_mesh():
    assert list(dz.launch(hybrid, 4)) == [([1.5] * 3, [0.0], 4.0)] * 4


def test_alone_needs_no_process_group(monkeypatch):
    comm = Comm()
    rows = torch.arange(4.0).view(1, 4)
    assert torch.equal(comm.reduce_scatter(rows, torch.float32).wait(), rows[0])
    assert torch.equal(comm.all_gather(rows[0]).wait(), rows[0])
    assert comm.gather_objects("x") == ["x"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="init_process_group"):
        Comm()


@pytest.mark.parametrize(
    ("backend", "device", "wanted"),
    [
        ("gloo", "cuda", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
    ],
)
def test_which_backend_serves_a_device(backend, device, wanted):
    assert backend_of(backend, device) == wanted
