"""Lines, bars, tables before and after, the placements of a step: what they draw and say."""

import re
from itertools import groupby

import pytest
import torch

import ddpz_lite as dz
from ddpz_lite import show
from ddpz_lite.course.show import before_after, charts, lesson04, loss_charts, placements
from ddpz_lite.strategies.placement import TRANSITIONS, strategy

SERIES = {"ring": ([1, 2, 4], [3.0, 4.0, 6.0]), "star": ([1, 2, 4], [1.0, 2.0, 4.0])}


@pytest.fixture
def drawn(monkeypatch):
    """The arguments of each figure that is shown: [(figure, alt, table), ...]."""
    shown = []

    def keep(fig, *, alt, table):
        fig.draw_without_rendering()
        shown.append((fig, alt, table))

    for module in (charts, before_after, placements, loss_charts):
        monkeypatch.setattr(module, "show_figure", keep)
    return shown


def test_lines_hold_their_numbers_and_names(drawn):
    show.lines(SERIES, x="bytes", y="seconds", alt="Two lines that rise.", log="xy",
               dots={"ring": ([2], [4.5])}, at={"limit": 5}, upright={"best": 3},
               ticks=[1, 2, 4])  # fmt: skip
    ((fig, alt, table),) = drawn
    (axes,) = fig.axes
    assert alt == "Two lines that rise." and axes.get_xscale() == axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ring", "star"]
    assert table[0] == ["line", "bytes", "seconds"] and ["star", 4, 4.0] in table
    assert ["ring, measured", 2, 4.5] in table
    assert [text.get_text() for text in axes.texts] == ["limit", "best"]
    places = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert places == ["1", "2", "4"]
    heights = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert "3" in heights and not any("times" in words for words in heights)


def test_heights_of_nearly_a_power_of_ten_have_labels_with_room():
    """0.1, 0.2, 0.5 and 1; with 0.6 to 0.9 as well they lay upon each other."""
    series = {"a": ([1, 10, 100], [0.91, 0.2, 0.1])}
    fig, _, _ = charts.line_figure(series, x="x", y="y", alt="falls", log="xy")
    fig.canvas.draw()
    (axes,) = fig.axes
    low, high = axes.get_ylim()
    ticks = [*axes.get_yticks(), *axes.get_yticks(minor=True)]
    shown = sorted(round(tick, 3) for tick in ticks if low <= tick <= high)
    assert {0.1, 0.2, 0.5} <= set(shown) <= {0.1, 0.2, 0.5, 1.0}


def test_fewer_than_two_powers_of_ten_along_x_have_plain_labels():
    series = {"a": ([3, 19, 120], [3, 1, 3])}
    fig, _, _ = charts.line_figure(series, x="minutes", y="y", alt="a valley", log="x")
    fig.canvas.draw()
    (axes,) = fig.axes
    labels = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert {"5", "10", "20", "50", "100"} <= set(labels)


def test_powers_of_two_along_x_are_their_own_labels():
    worlds = [2**k for k in range(11)]
    fig, _, _ = charts.line_figure({"a": (worlds, worlds)}, x="ranks", y="y", alt="up", log="xy")
    fig.canvas.draw()
    labels = [label.get_text() for label in fig.axes[0].get_xticklabels()]
    assert {"1", "4", "64", "1,024"} <= set(labels)


def test_each_of_many_lines_is_drawn():
    many = {str(i): ([1, 2], [i, i + 1]) for i in range(10)}  # there are eight looks
    fig, _, table = charts.line_figure(many, x="x", y="y", alt="rises", dots={"9": ([1], [9])})
    (axes,) = fig.axes
    assert [line.get_label() for line in axes.lines][:10] == list(many) and len(table) == 22
    assert axes.lines[10].get_color() == axes.lines[9].get_color()


def test_a_line_may_keep_its_height_until_the_next_point():
    for steps, style in ((True, "steps-post"), (False, "default")):
        fig, _, _ = charts.line_figure(SERIES, x="x", y="y", alt="rises", steps=steps)
        assert {line.get_drawstyle() for line in fig.axes[0].lines} == {style}


def test_an_axis_may_begin_above_zero():
    for options, begin in (({}, 0), ({"low": 0.9}, 0.9)):
        fig, *_ = charts.line_figure({"a": ([1, 2], [1.0, 1.8])}, x="x", y="y", alt="a", **options)
        assert fig.axes[0].get_ylim()[0] == begin


def test_a_long_line_keeps_its_last_point_in_the_table():
    _, _, table = charts.line_figure({"a": (range(100), range(100))}, x="x", y="y", alt="rises")
    assert 10 < len(table) < 16 and table[-1] == ["a", 99, 99]


@pytest.mark.parametrize("series", [{}, {"a": ([], [])}, {"a": ([1, 2], [1])}])
def test_lines_without_points_are_refused(series):
    with pytest.raises(ValueError, match="as many x as y"):
        show.lines(series, x="x", y="y", alt="nothing")


def test_losses_against_what_was_spent(drawn):
    losses = {"all": [[4.0, 3.0], [4.2, 3.2]], "half": [[4.5, 3.5]] * 2}
    show.loss_against({"all": 2.0, "half": 1.0}, losses, every=10, x="MB", title="Bytes")
    show.loss_against(None, losses, every=10, x="steps")
    (fig, alt, table), (_, _, by_step) = drawn
    assert table[1:3] == [["all", 20.0, pytest.approx(4.1), 4.0, 4.2],
                          ["all", 40.0, pytest.approx(3.1), 3.0, 3.2]]  # fmt: skip
    assert [row[1] for row in by_step[1:]] == [10, 20, 10, 20]
    assert (
        "Bytes, against MB. Mean and range of 2 seeds at the end: all 3.100 (3.000 to 3.200)" in alt
    )
    assert "half 3.500 (3.500 to 3.500) after 20" in alt
    (axes,) = fig.axes
    assert len(axes.collections) == 2  # a band for each
    with pytest.raises(KeyError, match="half"):
        show.loss_against({"all": 2.0}, losses, every=10, x="MB")


def test_many_losses_have_a_bar_at_the_end_instead_of_a_band(drawn):
    losses = {str(i): [[4.0], [4.5]] for i in range(5)}
    show.loss_against(None, losses, every=10, x="steps")
    ((fig, _, _),) = drawn
    ends = [one.get_segments()[0][:, 1].tolist() for one in fig.axes[0].collections]
    assert ends == [[4.0, 4.5]] * 5


def test_bars_end_in_their_values(drawn):
    show.bars({"right": 1e-7, "sum": 3.0}, x="off by", alt="Two bars.", log=True,
              first_is_right=True, text={"right": "rounding"})  # fmt: skip
    ((fig, _, table),) = drawn
    (axes,) = fig.axes
    assert [text.get_text() for text in axes.texts] == ["rounding", "3"]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 2
    assert table[1:] == [["right", 1e-7], ["sum", 3.0]]


@pytest.mark.filterwarnings("error")
def test_bars_may_all_be_nothing(drawn):
    show.bars({"sent": 0, "received": 0}, x="bytes", alt="No bar.")
    ((fig, _, _),) = drawn
    assert [text.get_text() for text in fig.axes[0].texts] == ["0", "0"]


def test_idle_time_of_each_distribution_and_rank():
    fig, alt, table = show.idle_figure({"stride": [(1.0, 0.5), (1.5, 0)], "counter": [(2.0, 0)]})
    (axes,) = fig.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "stride\n17% idle",
        "counter\n0% idle",
    ]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [1.0, 0.5, 1.5, 0, 2.0, 0]
    assert "stride: 17% of the time idle; counter: 0%" in alt
    assert table[1:] == [["stride", 0, 1.0, 0.5], ["stride", 1, 1.5, 0], ["counter", 0, 2.0, 0]]
    for nothing in ({}, {"stride": []}):
        with pytest.raises(ValueError, match="at least one rank"):
            show.idle_figure(nothing)


def test_a_box_for_each_text_of_a_rank():
    ranks = {"by number": [[0, 1], [2]], "longest first": [[3]]}
    fig, alt, table = lesson04.boxes_figure(ranks, [300, 2, 100, 9])
    (axes,) = fig.axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [300, 2, 0, 100, 202, 9, 0]  # a rank's texts, then its waiting
    assert [text.get_text() for text in axes.texts] == ["300", "100"]  # 2 and 9 are too narrow
    assert [line.get_xdata()[0] for line in axes.lines] == [201, 9]  # the means
    assert "by number: 302, 100; longest first: 9" in alt
    assert table[1:] == [
        ["by number", 0, "300 2", 302],
        ["by number", 1, "100", 100],
        ["longest first", 0, "9", 9],
    ]
    for nothing in ({}, {"by number": []}):
        with pytest.raises(ValueError, match="at least one rank"):
            lesson04.boxes_figure(nothing, [])


def test_random_steps_show_a_typical_one():
    draw = lesson04.random_steps([100, 200, 300], seconds=1e-3)
    shares = []
    for texts in (1, 16):
        _, alt, table = draw(4, texts)
        works, waits = zip(*(row[2:] for row in table[1:]), strict=True)
        shares.append(sum(waits) / sum(works + waits))
        assert min(waits) == 0 and f"{shares[-1]:.0%} of the time idle" in alt
    assert shares[1] < 0.5 * shares[0]  # sums of more texts scatter less


def test_collectives_before_and_after(drawn):
    run = [{"gather": ({r: 10.0 * r + r}, [0.0, 11.0] if r == 0 else [])} for r in range(2)]
    show.collectives(run)
    ((fig, alt, table),) = drawn
    assert alt == "What each of 2 ranks holds before and after: gather."
    assert table[1:] == [["gather", 0, "00", "00 11"], ["gather", 1, "11", "nothing"]]
    assert [text.get_text() for text in fig.axes[0].texts if text.get_text()] == [
        "00",
        "11",
        "00",
        "11",
    ]
    with pytest.raises(ValueError, match="nothing to draw"):
        show.collectives([])


def test_collectives_of_more_ranks_than_there_are_looks(drawn):
    show.collectives([{"broadcast": ([10 * r], [0])} for r in range(9)])
    ((_, _, table),) = drawn
    assert table[9] == ["broadcast", 8, "80", "00"]


# ---- the placements of a step


@pytest.mark.parametrize("stage", range(4))
def test_placements_change_by_transitions_and_end_as_in_the_table(stage):
    step, row = placements.moments(stage), strategy(stage)
    assert (step[-1].parameter, step[-1].optimizer) == (row.parameter, row.optimizer)
    assert step[0].parameter is row.parameter and step[0].gradient is None
    backward = [moment.gradient for moment in step if moment.phase == "backward"]
    assert backward[-1] is row.gradient
    assert {name for _, _, name in placements.changes(stage)} <= set(TRANSITIONS.values())


ON_GLOO = {"all_to_all": "reduce_scatter", "broadcast": "all_gather"}  # what comm makes them of


def two_steps(stage):
    torch.manual_seed(0)
    module = dz.GPT(dz.GPTConfig(layers=2, width=16, heads=2, context=8, vocab_size=16))
    model, optimizer = dz.parallelize(module, torch.optim.SGD, stage=stage, lr=0.1)
    for _ in range(2):
        with dz.span("one step"):
            model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stage", range(4))
def test_the_drawn_transitions_are_the_calls_of_a_real_step(stage):
    run = dz.launch(two_steps, world_size=2, args=(stage,), backend="gloo")
    last = [span for span in run.spans if span.rank == 0][-1]
    called = [r.op for r in run.ledger if r.rank == 0 and last.started <= r.started]
    called = [ON_GLOO.get(op, op) for op in called]
    names = [name for _, _, name in placements.changes(stage) if name != "slice"]
    assert [op for op, _ in groupby(called)] == [op for op, _ in groupby(names)]


def test_the_figure_of_placements(drawn):
    show.step_placements(0, 3, title="Two stages")
    ((fig, alt, table),) = drawn
    assert "stage 0, DDP" in alt and "parameter S R S R R S S" in alt
    assert len(fig.axes) == 2 and [
        text.get_text() for text in fig.axes[0].texts if "-" in text.get_text()
    ] == ["all-reduce"]
    assert len(table) == 1 + 4 + 7 and any(
        re.match("gradient: all_reduce", row[-1]) for row in table[1:]
    )
    show.step_placements(0)
    (legend,) = drawn[1][0].legends
    names = [text.get_text()[0] for text in legend.get_texts()]
    assert names == ["R", "P"], "no letter that is not in the figure"
    boxes = {letter: placements._box(0, 0, 1, 1, letter) for letter in placements.MEANINGS}
    looks = {
        tuple((p.get_facecolor(), p.get_hatch(), p.get_width()) for p in parts)
        for parts in boxes.values()
    }
    assert len(looks) == 3
    for parts in boxes.values():
        for patch in parts:  # colours are for the kinds of state
            assert max(patch.get_facecolor()[:3]) - min(patch.get_facecolor()[:3]) < 0.05
    with pytest.raises(ValueError, match="at least one stage"):
        show.step_placements()
    with pytest.raises(ValueError, match="stage must be 0"):
        show.step_placements(4)
