"""The figures of lesson 19: shares of experts over steps, and what a capacity drops."""

from __future__ import annotations

import pytest

from ddpz_lite.course.show import lesson19


@pytest.mark.parametrize(
    ("factor", "capacity", "kept", "dropped"),
    [
        (1.0, 4, [4, 3, 4, 0], "31.2%"),
        (1.5, 6, [6, 3, 5, 0], "12.5%"),
        (4.0, 16, [8, 3, 5, 0], "0.0%"),
    ],
)
def test_a_capacity_cuts_each_expert_at_the_factor_times_the_mean(factor, capacity, kept, dropped):
    counts = [8, 3, 5, 0]
    fig, alt, rows = lesson19.capacity_picture(counts, factor, "alone")
    assert [row[1] for row in rows[1:]] == kept
    assert [row[1] + row[2] for row in rows[1:]] == counts
    title = fig.axes[0].get_title("left")
    assert f"capacity {capacity}, {dropped} dropped" in title and dropped in alt


def test_shares_are_means_over_steps_and_stack_to_one(monkeypatch):
    seen = {}
    monkeypatch.setattr(lesson19, "show_figure", lambda fig, **rest: seen.update(fig=fig, **rest))
    falls, stays = [[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [[0.25, 0.75]] * 4
    lesson19.routing_over_steps({"falls": falls, "stays": stays}, every=2, title="x")
    assert seen["table"][1:] == [
        ["falls", 1.0, 0.75],
        ["falls", 3.0, 0.5],
        ["stays", 1.0, 0.75],
        ["stays", 3.0, 0.75],
    ]
    for axes in seen["fig"].axes:
        top = axes.collections[-1].get_paths()[0].vertices[:, 1].max()
        assert top == pytest.approx(1)
    assert "falls: the largest is 75% at first and 50% at the end" in seen["alt"]
