"""The drawings of single lessons: what they count, what they say, that they are drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpz_lite.course.show.lesson05 import bucket_sizes
from ddpz_lite.course.show.lesson07 import delay, path
from ddpz_lite.course.show.lesson09 import owners
from ddpz_lite.course.show.lesson10 import on_one_axis
from ddpz_lite.course.show.lesson11 import (
    FUNCTIONS,
    METHODS,
    fsdp2_places,
    memory_changes,
    side_by_side,
    two_cuts,
    watched_fsdp2,
)

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

    for lesson in ("lesson09", "lesson10", "lesson11"):
        monkeypatch.setattr(f"ddpz_lite.course.show.{lesson}.show_figure", show_figure)
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


def test_strategies_stand_side_by_side(shown):
    one = {"parameters": 4, "gradients": 4, "optimizer": 8}
    measured = {
        "DDP": {"held": one, "sent": 6e6, "peak": 2e7},
        "ZeRO-3": {"held": one, "sent": 9e6, "peak": 1e7},
    }
    side_by_side(measured, {"DDP": (16, 6e6), "ZeRO-3": (16, 9e6)})
    ((alt, table),) = shown
    assert "ZeRO-3: holds 0.00 MB, sends 9.00 MB per step, peak 10.00 MB." in alt
    assert [row[0] for row in table] == ["strategy", "DDP", "ZeRO-3"]


def test_fsdp2_is_watched_only_inside_the_with_and_its_places_exist():
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as source

    before = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    before += [getattr(source, n) for n in FUNCTIONS]
    with watched_fsdp2() as log:
        assert source.foreach_reduce is not before[-1]
        assert log == []
    after = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    assert [*after, *(getattr(source, n) for n in FUNCTIONS)] == before
    found = fsdp2_places()
    assert all(line > 0 and file.startswith("_fsdp_") for _, file, line, _ in found)
    assert ("free", "_fsdp_param.py") in {(step, file) for step, file, *_ in found}


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
