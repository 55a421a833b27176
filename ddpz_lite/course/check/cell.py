"""`check("03.weighted_mean", weighted_mean)`: an answer, run and judged in the notebook.

It prints a sentence for each criterion and raises at the end if one failed, so that nbval or a CI
job sees it too.
"""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import replace
from typing import Any

from ddpz_lite.course import interactive
from ddpz_lite.course.check.progress import Progress, own_seed, own_work
from ddpz_lite.course.check.score import Verdict, score
from ddpz_lite.course.check.task import Task, find

WIDTH = 92
MARKS = {"pass": "pass", "fail": "FAIL", "not judged": "  - "}
COLOURS = {"pass": "1;32", "FAIL": "1;31"}  # ANSI: bold green, bold red


class CheckFailed(AssertionError):
    """A task that is not solved yet. The sentences stand above it."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: one line, for the frames of the checker would say nothing."""
        return [f"{type(self).__name__}: {self}"]


class NotAttempted(CheckFailed):
    """A task that still holds its stub."""


class _Check:
    """The one object behind `dz.check`."""

    def __call__(self, task_id: str, answer: Any) -> None:
        """Run `answer` on real ranks, at several world sizes, and say what each criterion is worth.

        Raises KeyError for a task that does not exist, NotAttempted for the stub, CheckFailed for
        what is not right yet.
        """
        from ddpz_lite.course.check.run import draw, observe

        task = find(task_id)
        cases = draw(task)
        if task.own and own_work():
            own = task.own()
            cases = [replace(c, inputs=[given | own for given in c.inputs]) for c in cases]
        verdict = score(task, observe(task, answer, cases))
        keep(verdict)
        if verdict.status == "not attempted":
            raise NotAttempted(
                f"{task.id} is not solved yet: {task.points} points, about {task.minutes} minutes. "
                f'Where to begin: check.hint("{task.id}")'
            )
        text = verdict_text(task, verdict)
        print(coloured(text) if interactive.colour() else text)
        if not verdict.solved:
            raise CheckFailed(f"{task.id}: {verdict.points} of {verdict.out_of} points")

    def hint(self, task_id: str) -> None:
        """Print the next hint of a task: a question, a nudge, a sketch; after these all three."""
        task = find(task_id)
        progress = Progress.load()
        mark = progress.of(task_id)
        of = len(task.hints)
        again = mark.hints >= of
        mark.hints = min(mark.hints + 1, of)
        progress.save()
        for number in range(1 if again else mark.hints, mark.hints + 1):
            print(_wrapped(f"hint {number} of {of}: ", task.hints[number - 1]))

    def seed(self) -> int:
        """The learner's seed, for tasks in which each learner makes a run of their own."""
        return own_seed()

    def times(self, holds: bool) -> None:
        """A claim about measured seconds, which other programs on the machine can spoil.

        `ddpz lessons` sets DDPZ_TIMES=assert: what it stores has shown the claim. Elsewhere a
        busy machine is not an error, and a sentence says what to do.
        """
        if holds:
            return
        if os.environ.get("DDPZ_TIMES") == "assert":
            raise AssertionError("the measured times do not show what the lesson says of them")
        print("These times do not show it: other programs used the processors. Run the cell again.")

    def __repr__(self) -> str:
        return 'check("03.weighted_mean", weighted_mean) judges an answer; check.hint(...) helps'


check = _Check()


def verdict_text(task: Task, verdict: Verdict) -> str:
    """The verdict as the learner reads it."""
    lines = [f"{task.id}   {verdict.points} of {verdict.out_of} points"]
    if verdict.sentence:
        lines.append(_wrapped("  ", verdict.sentence))
    for found in verdict.findings:
        lead = f"  {MARKS[found.outcome]}  "
        if found.outcome == "fail":
            lines.append(_wrapped(lead, f"{found.says}:"))
            lines += [_wrapped(" " * 8, line) for line in found.sentence.splitlines()]
        else:
            later = found.sentence or "judged when the first is right"
            note = f" ({later})" if found.outcome == "not judged" else ""
            lines.append(_wrapped(lead, f"{found.says}{note}"))
    if verdict.solved:
        lines += ["", _wrapped("  ", task.debrief)]
    else:
        lines.append(f'        hint: check.hint("{task.id}")')
    return "\n".join(lines)


def coloured(text: str) -> str:
    """A verdict with its marks in colour. The words say the same without it."""
    for mark, colour in COLOURS.items():
        text = re.sub(rf"^  {mark}(?=  )", f"  \x1b[{colour}m{mark}\x1b[0m", text, flags=re.M)
    return text


def _wrapped(lead: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False
    )


def keep(verdict: Verdict) -> None:
    """Note the points in the learner's progress, unless the work is not theirs."""
    if not own_work():
        return
    progress = Progress.load()
    mark = progress.of(verdict.task)
    mark.out_of = verdict.out_of
    mark.points = max(mark.points, verdict.points)
    mark.tries += verdict.status != "not attempted"
    progress.save()
