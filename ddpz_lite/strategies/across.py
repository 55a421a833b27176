"""HFSDP, ZeRO-1 outside: ranks that hold the same shard cut the optimizer's state among themselves.

They exchange gradients once for each step, however many backwards it has. Until then a gradient
that was reduced inside the mesh waits here, and `Flat` goes on with what `reduce` returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpz_lite.strategies.comm import Comm, Handle


class WaitingGrads:
    """The gradients of one flat buffer between backward and step.

    comm: the mesh; `comm.across` are the ranks that hold the same parameters. shards: what the
    optimizer steps on; as long as a gradient waits, they show this rank's part of it as `.grad`.
    """

    def __init__(self, comm: Comm, flags: int) -> None:
        self.comm, self.flags = comm, flags
        self.partial: Tensor | None = None  # (padded // world + flags,)
        self.missed = False  # whether a gradient that `partial` should hold was missing here

    def add(self, mean: Tensor, missing: bool) -> None:
        """Keep a mean over the ranks inside (padded // world + flags,)."""
        self.partial = mean if self.partial is None else self.partial.add_(mean)
        self.missed |= missing

    def own(self) -> Tensor:
        """This rank's part of what waits (padded // shards,)."""
        return self.comm.across.shard(self.partial[: -self.flags])

    def drop(self, index: int, places: list[tuple[slice, slice]]) -> None:
        """Forget the gradient of parameter `index`, at `places` in the rows of all ranks inside."""
        before = self.comm.rank * self.partial.numel()
        for place, _ in places:
            if before <= place.start < before + self.partial.numel():
                self.partial[place.start - before : place.stop - before].zero_()
        self.partial[index - self.flags], self.missed = 0, True

    def reduce(self, reduce_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Handle, bool]:
        """Start to reduce what waits over the ranks that hold the same parameters."""
        ranks, flags = self.comm.across.world, self.partial[-self.flags :]
        rows = self.partial[: -self.flags].view(ranks, -1)  # (ranks, padded // shards)
        rows = torch.cat([rows, flags.expand(ranks, -1)], 1).to(reduce_dtype)
        handle, missed = self.comm.across.reduce_scatter(rows, dtype), self.missed
        self.partial, self.missed = None, False
        return handle, missed
