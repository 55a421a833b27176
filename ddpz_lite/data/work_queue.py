"""Work assigned one item at a time: a free rank takes the next one.

A counter in the job's store says how many items are taken. `store.add` reads and writes it as one
operation, so no two ranks get the same number, without a coordinator. A slow rank takes fewer.

Source: list scheduling; Graham, *Bounds for Certain Multiprocessing Anomalies*, 1966. It ends at
most one item later than an equal split of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist


def job_store() -> dist.Store:
    """The store of the job, whose keys all ranks see.

    A file where ranks were launched from a cell; under torchrun a server, in the agent of the first
    machine (in rank 0 where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). Raises RuntimeError where no
    process group exists.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "job_store: this process is not in a process group. Fix: call it inside the function "
            "that launch runs, or after dist.init_process_group()."
        )
    return dist.distributed_c10d._get_default_store()


class WorkQueue:
    """Numbers from 0 to length - 1; each goes to the rank that asks first.

        for i in queue:  # this rank's items, as many as it gets to
            ...

    Afterwards `queue.taken` has the items of this rank. Ranks end with different numbers of items,
    so the loop must not contain a collective: sum up locally, then combine once, with weights.

    Each iteration over the queue distributes all items again. Like process groups, queues are
    identified by the order in which they are made: make the same ones, in the same order, on every
    rank.

    costs: how long each item will take, in any unit. The longest are then assigned first, so that
    none is left for the end. Otherwise they come in order.
    store: shared by the ranks; None is the job's, or a private one without a process group.

    An item is lost if its rank dies. Raises ValueError for an invalid length or costs.
    """

    _made = 0  # by this process

    def __init__(
        self, length: int, *, costs: Sequence[float] | None = None, store: dist.Store | None = None
    ) -> None:
        if length < 0:
            raise ValueError(f"WorkQueue: a queue cannot have {length} items.")
        if costs is not None and len(costs) != length:
            raise ValueError(
                f"WorkQueue: {len(costs)} costs for {length} items. Fix: give one cost per item."
            )
        if store is None:
            store = job_store() if dist.is_available() and dist.is_initialized() else None
        self._store = dist.HashStore() if store is None else store
        self._order = list(range(length))
        if costs is not None:
            self._order.sort(key=lambda item: -costs[item])
        self._name, self._rounds = f"ddpz work queue {WorkQueue._made}", 0
        WorkQueue._made += 1
        self.taken: list[int] = []

    def __len__(self) -> int:
        """Items for all ranks together."""
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        key, self._rounds = f"{self._name}, round {self._rounds}", self._rounds + 1
        self.taken = taken = []
        while (place := self._store.add(key, 1) - 1) < len(self._order):
            taken.append(self._order[place])
            yield self._order[place]
