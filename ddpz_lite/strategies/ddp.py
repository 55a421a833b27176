"""DDP: every rank holds the full model; backward makes each gradient the mean over ranks.

`replica` makes the ranks equal at the start, `reducer` sends the gradients while backward runs.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020, section 3.2.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.gradient import in_backward
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.reducer import Bucket, CommHook, HookPerBucket, Reducer, buckets_of
from ddpz_lite.strategies.replica import Replica


class DDP(Replica):
    """Distributed data parallel: `DDP(module)`, then train as with one process.

    After `loss.backward()` each `.grad` is the mean over ranks, the same on all. A parameter that
    no rank used keeps `.grad`; one that only some used gets their sum over the number of all.

    Args:
        module: the same architecture on every rank; rank 0's values win.
        mesh: a process group or mesh; default: the world.
        bucket_mb: megabytes of gradients per all-reduce. Smaller starts earlier, larger calls less.
        reduce_dtype: in which gradients are summed; default: their own.
        broadcast_buffers: send rank 0's buffers before each forward in training.
        comm_hook: `hook(gradients, comm) -> Handle`, in place of scaling and all-reduce: gradients
            is a flat bucket of this rank's own, and must hold their mean when the handle has been
            waited for. Or one of `hooks`: Rounded, Int8, TopK, PowerSGD.

    Raises: RuntimeError if the ranks' parameters differ in name, shape, dtype or requires_grad; if
    requires_grad was switched on after wrapping.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
        bucket_mb: float = 8.0,
        reduce_dtype: torch.dtype | None = None,
        broadcast_buffers: bool = True,
        comm_hook: CommHook | HookPerBucket | None = None,
    ) -> None:
        super().__init__(module, Comm.of(mesh), broadcast_buffers)
        groups = buckets_of(list(module.parameters()), bucket_mb)
        rows = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        sparse = {m.weight for m in rows if m.sparse}
        self.buckets = [Bucket(g, self.comm, reduce_dtype, comm_hook, sparse) for g in groups]
        self._reducer = Reducer(self.buckets, in_flight=len(self.buckets))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not in_backward():  # else it is a recomputation
            self._reducer.reset()
            for bucket in self.buckets:
                bucket.forget()
        return super().forward(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside keep this rank's own gradients; the next one outside reduces the sum."""
        return self._reducer.no_sync()

    def attach(self, optimizer: ShardedOptimizer) -> None:
        super().attach(optimizer)
        optimizer.before_finalize = self._reducer.flush

    def abandon(self) -> None:
        """Release what is in flight: it would keep the process group alive."""
        self._reducer.abandon()
        for bucket in self.buckets:
            bucket.abandon()

    def join(self) -> None:
        """Continue with the ranks of the world as it is now, each of which has the same model."""
        self.comm.__init__()  # the buckets have the same one

    def memory_extra(self) -> dict[str, list[Tensor]]:
        """Buckets hold the gradients, whether a `.grad` points into them at the moment or not."""
        gradients = [bucket.flat for bucket in self.buckets]
        kept = [t for bucket in self.buckets for t in getattr(bucket.hook, "state", ())]
        return super().memory_extra() | {"gradients": gradients, "transient": kept}
