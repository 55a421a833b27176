"""Schedules of a pipeline: their order, their time and what is kept, against torch and formulas."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from ddpz_lite.strategies.pipeline.schedules import (
    gpipe,
    idle,
    interleaved,
    length,
    live,
    one_f_one_b,
    play,
    read,
    words,
    zero_bubble,
)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
def test_gpipe_and_1f1b_take_the_same_time_and_keep_what_the_formulas_say(p, m):
    all_first, one = play(gpipe(p, m)), play(one_f_one_b(p, m))
    assert length(all_first) == length(one) == 3 * (m + p - 1)
    assert idle(one) == pytest.approx((p - 1) / (m + p - 1))
    assert live(all_first) == [m] * p
    assert live(one) == [min(p - stage, m) for stage in range(p)]


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (3, 6), (4, 16)])
def test_interleaving_divides_the_bubble_and_is_in_torchs_order(p, m, chunks):
    schedule = interleaved(p, m, chunks)
    bars = play(schedule)
    assert length(bars) == pytest.approx(3 * (m + (p - 1) / chunks))
    done = {(bar.kind, bar.micro, bar.chunk, bar.stage) for bar in bars}
    assert len(done) == len(bars) == 2 * p * m * chunks

    sizes = {"_n_microbatches": m, "microbatches_per_round": p, "pp_group_size": p}
    torchs = SimpleNamespace(n_local_stages=chunks, **sizes)
    for rank, order in enumerate(schedule):
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(torchs, rank)
        kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}
        theirs = (a for a in actions if a is not None)
        assert order == [
            (kinds[a.computation_type.name], a.microbatch_index, a.stage_index // p) for a in theirs
        ]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16])
def test_zero_bubble_has_a_third_of_the_bubble_and_keeps_as_much_as_1f1b_on_its_first_stage(p, m):
    bars, before = play(zero_bubble(p, m)), play(one_f_one_b(p, m))
    assert live(bars) == [min(p, m)] * p == [max(live(before))] * p
    if m >= p:  # (p - 1) (F + B - W), where 1F1B has (p - 1) (F + B + W)
        assert length(bars) == 3 * m + (p - 1)
        assert length(before) == 3 * m + 3 * (p - 1)
    else:
        assert length(bars) <= length(before)


def test_the_slowest_stage_sets_the_pace():
    bars = play(one_f_one_b(3, 50), forward=[1, 2, 1])
    assert length(bars) == pytest.approx(50 * 3 * 2, rel=0.05)


def test_a_line_of_words():
    assert words(read("F0 F1 B0 B1")) == "F0 F1 B0 B1"
    line = words(interleaved(1, 2, 2)[0])
    assert line.startswith("F0a F0b B0b") and read(line) == interleaved(1, 2, 2)[0]
    assert read("F0 B0 W0") == [("F", 0), ("B", 0), ("W", 0)]
    with pytest.raises(ValueError, match=r"'G0' is not an action\. Fix: F3"):
        read("F0 G0")


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        (["F0 B0", "F0"], "stage 1 must run F and B of each"),
        (["F0 F0"], "stage 0 must run"),
        (["B0 F0"], "stage 0 for B0"),
        (["F0 W0 B0"], "stage 0 for W0"),
        (["F0 B0 W0", "F0 B0"], "stage 1 must run F and B and W of each"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], "wait forever (stage 0 for B0; stage 1 for F1)"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], "stage 1 runs F1 F0, stage 0 F0 F1"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_in_words(lines, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        play([read(line) for line in lines])


@pytest.mark.parametrize("schedule", ["1F1B", ["F0 B0"], [["F0"]], [[("F",)]], [[("F", "0")]]])
def test_what_is_no_schedule_is_told_what_one_is(schedule):
    with pytest.raises(ValueError, match=r"stage 0 has .* not an action\. Fix: tuples such as"):
        play(schedule)
    with pytest.raises(ValueError, match=re.escape("must run F and B of each")):
        play([[("F", 0), ("B", 0, 0)]])


def test_interleaving_takes_groups_as_large_as_the_pipeline():
    with pytest.raises(ValueError, match="a multiple of 4"):
        interleaved(4, 6, 2)
