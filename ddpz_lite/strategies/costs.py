"""What a stage costs: bytes that a rank holds, elements that it sends, from the placements.

The arithmetic needs no torch, so this module imports none.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020, sections 5 and 7.
"""

from __future__ import annotations

from math import prod
from numbers import Integral

from ddpz_lite.strategies.placement import TRANSITIONS, P, Placement, R, S, Stage, rows, strategy

Ranks = int | tuple[int, int]  # on a mesh (replicas, shards)

# Times the size of the tensor, as a ring sends it, but for the factor (N-1)/N.
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "slice": 0}

# Bytes per parameter of (parameters, gradients, Adam's state) that this library holds in bf16 or
# fp16, by stage. The paper's are 2, 2, 12; but a gradient in shards is a sum, kept in fp32, and the
# shards of ZeRO-3 are themselves the fp32 master copy, unless the replicas cut that.
MIXED: dict[Stage, tuple[int, int, int]] = {
    0: (2, 2, 12),
    1: (2, 2, 12),
    2: (2, 4, 12),
    3: (4, 4, 8),
    (1, 3): (2, 4, 12),
}


def changes(
    stage: int, micro_batches: int = 1, resharded: bool = True
) -> list[tuple[Placement, Placement]]:
    """The changes of placement in one optimizer step, each of all Ψ elements, in order.

    Compute needs full parameters and leaves a partial gradient; the update needs the gradient
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
    world_size: Ranks,
    stage: Stage,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of model state on one rank: a sharded kind is divided by the world, any other is not.

    The defaults are the paper's mixed-precision Adam: 2 + 2 + 12 bytes per parameter, where 12 are
    the fp32 copy, momentum and variance. fp32 Adam is 4 + 4 + 8. What this library holds in mixed
    precision is `zero_memory(num_params, world_size, stage, *MIXED[stage])`: at stage 2 on 2 ranks,
    11% more. Activations and transient buffers are not model state and are not counted.

    Args:
        num_params: Ψ, the number of parameters.
        world_size: N, the ranks that share the state; for a mesh (replicas, shards).
        stage: 0 (DDP), 1, 2 or 3; for a mesh (outside, inside), or a number: (0, number).
        param_bytes, grad_bytes, optimizer_bytes: bytes per parameter of each kind.

    Raises:
        ValueError: a stage that is not in the table, or a negative or empty size.

    Source: Rajbhandari et al. 2020, section 5 and figure 1 (7.5e9 parameters on 64 ranks: 120,
    31.4, 16.6, 1.9 GB).
    """
    axes = tuple(zip(_mesh(world_size, stage), rows(stage), strict=True))
    sizes = (param_bytes, grad_bytes, optimizer_bytes)
    if not all(size >= 0 for size in (num_params, *sizes)):  # a NaN is not either
        raise ValueError(
            f"sizes cannot be negative, got num_params={num_params!r}, bytes per parameter {sizes}"
        )
    kinds = zip(sizes, ("parameter", "gradient", "optimizer"), strict=True)
    return sum(
        num_params * size / prod(n for n, row in axes if getattr(row, kind) is S)
        for size, kind in kinds
    )


def _mesh(world_size: Ranks, stage: Stage) -> tuple[int, int]:
    """(replicas, shards); a number is one axis. Raises ValueError for what is no size."""
    mesh = world_size if isinstance(world_size, tuple) else (1, world_size)
    if len(mesh) != 2 or not all(isinstance(n, Integral) and n is not True and n > 0 for n in mesh):
        raise ValueError(
            "world_size must be an integer of at least 1, or two for a mesh, (replicas, shards), "
            f"got {world_size!r}"
        )
    if isinstance(stage, tuple) and not isinstance(world_size, tuple):
        raise ValueError(
            f"stage={stage} is for a mesh, so world_size must be (replicas, shards), "
            f"got {world_size!r}"
        )
    return mesh


def elements_moved(
    num_params: float,
    world_size: Ranks,
    stage: Stage,
    micro_batches: int = 1,
    resharded: bool = True,
) -> float | tuple[float, float]:
    """Elements that one rank sends in one optimizer step, with the exact ring factor (N-1)/N.

    For a mesh two numbers: across, between the ranks that hold the same shard, and inside.

    Args:
        num_params: Ψ. For sharded buffers count the padding too.
        world_size, stage: as for `zero_memory`.
        micro_batches: backward passes per step. DDP and ZeRO-1 reduce once (DDP under `no_sync`);
            ZeRO-2 and ZeRO-3 reduce every time.
        resharded: ZeRO-3 only. False if parameters are kept from forward to backward.

    Source: Rajbhandari et al. 2020, section 7.
    """
    replicas, shards = _mesh(world_size, stage)
    outside, inside = rows(stage)
    outer, inner = stage if isinstance(stage, tuple) else (0, stage)
    within, across = changes(inner, micro_batches, resharded), changes(outer)
    if outside.gradient is not P:  # it does not wait for the step: as often as inside
        across *= sum(before is P for before, _ in within)
    slice_ = num_params / (shards if inside.optimizer is S else 1)  # what the replicas have alike
    moved = _sent(across, slice_, replicas), _sent(within, num_params, shards)
    return moved if isinstance(world_size, tuple) else moved[1]


def offload_moved(
    num_params: float,
    world_size: Ranks,
    stage: Stage,
    param_bytes: float = 2,
    micro_batches: int = 1,
    resharded: bool = True,
) -> dict[str, float]:
    """Bytes that one rank moves in one optimizer step with `offload=True`, by where.

    down: reduced gradients to the host, in fp32, as they are summed; up: parameters to the device,
    as compute has them; update: what Adam on the host reads (parameter, gradient, two moments) and
    writes (all but the gradient) in the host's memory, 28 bytes per parameter.

    Up go the new parameters after the update; but if shards rest on the host they go up for every
    gather. Arguments as for `elements_moved`; param_bytes: of compute.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021, section 3
    (gradients go down in fp16 there: 2 bytes).
    """
    mesh, (outside, inside) = _mesh(world_size, stage), rows(stage)
    own = num_params / prod(
        n for n, row in zip(mesh, (outside, inside), strict=True) if row.optimizer is S
    )
    inner = stage[1] if isinstance(stage, tuple) else stage
    within = changes(inner, micro_batches, resharded)
    cut = outside.optimizer is S and mesh[0] > 1
    down = 1 if cut else sum(before is P for before, _ in within)
    up = within.count((S, R)) if inside.parameter is S and not cut else 1
    return {"down": 4 * own * down, "up": param_bytes * own * up, "update": 28 * own}


def _sent(steps: list[tuple[Placement, Placement]], elements: float, ranks: int) -> float:
    return sum(_SENT[TRANSITIONS[each]] for each in steps) * elements * (ranks - 1) / ranks
