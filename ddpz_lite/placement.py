"""The table: which of parameter, gradient and optimizer state is replicated, partial or sharded.

A stage is three letters. From them follow what a rank holds (`zero_memory`), which transitions a
step needs (`changes`), so what it sends (`elements_moved`), and what `parallelize` builds.

    strategy | parameter | gradient           | optimizer | moved per step and rank, times (N-1)/N
    ---------|-----------|--------------------|-----------|---------------------------------------
    DDP      | Replicate | Partial, Replicate | Replicate | 2Ψ   all-reduce
    ZeRO-1   | Replicate | Partial            | Shard     | 2Ψ   reduce-scatter, all-gather
    ZeRO-2   | Replicate | Shard              | Shard     | 2Ψ   reduce-scatter, all-gather
    ZeRO-3   | Shard     | Shard              | Shard     | 3Ψ   all-gather twice, reduce-scatter

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5 and 7. The arithmetic needs no torch, so this module imports none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How the ranks of a group hold one logical tensor."""

    REPLICATE = "R"  # every rank holds the whole value
    PARTIAL = "P"  # every rank holds a whole tensor; the value is their sum
    SHARD = "S"  # rank r holds the r-th of N equal slices


R, P, S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

TRANSITIONS = {
    (S, R): "all_gather",
    (P, S): "reduce_scatter",
    (P, R): "all_reduce",
    (R, S): "slice",  # local: moves nothing
}
# Times the size of the tensor, as a ring sends it, but for the factor (N-1)/N.
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "slice": 0}


# Bytes per parameter of (parameters, gradients, Adam's state) that this library holds in bf16 or
# fp16, by stage. The paper's are 2, 2, 12; but a gradient in shards is a sum, kept in fp32, and the
# shards of ZeRO-3 are themselves the fp32 master copy.
MIXED = {0: (2, 2, 12), 1: (2, 2, 12), 2: (2, 4, 12), 3: (4, 4, 8)}


@dataclass(frozen=True)
class Strategy:
    """One row of the table: where the three kinds of state live between two steps."""

    name: str
    parameter: Placement
    gradient: Placement
    optimizer: Placement


# DDP's gradient is Partial while backward runs and Replicate afterwards: the row says how it rests.
STAGES: dict[int, Strategy] = {
    0: Strategy("DDP", R, R, R),
    1: Strategy("ZeRO-1", R, P, S),
    2: Strategy("ZeRO-2", R, S, S),
    3: Strategy("ZeRO-3", S, S, S),
}


def strategy(stage: int) -> Strategy:
    """The row of the table for `stage`. Raises ValueError for anything but 0, 1, 2, 3."""
    if stage not in STAGES:
        raise ValueError(f"stage must be 0 (DDP), 1, 2 or 3 (ZeRO), got {stage!r}")
    return STAGES[stage]


def changes(
    stage: int, micro_batches: int = 1, resharded: bool = True
) -> list[tuple[Placement, Placement]]:
    """The changes of placement in one optimizer step, each of all Ψ elements, in order.

    Compute needs whole parameters and leaves a partial gradient; the update needs the gradient
    placed as the optimizer's state is. So a parameter in shards is gathered for each forward, and
    again for backward if it was freed between the two; one that only its update leaves in shards,
    once. A gradient that rests in shards is reduced in every backward; any other waits for the last
    (DDP under `no_sync`). Arguments as in `elements_moved`.
    """
    row = strategy(stage)
    reductions = [(P, row.optimizer)]
    if row.parameter is S:
        return micro_batches * ([(S, R)] * (2 if resharded else 1) + reductions)
    if row.gradient is S:
        reductions *= micro_batches
    return reductions + ([(S, R)] if row.optimizer is S else [])


def zero_memory(
    num_params: float,
    world_size: int,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of model state on one rank: a sharded kind is divided by the world, any other is whole.

    The defaults are the paper's mixed-precision Adam: 2 + 2 + 12 bytes per parameter, where 12 are
    the fp32 copy, momentum and variance. fp32 Adam is 4 + 4 + 8. What this library holds in mixed
    precision is `zero_memory(num_params, world_size, stage, *MIXED[stage])`: at stage 2 on 2 ranks,
    11% more. Activations and transient buffers are not model state and are not counted.

    Args:
        num_params: Ψ, the number of parameters.
        world_size: N, the ranks that share the state (hybrid: the ranks of one shard group).
        stage: 0 (DDP), 1, 2 or 3.
        param_bytes, grad_bytes, optimizer_bytes: bytes per parameter of each kind.

    Raises:
        ValueError: a stage that is not in the table, or a negative or empty size.

    Source: Rajbhandari et al. 2020, section 5 and figure 1 (7.5e9 parameters on 64 ranks: 120,
    31.4, 16.6, 1.9 GB).
    """
    row = strategy(stage)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
    sizes = (param_bytes, grad_bytes, optimizer_bytes)
    if not all(size >= 0 for size in (num_params, *sizes)):  # a NaN is not either
        raise ValueError(
            f"sizes cannot be negative, got num_params={num_params!r}, bytes per parameter {sizes}"
        )
    places = (row.parameter, row.gradient, row.optimizer)
    return sum(
        num_params * size / (world_size if place is S else 1)
        for size, place in zip(sizes, places, strict=True)
    )


def elements_moved(
    num_params: float, world_size: int, stage: int, micro_batches: int = 1, resharded: bool = True
) -> float:
    """Elements that one rank sends in one optimizer step, with the exact ring factor (N-1)/N.

    Args:
        num_params: Ψ. For sharded buffers count the padding too.
        micro_batches: backward passes per step. DDP and ZeRO-1 reduce once (DDP under `no_sync`);
            ZeRO-2 and ZeRO-3 reduce every time.
        resharded: ZeRO-3 only. False if parameters are kept from forward to backward.

    Source: Rajbhandari et al. 2020, section 7.
    """
    sent = sum(_SENT[TRANSITIONS[each]] for each in changes(stage, micro_batches, resharded))
    return sent * num_params * (world_size - 1) / world_size
