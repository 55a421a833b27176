"""`ddpz check`: run an exercise from top to bottom and say what each task is worth."""

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

from ddpz_lite.course import interactive as attended
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import Task, lessons, tasks
from ddpz_lite.course.cli.lessons import ANSI, client_of
from ddpz_lite.course.cli.shared import UserError, exercises, shown

POINTS = re.compile(r"^(\S+) +(\d+) of \d+ points$", re.M)
FAILED = re.compile(r"^  FAIL  (.*?):$", re.M)
WIDTH = 60  # of what is said beside the points


@dataclass(frozen=True)
class Line:
    """What became of one task."""

    task: Task
    points: int
    says: str


def run(options: Namespace) -> int:
    """Print a line per task and the sum; 1 if not all tasks are solved."""
    lesson, path = _find(options.lesson, options.dir)
    notebook = _read(path)
    stopped = _execute(notebook, path, options.timeout)
    lines = [_line(task, notebook, stopped) for task in tasks(lesson)]
    if not options.dir:
        print(shown(path))
    text = table(lines)
    print(coloured(text) if attended.colour() else text)
    return 0 if all(line.points == line.task.points for line in lines) else 1


def table(lines: Sequence[Line]) -> str:
    """One line per task, the sum, and where to get help."""
    width = max(len(line.task.id) for line in lines)
    rows = [
        f"{line.task.id:<{width}}  {line.points:>2} of {line.task.points:>2}  {line.says}"
        for line in lines
    ]
    points, out_of = sum(x.points for x in lines), sum(x.task.points for x in lines)
    rows.append(f"{'sum':<{width}}  {points:>2} of {out_of:>2}")
    if open_ := [line.task.id for line in lines if line.points < line.task.points]:
        rows.append(f'a hint, in the notebook: check.hint("{open_[0]}")')
    return "\n".join(rows)


def coloured(text: str) -> str:
    """The table with what is solved in green and what is not in red."""
    text = re.sub(r"  solved$", "  \x1b[1;32msolved\x1b[0m", text, flags=re.M)
    return re.sub(r"  not yet(?=: )", "  \x1b[1;31mnot yet\x1b[0m", text)


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
    """Run all cells, whatever they raise; what stopped the run, or nothing."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    on = {"interrupt_on_timeout": True, "allow_errors": True}  # go on: the other tasks count
    client = client_of(notebook, path, timeout, **on)
    with tqdm(total=len(notebook.cells), unit="cell", leave=False, disable=None) as bar:
        client.on_cell_complete = lambda **_: bar.update()
        try:
            client.execute()
        except DeadKernelError:
            return "the kernel died"
    return ""


def _line(task: Task, notebook: nbformat.NotebookNode, stopped: str) -> Line:
    """What the check cell of a task, or else what stands in its way, says."""
    cells = [c for c in notebook.cells if notebooks.of(c) == task.id and c.cell_type == "code"]
    checks = [cell for cell in cells if notebooks.role(cell) == "check"]
    if not checks:
        return Line(task, 0, "its check cell is missing: begin with a fresh copy of the exercise")
    text = "".join(o.text for o in checks[-1].outputs if o.output_type == "stream")
    if said := [points for name, points in POINTS.findall(text) if name == task.id]:
        failed = "; ".join(FAILED.findall(text))
        return Line(task, int(said[-1]), _short(f"not yet: {failed}" if failed else "solved"))
    errors = [_error(cell) for cell in cells]
    return Line(task, 0, _short(next(filter(None, errors), stopped or "the check said nothing")))


def _error(cell: Any) -> str:
    for output in cell.outputs:
        if output.output_type == "error" and output.ename == "NotAttempted":
            return "not attempted"
        if output.output_type == "error" and output.ename == "KeyboardInterrupt":
            return "stopped: it did not end in time"
        if output.output_type == "error":
            return ANSI.sub("", f"{output.ename}: {output.evalue}").splitlines()[0]
    return ""


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3].rstrip() + "..."
