"""Ranks with different numbers of batches, or batches of different sizes.

Every strategy expects all ranks to take the same number of steps, and divides a sum of gradients by
their number. Here a rank without batches left continues with weight 0, and each of the others
weighs by its samples. The result is the mean over all samples of the step (lesson 03).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

Batch = TypeVar("Batch")


def joined(
    batches: Iterable[Batch],
    size: Callable[[Batch], float],
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[Batch, float]]:
    """(batch, weight) in each step, as many steps on all ranks as the longest of them has batches.

        for (x, y), weight in joined(loader, lambda batch: batch[1].numel()):
            (loss_of(model(x), y) * weight).backward()  # loss_of: a mean over the batch

    size: the samples or tokens over which a batch's loss is a mean. weight: N n / Σn, which turns a
    mean over ranks into the mean over all of the step's samples. A rank without batches left gets
    its last batch again, with weight 0: it joins every call of the others and changes nothing.

    Each step costs an all-reduce of two numbers: the samples, and how many ranks still have some.
    device: of these numbers; NCCL needs a GPU. Break out of the loop on all ranks or on none.
    Raises ValueError on a rank without a single batch, because it has none to repeat.
    """
    world = dist.get_world_size(group)
    source, batch = iter(batches), None
    while True:
        fresh = next(source, None)
        if fresh is None and batch is None:
            raise ValueError(
                f"joined: rank {dist.get_rank()} has no batch, and needs one to repeat. Fix: "
                "give every rank at least one."
            )
        batch = batch if fresh is None else fresh
        local = 0.0 if fresh is None else float(size(fresh))
        sums = torch.tensor([local, fresh is not None], dtype=torch.float64, device=device)  # (2,)
        dist.all_reduce(sums, group=group)
        total, running = sums.tolist()
        if not running:
            return
        yield batch, world * local / total if local else 0.0
