"""Where each tensor lies in a flat buffer, and what of it a rank holds: arithmetic on offsets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a buffer of `padded` elements, cut into `world` equal slices."""

    shapes: tuple[torch.Size, ...]
    world: int
    rank: int

    @cached_property
    def offsets(self) -> list[int]:
        """Start of each tensor, then the end of the last: len(shapes) + 1 numbers."""
        return [0, *accumulate(map(prod, self.shapes))]

    @cached_property
    def shard_numel(self) -> int:
        return -(-self.offsets[-1] // self.world)

    @property
    def padded(self) -> int:
        return self.shard_numel * self.world

    def views(self, full: Tensor) -> list[Tensor]:
        """full (padded,) or longer: one view per tensor, in its shape."""
        spans = zip(pairwise(self.offsets), self.shapes, strict=True)
        return [full[start:stop].view(shape) for (start, stop), shape in spans]

    def owned(self, index: int) -> tuple[int, int]:
        """The range of tensor `index`, in its own elements, that this rank's shard holds."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        left = self.rank * self.shard_numel
        first = min(max(left, start), stop)
        return first - start, max(first, min(left + self.shard_numel, stop)) - start

    @cached_property
    def _lengths(self) -> list[int]:
        return [last - first for first, last in map(self.owned, range(len(self.shapes)))]

    def split(self, shard: Tensor) -> tuple[Tensor, ...]:
        """shard (shard_numel,) or longer: a 1-D view per tensor, empty if it lies elsewhere."""
        return shard[: sum(self._lengths)].split(self._lengths)

    def segments(self, start: int, stop: int, rows: int, extra: int) -> list[tuple[slice, slice]]:
        """The flat range start:stop of `padded` elements in so many rows, each `extra` longer.

        As (place in the rows end to end, elements counted from start).
        """
        width, cut, found = self.padded // rows, start, []
        while cut < stop:
            row = cut // width
            end, at = min(stop, (row + 1) * width), cut + row * extra
            found.append((slice(at, at + end - cut), slice(cut - start, end - start)))
            cut = end
        return found
