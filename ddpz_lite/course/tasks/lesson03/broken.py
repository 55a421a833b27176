"""The steps that 03.diagnose is shown: what each makes of the ranks' micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MISTAKES = ("right", "local", "sum", "twice", "equal", "last", "again", "stale")


def gradients(
    mistake: str, batches: Sequence[Sequence[torch.Tensor]], before: Sequence[float]
) -> list[float]:
    """What each rank's gradient is after a step.

    batches: of each rank its micro-batches, each (samples,), float64; a sample is its own gradient.
    before: what each rank's gradient was after the last step, 0 at first.
    """
    world = len(batches)
    own = [torch.cat(list(local)) for local in batches]
    every = torch.cat(own)
    right = every.mean().item()
    if mistake == "local":
        return [values.mean().item() for values in own]
    if mistake == "equal":
        return [sum(values.mean().item() for values in own) / world] * world
    if mistake == "last":
        return [torch.cat([local[-1] for local in batches]).mean().item()] * world
    if mistake == "again":
        total = 0.0
        for together in zip(*batches, strict=True):  # summed over ranks each time, with the earlier
            total = total * world + sum(part.sum().item() for part in together)
        return [total / len(every)] * world
    if mistake == "stale":
        return [right + value for value in before]
    return [{"right": right, "sum": right * world, "twice": right / world}[mistake]] * world
