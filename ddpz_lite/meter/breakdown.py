"""Where a step's time goes: compute, exposed communication, waiting for data, and the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpz_lite.meter.intervals import Interval, length, minus, union, within

if TYPE_CHECKING:
    from ddpz_lite.launcher.run import Run
    from ddpz_lite.wire import Record
    from ddpz_lite.wire.trace import Trace


@dataclass(frozen=True)
class Parts:
    """Seconds of one rank in one step. The first four do not overlap, and their sum is the step."""

    compute: float
    exposed: float  # communication is in flight, and neither compute nor data
    data: float
    rest: float
    hidden: float  # communication during compute or data: it costs no time

    @property
    def seconds(self) -> float:
        """The step."""
        return self.compute + self.exposed + self.data + self.rest

    @property
    def communication(self) -> float:
        return self.exposed + self.hidden

    @property
    def own(self) -> float:
        """The step without waiting for communication."""
        return self.seconds - self.exposed


@dataclass(frozen=True)
class Step:
    """One step on all ranks."""

    ranks: tuple[Parts, ...]

    @property
    def slowest(self) -> int:
        """The rank with the most compute + data + rest; the others wait for it."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].own)

    @property
    def parts(self) -> Parts:
        """Of the slowest rank, which determines the step; a mean would hide it."""
        return self.ranks[self.slowest]


def breakdown(
    run: Run | Trace, step: str = "step", data: Collection[str] = ("data",)
) -> list[Step]:
    """The parts of each step, in order; the first ones are often warm-up.

    run: of `dz.launch`, or a trace from `read_trace`. step, data: names of spans,
    `with dz.span(...)`. A span of any other name inside a step counts as compute, minus the time in
    which its rank was in `wait()`. torch's own DDP waits inside C++, unseen, which counts as
    compute. On a GPU a span must end with a synchronize.

    Raises ValueError if there is no such step, or if the ranks have different numbers of them.
    """
    found = [_steps(run, rank, step, data) for rank in range(run.world_size)]
    counts = [len(steps) for steps in found]
    if not counts[0] or len(set(counts)) > 1:
        raise ValueError(
            f"breakdown: the ranks have {', '.join(map(str, counts))} spans named {step!r}; all "
            f"need the same number, at least one. Fix: put with dz.span({step!r}): around a step."
        )
    return [Step(ranks) for ranks in zip(*found, strict=True)]


def _steps(run: Run | Trace, rank: int, step: str, data: Collection[str]) -> list[Parts]:
    spans = sorted((s for s in run.spans if s.rank == rank), key=lambda s: s.started)
    calls = [record for record in run.ledger if record.rank == rank]
    loading = [(s.started, s.finished) for s in spans if s.name in data]
    working = [(s.started, s.finished) for s in spans if s.name not in (step, *data)]
    return [_parts(s.started, s.finished, working, loading, calls) for s in spans if s.name == step]


def _parts(
    start: float,
    end: float,
    working: list[Interval],
    loading: list[Interval],
    calls: list[Record],
) -> Parts:
    """The parts of one rank's time from `start` to `end`."""
    waits = [record.waited for record in calls if record.waited]
    flights = [(r.started, end if r.finished is None else r.finished) for r in calls]
    traffic = union(within([*flights, *waits], start, end))
    compute = minus(within(working, start, end), waits)
    data = minus(minus(within(loading, start, end), waits), compute)
    exposed = minus(traffic, [*compute, *data])
    return Parts(
        compute=length(compute),
        exposed=length(exposed),
        data=length(data),
        rest=length(minus([(start, end)], [*compute, *data, *exposed])),
        hidden=length(traffic) - length(exposed),
    )
