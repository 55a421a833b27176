"""Bytes per rank by the arithmetic of the ZeRO paper: what a measurement is reconciled with."""

from __future__ import annotations


def zero_memory(
    num_params: float,
    world_size: int,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of model states on each rank at a ZeRO stage (Rajbhandari et al. 2020, section 5 and
    figure 1).

    num_params: Ψ. stage 0 is DDP and shards nothing, 1 shards the optimizer state, 2 also the
    gradients, 3 also the parameters. The bytes are per parameter; the defaults are mixed precision
    with Adam (fp16 parameter and gradient; fp32 copy, momentum and variance). Plain fp32 AdamW is
    4, 4, 8. Activations, buffers and the padding of a shard to whole elements are not in the
    formula.

    Raises ValueError for a negative count, a world below 1 or a stage other than 0, 1, 2, 3.

    >>> zero_memory(7.5e9, 64, 3) / 1e9
    1.875
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_memory: stage must be 0 (DDP), 1, 2 or 3, got {stage!r}.")
    if world_size < 1 or world_size != int(world_size):
        raise ValueError(
            f"zero_memory: world_size must be a whole number of at least 1, got {world_size!r}."
        )
    sizes = {"num_params": num_params, "param_bytes": param_bytes, "grad_bytes": grad_bytes}
    for name, value in (sizes | {"optimizer_bytes": optimizer_bytes}).items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"zero_memory: {name} must be a number of at least 0, got {value!r}.")
    optimizer = optimizer_bytes / (world_size if stage >= 1 else 1)
    grad = grad_bytes / (world_size if stage >= 2 else 1)
    param = param_bytes / (world_size if stage >= 3 else 1)
    return num_params * (param + grad + optimizer)
