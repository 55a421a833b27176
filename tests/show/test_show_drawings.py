"""The drawings of single lessons: what they count, what they say, that they are drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddpz_lite.course.show import lesson03, lesson06
from ddpz_lite.course.show.lesson05 import (
    bucket_layout,
    bucket_sizes,
    exposed,
    versions,
)
from ddpz_lite.course.show.lesson07 import (
    chord,
    delay,
    losses_on_two_axes,
    path,
    share_of_gradients,
)
from ddpz_lite.course.show.lesson09 import owners
from ddpz_lite.course.show.lesson10 import memory_in_phases, on_one_axis
from ddpz_lite.course.show.lesson11 import (
    FUNCTIONS,
    METHODS,
    calls_of,
    memory_changes,
    watched_fsdp2,
)
from ddpz_lite.course.show.lesson13 import regroup_sequence, resharding, shares_figure
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

    for module in (
        "lesson03",
        "lesson05",
        "lesson06",
        "lesson07",
        "lesson09",
        "lesson10",
        "lesson11",
        "lesson13",
        "one_axis",
    ):
        monkeypatch.setattr(f"ddpz_lite.course.show.{module}.show_figure", show_figure)
    return calls


def steps_of(seconds):
    """A run of one rank: a forward of a second, and then a message."""
    spans = [SimpleNamespace(rank=0, name="forward", started=5.0, finished=6.0)]
    sent = SimpleNamespace(rank=0, op="all_gather", started=6.0, finished=5.0 + seconds)
    return SimpleNamespace(world_size=1, spans=spans, ledger=[sent])


def legend_of(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def test_memory_is_drawn_by_phase(shown):
    held = [NONE | {"parameters": 40, "gradients": size} for size in (0, 5, 20, 10)]
    samples = list(zip((0.0, 0.3, 0.6, 0.9), held, strict=True))
    marks = [(0.1, "forward"), (0.5, "backward"), (0.8, "step"), (1.0, "end")]
    one = SimpleNamespace(samples=samples, marks=marks, peak=60)
    memory_in_phases({"one": one}, per=10, title="A step")
    ((alt, table),) = shown
    assert "one, most in forward 4.5, backward 6.0, step 5.0" in alt
    assert table == [
        ["", "phase", "most", "parameters", "gradients"],
        ["one", "forward", 4.5, 4.0, 0.5],
        ["one", "backward", 6.0, 4.0, 2.0],
        ["one", "step", 5.0, 4.0, 1.0],
    ]
    assert shown.figures[0].axes[0].get_title(loc="left") == "one: peak 6.0, in backward"
    one.marks = marks[:2]
    with pytest.raises(ValueError, match="the timeline has no step"):
        memory_in_phases({"one": one}, per=10, title="A step")


def test_four_ranks_share_one_batch(shown):
    lesson03.one_batch()
    ((alt, table),) = shown
    assert "four parts of 8" in alt
    assert [row[1] for row in table[1:]] == ["1 to 8", "9 to 16", "17 to 24", "25 to 32"]


def test_the_gradient_of_a_sum_comes_from_both_losses(shown):
    lesson03.sum_and_its_gradient()
    ((_, table),) = shown
    back = [row[1:] for row in table if row[0] == "backward"]
    assert back == [["loss of rank 0", "sum"], ["loss of rank 1", "sum"], ["sum", "x of rank 0"]]
    forward, backward = shown.figures[0].axes
    assert len(forward.patches) == len(backward.patches) == 5
    arrows = [
        sum(hasattr(text, "arrow_patch") for text in axes.texts) for axes in (forward, backward)
    ]
    assert arrows == [4, 3]


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
    assert legend_of(shown.figures[0]) == ["forward", "all_gather"]  # no rank was ever idle


def test_the_legend_explains_idle_time_where_a_rank_has_some(shown):
    waits = steps_of(4.0)
    waits.ledger[0].started = 7.0
    on_one_axis({"waits": waits}, title="A pause")
    assert legend_of(shown.figures[0]) == ["forward", "all_gather", "idle"]


def test_buckets_take_the_parameters_in_reverse_and_hold_a_view_of_each(shown):
    bucket_layout({"first": 40, "middle": 20, "last": 50}, [[0, 1], [2]], most=80)
    ((alt, table),) = shown
    assert "read in reverse" in alt
    assert table[1:] == [[0, "last, middle", 70], [1, "first", 40]]
    drawn = [text.get_text() for text in shown.figures[0].axes[0].texts]
    assert [text for text in drawn if ".grad" in text] == ["last.grad", "middle.grad", "first.grad"]
    assert {"bucket 0\n70 of 80", "bucket 1\n40 of 80", "middle\n20"} <= set(drawn)


def test_owners_have_one_slice_each_after_the_reduce_scatter(shown):
    owners(3)
    ((alt, table),) = shown
    assert "rank r has the mean in slice r only" in alt
    held = {(moment, rank): (fresh, pale) for moment, rank, fresh, pale in table[1:]}
    assert held["backward", "1"] == ("", "0, 1, 2")  # nothing is the mean yet
    assert held["reduce-scatter", "1"] == held["update", "1"] == ("1", "0, 2")
    assert held["all-gather", "1"] == ("0, 1, 2", "")


def test_changes_begin_at_forward_and_tell_the_peak(shown):
    samples = [
        (0.0, {**NONE, "parameters": 9000}),
        (1.0, {**NONE, "parameters": 100}),
        (2.0, {**NONE, "parameters": 100, "transient": 400}),
        (3.0, {**NONE, "parameters": 100}),
    ]
    marks = [(0.5, "forward"), (1.5, "backward"), (3.0, "end")]
    memory_changes(samples, marks, root=0, title="units come and go")
    ((alt, table),) = shown
    assert "units come and go" in alt and "500 bytes" in alt
    assert table[1:] == [["parameter shards", 100], ["unsharded units", 400]]
    with pytest.raises(ValueError, match='no mark "forward"'):
        memory_changes(samples, [(3.0, "end")], root=0, title="units come and go")


def test_blocks_are_numbered_forward_and_in_reverse(shown):
    root, block = {**NONE, "transient": 40}, {**NONE, "transient": 140}
    moments = [root, block, root, block, block, root, block, root, block]
    samples = [(float(at), held) for at, held in enumerate(moments, start=1)]
    memory_changes(samples, [(0.5, "forward")], root=40, title="two blocks")
    (axes,) = shown.figures[-1].axes
    assert [text.get_text() for text in axes.texts if text.get_text().isdigit()] == list("0110")


def test_fsdp2_is_watched_only_inside_the_with():
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as source

    before = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    before += [getattr(source, n) for n in FUNCTIONS]
    with watched_fsdp2() as log:
        assert source.foreach_reduce is not before[-1]
        assert log == []
    after = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    assert [*after, *(getattr(source, n) for n in FUNCTIONS)] == before


def test_a_call_that_another_unit_made_comes_below_its_caller():
    log = [("b", "pre_backward"), ("b", "    unshard"), ("a", "    unshard"), ("a", "        copy")]
    log += [("a", "pre_backward"), ("a", "    unshard"), ("b", "post_backward")]
    assert calls_of("a", log) == [
        "pre_backward of b",
        "    unshard",
        "        copy",
        "pre_backward",
        "    unshard",
    ]


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
    assert "2 all-reduces end the step after 50 ms; compute alone takes 40 ms" in alt
    assert "The best of the limits is 4 MB, 40 ms" in alt  # never shorter than computing
    assert [row[:2] for row in table[1:]] == [[0.1, 2], [1.0, 1], [4.0, 1]]
    assert fig.axes[0].get_title(loc="left") == "2 calls, 1.25 x compute"
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


def test_slow_steps_cost_lockstep_more_the_more_workers_there_are():
    fig, alt, table = share_of_gradients({"lockstep": 0.3, "at once": 0.5}, 25, 4)
    shares = {
        name: [y for line, _, y in table[1:] if line == name] for name in ("lockstep", "at once")
    }
    assert shares["lockstep"][0] == shares["at once"][0] == pytest.approx(1 / 1.75)
    assert shares["lockstep"] == sorted(shares["lockstep"], reverse=True)
    assert shares["lockstep"][-1] == pytest.approx(1 / 4) and len(set(shares["at once"])) == 1
    assert ["lockstep, measured", 3, 0.3] in table and "lockstep 0.25" in alt
    low, high = fig.axes[0].get_ylim()
    assert low == 0 and high > 1  # no line on the frame, and the same for each setting
    assert len(share_of_gradients({"lockstep": 0.3}, 1, 4)[2]) == len(table) - 2


def test_losses_are_read_at_equal_updates_and_at_the_end(shown):
    lockstep = [(0.0, 0, 5.0), (0.2, 1, 4.0), (0.4, 2, 3.5)]
    at_once = [(0.0, 0, 5.0), (0.1, 1, 4.8), (0.2, 2, 4.5), (0.3, 3, 3.0)]
    losses_on_two_axes({"lockstep": [lockstep], "at once": [at_once, at_once]}, 2)
    ((alt, table),) = shown
    assert table[1:] == [
        ["lockstep", 0, 3.5, 3.5, 2],
        ["at once", 0, 4.5, 3.0, 3],
        ["at once", 1, 4.5, 3.0, 3],
    ]
    assert "at once, seed 1: 4.50 and 3.00" in alt
    left, right = shown.figures[0].axes
    assert [len(line.get_xdata()) for line in left.lines] == [3, 3, 3]  # as many updates for all
    assert [len(line.get_xdata()) for line in right.lines] == [3, 4, 4]


@pytest.mark.parametrize("age", [1, 2, 3, 4])
def test_the_chord_is_as_long_as_the_largest_rate_and_stands_on_a_right_angle(shown, age):
    chord(age)
    ((alt, table),) = shown
    assert table[1][0] == age and table[1][2] == pytest.approx(90)
    rate = table[1][3]
    for factor, word in ((0.98, "shrinks"), (1.02, "grows")):
        late = max(map(abs, path(factor * rate, age, 900)[-40:]))
        assert (late < 1) == (word == "shrinks")
    arrow = shown.figures[0].axes[2].texts
    places = [(text.xyann, text.xy) for text in arrow if getattr(text, "arrow_patch", None)]
    (start, end), (centre, old) = places
    step = (end[0] - start[0], end[1] - start[1])
    assert step[0] == pytest.approx(-rate * old[0]) and step[1] == pytest.approx(-rate * old[1])
    assert centre == (0.0, 0.0) and "chord" in alt


def test_what_ranks_hold_around_the_two_hops_of_an_int8_mean(shown):
    lesson06.two_hops(3)
    ((alt, table),) = shown
    assert "rank r has part r of every rank" in alt and len(table) == 1 + 4 * 3
    assert table[4] == ["hop 1: all-to-all", "0", "part 0 from 0, part 0 from 1, part 0 from 2"]
    assert table[8] == ["mean", "1", "part 1 mean"]


class OneLargest:
    """Top-k with k = 1 and error feedback, on one rank."""

    k = 1

    def __init__(self, feedback=True):
        self.residual, self.feedback = torch.zeros(3), feedback

    def __call__(self, gradient):
        total = gradient + self.residual
        sent = torch.zeros(3).index_fill(0, total.abs().topk(1).indices, 1) * total
        self.residual = (total - sent) * self.feedback
        return sent


def watched(**how):
    method = lesson06.Watched(OneLargest(**how), stride=1)
    for _ in range(10):
        method(torch.tensor([1.0, 0.3, -0.02]))
    return method.record


def test_an_entry_is_sent_when_its_residual_has_grown(shown):
    times = lesson06.residual(watched(), sent_times=2)
    ((alt, table),) = shown
    assert times == 2 == len(table) - 1 and "in steps [3, 7]" in alt
    assert table[1] == [3, *(pytest.approx(size) for size in (0.3, 1.2, 1.2))]
    assert lesson06.residual(watched(feedback=False), sent_times=2) == 0


def test_times_of_a_step_are_those_of_the_first_way(shown):
    lesson06.step_times({"all": 4.0, "half": 3.0}, {"all": 2.0, "half": 1.0}, title="A step")
    ((alt, table),) = shown
    assert table[1:] == [["all", 1.0, 1.0], ["half", 0.75, 0.5]] and "half 0.75 and 0.5" in alt


def test_a_way_pays_up_to_the_bandwidth_at_its_dot():
    sent, extra = {"all": 100.0, "half": 50.0, "more": 200.0}, {"all": 0.0, "half": 1e-6, "more": 0}
    fig, alt, _ = lesson06.pays(sent, extra)
    assert "shorter for half below 5e+07 bytes per second." in alt
    lines = {line.get_label(): line for line in fig.axes[0].lines}
    assert lines["all"].get_ydata()[0] == 1 and lines["more"].get_ydata()[-1] == 2
    (dot,) = [line for line in fig.axes[0].lines if line.get_linestyle() == "None"]
    assert dot.get_xdata()[0] == pytest.approx(5e7)


def test_a_method_is_timed_alone():
    calls = []
    found = lesson06.seconds_alone({"copy": lambda: calls.append}, torch.ones(4))
    assert len(calls) == 12 and found["copy"] >= 0


def test_the_sequence_begins_with_the_death_and_is_in_order_of_time(shown):
    events = {
        0: [(10.004, "leaves the group", False), (10.03, "agrees on [0, 2]", True)],
        2: [(10.002, "leaves the group", False), (10.02, "agrees on [0, 2]", True)],
    }
    regroup_sequence(events, dead=1, died=10.0)
    ((alt, table),) = shown
    assert alt.startswith(
        "Rank 1 is killed. Then, in order: rank 2 leaves the group; rank 0 leaves"
    )
    assert [row[:2] for row in table[1:]] == [[0, 1], [2, 2], [4, 0], [20, 2], [30, 0]]
    assert [row[3] for row in table[1:]] == ["", "", "", "yes", "yes"]
    heads = {text.get_text() for text in shown.figures[0].axes[0].texts}
    assert {"rank 0", "rank 1", "rank 2", "store", "20 ms"} <= heads


def test_resharding_and_shares_say_their_numbers():
    _, alt, table = resharding(5, 2, [[(0, 0, 2)], [(0, 2, 3), (1, 0, 1)], [(1, 1, 2)]])
    assert (
        "new rank" in table[0] and "rank 1 reads 2 to 3 of old rank 0, 0 to 1 of old rank 1" in alt
    )
    _, alt, table = shares_figure({"restart": 0.131, "twice": 1.5}, title="Modelled")
    assert alt == "Modelled. Lost: restart 13.1%; twice 150.0%."
    assert table[1:] == [["restart", "13.1%"], ["twice", "150.0%"]]


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
