"""Every bug of the zoo shows its symptom, and its fix removes it."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

import ddpz_lite as dz
from ddpz_lite.course import zoo

STOPS = {1: "rank 1 returned without", 2: "rank 1 returned without", 3: "rank 1 call(s|ed) barrier",
         4: "units are gathered by all ranks together", 5: "all_reduce", 6: "all_reduce",
         7: "Expected to have finished reduction", 8: "mark a variable ready only once",
         9: "every rank must make every group",
         10: "Global rank 0 is not part of group"}  # fmt: skip
ENDS = [number for number in zoo.GUIDE if number not in STOPS]
WASTEFUL = (11, 13)  # right by the numbers: one process does the same


def all_on_rank(programs):
    return [zoo.on_rank(name, text) for name, text in programs]


def one_launch(world, programs):
    """{(number, fixed): what rank 0, 1, ... returned} of these programs, and their ledger."""
    sources = [(f"{n}{'fixed' * m}.py", zoo.source(n, fixed=m)) for n, m in programs]
    run = dz.launch(all_on_rank, world, args=(sources,))
    return dict(zip(programs, zip(*run, strict=True), strict=True)), run.ledger


@pytest.fixture(scope="module")
def ended():
    """What two ranks, and one, made of every program that ends: {world: {(number, fixed): ...}}"""
    programs = [(number, fixed) for number in ENDS for fixed in (False, True)]
    return {world: one_launch(world, programs) for world in (1, 2)}


@pytest.mark.parametrize("number", STOPS)
def test_the_report_tells_the_bug(number):
    with pytest.raises(dz.RankFailed, match=STOPS[number]) as failed:
        zoo.run(number)
    assert failed.value.where is None or f"bug_{number:02}.py:" in failed.value.where


@pytest.mark.parametrize("world", [2, 4])
def test_the_fixed_programs_end(world):
    numbers = [number for number in STOPS if zoo.GUIDE[number].world == world]
    found, _ = one_launch(world, [(number, True) for number in numbers])
    assert all(len(results) == world for results in found.values()) and len(found) == len(numbers)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("number", ENDS)
def test_one_process_and_the_other_rank_tell_the_wrong_from_the_right(number, fixed, ended):
    key = zoo.GUIDE[number].same
    (alone,), two = (ended[world][0][number, fixed] for world in (1, 2))
    values = [torch.as_tensor(result[key]) for result in (alone, *two)]
    same = all(torch.allclose(values[0], value, atol=1e-4) for value in values)
    assert same is (fixed or number in WASTEFUL)


def test_without_set_epoch_all_epochs_are_alike(ended):
    before, after = (ended[2][0][11, fixed][0]["orders"] for fixed in (False, True))
    assert before[0] == before[1] == before[2] and after[0] != after[1]


def test_no_sync_around_backward_alone_sends_four_times_as_much(ended):
    sent = Counter(r.where.partition(":")[0] for r in ended[2][1] if r.op == "all_reduce")
    assert (sent["13.py"], sent["13fixed.py"]) == (2 * 8, 2 * 2)


@pytest.mark.parametrize("number", zoo.GUIDE)
def test_programs_are_short_and_answers_name_lines_that_are_there(number):
    lines = zoo.source(number).splitlines()
    assert len(lines) <= 30
    for answer in zoo.GUIDE[number].answers:
        at = int(re.match(r"line (\d+):", answer.text)[1])
        assert lines[at - 1].strip()


@pytest.mark.parametrize("number", zoo.GUIDE)
def test_the_right_answer_is_where_the_fix_is_or_its_cause(number):
    removed = {
        i
        for i, line in enumerate(zoo.source(number).splitlines(), 1)
        if line not in zoo.source(number, fixed=True).splitlines()
    }
    at = zoo.GUIDE[number].line
    assert not removed or min(abs(at - i) for i in removed) <= 6


def test_visit_shows_program_tools_and_fix(capsys):
    zoo.visit(12)
    shown = capsys.readouterr().out
    for part in ("DistributedSampler", "0.6667", "one process: 0.6", "pytorch/pytorch#25162", "+"):
        assert part in shown


@pytest.mark.extra
@pytest.mark.parametrize("number", zoo.GUIDE)
def test_every_bug_can_be_visited(number, capsys):
    zoo.visit(number)
    assert zoo.GUIDE[number].thread in capsys.readouterr().out


def test_refuses_a_number_that_is_not_there():
    with pytest.raises(ValueError, match="choose 1 to 20"):
        zoo.source(21)
