"""The table: which of parameter, gradient and optimizer state is replicated, partial or sharded.

A stage is three placements. From them follow what `parallelize` builds, and what a rank holds and
sends (`costs`).

    strategy | parameter | gradient           | optimizer | moved per step and rank, times (N-1)/N
    ---------|-----------|--------------------|-----------|---------------------------------------
    DDP      | Replicate | Partial, Replicate | Replicate | 2Ψ   all-reduce
    ZeRO-1   | Replicate | Partial            | Shard     | 2Ψ   reduce-scatter, all-gather
    ZeRO-2   | Replicate | Shard              | Shard     | 2Ψ   reduce-scatter, all-gather
    ZeRO-3   | Shard     | Shard              | Shard     | 3Ψ   all-gather twice, reduce-scatter

On a mesh each axis has a row of its own. The axis outside joins the ranks that hold the same slice
of the parameters: among themselves they are DDP (hybrid sharding), or ZeRO-1, which cuts the
optimizer's state of that slice once more (HFSDP). S ranks inside, R outside:

    outside, inside | held, 2 + 2 + 12 bytes         | inside      | across
    ----------------|--------------------------------|-------------|--------------
    DDP, ZeRO-3     | 16Ψ/S                          | 3Ψ(S-1)/S   | 2(Ψ/S)(R-1)/R
    ZeRO-1, ZeRO-3  | (2 + 2)Ψ/S + 12Ψ/(S R)         | 3Ψ(S-1)/S   | 2(Ψ/S)(R-1)/R

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5 and 7. The arithmetic needs no torch, so this module imports none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Integral


class Placement(Enum):
    """How the ranks of a group hold one logical tensor."""

    REPLICATE = "R"  # every rank holds the full value
    PARTIAL = "P"  # every rank holds a full-size tensor; the value is their sum
    SHARD = "S"  # rank r holds the r-th of N equal slices


Stage = int | tuple[int, int]  # on a mesh (outside, inside)
R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

TRANSITIONS = {
    (S, R): "all_gather",
    (P, S): "reduce_scatter",
    (P, R): "all_reduce",
    (R, S): "slice",  # local: moves nothing
}


@dataclass(frozen=True)
class Strategy:
    """One row of the table: where the three kinds of state live between two steps."""

    name: str
    parameter: Placement
    gradient: Placement
    optimizer: Placement


# DDP's gradient is Partial while backward runs and Replicate afterwards, which the row says.
STAGES: dict[int, Strategy] = {
    0: Strategy("DDP", R, R, R),
    1: Strategy("ZeRO-1", R, P, S),
    2: Strategy("ZeRO-2", R, S, S),
    3: Strategy("ZeRO-3", S, S, S),
}


def strategy(stage: int) -> Strategy:
    """The row of the table for `stage`. Raises ValueError for anything but 0, 1, 2, 3."""
    if not isinstance(stage, Integral) or isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"stage must be 0 (DDP), 1, 2 or 3 (ZeRO), got {stage!r}")
    return STAGES[stage]


def rows(stage: Stage) -> tuple[Strategy, Strategy]:
    """The rows of the table for a mesh (replicate, shard): outside, inside.

    A number is the stage inside, with DDP outside. Outside, only what is sharded inside may be:
    there each rank of the axis takes a slice of its slice. Raises ValueError for any other pair
    than (0, 0) to (0, 3) and (1, 1) to (1, 3).
    """
    if not isinstance(stage, tuple):
        return STAGES[0], strategy(stage)
    if len(stage) != 2:
        raise ValueError(f"stage must be a number or two of them, (outside, inside), got {stage!r}")
    outside, inside = map(strategy, stage)
    if stage[0] > 1:
        raise ValueError(
            f"stage={stage}: outside it must be 0 (DDP) or 1 (ZeRO-1); sharding more would gather "
            "across the slow axis in every step. Fix: a mesh of one axis, stage=3."
        )
    if outside.optimizer is S and inside.optimizer is not S:
        raise ValueError(
            f"stage={stage}: the stage inside must be 1, 2 or 3 if that outside shards. Fix: "
            "stage=(0, 1) on a mesh with its axes exchanged."
        )
    return outside, inside
