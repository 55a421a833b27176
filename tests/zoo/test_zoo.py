"""Every bug of the zoo shows itself, and its cure cures it."""

from __future__ import annotations

import re

import pytest
import torch

from ddpz_lite import zoo
from ddpz_lite.launcher import RankFailed
from ddpz_lite.wire import CollectiveMismatch

STOPS = {1: "rank 1 returned without", 2: "rank 1 returned without", 3: "rank 1 called barrier",
         4: "units are gathered by all ranks together", 5: "all_reduce", 6: "all_reduce",
         7: "Expected to have finished reduction", 8: "mark a variable ready only once",
         10: "Global rank 0 is not part of group"}  # fmt: skip
HANGS = {9: "did not end"}  # nothing tells it before the time is over


@pytest.mark.parametrize(
    "number, says",
    [*STOPS.items(), *(pytest.param(*hang, marks=pytest.mark.extra) for hang in HANGS.items())],
)
def test_the_report_tells_the_bug(number, says):
    with pytest.raises((RankFailed, CollectiveMismatch), match=says):
        zoo.run(number)


@pytest.mark.parametrize(
    "number", [1, *(pytest.param(n, marks=pytest.mark.extra) for n in [*STOPS, *HANGS] if n > 1)]
)
def test_with_its_cure_the_program_ends(number):
    assert len(zoo.run(number, mended=True)) == zoo.GUIDE[number].world


@pytest.mark.parametrize("mended", [False, True])
@pytest.mark.parametrize("number", [n for n, bug in zoo.GUIDE.items() if bug.compare])
def test_one_process_tells_the_wrong_from_the_right(number, mended):
    key = {12: "accuracy", 14: "x"}.get(number, "weights")
    found, alone = (zoo.run(number, world, mended=mended)[0][key] for world in (2, 1))
    same = torch.allclose(torch.as_tensor(found), torch.as_tensor(alone), atol=1e-4)
    assert same is mended


def test_without_set_epoch_all_epochs_are_alike():
    before, after = (zoo.run(11, mended=mended)[0]["orders"] for mended in (False, True))
    assert before[0] == before[1] == before[2] and after[0] != after[1]


def test_no_sync_around_backward_alone_sends_four_times_as_much():
    sent = [
        sum(r.op == "all_reduce" for r in zoo.run(13, mended=m).ledger if r.rank == 0)
        for m in (False, True)
    ]
    assert sent == [8, 2]


def test_a_flag_read_before_it_came_lets_replicas_drift():
    before, after = zoo.run(15), zoo.run(15, mended=True)
    assert not torch.equal(before[0]["weights"], before[1]["weights"])
    assert torch.equal(after[0]["weights"], after[1]["weights"])


@pytest.mark.parametrize("number", zoo.GUIDE)
def test_programs_are_short_and_answers_name_lines_that_are_there(number):
    lines = zoo.source(number).splitlines()
    assert len(lines) <= 30
    for answer in zoo.GUIDE[number].answers:
        at = int(re.match(r"line (\d+):", answer.text)[1])
        assert lines[at - 1].strip()


@pytest.mark.parametrize("number", zoo.GUIDE)
def test_the_right_answer_is_where_the_cure_is_or_its_cause(number):
    removed = {
        i
        for i, line in enumerate(zoo.source(number).splitlines(), 1)
        if line not in zoo.source(number, mended=True).splitlines()
    }
    text = next(a.text for a in zoo.GUIDE[number].answers if a.right)
    at = int(re.match(r"line (\d+):", text)[1])
    assert not removed or min(abs(at - i) for i in removed) <= 6


def test_visit_shows_program_tools_and_cure(capsys):
    zoo.visit(12)
    shown = capsys.readouterr().out
    for part in ("DistributedSampler", "0.666", "one process: 0.6", "pytorch/pytorch#25162", "+"):
        assert part in shown


def test_refuses_a_number_that_is_not_there():
    with pytest.raises(ValueError, match="bugs 1 to 20"):
        zoo.source(21)


def test_the_table_has_every_bug_and_its_thread():
    rows = zoo.table()
    assert len(rows) == 21 and len({row[2] for row in rows}) == 21
