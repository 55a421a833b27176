"""The picture of a schedule says what it shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpz_lite.course.show import pipeline
from ddpz_lite.strategies.pipeline.schedules import zero_bubble


def test_the_widget_names_the_chunks_and_counts_them_as_shares():
    _, alt, table = pipeline._turned("1F1B", 2, 2, chunks=2, slow="1")
    assert alt.startswith("1F1B, 2 chunks of 2 stages: 7.5 units of time, 20.0% of it idle.")
    assert table[1] == [0, 2.0, "F0a F1a F0b F1b B0b B1b B0a B1a"]
    assert pipeline._turned("GPipe", 2, 2, chunks=1, slow="2")[2][1] == [0, 2.0, "F0 F1 B0 B1"]


def test_a_split_backward_has_its_own_colour():
    fig, alt, table = pipeline.picture(zero_bubble(3, 5), title="ZB-H1")
    assert "17 units of time" in alt and "3, 3, 3 micro-batches" in alt
    assert table[1][2].startswith("F0 F1 F2 B0 W0")
    [axes] = fig.axes
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert len(hatched) == 3 * 5 and "weight gradients" in axes.get_xlabel()


def test_measured_steps_are_drawn_on_one_axis(monkeypatch):
    def span(rank, name, started, finished):
        return SimpleNamespace(rank=rank, name=name, started=started, finished=finished)

    run = SimpleNamespace(
        spans=[
            span(1, "backward", 5.2, 5.6),
            span(0, "forward", 5.0, 5.1),
            span(1, "forward", 5.1, 5.2),
            span(0, "backward", 5.6, 6.0),
            span(0, "step", 4.0, 7.0),
        ]
    )
    bars = pipeline.bars_of(run, ["F0 B0", "F0 B0"], unit=0.1)
    assert [(b.stage, b.kind, round(b.start), round(b.end)) for b in bars] == [
        (0, "F", 0, 1),
        (0, "B", 6, 10),
        (1, "F", 1, 2),
        (1, "B", 2, 6),
    ]
    with pytest.raises(ValueError, match="zip"):
        pipeline.bars_of(run, ["F0 F1 B0 B1", "F0 B0"], unit=0.1)
    shown = {}
    monkeypatch.setattr(pipeline, "show_figure", lambda fig, **said: shown.update(said, fig=fig))
    pipeline.measured({"one": bars, "same": bars})
    assert shown["table"][1:] == [["one", 10.0, 0.5], ["same", 10.0, 0.5]]
    assert "one: 10.0 units of time, 50% idle" in shown["alt"]
    assert len({panel.get_xlim() for panel in shown["fig"].axes}) == 1
