"""A step taken apart: by hand, and on ranks."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from test_trace import a_run, record

import ddpz_lite as dz
from ddpz_lite.meter import Parts, breakdown
from ddpz_lite.meter.intervals import gaps, length, minus, union, within
from ddpz_lite.wire import Span


def test_parts_by_hand():
    """0 data 2, 2 forward 5, a call from 4 to 8 of which the rank waits 6 to 8 inside backward."""
    spans = [
        Span(0, "step", 0.0, 10.0),
        Span(0, "data", 0.0, 2.0),
        Span(0, "forward", 2.0, 5.0),
        Span(0, "backward", 5.0, 8.5),
    ]
    (step,) = breakdown(a_run(record(0, 0, 4.0, 8.0, waited=(6.0, 8.0)), spans=spans, world=1))
    # compute 2-6 and 8-8.5; exposed 6-8; hidden 4-6; rest 8.5-10
    assert step.parts == Parts(compute=4.5, exposed=2.0, data=2.0, rest=1.5, hidden=2.0)
    assert (step.parts.seconds, step.parts.communication, step.parts.own) == (10.0, 4.0, 8.0)


def test_what_is_not_waited_for_is_exposed_only_where_nothing_runs():
    spans = [Span(0, "step", 0.0, 4.0), Span(0, "work", 0.0, 2.0)]
    calls = [record(0, 0, 1.0, 3.0), record(0, 1, 2.5, 3.5), record(0, 2, 3.75, None)]
    (step,) = breakdown(a_run(*calls, spans=spans, world=1))
    assert step.parts == Parts(compute=2.0, exposed=1.75, data=0.0, rest=0.25, hidden=1.0)


def test_the_slowest_rank_rules_and_it_is_the_one_that_does_not_wait():
    spans = [Span(rank, "step", 0.0, 3.0) for rank in range(3)]
    spans += [Span(rank, "work", 0.0, 2.5 if rank == 1 else 1.0) for rank in range(3)]
    calls = [record(r, 0, 2.5 if r == 1 else 1.0, 3.0, group=(0, 1, 2)) for r in range(3)]
    (step,) = breakdown(a_run(*calls, spans=spans, world=3))
    assert step.slowest == 1 and step.parts == Parts(2.5, 0.5, 0.0, 0.0, 0.0)
    assert [parts.exposed for parts in step.ranks] == [2.0, 0.5, 2.0]


def test_other_names_and_missing_steps():
    spans = [Span(0, "iteration", 0.0, 2.0), Span(0, "load", 0.0, 1.0), Span(0, "io", 1.0, 1.5)]
    (step,) = breakdown(a_run(spans=spans, world=1), "iteration", data=("load", "io"))
    assert step.parts == Parts(0.0, 0.0, 1.5, 0.5, 0.0)
    with pytest.raises(ValueError, match=r"have 0 spans named 'step'.*Fix: put with dz.span"):
        breakdown(a_run(spans=spans, world=1))
    with pytest.raises(ValueError, match="have 1, 0 spans named 'iteration'"):
        breakdown(a_run(spans=spans, world=2), "iteration")


def overlapping():
    x = torch.ones(1000)
    for _ in range(3):
        with dz.span("step"):
            with dz.span("backward"):
                work = dist.all_reduce(x, async_op=True)
                time.sleep(0.005)
                work.wait()
            dist.all_reduce(x)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parts_of_real_steps_sum_to_them_and_waits_are_exposed(world):
    run = dz.launch(overlapping, world)
    steps = breakdown(run)
    assert len(steps) == 3
    for number, step in enumerate(steps):
        for rank, parts in enumerate(step.ranks):
            span = [s for s in run.spans if (s.rank, s.name) == (rank, "step")][number]
            calls = [r for r in run.ledger if r.rank == rank]
            waits = within([r.waited for r in calls], span.started, span.finished)
            assert parts.seconds == pytest.approx(span.finished - span.started)
            assert parts.exposed >= length(waits) - 1e-9 and parts.compute >= 0.005
            assert min(parts.rest, parts.hidden, parts.data) >= 0


def test_intervals_against_a_grid():
    """Random intervals of whole numbers, next to sets of unit cells."""
    rng = random.Random(0)
    for _ in range(300):
        some, others = (
            [(a, a + rng.randint(1, 6)) for a in (rng.randint(0, 20) for _ in range(n))]
            for n in (rng.randint(0, 5), rng.randint(0, 5))
        )
        cells, theirs = ({c for a, b in part for c in range(a, b)} for part in (some, others))
        assert length(some) == len(cells)
        left = minus(some, others)
        assert {c for a, b in left for c in range(a, b)} == cells - theirs
        assert left == sorted(left) and length(left) == sum(b - a for a, b in left)
        assert union(some) == minus(some, [])
        assert length(within(some, 5, 15)) == len(cells & set(range(5, 15)))
        assert {c for a, b in gaps(some, 26) for c in range(a, b)} == set(range(26)) - cells
