"""The order of units, in which ZeRO-3 prefetches: that of the first forward holds for all others.

All ranks take part in an all-gather, so a rank that runs other units than the rest would hang them.
The first forward asks every rank at every unit where it is; later ones are compared with it, which
costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.units import Unit

EVERY_RANK = (
    "units are gathered by all ranks together, so every rank must run the same units in the same "
    "order. Fix: run the unit on every rank and multiply its output by 0 where it is not wanted; "
    "if all ranks skip it together, ZeRO3(prefetch=False)."
)


class ForwardOrder:
    """Units in the order of the forward that runs (`order`), and of the first one.

    A forward without gradients (evaluation) is not compared, and never becomes the first.
    """

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._units, self._comm = units, comm
        self.order: list[Unit] = []
        self._first: list[Unit] = []

    def begin(self) -> None:
        """A forward begins."""
        self.order = []

    def next_after(self, unit: Unit) -> Unit | None:
        """Forward runs `unit`. Returns the unit to prefetch, None if it is not known.

        Raises RuntimeError if this is not the unit of the first forward, or, in the first forward,
        on all ranks.
        """
        expected = self._first[len(self.order) : len(self.order) + 2]
        unit.position = len(self.order)
        self.order.append(unit)
        if torch.is_grad_enabled():
            if not self._first:
                self._agree(unit)
            elif expected[:1] != [unit]:
                name = repr(expected[0].name) if expected else "the end of forward"
                raise RuntimeError(
                    f"rank {self._comm.rank} runs unit {unit.name!r} where the first forward had "
                    f"{name}: {EVERY_RANK}"
                )
        return expected[1] if expected[:1] == [unit] and len(expected) == 2 else None

    def end(self) -> None:
        """Forward is over. Raises RuntimeError if units are missing."""
        if not torch.is_grad_enabled():
            return
        if len(self.order) < len(self._first):
            skipped = self._first[len(self.order)]
            raise RuntimeError(
                f"rank {self._comm.rank} ended forward without unit {skipped.name!r}, which "
                f"the first forward had: {EVERY_RANK}"
            )
        if not self._first:
            self._agree(None)
        self._first = self.order

    def _agree(self, unit: Unit | None) -> None:
        """Raise on all ranks unless all are at this unit, or, for None, at the end.

        One small all-reduce, in the first forward only.
        """
        names = [*(repr(unit.name) for unit in self._units), "the end of forward"]
        index = -1 if unit is None else self._units.index(unit)
        device = self._units[-1].flats[0].full.device
        votes = torch.zeros(len(names), device=device)  # (units + 1,) how many ranks are where
        votes[index] = 1
        counts = self._comm.all_reduce(votes).wait().tolist()
        found = {name: int(n) for name, n in zip(names, counts, strict=True) if n}
        if len(found) > 1:
            where = ", ".join(f"{n} at {name}" for name, n in found.items())
            raise RuntimeError(
                f"rank {self._comm.rank} is at {names[index]} in the first forward, but the ranks "
                f"differ: {where}; {EVERY_RANK}"
            )
