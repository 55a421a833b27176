"""Which tokens of a sequence each rank has.

The sequence is cut into equal chunks: N of them, one for each rank, or 2N, of which rank r has
chunk r and chunk 2N - 1 - r. Under a causal mask a query sees the keys before it, so the rank with
the last of N chunks computes 2N - 1 times as much as the one with the first. A pair of a zigzag
costs the same for all ranks, because what chunk r sees too little chunk 2N - 1 - r sees too much.

Source: zigzag as in github.com/zhuzilin/ring-flash-attention; torch calls it head-tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """The tokens of rank `rank` of `world`: chunk r of N, or chunks r and 2N - 1 - r of 2N."""

    world: int
    rank: int
    zigzag: bool = True

    @property
    def parts(self) -> int:
        """Chunks of the sequence."""
        return 2 * self.world if self.zigzag else self.world

    def chunks(self, rank: int | None = None) -> tuple[int, ...]:
        """The chunks of a rank (default: this one), in the order in which it has them."""
        rank = self.rank if rank is None else rank
        return (rank, self.parts - 1 - rank) if self.zigzag else (rank,)

    def of(self, full: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of (B, T, ...): inputs, targets, or anything else with a T.

        Slice targets that were shifted before. A part that is shifted afterwards has no target for
        its last token, since that is the first token of another rank. Raises ValueError if the
        chunks do not divide T.
        """
        self.check(full.shape[dim])
        chunks = full.chunk(self.parts, dim)
        return torch.cat([chunks[c] for c in self.chunks()], dim)

    def places(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions (T / N,) of this rank's tokens in the sequence of `tokens`."""
        return self.of(torch.arange(tokens, device=device), dim=0)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The full tensor (B, T, ...), from the parts of all ranks in the order of ranks."""
        each = self.parts // self.world
        found = {
            chunk: piece
            for rank, part in enumerate(parts)
            for chunk, piece in zip(self.chunks(rank), part.chunk(each, dim), strict=True)
        }
        return torch.cat([found[c] for c in range(self.parts)], dim)

    def pairs(self, source: int, causal: bool) -> list[tuple[int, int, bool]]:
        """What this rank's queries see of the keys of rank `source`, chunk by chunk.

        (i, j, masked): my i-th chunk sees all of its j-th; masked: it is the same chunk, of which
        a token sees those before it. Chunks that come later in the sequence are left out.
        """
        pairs = [
            (i, j, causal and own == other)
            for i, own in enumerate(self.chunks())
            for j, other in enumerate(self.chunks(source))
            if not causal or other <= own
        ]
        return pairs

    def check(self, tokens: int) -> None:
        """Raise ValueError if the chunks do not divide the tokens."""
        if tokens % self.parts:
            fewer = tokens - tokens % self.parts
            raise ValueError(
                f"{tokens} tokens do not divide into {self.parts} chunks, "
                f"{self.parts // self.world} for each of {self.world} ranks. Fix: windows of a "
                f"multiple of {self.parts} tokens, {fewer or self.parts} for example."
            )
