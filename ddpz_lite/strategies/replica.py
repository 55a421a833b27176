"""A module that is the same on every rank, at the start and in what a step must not change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.gradient import own_grad
from ddpz_lite.strategies.guards.model import check_frozen
from ddpz_lite.strategies.guards.modules import KnownModules, check_reached, is_detached
from ddpz_lite.strategies.mesh import by_comm
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.reducer import kind_of


class Replica(nn.Module):
    """A module that is the same on every rank: rank 0's parameters and buffers at the start.

    In training the buffers of rank 0 (BatchNorm statistics) are sent before each forward, as in
    torch's DDP, as bytes in one broadcast. `broadcast_buffers=False` leaves them to each rank.

    Attributes: `flats` are the flat buffers of its optimizer's shards; `masters` those of the
    frozen parameters that were cast for compute.
    """

    def __init__(self, module: nn.Module, comm: Comm, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        names, buffers = {p: n for n, p in module.named_parameters()}, list(module.buffers())
        for own, params in by_comm(names, comm).items():
            lines = describe((names[p], p) for p in params)
            own.check_equal("the parameters of the model", lines)
            tensors = [*params, *(buffers if own is comm else ())]
            own.broadcast([t for t in tensors if not t.is_meta])
        self._sends_buffers = broadcast_buffers and comm.size > 1 and bool(buffers)
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self.flats: list[Flat] = []
        self.masters: list[Flat] = []
        self._clear: Callable[[bool], None] | None = None
        self._known = KnownModules(module)
        self._detached = False  # whether the last forward made an output without a gradient

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check_frozen(self._frozen)
        learns = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if learns:
            self._known.check(self.module)
        if self._sends_buffers and self.training and torch.is_grad_enabled():
            send_buffers(list(self.module.buffers()), self.comm)
        output = self.module(*args, **kwargs)
        if learns:
            self._detached = is_detached(output, self.module)
        return output

    def batch_weight(self, count: float) -> float:
        """The factor for this rank's mean loss with which unequal batches give the global mean.

            (loss * model.batch_weight(len(y))).backward()

        count: this rank's samples or tokens. One small all-reduce, so every rank must call it. The
        mean of per-rank means is wrong when counts differ: a rank with 1 of 9 samples would get
        half the weight. A rank whose batches have run out takes part until all ranks' have: with
        any batch it has, and count 0. (Not with an empty one: the mean of nothing is nan.) Raises
        ValueError on all ranks if none has a sample.
        """
        device = next((p.device for p in self.module.parameters()), "cpu")
        total = self.comm.all_reduce(torch.tensor(float(count), device=device)).wait().item()
        if not total > 0:
            raise ValueError(
                f"the batches of all ranks together hold {total:g} samples, so they have no mean. "
                "Fix: end the loop when no rank has a batch left."
            )
        return count * self.comm.size / total

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Tell the model which optimizer steps on it: `zero_grad` is its, and its buffers count."""
        self._clear = optimizer.zero_grad
        optimizer.register_step_pre_hook(self._check_reached)
        self.flats = self.flats or optimizer.flats  # the same list: it grows with new groups

    def _check_reached(self, optimizer: ShardedOptimizer, *_: Any) -> None:
        if self._detached:
            shards = [shard for flat in optimizer.flats for shard in flat.shards]
            check_reached(type(optimizer).__name__, [*self.module.parameters(), *shards])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's, which knows where gradients lie."""
        if self._clear is None:
            super().zero_grad(set_to_none)
        else:
            self._clear(set_to_none)

    def cast_frozen(self, dtype: torch.dtype | None, keep: Collection[nn.Parameter]) -> None:
        """Cast the frozen parameters for compute, all but `keep`.

        Their masters, which are only ever saved, are sharded in the memory of the host.
        """
        kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for param in self.module.parameters():
            wanted = not param.requires_grad and param.is_floating_point() and param not in keep
            if dtype not in (None, param.dtype) and wanted:
                kinds[kind_of(param)].append(param)
        self.masters = [Flat(p, self.comm, dtype=dtype, offload=True) for p in kinds.values()]

    def memory_extra(self) -> dict[str, list[Tensor]]:
        """Masters count as the optimizer's, though it does not step on them."""
        return {"optimizer": [flat.shard for flat in self.masters]}


class ReplicaOf(Replica):
    """The model of ZeRO-1 and ZeRO-2: the same on every rank; the optimizer does the rest."""

    def __init__(self, module: nn.Module, optimizer: Any, broadcast_buffers: bool) -> None:
        super().__init__(module, optimizer.comm, broadcast_buffers)
        self._no_sync = optimizer.no_sync

    def no_sync(self) -> AbstractContextManager[None]:
        """ZeRO-2: keep full gradients until the next backward outside. ZeRO-1 always does."""
        return self._no_sync()

    def memory_extra(self) -> dict[str, list[Tensor]]:
        """A reduced gradient belongs to the shard of a parameter."""
        reduced = [own_grad(shard) for flat in self.flats for shard in flat.shards]
        gradients = [grad for grad in reduced if grad is not None]
        return super().memory_extra() | {"gradients": gradients}


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """One line per parameter, for `Comm.check_equal`."""
    return [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in named]


@torch.compiler.disable
@torch.no_grad()
def send_buffers(buffers: Sequence[Tensor], comm: Comm) -> None:
    """Rank 0's values of buffers of any dtype, in one broadcast."""
    flat = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in buffers])  # (bytes,)
    comm.broadcast([flat])
    sizes = [b.numel() * b.element_size() for b in buffers]
    for buffer, data in zip(buffers, flat.split(sizes), strict=True):
        buffer.data.copy_(data.clone().view(buffer.dtype).view(buffer.shape))  # no new version
