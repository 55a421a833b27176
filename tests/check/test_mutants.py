"""Mutants of the solutions, and what the judges let pass of them."""

from __future__ import annotations

import pytest
from answers import mutants, trying

from ddpz_lite.course.check.task import find

pytestmark = pytest.mark.rest

KILLED = 0.95  # of the mutants that are no right answers

ANSWER = '''
def answer(xs, n):
    """The docstring stays."""
    kept = []
    for i in range(n):
        kept.append(xs[i].clone() / n)
    if n > 1:
        dist.all_reduce(kept[0])
    return kept[-1]
'''


def test_each_mutant_is_a_program_with_one_change_and_its_own_name():
    made = mutants.make(ANSWER)
    names = {mutant.name: mutant for mutant in made}
    assert len(names) == len(made) == len({mutant.source for mutant in made})
    for name in (
        "`dist.all_reduce(kept[0])` -> dropped",
        "`dist.all_reduce(kept[0])` -> twice",
        "`xs[i].clone()` -> `xs[i]`",
        "`xs[i].clone() / n` -> `xs[i].clone()`",
        "`range(n)` -> `range(n - 1)`",
        "`n > 1` -> `n >= 1`",
        "`xs[i]` -> `xs[0]`",
        "`0` -> `1`",
    ):
        assert name in names
    assert any(mutant.name.endswith("its first result, kept") for mutant in made)
    assert names["`n > 1` -> `n >= 1`"].line == 7
    assert "n >= 1" in names["`n > 1` -> `n >= 1`"].source
    for mutant in made:
        compile(mutant.source, "<mutant>", "exec")
        assert "The docstring stays" in mutant.source


def test_a_docstring_and_a_mark_of_a_call_without_wait_make_no_mutant():
    made = mutants.make('def f(x):\n    """Words."""\n    return dist.send(x, async_op=True)\n')
    assert not any("async_op=False" in mutant.source for mutant in made)
    assert not any("Words" in mutant.name and "dropped" in mutant.name for mutant in made)


def test_survivors_tells_killed_from_alive_and_equivalent(monkeypatch):
    monkeypatch.setattr(mutants, "SECONDS", 60.0)  # none of these runs forever
    task = find("09.shard_owners")
    notebook = trying.master("09")
    *given, (cell, _) = mutants.notebooks.program(notebook, task.id)
    source = (
        "def shard_owners(sizes):\n"
        "    loads, owners = [0] * dist.get_world_size(), [None] * len(sizes)\n"
        "    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):\n"
        "        owners[i] = loads.index(min(loads))\n"
        "        loads[owners[i]] += sizes[i]\n"
        "        i = None\n"
        "    return owners\n"
    )
    right, killed = "`i = None` -> dropped", "`return owners` -> dropped"
    report = mutants.survivors(task, [*given, (cell, source)], {right: "unused", killed: "no"})
    assert right in report.equivalent and report.stale == [killed]
    assert report.made == report.killed + len(report.surviving) + len(report.equivalent)
    assert killed not in {mutant.name for mutant in report.surviving} and report.killed > 10
    assert f"{report.made} made" in str(report) and "listed as equivalent, and is not" in str(
        report
    )


@pytest.mark.extra
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lesson", trying.lessons())
def test_the_mutants_of_a_solution_die(lesson):
    for report in mutants.mutation_report(lesson):
        assert report.share >= KILLED and not report.stale, str(report)
