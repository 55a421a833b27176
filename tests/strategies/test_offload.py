"""Offload: what crosses between host and device in a step is what its model says.

No GPU is needed: the device is torch's meta device, whose tensors have a shape and no memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ddpz_lite.meter import HostTraffic
from ddpz_lite.strategies import comm
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.costs import offload_moved
from ddpz_lite.strategies.flat import Flat


class FromMeta(TorchDispatchMode):
    """A copy from the meta device to the host, which torch refuses, brings zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        out_of_meta = func is torch.ops.aten._to_copy.default and args[0].is_meta
        if out_of_meta and to is not None and torch.device(to).type == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


@pytest.fixture
def four_ranks(monkeypatch):
    """Four ranks as one of them sees them: their collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for name in ("broadcast", "all_reduce", "all_to_all_single"):
        monkeypatch.setattr(comm.dist, name, lambda *_, **__: SimpleNamespace(wait=int))
    with FromMeta():
        yield mesh
    dist.destroy_process_group()


def one_step(flat: Flat, inner: int, micro_batches: int, resharded: bool) -> None:
    """What a step of this stage asks of a buffer."""

    def gather() -> None:
        flat.unshard()
        flat.wait_for_unshard()

    for micro in range(micro_batches):
        if inner == 3:
            gather()
            if resharded:
                flat.reshard()
                gather()
        if inner > 1 or micro == micro_batches - 1:
            for index, param in enumerate(flat.params):
                flat.collect(index, torch.empty_like(param))
            flat.reduce()
            flat.wait_for_reduce()
        if inner == 3:
            flat.reshard()
    flat.reduce_across()
    flat.wait_for_reduce()
    flat.publish().wait()
    if inner < 3:
        gather()


@pytest.mark.parametrize("stage", [1, 2, 3, (0, 3), (1, 2), (1, 3)])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(("micro_batches", "resharded"), [(1, True), (3, True), (3, False)])
def test_bytes_between_host_and_device_are_the_model(
    four_ranks, stage, half, micro_batches, resharded
):
    mesh, inner = isinstance(stage, tuple), stage[1] if isinstance(stage, tuple) else stage
    ranks = Comm.of(four_ranks, cut=stage[0] == 1) if mesh else Comm()
    params = [nn.Parameter(torch.empty(n, device="meta")) for n in (41, 7, 6)]
    flat = Flat(params, ranks, dtype=half, resident=inner < 3, offload=True)
    assert (flat.shard.device.type, flat.full.device.type) == ("cpu", "meta")
    if inner == 3:
        flat.reshard()
    with HostTraffic() as moved:
        one_step(flat, inner, micro_batches, resharded)
    facts = flat.layout.padded, (2, 2) if mesh else 4, stage
    says = offload_moved(*facts, 2 if half else 4, micro_batches, resharded)
    reductions = says["down"] / offload_moved(*facts)["down"]  # each has a flag for a parameter
    assert (moved.up, moved.down) == (says["up"], says["down"] + 4 * len(params) * reductions)


def test_the_model_by_hand():
    """A rank's part of 800 parameters on 4 ranks is 200: 4 bytes down, 2 up, 28 in the update."""
    assert offload_moved(800, 4, 1) == {"down": 800, "up": 400, "update": 5600}
    assert offload_moved(800, 4, 2, micro_batches=3) == {"down": 2400, "up": 400, "update": 5600}
    assert offload_moved(800, 4, 3) == {"down": 800, "up": 800, "update": 5600}
    assert offload_moved(800, 4, 3, resharded=False)["up"] == 400
    assert offload_moved(800, (2, 2), (1, 3), micro_batches=3) == offload_moved(800, 4, 1)
