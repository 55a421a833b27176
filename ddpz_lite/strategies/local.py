"""Ranks that step alone and meet every H steps: local SGD, and DiLoCo.

    model = ...                                      # a plain module on every rank, no DDP
    local = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=16)
    for x, y in batches:
        loss_fn(model(x), y).backward()
        local.step()
        local.zero_grad()
    local.synchronise()                              # the steps since the last meeting, if any

Parameters travel, not gradients: once in `every` steps, so 2(N-1)/N · 4P / every bytes a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import experts


class LocalSGD:
    """Every rank steps with `optimizer` alone; after `every` steps all take the mean of weights.

    The optimizer's state (momenta) stays each rank's own: a parameter may be unused on some ranks.

    With SGD and every=1 this is DDP up to rounding. With Adam it is not: a mean of steps is not the
    step of a mean.

    Args:
        optimizer: any torch optimizer over a model that is not wrapped. Parameters become rank 0's.
        every: steps between two meetings. All ranks must take the same number of steps, for the
            count is kept by each; buffers (BatchNorm statistics) stay each rank's own.
        mesh: a process group or mesh; default: the world.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a whole number of steps from 1 on, got {every!r}")
        self.optimizer, self.every, self.comm = optimizer, every, Comm.of(mesh)
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        if any(experts(param) is not None for param in self.params):
            raise ValueError(
                f"{type(self).__name__} averages parameters over ranks, and these hold other "
                "experts each. Fix: dz.parallelize, which knows of experts."
            )
        self.alone = 0  # steps since the last meeting
        self.comm.broadcast(self.params)

    def step(self) -> None:
        self.optimizer.step()
        self.alone += 1
        if self.alone == self.every:
            self.synchronise()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Meet now. Nothing is sent if no step was taken since the last time."""
        if not self.alone:
            return
        self.alone = 0
        self._meet()

    def _meet(self) -> None:
        average_(self.params, self.comm)


class DiLoCo(LocalSGD):
    """The way that all ranks went, in `every` steps, is the gradient of an outer optimizer.

    Each rank goes from the common `start` to weights of its own; the mean of start - weights is
    handed to SGD with Nesterov momentum, which steps on `start`. With lr=1 and no momentum this is
    local SGD. It keeps start and momentum: 8 bytes for each float32 parameter. The inner
    optimizer's state stays each rank's own.

    Args:
        optimizer: the inner one; AdamW in the paper.
        every: inner steps between two outer ones; 500 in the paper.
        lr, momentum: of the outer step.

    Source: Douillard et al., "DiLoCo", 2023 (arXiv 2311.08105), algorithm 1 and section 3.1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
    ) -> None:
        super().__init__(optimizer, every, mesh=mesh)
        self.start = [nn.Parameter(p.detach().clone()) for p in self.params]
        options = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        self.outer = torch.optim.SGD(self.start, **options)

    def _meet(self) -> None:
        ways = [start - param for start, param in zip(self.start, self.params, strict=True)]
        average_(ways, self.comm)
        for start, way in zip(self.start, ways, strict=True):
            start.grad = way
        self.outer.step()
        self.outer.zero_grad()
        for start, param in zip(self.start, self.params, strict=True):
            param.copy_(start)


def average_(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Each tensor becomes its mean over the ranks, in place: one all-reduce for each dtype."""
    kinds: dict[object, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    for same in kinds.values():
        flat = torch.cat([t.flatten() for t in same])
        comm.all_reduce(flat).wait().div_(comm.size)
        for tensor, mean in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(mean.view_as(tensor))
