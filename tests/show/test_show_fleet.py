"""The figures of lesson 20: causes of interruptions, and the parts of the time that was lost."""

from __future__ import annotations

import pytest

from ddpz_lite.course.fleet.events import HOUR, MINUTE, Fault, Fleet, Save, simulate
from ddpz_lite.course.show import lesson20

CRASH = Fault("crash", mtbf=300 * HOUR, nodes=0, detect=MINUTE)
NODE = Fault("node", mtbf=300 * HOUR, detect=MINUTE, repair=HOUR)


def fleet(spares: int = 0, group: int = 0) -> Fleet:
    saves = [Save("store", every=20 * MINUTE, cost=MINUTE)]
    return Fleet(100, [CRASH, NODE], saves, spares, restart=300, group=group, regroup=20)


@pytest.mark.parametrize("group", [0, 10])
def test_parts_of_the_figures_add_up_to_all_that_was_lost(group):
    report = simulate(fleet(group=group), days=20)
    parts = lesson20.shares(report)
    assert set(parts) == set(lesson20.PARTS)
    assert sum(parts.values()) == pytest.approx(1 - report.goodput)
    assert (parts["missing groups"] > 0) == bool(group)
    assert (parts["repeated work"] > 0) == (not group)


def test_bars_are_as_long_as_the_shares_and_the_table_has_them():
    report = simulate(fleet(), days=20)
    fig, alt, table = lesson20.time_lost_figure({"here": {"a job": report}}, title="Lost")
    (axes,) = fig.axes
    lost = 100 * (1 - report.goodput)
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(lost, abs=0.1)
    assert axes.texts[0].get_text() == f"{lost:.1f}%"
    assert table[1][2] == f"{report.goodput:.1%}" and f"goodput {report.goodput:.1%}" in alt
    assert "missing groups" not in table[0]  # a part that no bar has


def test_published_causes_are_those_of_the_419_interruptions(monkeypatch):
    seen = {}
    monkeypatch.setattr(lesson20, "show_figure", lambda fig, **rest: seen.update(fig=fig, **rest))
    lesson20.interruptions(50_677)
    left, right = seen["fig"].axes
    assert sum(bar.get_width() for bar in left.patches) == 419
    line, *points = right.get_lines()
    assert len(points) == len(lesson20.POINTS)
    # Llama 3's own point lies on its line.
    assert points[0].get_ydata()[0] == pytest.approx(50_677 / 16_384, rel=1e-3)
    assert line.get_ydata()[0] == pytest.approx(50_677 / line.get_xdata()[0])
    assert "35%" in seen["alt"] and "14.9 h" in seen["alt"]


def test_the_widget_draws_a_job_for_its_sliders(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        lesson20, "explore", lambda draw, **sliders: seen.update(draw=draw, **sliders)
    )

    def job_of(gpus, *, cost, detect, restart, memory, spares):
        seen["setting"] = (gpus, cost, detect, restart, memory, spares)
        return fleet(spares=round(100 * spares))

    lesson20.fleet_explorer(job_of)
    draw = seen.pop("draw")
    _, alt, _ = draw(1024, 60, 600, 10, "yes", 2)
    assert seen["setting"] == (1024, 60, 600, 10, True, 0.02) and "1,024 GPUs (modelled)" in alt
