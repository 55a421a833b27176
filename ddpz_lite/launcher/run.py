"""The results of a finished job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpz_lite.wire import Record, Span


@dataclass(frozen=True, eq=False, repr=False)
class Run(Sequence):
    """The results of a job by rank, and the records of its communication.

    `run[r]` is what the function returned on rank r; iterating yields the results by rank;
    `len(run)` is the world size.
    """

    results: list[Any]
    seconds: float  # wall time of the job, start-up included
    backend: str  # "gloo", "nccl", or one for each device: "cpu:gloo,cuda:nccl"
    # One record per collective per rank, by rank and order of issue.
    ledger: list[Record] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)  # the blocks `with dz.span(name)`
    output: list[list[str]] = field(default_factory=list)  # the lines that each rank printed
    began: float = 0.0  # time.time() at time 0 of ledger and spans

    @property
    def world_size(self) -> int:
        return len(self.results)

    def bytes_sent(self, far: bool | None = None) -> dict[int, dict[str, int]]:
        """Bytes that each rank sent, by operation: {rank: {op: bytes}}.

        far: True counts bytes to other nodes of the `Network` (inter-node), False those within one.
        """
        total: dict[int, dict[str, int]] = {rank: {} for rank in range(self.world_size)}
        for record in self.ledger:
            sent = {None: record.bytes_sent, True: record.bytes_far}
            sent[False] = record.bytes_sent - record.bytes_far
            by_op = total[record.rank]
            by_op[record.op] = by_op.get(record.op, 0) + sent[far]
        return total

    def trace(
        self,
        path: str | os.PathLike[str],
        *,
        offsets: Sequence[float | tuple[float, float]] | None = None,
        profiles: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        """Write all ranks on one clock, as JSON that ui.perfetto.dev and chrome://tracing open.

        offsets    how far each rank's clock is ahead of rank 0's: seconds, or (seconds at time 0,
                   seconds gained per second). None: they share one, as on one machine
        profiles   files that torch.profiler exported on the ranks, shown next to their collectives

        `ddpz explain` reads the file. Raises ValueError if nothing was recorded, for offsets that
        do not fit the ranks, and for a profile without its rank.
        """
        from ddpz_lite.wire.trace import Trace, write_trace

        trace = Trace(self.world_size, self.ledger, self.spans, self.backend, self.began)
        write_trace(path, trace, offsets, profiles)

    def __getitem__(self, rank):
        return self.results[rank]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results)

    def __repr__(self) -> str:
        return f"Run({self.world_size} ranks over {self.backend}, {len(self.ledger)} records)"
