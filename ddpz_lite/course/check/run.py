"""An answer's cases on ranks of this machine: for the one who learns, who has no reason to cheat.

The grader observes the same cases in a sandbox (`grader.arena`) and hands the same `Observed` to
the same judges.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddpz_lite.course.check import data
from ddpz_lite.course.check import job as jobs
from ddpz_lite.course.check.chance import generator
from ddpz_lite.course.check.score import Judging, Verdict
from ddpz_lite.course.check.task import Case, Observed, Task
from ddpz_lite.course.check.together import observe_together
from ddpz_lite.launcher import CannotSend, RankFailed, launch

OUTCOMES = {
    "raised": "raised",
    "mismatch": "mismatch",
    "exited": "died",
    "killed": "died",
    "stalled": "stuck",
    "timeout": "late",
}
STUB = re.compile(r"ranks? [\d, and]+ raised NotImplementedError at ")
FRAME = re.compile(r'File "(.*)", line (\d+)')
BUSY = 3  # a learner's machine has other work, too; who waits for another rank is found earlier


def draw(task: Task, key: str | None = None) -> list[Case]:
    """The cases of a task. Without a key, the ones that a learner always gets."""
    if key is not None:
        return task.cases(generator(key))
    seed = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:6])
    return task.cases(torch.Generator().manual_seed(seed))


def observe(task: Task, answer: Any, cases: Sequence[Case]) -> list[Observed]:
    """Run `answer` in the cases that its verdict needs, in their order.

    Criteria pull them: an answer that fails the first criterion in one case is run in no other. The
    stub is run once: it says the same in all of them. After a case that used up its time the others
    are not run, so that one waits once for an endless loop.
    """
    judging = Judging(task, cases)
    while (index := judging.wanted()) is not None:
        _add(judging, index, _observe(task, answer, cases[index]))
    return judging.observed()


def judge_all(
    task: Task,
    answers: Sequence[Any],
    cases: Sequence[Case],
    *,
    exact: bool = True,
    seconds: float | None = None,
    enough: Callable[[int, Judging], bool] = lambda index, judging: False,
) -> list[Verdict]:
    """The verdict on each answer, as `score(task, observe(...))` gives it, in far fewer launches.

    Answers that need the same case have their turns in one launch; those that do not come to their
    end there are run alone. Not exact: one that does not come to its end has "raised", and nothing
    is run again to say how. seconds: until a turn is ended; by default the case's own time.
    enough(number of an answer, its judging so far): whether what it did in other cases is of no
    interest.
    """
    every = [Judging(task, cases) for _ in answers]
    while waiting := [
        (wanted, i)
        for i, one in enumerate(every)
        if (wanted := one.wanted()) is not None and not enough(i, one)
    ]:
        index = min(waiting)[0]
        turn = [i for wanted, i in waiting if wanted == index]
        case = cases[index]
        seen = observe_together(task, [answers[i] for i in turn], case, seconds)
        for i, observed in zip(turn, seen, strict=True):
            if observed is None and not exact:
                observed = Observed(case, "raised", "it did not come to its end")
            _add(every[i], index, observed or _observe(task, answers[i], case))
    return [judging.verdict() for judging in every]


def _add(judging: Judging, index: int, seen: Observed) -> None:
    """Hand a case to the judging, and with a case that used up its time all that are left."""
    if seen.outcome != "late":
        judging.add(index, seen)
        return
    for other, case in enumerate(judging.cases):
        if other not in judging.seen:
            judging.add(other, replace(seen, outcome="stuck", case=case))


def _observe(task: Task, answer: Any, case: Case) -> Observed:
    inputs = [data.pack(given) for given in case.inputs]
    try:
        run = launch(
            _on_rank,
            case.world,
            args=(task.job, answer, inputs, task.uses_own),
            timeout=BUSY * case.timeout,
            network=case.network,
            output="by_rank",
        )
    except RankFailed as failed:
        outcome, sentence = _ending(failed)
        return Observed(case, outcome, sentence, ledger=failed.ledger)
    except CannotSend as error:
        return Observed(case, "raised", str(error))
    results = [data.unpack(raw) for raw in run]
    return Observed(case, "ok", "", results, run.ledger, run.spans)


def _on_rank(job: str, answer: Any, inputs: Sequence[bytes], guarded: bool) -> bytes:
    return jobs.run(job, answer, data.unpack(inputs[dist.get_rank()]), guarded)


def _ending(failed: RankFailed) -> tuple[str, str]:
    """(outcome, the sentence about it) of a job that did not end well."""
    sentence = str(failed).partition("\n\n")[0].strip()
    if _is_stub(str(failed), failed.where):
        return "unsolved", "not attempted yet"
    return OUTCOMES[failed.kind], sentence


def _is_stub(story: str, where: str | None) -> bool:
    """Whether the answer's own line raised NotImplementedError, and not torch below it."""
    if not STUB.match(story) or not (frames := FRAME.findall(story)):
        return False
    return f"{frames[-1][0]}:{frames[-1][1]}" == where
