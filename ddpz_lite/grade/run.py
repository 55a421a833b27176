"""An answer's cases on ranks of this machine: for the one who learns, who has no reason to cheat.

The grader observes the same cases in a sandbox (`grade.grader`) and hands the same `Observed` to
the same judges.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..launcher import CannotSend, RankFailed, launch
from . import data
from . import job as jobs
from .chance import generator
from .task import Case, Observed, Task

OUTCOMES = {
    "raised": "raised",
    "mismatch": "mismatch",
    "exited": "died",
    "killed": "died",
    "stalled": "stuck",
    "timeout": "late",
}
RAISED = re.compile(r"ranks? [\d, and]+ raised (?:\w+\.)*(\w+)")


def draw(task: Task, key: str | None = None) -> list[Case]:
    """The cases of a task. Without a key, the ones that a learner always gets."""
    if key is not None:
        return task.cases(generator(key))
    seed = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:6])
    return task.cases(torch.Generator().manual_seed(seed))


def observe(task: Task, answer: Any, cases: Sequence[Case]) -> list[Observed]:
    """Run `answer` in each case.

    The stub is run once: it says the same in all of them. After a case that used up its time the
    others are not run, so that whoever wrote an endless loop waits for it once.
    """
    seen: list[Observed] = []
    for case in cases:
        seen.append(_observe(task, answer, case))
        if seen[-1].outcome == "unsolved":
            break
        if seen[-1].outcome == "late":
            stuck = replace(seen[-1], outcome="stuck")
            rest = [replace(stuck, case=left) for left in cases[len(seen) :]]
            return [*seen[:-1], stuck, *rest]
    return seen


def _observe(task: Task, answer: Any, case: Case) -> Observed:
    inputs = [data.pack(mine) for mine in case.inputs]
    try:
        run = launch(
            _on_rank,
            case.world,
            args=(task.job, answer, inputs, task.uses_own),
            timeout=case.timeout,
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
    if (raised := RAISED.match(sentence)) and raised[1] == "NotImplementedError":
        return "unsolved", "not attempted yet"
    return OUTCOMES[failed.kind], sentence
