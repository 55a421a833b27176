"""The fastest step of a run, for pictures of time on a machine that is sometimes busy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any


def fastest_step(run: Any) -> tuple[Any, float]:
    """The run cut down to its fastest step but the first, and the seconds that it took.

    A step begins where a rank has left a barrier and ends with the last thing that started before
    its next one; what is outside any step is left out, and so are the barriers. Raises ValueError
    for a run of fewer than two steps.
    """
    ranks = range(run.world_size)
    cuts = [[r.finished for r in run.ledger if (r.rank, r.op) == (k, "barrier")] for k in ranks]
    steps = min(len(begins) for begins in cuts)
    if steps < 2:
        raise ValueError(
            f"fastest_step: the run has {steps} barriers on some rank, and needs two or more. "
            "Fix: call dist.barrier() before each step, the first one included."
        )

    def step(k: int) -> Any:
        def inside(record: Any) -> bool:
            begin, end = [*cuts[record.rank], math.inf][k : k + 2]
            return begin <= record.started < end

        ledger = [r for r in run.ledger if r.op != "barrier" and inside(r)]
        return replace(run, ledger=ledger, spans=[s for s in run.spans if inside(s)])

    timed = [(step(k), seconds_of(step(k))) for k in range(1, steps)]
    return min(timed, key=lambda one: one[1])


def seconds_of(run: Any) -> float:
    """From the first to the last thing that a run tells of, of those that ended; 0 for none."""
    finished = [one for one in (*run.ledger, *run.spans) if one.finished is not None]
    if not finished:
        return 0.0
    return max(one.finished for one in finished) - min(one.started for one in finished)
