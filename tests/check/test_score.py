"""From observations to points and sentences; no rank is started."""

from __future__ import annotations

from dataclasses import replace

from ddpz_lite.course.check.cell import told
from ddpz_lite.course.check.score import NO_END, score
from ddpz_lite.course.check.task import Case, Criterion, Observed, find

CASES = [Case("equal parts", [None], kind="equal"), Case("no samples", [None], kind="none")]


def task(*criteria: Criterion):
    return replace(find("03.weighted_mean"), criteria=criteria)


def right(_: Observed) -> None:
    return None


def test_what_came_to_no_end_is_told_once_and_costs_all_that_look_there():
    """The next criterion has nothing to judge: it says so, and not the same sentence again."""
    one = task(
        Criterion("the mean", 2, right, on=("equal",)),
        Criterion("a rank without samples", 1, right, on=("none",)),
        Criterion("one collective", 1, right, on=("equal", "none")),
    )
    seen = [Observed(CASES[0], "ok"), Observed(CASES[1], "stuck", "rank 0 waits in all_reduce #0")]
    verdict = score(one, seen)
    assert [found.outcome for found in verdict.findings] == ["pass", "fail", "not judged"]
    assert (verdict.points, verdict.solved, verdict.status) == (2, False, "timeout")
    text = told(one, verdict)
    assert text.count("rank 0 waits in all_reduce #0") == 1 and "as above" not in text
    assert f"one collective ({NO_END})" in " ".join(text.split())


def test_the_same_mistake_in_two_aspects_is_as_above():
    def wrong(_: Observed) -> str:
        return "It is the sum."

    one = task(
        Criterion("first", 1, right), Criterion("second", 1, wrong), Criterion("third", 1, wrong)
    )
    verdict = score(one, [Observed(case, "ok") for case in CASES])
    assert [found.sentence for found in verdict.findings] == [
        "",
        "It is the sum. (equal parts)",
        "as above",
    ]


def test_what_waits_for_the_first_aspect_says_so():
    def wrong(_: Observed) -> str:
        return "It is the sum."

    one = task(Criterion("first", 1, wrong), Criterion("second", 1, right))
    assert "second (judged when the first is right)" in told(
        one, score(one, [Observed(CASES[0], "ok")])
    )
