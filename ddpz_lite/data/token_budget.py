"""Batches of equal work: samples of unequal length, distributed by tokens and not by number.

All ranks draw the same order from the same seed, and cut it into steps of about equally many
tokens. Within a step the longest sample goes first, each to the rank with the fewest tokens so far
(Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969). So no rank has more than an equal
share plus (1 - 1/N) of the longest sample. Nothing is sent: lengths and seed decide.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils.data import Sampler

from ddpz_lite.data.sampler import place_in_world


class TokenBudgetSampler(Sampler[list[int]]):
    """The batches of one rank, lists of indices: a DataLoader's `batch_sampler`.

    In an epoch each sample occurs once, on one rank. All ranks get the same number of non-empty
    batches, and in a step about the same number of tokens.

    lengths: the tokens of each sample, at least 1. budget: tokens for a rank in a step, on average;
    at least the longest sample. It decides the number of steps, which is the same in every epoch.
    rank, world_size: None asks torch.distributed, or means 0 of 1 where no process group exists.
    padded: batches are rectangles, and their work is samples times the longest. Then samples of
    similar length come together, and the rectangles are equal. The budget still counts tokens
    without padding.
    shuffle, seed: the order of epoch e comes from seed + e; call `set_epoch(e)` before each epoch.

    Raises ValueError for invalid lengths, budgets or ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        budget: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        padded: bool = False,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.rank, self.world_size = place_in_world("TokenBudgetSampler", rank, world_size)
        self.lengths = [int(length) for length in lengths]
        if len(self.lengths) < self.world_size:
            raise ValueError(
                f"TokenBudgetSampler: {len(self.lengths)} samples are too few for "
                f"{self.world_size} ranks: each needs one in every step."
            )
        if min(self.lengths) < 1:
            place = self.lengths.index(min(self.lengths))
            raise ValueError(
                f"TokenBudgetSampler: sample {place} has {self.lengths[place]} tokens; a sample "
                "has one or more. Fix: leave out empty samples."
            )
        if budget < max(self.lengths):
            raise ValueError(
                f"TokenBudgetSampler: the longest sample has {max(self.lengths)} tokens and the "
                f"budget is {budget}. Fix: raise the budget, or cut the sample."
            )
        self.budget, self.padded, self.shuffle, self.seed = budget, padded, shuffle, seed
        self.epoch = 0
        self._reset()

    def _reset(self) -> None:
        self._start_at(0, len(self))

    def _start_at(self, start: int, planned: int) -> None:
        """The next iteration begins after `start` samples of the order and has `planned` steps."""
        self._next = self._now = (start, planned)
        self._returned = 0  # steps of the current iteration

    def _steps(self, samples: int, tokens: int) -> int:
        by_tokens = -(-tokens // (self.budget * self.world_size))
        return max(1, min(by_tokens, samples // self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order. The epoch of a loaded state continues."""
        if epoch < 0:
            raise ValueError(f"TokenBudgetSampler.set_epoch: epochs count from 0, got {epoch}.")
        if epoch != self.epoch:
            self.epoch = epoch
            self._reset()

    def __len__(self) -> int:
        """Steps of a full epoch, equal on all ranks and in all epochs."""
        return self._steps(len(self.lengths), sum(self.lengths))

    def __iter__(self) -> Iterator[list[int]]:
        self._now, self._next, self._returned = self._next, (0, len(self)), 0
        order, cuts = self._order(), self._cuts()
        distribute = _rectangles if self.padded else _packed
        for start, stop in pairwise(cuts):
            # Wraps around only if fewer samples are left than ranks.
            samples = [order[place % len(order)] for place in range(start, stop)]
            parts = distribute(samples, self.lengths, self.world_size)
            self._returned += 1
            # Rotate, so that in each step another rank has the longest sample.
            yield parts[(self.rank + start) % self.world_size]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.lengths)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self.lengths), generator=generator).tolist()

    def _cuts(self) -> list[int]:
        """Where in the order each step of this iteration begins, and where the last ends.

        Each step takes an equal share of the remaining tokens, so a resumed run cuts the same way.
        """
        (start, planned), order = self._now, self._order()
        if not planned:
            return [start]
        tokens = list(accumulate((self.lengths[i] for i in order), initial=0))
        cuts, end = [start], max(len(order), start + self.world_size)
        for left in range(planned, 1, -1):
            share = (tokens[-1] - tokens[cuts[-1]]) / left
            place = bisect_left(tokens, tokens[cuts[-1]] + share)
            least, most = cuts[-1] + self.world_size, end - (left - 1) * self.world_size
            cuts.append(min(max(place, least), most))
        return [*cuts, end]

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """What resuming needs, equal on all ranks that have taken the same number of batches.

        taken: batches of this iteration that this rank has used. None counts the batches returned,
        which is the same unless a DataLoader with workers fetches ahead.
        """
        planned, taken = self._now[1], self._returned if taken is None else taken
        if not 0 <= taken <= planned:
            raise ValueError(
                f"TokenBudgetSampler.state_dict: taken must lie in 0..{planned}, got {taken}."
            )
        return {
            **self._about(),
            "epoch": self.epoch,
            "world_size": self.world_size,
            "start": self._cuts()[taken],
            "left": planned - taken,
        }

    def _about(self) -> dict[str, Any]:
        return {
            "samples": len(self.lengths),
            "tokens": sum(self.lengths),
            "budget": self.budget,
            "padded": self.padded,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: the next iteration returns the rest of that epoch.

        The world size may differ; if fewer samples are left than ranks, some of the first are
        repeated. Raises ValueError if the state is of other samples or another order.
        """
        for name, value in self._about().items():
            if state[name] != value:
                raise ValueError(
                    f"TokenBudgetSampler: the state was saved with {name}={state[name]}, this "
                    f"sampler has {name}={value}. Fix: build it with the same {name} to resume."
                )
        self.epoch, planned = state["epoch"], state["left"]
        if planned and state["world_size"] != self.world_size:
            left = self._order()[state["start"] :]
            planned = self._steps(len(left), sum(self.lengths[i] for i in left))
        self._start_at(state["start"], planned)


def _packed(samples: Sequence[int], lengths: Sequence[int], world: int) -> list[list[int]]:
    """A part for each rank, with about equal numbers of tokens."""
    parts: list[list[int]] = [[] for _ in range(world)]
    fewest = [(0, part) for part in range(world)]
    for sample in sorted(samples, key=lambda i: -lengths[i]):
        tokens, part = heapq.heappop(fewest)
        parts[part].append(sample)
        heapq.heappush(fewest, (tokens + lengths[sample], part))
    return parts


def _rectangles(samples: Sequence[int], lengths: Sequence[int], world: int) -> list[list[int]]:
    """A part for each rank, similar in length within a part; samples x longest is about equal.

    The sorted samples are cut into runs of at most `most`, for the smallest `most` that does.
    """
    ordered = sorted(samples, key=lambda i: -lengths[i])
    least, most = lengths[ordered[0]], len(ordered) * lengths[ordered[0]]
    while least < most:
        middle = (least + most) // 2
        if len(_runs(ordered, lengths, middle)) <= world:
            most = middle
        else:
            least = middle + 1
    parts = _runs(ordered, lengths, most)
    while len(parts) < world:  # otherwise a rank would have no sample
        fullest = max(range(len(parts)), key=lambda part: len(parts[part]))
        half = len(parts[fullest]) // 2
        parts[fullest : fullest + 1] = [parts[fullest][:half], parts[fullest][half:]]
    return parts


def _runs(ordered: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Samples from the longest to the shortest, in runs whose rectangles hold at most `most`."""
    runs: list[list[int]] = []
    for sample in ordered:
        if not runs or (len(runs[-1]) + 1) * lengths[runs[-1][0]] > most:
            runs.append([])
        runs[-1].append(sample)
    return runs
