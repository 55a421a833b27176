"""The records of a rank inside one span: one step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpz_lite.launcher.run import Run
    from ddpz_lite.wire import Record


def records_in(run: Run, name: str | None = None, rank: int = 0) -> list[Record]:
    """The records that began inside the last span of `name` on `rank`, in order.

    name: of a `with dz.span(name):` in the function that ran; None: the last span of any name.
    Raises ValueError if the rank has no such span.
    """
    spans = [s for s in run.spans if s.rank == rank and name in (None, s.name)]
    if not spans:
        known = ", ".join(dict.fromkeys(repr(s.name) for s in run.spans if s.rank == rank))
        raise ValueError(
            f"records_in: rank {rank} has no span {name!r}; it has {known or 'none'}. "
            'Fix: put with dz.span("step"): around what is to be counted.'
        )
    span = max(spans, key=lambda one: one.started)
    local = (r for r in run.ledger if r.rank == rank)
    return [r for r in local if span.started <= r.started <= span.finished]
