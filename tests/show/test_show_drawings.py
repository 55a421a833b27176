"""The drawings of single lessons: what they count, what they say, that they are drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpz_lite.course.show.lesson05 import bucket_sizes, exposed, versions
from ddpz_lite.course.show.lesson07 import delay, path
from ddpz_lite.course.show.lesson09 import owners
from ddpz_lite.course.show.lesson10 import on_one_axis
from ddpz_lite.course.show.lesson11 import (
    FUNCTIONS,
    METHODS,
    memory_changes,
    two_cuts,
    watched_fsdp2,
)
from ddpz_lite.course.show.lesson18 import causal_picture, windows_picture, works

NONE = dict.fromkeys(
    ("parameters", "gradients", "optimizer", "buffers", "transient", "activations", "temporary"), 0
)


class Shown(list):
    def __init__(self):
        super().__init__()
        self.figures = []


@pytest.fixture
def shown(monkeypatch):
    """What a function that shows a figure hands over, (alt, table), and its `figures`."""
    calls = Shown()

    def show_figure(fig, alt, table):
        fig.canvas.draw()
        calls.append((alt, table))
        calls.figures.append(fig)

    for module in ("lesson09", "lesson10", "lesson11", "one_axis"):
        monkeypatch.setattr(f"ddpz_lite.course.show.{module}.show_figure", show_figure)
    return calls


def steps_of(seconds):
    """A run of one rank: a forward of a second, and then a message."""
    spans = [SimpleNamespace(rank=0, name="forward", started=5.0, finished=6.0)]
    sent = SimpleNamespace(rank=0, op="all_gather", started=6.0, finished=5.0 + seconds)
    return SimpleNamespace(world_size=1, spans=spans, ledger=[sent])


def test_steps_that_are_compared_share_one_time_axis(shown):
    on_one_axis({"slow": steps_of(4.0), "fast": steps_of(2.0)}, title="Two steps")
    ((alt, table),) = shown
    assert "slow 4 s, fast 2 s" in alt
    assert table[1:] == [
        ["slow", 0, "forward", 1.0],
        ["slow", 0, "all_gather", 3.0],
        ["fast", 0, "forward", 1.0],
        ["fast", 0, "all_gather", 1.0],
    ]
    upper, lower = shown.figures[0].axes
    assert upper.get_xlim() == lower.get_xlim() and upper.get_xlim()[1] >= 4.0


def test_owners_have_one_slice_each_after_the_reduce_scatter(shown):
    owners(3)
    ((alt, table),) = shown
    assert "rank r has only slice r" in alt
    held = {(moment, rank): slices for moment, rank, slices in table[1:]}
    assert held["backward: P", "1"] == held["all-gather: R", "1"] == "0, 1, 2"
    assert [held["reduce-scatter: S", str(rank)] for rank in range(3)] == ["0", "1", "2"]


def test_the_flat_cut_divides_rows_and_the_other_one_does_not(shown):
    two_cuts(3, rows=4, columns=5)
    ((_, table),) = shown
    assert table[1:] == [[0, 7, 10], [1, 7, 10], [2, 6, 0]]  # of 4 rows two, two and none


def test_changes_begin_at_forward_and_tell_the_peak(shown):
    samples = [
        (0.0, {**NONE, "parameters": 9000}),
        (1.0, {**NONE, "parameters": 100}),
        (2.0, {**NONE, "parameters": 100, "transient": 400}),
        (3.0, {**NONE, "parameters": 100}),
    ]
    marks = [(0.5, "forward"), (1.5, "backward"), (3.0, "end")]
    memory_changes(samples, marks, alt="units come and go", names={"transient": "whole units"})
    ((alt, table),) = shown
    assert alt == "units come and go"
    assert table[1:] == [["parameters", 100], ["whole units", 400]]
    with pytest.raises(ValueError, match='no mark "forward"'):
        memory_changes(samples, [(3.0, "end")], alt="units come and go")


def test_fsdp2_is_watched_only_inside_the_with():
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as source

    before = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    before += [getattr(source, n) for n in FUNCTIONS]
    with watched_fsdp2() as log:
        assert source.foreach_reduce is not before[-1]
        assert log == []
    after = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    assert [*after, *(getattr(source, n) for n in FUNCTIONS)] == before


def step(*, waits: float | None = None, sent: float = 9.0):
    """A step of two ranks: forward 1 to 2, backward 2 to 4 (6 with a wait), one all-reduce."""
    spans = [("forward", 1.0, 2.0), ("backward", 2.0, 4.0 if waits is None else 6.0)]
    spans += [] if waits is None else [("wait", waits, 6.0)]
    both = [
        SimpleNamespace(rank=rank, name=name, started=a, finished=b + rank)
        for rank in (0, 1)
        for name, a, b in spans
    ]
    calls = [SimpleNamespace(rank=r, op="all_reduce", started=3.0, finished=sent) for r in (0, 1)]
    return SimpleNamespace(spans=both, ledger=calls)


@pytest.mark.parametrize(
    ("one", "seconds"),
    [(step(), 5.0), (step(waits=4.5), 4.5), (step(sent=3.5), 0.0)],
    ids=["after backward", "inside backward, after computing", "hidden altogether"],
)
def test_exposed_is_what_goes_on_when_rank_0_has_computed(one, seconds):
    assert exposed(one) == seconds


def test_versions_share_an_axis_and_count_in_backwards(shown):
    versions({"early": step(waits=4.5), "late": step()}, unit=2.0)
    ((alt, table),) = shown
    assert table == [
        ["version", "collectives", "step", "exposed"],
        ["early", 1, 4.0, 2.25],
        ["late", 1, 4.0, 2.5],
    ]
    assert "late: collectives 1, step 4.0, exposed 2.5" in alt


def test_bucket_sizes_draw_one_step_and_compare_all():
    transfers = {0.1: [(0.01, 0.02), (0.02, 0.05)], 1.0: [(0.04, 0.10)], 4.0: [(0.0, 0.01)]}
    fig, alt, table = bucket_sizes(transfers, 0.1, forward=0.01, computing=0.04)
    fig.canvas.draw()
    assert "2 all-reduces end the step after 50 ms; computing alone takes 40 ms" in alt
    assert "The best of the limits is 4 MB, 40 ms" in alt  # never shorter than computing
    assert [row[:2] for row in table[1:]] == [[0.1, 2], [1.0, 1], [4.0, 1]]
    assert fig.axes[0].get_title(loc="left") == "2 calls, 1.25 x computing"
    with pytest.raises(ValueError, match="no limit of 2 MB"):
        bucket_sizes(transfers, 2, 0.01, 0.04)


@pytest.mark.parametrize(("late", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (8, 0.1845)])
def test_old_gradients_shrink_below_the_limit_and_grow_above_it(late, limit):
    """2 sin(pi / (4 delay + 2)): two, one, the golden ratio less one."""
    assert max(map(abs, path(0.97 * limit, late, 4000)[-50:])) < 0.1
    assert max(map(abs, path(1.03 * limit, late, 4000)[-50:])) > 10
    for rate, word in ((round(0.9 * limit, 3), "shrinks"), (round(1.1 * limit, 3), "grows")):
        fig, alt, table = delay(late, rate)
        fig.canvas.draw()
        assert alt.endswith(f"it {word}.") and f"rate {rate}" in alt
        assert table[1] == [f"delay {late}, rate {rate}", 0, 1.0]


def test_a_causal_mask_gives_contiguous_parts_unequal_work_and_a_zigzag_equal():
    for ranks in (2, 4, 8):
        assert works(ranks, "contiguous") == [(2 * r + 1) / ranks**2 for r in range(ranks)]
        assert works(ranks, "zigzag") == [1 / ranks] * ranks
        figure, alt, table = causal_picture(ranks, "contiguous")
        figure.canvas.draw()
        assert f"{(ranks - 1) / (2 * ranks - 1):.1%} of the ranks' time is idle" in alt
        assert table[1:] == [[r, (2 * r + 1) / ranks**2] for r in range(ranks)]


def test_each_rank_has_its_chunks_of_its_window():
    figure, alt, table = windows_picture(2, 2, "zigzag")
    figure.canvas.draw()
    assert table[1:] == [[0, 0, "0, 3"], [1, 0, "1, 2"], [2, 1, "0, 3"], [3, 1, "1, 2"]]
    assert "rank 3 has chunks 1, 2 of window 1" in alt
    assert windows_picture(1, 2, "contiguous")[2][1:] == [[0, 0, "0, 1"], [1, 0, "2, 3"]]
