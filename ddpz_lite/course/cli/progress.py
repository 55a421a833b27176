"""`ddpz progress`: what of the exercises is solved."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import ddpz_lite
from ddpz_lite.course.check.progress import Mark, Progress
from ddpz_lite.course.check.task import Task, lessons, tasks
from ddpz_lite.course.cli.shared import CHECKOUT, UserError

BAR = 10  # characters


def run(options: Namespace) -> int:
    """Print the table over all tasks; with --reset forget them first."""
    try:
        progress = Progress.load()
    except ValueError as error:
        raise UserError(str(error)) from None
    if options.reset is not None:
        print(_reset(progress, options.reset or lessons()))
        return 0
    print(table([task for lesson in lessons() for task in tasks(lesson)], progress))
    print(f"\ncourse: ddpz-lite {ddpz_lite.__version__} in {_from_home(CHECKOUT)}")
    print(f"kept in {_from_home(progress.path)}, which all copies of the course share")
    return 0


def _from_home(path: Path) -> str:
    """A path with ~ for the user's folder."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _reset(progress: Progress, numbers: Sequence[str]) -> str:
    """Forget the marks of these lessons' tasks, and say where they are still kept."""
    if unknown := sorted({*numbers} - {*lessons()}):
        there = ", ".join(lessons())
        raise UserError(f"lesson {unknown[0]!r} has no exercises; these have: {there}.")
    forgotten = [task for task in progress.marks if task.partition(".")[0] in numbers]
    if not forgotten:
        return "There is nothing to forget."
    before = progress.copy()
    for task in forgotten:
        del progress.marks[task]
    progress.save()
    return f"Forgot {len(forgotten)} tasks. As it was before: {before}"


def table(there: list[Task], progress: Progress) -> str:
    """A line per task: a bar, points, hints asked for; and the sum."""
    marks = {task.id: progress.marks.get(task.id, Mark()) for task in there}
    if not any(mark.tries or mark.points for mark in marks.values()):
        first = there[0]
        return (
            f"Nothing is solved yet: {len(there)} tasks are waiting. The first is {first.id}, "
            f"about {first.minutes} minutes, in my/exercises/; lesson {first.lesson} leads to it."
        )
    width = max(len(task.id) for task in there)
    rows = [f"{'task':<{width}}  {'':<{BAR}}  points    hints"]
    for task in there:
        mark = marks[task.id]
        hints = f"{mark.hints} of {len(task.hints)}" if mark.hints else ""
        points = min(mark.points, task.points)
        rows.append(f"{_row(task.id, width, points, task.points)}  {hints}".rstrip())
    points = sum(min(marks[task.id].points, task.points) for task in there)
    solved = sum(marks[task.id].points >= task.points for task in there)
    rows.append(_row("sum", width, points, sum(task.points for task in there)).rstrip())
    rows.append(f"{solved} of {len(there)} tasks solved")
    return "\n".join(rows)


def _row(name: str, width: int, points: int, out_of: int) -> str:
    full = BAR * points // out_of
    bar = "█" * full + "░" * (BAR - full)
    return f"{name:<{width}}  {bar}  {points:>3} of {out_of:<3}"
