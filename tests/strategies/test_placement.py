"""The table and its arithmetic, against the numbers printed in the ZeRO paper."""

import subprocess
import sys

import numpy
import pytest

from ddpz_lite.strategies.costs import changes, elements_moved, zero_memory
from ddpz_lite.strategies.placement import STAGES, TRANSITIONS, Placement


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_paper_figure_1(stage, gigabytes):
    assert zero_memory(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_world_of_one_saves_nothing():
    assert {zero_memory(1000, 1, stage) for stage in STAGES} == {16000}


def test_fp32_adam_is_sixteen_bytes_too():
    assert zero_memory(1000, 4, 1, 4, 4, 8) == 1000 * (4 + 4) + 1000 * 8 / 4


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_of_a_step(stage, volume):
    assert elements_moved(1200, 4, stage) == volume * 900


def test_volume_with_micro_batches_and_kept_parameters():
    volumes = [elements_moved(1200, 4, stage, micro_batches=3) / 900 for stage in range(4)]
    assert volumes == [2, 2, 4, 9]
    assert elements_moved(1200, 4, 3, resharded=False) == 2 * 900


def test_four_transitions_lead_from_letter_to_letter():
    assert sorted(TRANSITIONS.values()) == ["all_gather", "all_reduce", "reduce_scatter", "slice"]
    assert all(a is not b and {a, b} <= set(Placement) for a, b in TRANSITIONS)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (0, ["all_reduce"]),
        (1, ["reduce_scatter", "all_gather"]),
        (2, ["reduce_scatter", "reduce_scatter", "all_gather"]),
        (3, ["all_gather", "all_gather", "reduce_scatter"] * 2),
    ],
)
def test_the_letters_say_what_two_micro_batches_need(stage, words):
    assert [TRANSITIONS[change] for change in changes(stage, micro_batches=2)] == words


BAD = [{"stage": 4}, {"stage": "3"}, {"world_size": 0}, {"num_params": -1}, {"world_size": 2.5}]


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_names_what_was_expected(bad):
    arguments = {"num_params": 10, "world_size": 2, "stage": 1} | bad
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        zero_memory(**arguments)


def test_numbers_of_numpy_are_numbers():
    two = numpy.int64(2)
    assert zero_memory(10, two, two) == zero_memory(10, 2, 2)
    assert zero_memory(10, (two, 2), (0, two)) == zero_memory(10, (2, 2), (0, 2))


def test_the_table_needs_no_torch():
    code = "import sys, ddpz_lite.strategies.costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
