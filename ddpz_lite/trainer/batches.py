"""The text as micro-batches of this rank, epoch after epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ddpz_lite.data import Corpus, RankSampler
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.trainer.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """One micro-batch of this rank."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T)
    count: int  # windows that count: B, or 0 on a rank that got none
    total: int  # windows of all ranks together


class Batches:
    """A split of the text, distributed over the ranks of `comm` (default: all), without end.

    The last micro-batch of an epoch has what is left. Ranks then differ by a window or more, and a
    rank without windows runs one that counts as nothing, because all ranks must enter every
    collective. `state_dict()` says where the next micro-batch begins, the same on all ranks, and
    any number of ranks can continue from there. Raises ValueError if the split is shorter than one
    window.
    """

    def __init__(
        self,
        text: Corpus,
        split: str,
        recipe: Recipe,
        device: torch.device,
        comm: Comm | None = None,
    ) -> None:
        comm = comm or Comm()
        self.windows = text.windows(recipe.context, split)
        self.batch, self.device = recipe.batch, device
        shuffle = split == "train"
        self.sampler = RankSampler(
            len(self.windows),
            comm.rank,
            comm.world,
            shuffle=shuffle,
            seed=recipe.seed,
            uneven="keep",
        )
        self.left = len(self.windows)  # of this epoch, for all ranks

    def state_dict(self) -> dict[str, int | bool]:
        return self.sampler.state_dict() | {"consumed": len(self.windows) - self.left}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue from a state. Raises ValueError if it is of another text or order."""
        self.sampler.load_state_dict(state)
        self.left = len(self.windows) - state["consumed"]

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.epoch()
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self.left = len(self.windows)

    def epoch(self) -> Iterator[Batch]:
        """The rest of this epoch: all of it, or less after a resume."""
        indices = iter(self.sampler)
        while self.left > 0:
            local = list(islice(indices, self.batch))
            total = min(self.left, self.batch * self.sampler.world_size)
            self.left -= total
            pairs = [self.windows[index] for index in local or [0]]
            inputs, targets = (torch.stack(side) for side in zip(*pairs, strict=True))  # (B, T)
            yield Batch(inputs.to(self.device), targets.to(self.device), len(local), total)
