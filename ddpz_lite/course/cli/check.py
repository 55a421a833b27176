"""`ddpz check`: run an exercise from top to bottom and print what its checks say."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import DeadKernelError
from tqdm import tqdm

from ddpz_lite.course import interactive
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.cell import coloured
from ddpz_lite.course.check.task import Task, lessons, tasks
from ddpz_lite.course.cli.lessons import ANSI, client_of
from ddpz_lite.course.cli.shared import UserError, exercises, shown

POINTS = re.compile(r"^(\S+) +(\d+) of \d+ points$", re.M)
PLACE = re.compile(r"Cell In\[(\d+)\],? line (\d+)|Input In \[(\d+)\].*?line (\d+)")
OWN_PLACE = re.compile(r" *\(\S+, line \d+\)$")  # at the end of a syntax error


@dataclass(frozen=True)
class Result:
    """What became of one task: its points, and the sentences that the notebook shows."""

    task: Task
    points: int
    text: str


def run(options: Namespace) -> int:
    """Print what each check says, and the sum; 1 if not all tasks are solved."""
    lesson, path = _find(options.lesson, options.dir)
    notebook = _read(path)
    stopped = _execute(notebook, path, options.timeout)
    results = [_result(task, notebook, stopped) for task in tasks(lesson)]
    if not options.dir:
        print(f"{shown(path)}\n")
    text = report(results)
    print(coloured(text) if interactive.colour() else text)
    return 0 if all(one.points == one.task.points for one in results) else 1


def report(results: Sequence[Result]) -> str:
    """The sentences about each task, as in the notebook, and the sum."""
    points, out_of = sum(one.points for one in results), sum(one.task.points for one in results)
    solved = sum(one.points == one.task.points for one in results)
    parts = [one.text for one in results]
    parts.append(f"{points} of {out_of} points; {solved} of {len(results)} tasks solved")
    return "\n\n".join(parts)


def _find(asked: str, where: str | None) -> tuple[str, Path]:
    """The lesson and its notebook, of which either is asked for."""
    notebook = Path(asked) if asked.endswith(".ipynb") else None
    if notebook and not notebook.is_file():
        raise UserError(f"there is no notebook {asked}.")
    if notebook and where:
        raise UserError(f"{asked} says where it is. Leave --dir out.")
    lesson = notebook.name.partition("_")[0] if notebook else asked
    if lesson not in lessons():
        raise UserError(f"lesson {lesson!r} has no exercises; these have: {', '.join(lessons())}.")
    if notebook:
        return lesson, notebook
    places = [Path(where)] if where else exercises()
    name = f"{lesson}_*.ipynb"
    place, found = next(((p, f) for p in places if (f := sorted(p.glob(name)))), (places[-1], []))
    if not found:
        raise UserError(f"no notebook {name} in {place}/. Say where it is with --dir.")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"more than one notebook for {lesson} in {place}/: {names}. Keep one.")
    return lesson, found[0]


def _read(path: Path) -> nbformat.NotebookNode:
    try:
        return notebooks.read(path)
    except notebooks.Malformed as error:
        raise UserError(str(error)) from None


def _execute(notebook: nbformat.NotebookNode, path: Path, timeout: float) -> str:
    """Run all cells, also after an error; what stopped the run, or nothing."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    on = {"interrupt_on_timeout": True, "allow_errors": True}  # continue: the other tasks count
    client = client_of(notebook, path, timeout, **on)
    with tqdm(total=len(notebook.cells), unit="cell", leave=False, disable=None) as bar:
        client.on_cell_complete = lambda **_: bar.update()
        try:
            client.execute()
        except DeadKernelError:
            return "the kernel died"
    return ""


def _result(task: Task, notebook: nbformat.NotebookNode, stopped: str) -> Result:
    """What the check cell of a task printed, or what kept it from running."""
    cells = [c for c in notebook.cells if notebooks.of(c) == task.id and c.cell_type == "code"]
    checks = [cell for cell in cells if notebooks.role(cell) == "check"]
    if not checks:
        reason = "Its check cell is missing. Fix: begin with a fresh copy of the exercise."
        return Result(task, 0, _unjudged(task, reason))
    text = ANSI.sub("", "".join(o.text for o in checks[-1].outputs if o.output_type == "stream"))
    if given := [points for name, points in POINTS.findall(text) if name == task.id]:
        return Result(task, int(given[-1]), text.strip("\n"))
    errors = (_error(cell) for cell in cells)
    reason = next(filter(None, errors), stopped or "The check printed nothing.")
    return Result(task, 0, _unjudged(task, reason))


def _unjudged(task: Task, reason: str) -> str:
    """A verdict in the notebook's form, of a task whose check printed none."""
    return f"{task.id}   0 of {task.points} points\n  {reason}"


def _error(cell: Any) -> str:
    """What a cell raised and where; "" if it raised nothing."""
    for output in cell.outputs:
        if output.output_type != "error":
            continue
        if output.ename == "NotAttempted":
            return ANSI.sub("", output.evalue)
        if output.ename == "KeyboardInterrupt":
            return f"cell {cell.execution_count} was stopped: it did not end in time"
        words = ANSI.sub("", f"{output.ename}: {output.evalue}").splitlines()[0]
        return f"{_place(cell, output)}: {OWN_PLACE.sub('', words)}"
    return ""


def _place(cell: Any, output: Any) -> str:
    """The line of the notebook in which an error arose, as "cell 7, line 1"."""
    places = PLACE.findall(ANSI.sub("", "\n".join(output.traceback)))
    number, line = next((p[:2] if p[0] else p[2:] for p in reversed(places)), ("", ""))
    return f"cell {number}, line {line}" if line else f"cell {cell.execution_count}"
