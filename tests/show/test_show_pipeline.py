"""The picture of a schedule says what it shows."""

from __future__ import annotations

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
