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
    """Where each tensor lies in a buffer of `padded` elements, cut into `world` equal slices.

    Here they lie end to end, and slices cut them anywhere; see `ownership` for the other layout.
    """

    shapes: tuple[torch.Size, ...]
    world: int
    rank: int

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, stop) of each tensor."""
        return list(pairwise([0, *accumulate(map(prod, self.shapes))]))

    @cached_property
    def shard_numel(self) -> int:
        return -(-self.numel // self.world)

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def padded(self) -> int:
        return self.shard_numel * self.world

    def views(self, full: Tensor) -> list[Tensor]:
        """full (padded,) or longer: one view per tensor, in its shape."""
        places = zip(self.spans, self.shapes, strict=True)
        return [full[start:stop].view(shape) for (start, stop), shape in places]

    def owned(self, index: int) -> tuple[int, int]:
        """The range of tensor `index`, in its own elements, that this rank's shard holds."""
        start, stop = self.spans[index]
        left = self.rank * self.shard_numel
        first = min(max(left, start), stop)
        return first - start, max(first, min(left + self.shard_numel, stop)) - start

    @cached_property
    def _lengths(self) -> list[int]:
        return [last - first for first, last in map(self.owned, range(len(self.shapes)))]

    def split(self, shard: Tensor) -> tuple[Tensor, ...]:
        """shard (shard_numel,) or longer: a 1-D view per tensor, empty if it lies elsewhere."""
        return shard[: sum(self._lengths)].split(self._lengths)

    def places(self, rows: int, extra: int) -> list[list[tuple[slice, slice]]]:
        """Where each tensor, then the padding, lies in so many rows, each `extra` longer.

        As (place in the rows end to end, elements of the tensor).
        """
        ends = [0, *(stop for _, stop in sorted(self.spans))]
        starts = [*(start for start, _ in sorted(self.spans)), self.padded]
        gaps = [
            part
            for end, start in zip(ends, starts, strict=True)
            for part in self._segments(end, start, rows, extra)
        ]
        return [*(self._segments(*span, rows, extra) for span in self.spans), gaps]

    def _segments(self, start: int, stop: int, rows: int, extra: int) -> list[tuple[slice, slice]]:
        width, cut, found = self.padded // rows, start, []
        while cut < stop:
            row = cut // width
            end, at = min(stop, (row + 1) * width), cut + row * extra
            found.append((slice(at, at + end - cut), slice(cut - start, end - start)))
            cut = end
        return found
