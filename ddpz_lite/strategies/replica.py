"""A module that is the same on every rank, at the start and in what a step must not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .comm import Comm


class Replica(nn.Module):
    """A module that is the same on every rank: rank 0's parameters and buffers at the start.

    In training the buffers of rank 0 (BatchNorm statistics) are sent before each forward, as in
    torch's DDP; all buffers travel as bytes in one broadcast. `broadcast_buffers=False` leaves them
    to each rank.
    """

    def __init__(self, module: nn.Module, comm: Comm, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        comm.check_equal("the parameters of the model", describe(module.named_parameters()))
        buffers = list(module.buffers())
        comm.broadcast([t for t in (*module.parameters(), *buffers) if not t.is_meta])
        self._sends_buffers = broadcast_buffers and comm.size > 1 and bool(buffers)
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        check_frozen(self._frozen)
        if self._sends_buffers and self.training and torch.is_grad_enabled():
            send_buffers(list(self.module.buffers()), self.comm)
        return self.module(*args, **kwargs)

    def batch_weight(self, count: float) -> float:
        """What to multiply this rank's mean loss with, so that unequal batches give the global
        mean: `(loss * model.batch_weight(len(y))).backward()`.

        count: this rank's samples or tokens. One small all-reduce, so every rank must call it. The
        mean of per-rank means is wrong when counts differ: a rank with 1 of 9 samples would get
        half the weight. A rank whose batches have run out takes part until all have: with any batch
        it has, and count 0. (Not with an empty one: the mean of nothing is nan.) Raises ValueError
        on all ranks if none has a sample.
        """
        device = next(self.module.parameters()).device
        total = self.comm.all_reduce(torch.tensor(float(count), device=device)).wait().item()
        if not total > 0:
            raise ValueError(
                f"the batches of all ranks together hold {total:g} samples, so they have no mean. "
                "Cure: end the loop when no rank has a batch left."
            )
        return count * self.comm.size / total


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """One line per parameter, for `Comm.check_equal`."""
    return [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in named]


@torch.no_grad()
def send_buffers(buffers: Sequence[Tensor], comm: Comm) -> None:
    """Rank 0's values of buffers of any dtype, in one broadcast."""
    flat = torch.cat([b.contiguous().view(-1).view(torch.uint8) for b in buffers])  # (bytes,)
    comm.broadcast([flat])
    sizes = [b.numel() * b.element_size() for b in buffers]
    for buffer, data in zip(buffers, flat.split(sizes), strict=True):
        buffer.data.copy_(data.clone().view(buffer.dtype).view(buffer.shape))  # no new version


def check_frozen(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise RuntimeError if a parameter that was frozen when the model was wrapped is trainable
    now.
    """
    for name, param in frozen:
        if param.requires_grad:
            raise RuntimeError(
                f"{name} was frozen when the model was wrapped and has requires_grad=True now; "
                "its gradient would never be reduced. Cure: set requires_grad before wrapping."
            )
