"""How a rank gets to the keys and values of the others: around a ring, or all at once.

Both give the blocks of all ranks, one after the other, and take each block's gradient home:

    ring     a rank passes on the block that it has and receives the next one meanwhile. Two blocks
             are held. The gradient follows its block, one rank behind, and gains each rank's part.
    gather   one all-gather, N blocks are held; one reduce-scatter takes the gradients home.

A block is the keys and values (2, B, H, T / N, D) of one rank.

Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023;
Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2 (all-gather).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddpz_lite.strategies.comm import Comm


class Ring:
    """Blocks from the rank before, to the rank after: N - 1 rounds, or N for gradients."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._in_flight: tuple[list[Any], Tensor, Tensor] | None = None  # works, sent, received

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its block), from this rank backwards; the next arrives while one is used."""
        block, world = own, self.comm.world
        for distance in range(world):
            arriving = self._pass_on(block) if distance + 1 < world else None
            yield (self.comm.rank - distance) % world, block
            if arriving is not None:
                block = self._wait(arriving)

    def add(self, source: int, grad: Tensor) -> None:
        """This rank's part of the gradient of the block of `source`, in the order of `blocks`."""
        if self._in_flight is not None:
            grad.add_(self._wait(self._in_flight))
        self._in_flight = self._pass_on(grad)

    def own_grad(self) -> Tensor:
        """The gradient of this rank's own block, once it has been everywhere."""
        arrived, self._in_flight = self._wait(self._in_flight), None
        return arrived

    def _pass_on(self, block: Tensor) -> tuple[list[Any], Tensor, Tensor]:
        rank, world = self.comm.rank, self.comm.world
        if world == 1:
            return [], block, block
        received = torch.empty_like(block)
        sends, receives = [(block, (rank + 1) % world)], [(received, (rank - 1) % world)]
        sent, arriving = self.comm.exchange(sends, receives)
        return [*sent, *arriving], block, received

    def _wait(self, in_flight: tuple[list[Any], Tensor, Tensor]) -> Tensor:
        works, _, received = in_flight
        for work in works:
            work.wait()
        return received


class Gather:
    """All blocks at once, which sends as many bytes as the ring, and holds N blocks."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._grads: Tensor | None = None  # (N, 2, B, H, T / N, D)

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its block), in the order of ranks."""
        full = own.new_empty(self.comm.world, *own.shape)
        full[self.comm.rank] = own
        self.comm.all_gather(full.view(-1)).wait()
        yield from enumerate(full)

    def add(self, source: int, grad: Tensor) -> None:
        """This rank's part of the gradient of the block of `source`."""
        if self._grads is None:
            self._grads = grad.new_empty(self.comm.world, *grad.shape)
        self._grads[source] = grad

    def own_grad(self) -> Tensor:
        """The gradient of this rank's own block: the sum over ranks."""
        rows, self._grads = self._grads, None
        mean = self.comm.reduce_scatter(rows.view(self.comm.world, -1), rows.dtype).wait()
        return mean.mul_(self.comm.world).view(rows.shape[1:])
