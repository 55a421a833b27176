"""Which samples a rank sees: every world-th element of one shuffled order.

All ranks draw the same order from the same seed, so nothing is sent. Rank r takes the indices
r, r + world, ... of it. With the same options the result equals torch's DistributedSampler. Added
are a third way to treat a remainder, and a state that resumes in the middle of an epoch, also at
another world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

UNEVEN = ("pad", "drop", "keep")


def place_in_world(who: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size) as given; asked of torch.distributed, or (0, 1), where both are None.

    who: the sampler's name, for the errors. Raises ValueError for invalid values.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"{who}: only one of rank and world_size is given. Fix: give both, or neither to ask "
            "torch.distributed."
        )
    if rank is None:
        live = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if live else (0, 1)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"{who}: rank {rank} is not in a world of {world_size}; ranks go from 0 up."
        )
    return rank, world_size


class RankSampler(Sampler[int]):
    """The indices of one rank out of a data set of `length` samples.

    rank, world_size: None asks torch.distributed, or means 0 of 1 where no process group exists.
    shuffle, seed: the order of epoch e comes from seed + e, equal on all ranks; call `set_epoch(e)`
    before each epoch.
    uneven: what happens when the world size does not divide the length.
        "pad"   repeat samples from the start until it does (DistributedSampler's default);
        "drop"  leave out the tail (its drop_last=True);
        "keep"  neither: the first ranks get one sample more. For evaluation, where a repeated
                sample is an error.
    Raises ValueError for invalid sizes, ranks or options.
    """

    def __init__(
        self,
        length: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        uneven: str = "pad",
    ) -> None:
        rank, world_size = place_in_world("RankSampler", rank, world_size)
        if length < 1:
            raise ValueError(f"RankSampler: a data set of length {length} has no samples.")
        if uneven not in UNEVEN:
            raise ValueError(f"RankSampler: uneven must be one of {UNEVEN}, got {uneven!r}.")
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.uneven = shuffle, seed, uneven
        self.epoch = 0
        self._consumed = 0  # samples of this epoch returned so far, over all ranks
        self._start = 0  # where the next iteration begins; above 0 only after load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order. The epoch of a loaded state continues."""
        if epoch < 0:
            raise ValueError(f"RankSampler.set_epoch: epochs count from 0, got {epoch}.")
        if epoch != self.epoch:
            self.epoch, self._consumed, self._start = epoch, 0, 0

    def __len__(self) -> int:
        """Samples of this rank in a full epoch."""
        return self._share(self.length)

    def _share(self, count: int) -> int:
        """How many of `count` samples this rank gets."""
        if self.uneven == "pad":
            return math.ceil(count / self.world_size)
        extra = self.uneven == "keep" and self.rank < count % self.world_size
        return count // self.world_size + extra

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        self._consumed = start
        order = self._order()
        left = max(self.length - start, 0)
        for i in range(self._share(left)):
            self._consumed += self.world_size
            # Past the end only when padding: continue at the start of the order.
            yield order[(start + i * self.world_size + self.rank) % self.length]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def state_dict(self, taken: int | None = None) -> dict[str, int | bool]:
        """What resuming needs, equal on all ranks that have taken the same number of samples.

        taken: samples of this epoch that this rank has used. None counts the samples returned,
        which is the same unless a DataLoader with workers fetches ahead.
        """
        if taken is not None and not 0 <= taken <= len(self):
            raise ValueError(
                f"RankSampler.state_dict: taken must lie in 0..{len(self)}, got {taken}."
            )
        consumed = self._consumed if taken is None else taken * self.world_size
        return {
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": min(consumed, self.length),
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continue from a state: the next iteration returns the rest of that epoch.

        The world size may differ. Raises ValueError if the state is of another data set or order.
        """
        for name in ("length", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"RankSampler: the state was saved with {name}={state[name]}, this sampler has "
                    f"{name}={getattr(self, name)}. Fix: build it with the same {name} to resume."
                )
        self.epoch = state["epoch"]
        self._consumed = self._start = state["consumed"]
