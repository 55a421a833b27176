"""Many answers in one launch: what one does is not felt by the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from answers import trying

from ddpz_lite.course.check import run
from ddpz_lite.course.check.cell import verdict_text
from ddpz_lite.course.check.run import judge_all, observe
from ddpz_lite.course.check.score import Judging, score
from ddpz_lite.course.check.task import Case, Criterion, Observed, find
from ddpz_lite.course.check.together import observe_together

WORLD = 2
GIVEN = "import os, sys, time, torch\nimport torch.distributed as dist\n"
CASE = Case("2 ranks", [{"gradients": [torch.ones(3)], "samples": 1}] * WORLD, timeout=60.0)


def answer(source: str) -> Any:
    """The answer whose body is `source`, with this rank's tensor x and rank r."""
    lines = "".join(f"    {line}\n" for line in source.splitlines())
    text = f"{GIVEN}def weighted_mean(gradients, samples):\n"
    text += f"    x, r = gradients[0], dist.get_rank()\n{lines}"
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(text, space)
    return space["weighted_mean"]


def judge(seen: Observed) -> str | None:
    ends = [rank["gradients"][0].tolist() for rank in seen.data]
    return None if ends == [[2.0] * 3] * WORLD and seen.ops(0) == ["all_reduce"] else f"{ends}"


TASK = replace(find("03.weighted_mean"), uses_own=False, criteria=(Criterion("the sum", 1, judge),))
GOOD = "dist.all_reduce(x)"
SPOILERS = {  # one rank fails: of two, chance would decide which is reported
    "raises": "if r: raise KeyError(r)\ndist.all_reduce(x)",
    "raises later": "dist.all_reduce(x)\nif r: raise KeyError(r)\ndist.all_reduce(x)",
    "the first rank leaves early": "if r == 0: return\ndist.all_reduce(x)",
    "calls differ": "dist.all_reduce(x) if r else dist.broadcast(x, 0)",
    "dies": "if r: os._exit(3)\ndist.all_reduce(x)",
    "exits": "if r: sys.exit(3)\ndist.all_reduce(x)",
    "a message without a receive": "dist.all_reduce(x)\nif r == 0: dist.isend(x * 7, 1)",
    "a call without a wait": "dist.all_reduce(x)\ndist.all_reduce(x.clone(), async_op=True)",
    "another dtype": "torch.set_default_dtype(torch.float64)\ndist.all_reduce(x)",
    "no gradients": "torch.set_grad_enabled(False)\ndist.all_reduce(x)",
    "another torch": "dist.all_reduce(x)\ndist.all_reduce = lambda t: t",
    "the group is gone": "dist.all_reduce(x)\ndist.destroy_process_group()",
    "a prisoner": "torch.nn.kept = x\ndist.all_reduce(x)",
}


def test_each_verdict_is_as_alone_and_the_next_answer_is_unaffected():
    """A right answer stands before and after each that may leave something behind."""
    sources = [GOOD]
    for source in SPOILERS.values():
        sources += [source, GOOD]
    answers = [answer(source) for source in sources]
    together = judge_all(TASK, answers, [CASE])
    assert all(verdict.solved for verdict in together[::2])
    for name, spoiler, verdict in zip(SPOILERS, answers[1::2], together[1::2], strict=True):
        alone = score(TASK, observe(TASK, spoiler, [CASE]))
        assert trying.words(verdict) == trying.words(alone), name


def test_an_endless_answer_does_not_affect_the_next():
    case = replace(CASE, timeout=4.0)
    never = answer("while r: time.sleep(0.01)")
    good, late, after = judge_all(TASK, [answer(GOOD), never, answer(GOOD)], [case])
    assert good.solved and after.solved
    assert trying.words(late) == trying.words(score(TASK, observe(TASK, never, [case])))


def test_the_ledger_and_the_namespace_of_a_turn_are_its_own():
    counting = answer("global n\nn = globals().get('n', 0) + 1\nx.fill_(n)\ndist.all_reduce(x)")
    for seen in observe_together(TASK, [counting, counting, answer(GOOD)], CASE):
        assert seen.data[0]["gradients"][0].tolist() == [2.0] * 3
        assert [record.seq for record in seen.ledger if record.rank == 1] == [0]
        assert all(record.started < 60 for record in seen.ledger)


def test_what_cannot_be_sent_is_reported_as_alone():
    lock = answer("guard")
    lock.__globals__["guard"] = __import__("threading").Lock()
    (verdict,) = judge_all(TASK, [lock], [CASE])
    assert "`guard`" in verdict.findings[0].sentence and "cannot be sent" in str(verdict)


# ---- which case is wanted next ----


def cases(*kinds: str) -> list[Case]:
    return [Case(f"case {i}", [{}], kind) for i, kind in enumerate(kinds)]


def says(words: dict[int, str]):
    return lambda seen: words.get(int(seen.case.says[-1]))


def course_of(criteria, kinds, outcomes=()):
    """The numbers of the cases that are asked for, and the verdict."""
    task = replace(TASK, criteria=tuple(criteria))
    judging, order = Judging(task, cases(*kinds)), []
    while (index := judging.wanted()) is not None:
        order.append(index)
        outcome = dict(outcomes).get(index, "ok")
        judging.add(index, Observed(judging.cases[index], outcome, "" if outcome == "ok" else "!"))
    return order, judging.verdict()


def test_an_answer_that_fails_the_first_criterion_is_run_no_further():
    criteria = [Criterion("a", 1, says({1: "no"}), on=("",)), Criterion("b", 1, says({}))]
    order, verdict = course_of(criteria, ["", "", "", "other"])
    assert order == [0, 1] and not verdict.solved


def test_a_later_criterion_asks_for_its_cases_and_stops_where_it_fails():
    criteria = [
        Criterion("a", 1, says({}), on=("",)),
        Criterion("b", 1, says({1: "no"})),
        Criterion("c", 1, says({}), on=("c",)),
    ]
    order, verdict = course_of(criteria, ["", "b", "b", "c"])
    assert order == [0, 1, 3]
    assert [found.outcome for found in verdict.findings] == ["pass", "fail", "pass"]


def test_what_was_not_run_does_not_change_the_verdict():
    """A case that would have hung behind one that is wrong has no say in the status."""
    criteria = [Criterion("a", 1, says({0: "no"})), Criterion("b", 1, says({}))]
    task = replace(TASK, criteria=tuple(criteria))
    seen = [
        Observed(case, outcome, "late")
        for case, outcome in zip(cases("", ""), ("ok", "stuck"), strict=True)
    ]
    assert score(task, seen) == score(task, seen[:1])
    assert score(task, seen).status == "wrong"


def test_what_has_failed_so_far_is_known_and_the_rest_is_not_judged():
    criteria = [
        Criterion("a", 1, says({}), on=("a",)),
        Criterion("b", 1, says({1: "no"})),
        Criterion("c", 1, says({}), on=("a", "c")),
    ]
    judging = Judging(replace(TASK, criteria=tuple(criteria)), cases("a", "b", "c"))
    judging.add(0, Observed(judging.cases[0], "ok", ""))
    assert judging.failed() == {} and judging.wanted() == 1
    judging.add(1, Observed(judging.cases[1], "ok", ""))
    assert judging.failed() == {"b": "no"} and judging.wanted() == 2
    found = [finding.outcome for finding in judging.verdict().findings]
    assert found == ["pass", "fail", "not judged"]


def test_an_answer_of_which_enough_is_known_is_run_no_further(monkeypatch):
    ran = []

    def observed(task, answers, case, seconds):
        ran.append((case.says, len(answers)))
        return [Observed(case, "ok", "") for _ in answers]

    monkeypatch.setattr(run, "observe_together", observed)
    task = replace(TASK, criteria=(Criterion("a", 1, says({})), Criterion("b", 1, says({0: "no"}))))

    def enough(number: int, judging: Judging) -> bool:
        return number == 0 and "b" in judging.failed()

    first, second = judge_all(task, [answer(GOOD)] * 2, cases("", ""), enough=enough)
    assert ran == [("case 0", 2), ("case 1", 1)]
    assert [found.outcome for found in first.findings] == ["not judged", "fail"]
    assert [found.outcome for found in second.findings] == ["pass", "fail"]


def test_the_stub_is_run_once():
    criteria = [Criterion("a", 1, says({})), Criterion("b", 1, says({}))]
    order, verdict = course_of(criteria, ["", ""], {0: "unsolved"})
    assert order == [0] and verdict.status == "not attempted"


def test_a_criterion_whose_run_did_not_end_is_not_judged_and_not_reported_twice():
    criteria = [
        Criterion("a", 1, says({}), on=("",)),
        Criterion("b", 1, says({}), on=("b",)),
        Criterion("c", 2, says({}), on=("b",)),
        Criterion("d", 1, says({0: "no"}), on=("",)),
        Criterion("e", 1, says({0: "no"}), on=("",)),
    ]
    _, verdict = course_of(criteria, ["", "b"], {1: "died"})
    assert [found.outcome for found in verdict.findings][1:3] == ["fail", "not judged"]
    assert verdict.findings[2].sentence.startswith("not judged: the run reported above")
    assert [found.sentence for found in verdict.findings][3:] == ["no (case 0)", "as above"]
    assert verdict.status == "crashed" and verdict.points == 1
    text = verdict_text(replace(TASK, criteria=tuple(criteria)), verdict)
    assert "  -   c (not judged: the run reported above did not come to its end)" in text


def test_what_waits_for_the_first_criterion_says_so():
    criteria = [Criterion("a", 1, says({0: "no"})), Criterion("b", 1, says({}))]
    _, verdict = course_of(criteria, [""])
    text = verdict_text(replace(TASK, criteria=tuple(criteria)), verdict)
    assert "b (judged when the first is right)" in text
