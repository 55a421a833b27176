"""Schedules of a pipeline: their time and what is kept, against the formulas."""

from __future__ import annotations

import pytest

from ddpz_lite.show import pipeline


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 5, 8])
def test_gpipe_and_1f1b_take_the_same_time_and_keep_what_the_formulas_say(stages, micros):
    gpipe, one = (
        pipeline.play(schedule)
        for schedule in (pipeline.gpipe(stages, micros), pipeline.interleaved(stages, micros))
    )
    assert pipeline.length(gpipe) == pipeline.length(one) == 3 * (micros + stages - 1)
    assert pipeline.idle(one) == pytest.approx((stages - 1) / (micros + stages - 1))
    assert pipeline.live(gpipe) == [micros] * stages
    assert pipeline.live(one) == [min(stages - stage, micros) for stage in range(stages)]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("stages", "micros"), [(2, 2), (2, 8), (3, 6), (4, 16)])
def test_interleaving_divides_the_bubble(stages, micros, chunks):
    bars = pipeline.play(pipeline.interleaved(stages, micros, chunks))
    assert pipeline.length(bars) == pytest.approx(3 * (micros + (stages - 1) / chunks))
    done = {(bar.kind, bar.micro, bar.chunk, bar.stage) for bar in bars}
    assert len(done) == len(bars) == 2 * stages * micros * chunks


def test_the_slowest_stage_sets_the_pace():
    bars = pipeline.play(pipeline.interleaved(3, 50), forward=[1, 2, 1])
    assert pipeline.length(bars) == pytest.approx(50 * 3 * 2, rel=0.05)


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match="stage 0: B0; stage 1: F1"):
        pipeline.play([pipeline.read("F0 B0 F1 B1"), pipeline.read("F1 F0 B0 B1")])
    with pytest.raises(ValueError, match="a multiple of 4"):
        pipeline.interleaved(4, 6, 2)


def test_the_picture_says_what_it_shows():
    _, alt, table = pipeline.picture(pipeline.gpipe(2, 2), title="GPipe")
    assert "9 units of time, 33.3% of it idle" in alt
    assert table[1] == [0, 2.0, "F0 F1 B0 B1"]
