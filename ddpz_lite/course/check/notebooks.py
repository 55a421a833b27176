"""Exercise notebooks: the master with its solutions, and the learner's copy that is made from it.

solutions/NN_name.ipynb is the master. Its notebook metadata says

    "ddpz": {"exercise": "03", "title": "Data parallelism", "minutes": 40}

and its cells say what they are for, in metadata `ddpz` and in their ids:

    {"role": "given"}                             code that everyone gets: imports, helpers
    {"role": "widget"}                            something to turn; no part of a graded program
    {"task": "03.weighted_mean", "role": "text"}      id weighted_mean-text: the task and its points
    {"task": "03.weighted_mean", "role": "answer"}    id weighted_mean-answer
    {"task": "03.weighted_mean", "role": "check"}     id weighted_mean-check

An answer's body stands between BEGIN and END; in the learner's copy one line, STUB, stands for it.
"""

from __future__ import annotations

import ast
import copy
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from ddpz_lite.course.check.cell import verdict_text
from ddpz_lite.course.check.score import Finding, Verdict
from ddpz_lite.course.check.task import Task, lessons, tasks

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = "raise NotImplementedError"
WHEN_SOLVED = "When solved:"
IMPORT = "from ddpz_lite import check"
ROLES = ("text", "answer", "check")
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


class Malformed(ValueError):
    """A master that does not have the form of an exercise."""


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook in a file. Raises Malformed for a file that is none."""
    try:
        return nbformat.v4.reads(path.read_text(encoding="utf-8"))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise Malformed(f"{path.name} is not a notebook of version 4: {error}") from None


def master(path: Path) -> nbformat.NotebookNode:
    """The master in a file. Raises Malformed with one line: the first thing wrong with it."""
    notebook = read(path)
    for complaint in complaints(notebook, path.stem):
        raise Malformed(f"{path.parent.name}/{path.name}: {complaint}")
    return notebook


def write_text(notebook: nbformat.NotebookNode) -> str:
    """The notebook as its file says it, with one newline at the end."""
    return nbformat.v4.writes(notebook).rstrip("\n") + "\n"


def make(path: Path) -> tuple[str, str]:
    """(the master with its grading metadata, the learner's copy) as texts of notebook files.

    Raises Malformed with one line: the first thing that is wrong with the master, and where.
    """
    notebook = master(path)
    _mark(notebook)
    return write_text(notebook), write_text(blank(notebook))


def blank(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The learner's copy: stubs for solutions; no output but, folded, what a solved check says."""
    notebook = copy.deepcopy(notebook)
    about = {task.id: task for task in tasks(notebook.metadata["ddpz"]["exercise"])}
    notebook.metadata = nbformat.from_dict(
        {
            "ddpz": notebook.metadata["ddpz"],
            "kernelspec": dict(KERNELSPEC),
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if role(cell) == "answer":
            cell.source = stubbed(cell.source)
        elif role(cell) == "check":
            cell.outputs = [_folded(praise(about[of(cell)]))]
            cell.execution_count = 0  # JupyterLab shows none; without one nbval refuses outputs
    return notebook


def _folded(text: str) -> nbformat.NotebookNode:
    """The output of a check that has not run: closed, so that it is not taken for a verdict."""
    page = f"<details><summary>{WHEN_SOLVED}</summary><pre>{html.escape(text)}</pre></details>"
    data = {"text/html": page, "text/plain": f"{WHEN_SOLVED}\n\n{text}"}
    return nbformat.v4.new_output("display_data", data=data)


def praise(task: Task) -> str:
    """What the check of a solved task prints."""
    findings = tuple(Finding(a.says, a.points, a.points, "pass") for a in task.criteria)
    return verdict_text(task, Verdict(task.id, "ok", findings)) + "\n"


def role(cell: Any) -> str | None:
    """ "given", "text", "answer", "check", or None for a cell that only explains."""
    return cell.metadata.get("ddpz", {}).get("role")


def of(cell: Any) -> str | None:
    """The id of the task that a cell belongs to."""
    return cell.metadata.get("ddpz", {}).get("task")


def program(notebook: nbformat.NotebookNode, task_id: str) -> list[tuple[str, str]]:
    """What runs to grade a task: (cell id, source) of given cells and of answers up to its own.

    Raises KeyError if the notebook has no answer cell for the task.
    """
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and role(cell) in ("given", "answer"):
            cells.append((cell.id, cell.source))
            if of(cell) == task_id:
                return cells
    raise KeyError(f"the notebook has no answer cell for {task_id}")


def stubbed(source: str) -> str:
    """The source with STUB in place of each solution, at the indentation of its BEGIN.

    Raises Malformed for markers that do not come in pairs.
    """
    kept, inside = [], None
    for number, line in enumerate(source.splitlines(), 1):
        word, indent = line.strip(), line[: len(line) - len(line.lstrip())]
        if word == BEGIN:
            if inside is not None:
                raise Malformed(f"line {number} begins a solution inside that of line {inside}")
            inside = number
            kept.append(indent + STUB)
        elif word == END:
            if inside is None:
                raise Malformed(f"line {number} ends a solution that no line began")
            inside = None
        elif inside is None:
            kept.append(line)
    if inside is not None:
        raise Malformed(f"the solution that line {inside} begins has no {END!r}")
    if STUB not in map(str.strip, kept):
        raise Malformed(f"there is no solution between {BEGIN!r} and {END!r}")
    return "\n".join(kept)


# ---- the form ----


def complaints(notebook: nbformat.NotebookNode, name: str) -> Iterator[str]:
    """What is wrong with a master of that name, the first things first."""
    about = notebook.metadata.get("ddpz", {})
    lesson = about.get("exercise")
    if lesson not in lessons() or not name.startswith(f"{lesson}_"):
        yield (
            f'the notebook\'s metadata `ddpz` says exercise {lesson!r}; expected is "NN" of the '
            f"file's name, one of {', '.join(lessons())}"
        )
        return
    there = {task.id: task for task in tasks(lesson)}
    yield from _header(notebook, list(there.values()))
    yield from _cells(notebook, there)


def _header(notebook: nbformat.NotebookNode, there: list[Task]) -> Iterator[str]:
    about = notebook.metadata["ddpz"]
    first = notebook.cells[0].source if notebook.cells else ""
    minutes = sum(task.minutes for task in there)
    heading, title = first.partition("\n")[0], str(about.get("title"))
    if not heading.startswith("# ") or title.casefold() not in heading.casefold():
        yield f"the first cell's heading does not say the title of the metadata, {title!r}"
    if about.get("minutes") != minutes:
        yield f"the metadata says {about.get('minutes')} minutes; the tasks sum up to {minutes}"
    if f"{minutes} minutes" not in first:
        yield f"the first cell does not say {f'{minutes} minutes'!r}"


def _cells(notebook: nbformat.NotebookNode, there: dict[str, Task]) -> Iterator[str]:
    wanted = [(task, part) for task in there for part in ROLES]
    seen = []
    for cell in notebook.cells:
        part, task = role(cell), of(cell)
        if "generated" in cell.metadata.get("ddpz", {}):
            continue
        where = f"cell {cell.get('id')!r}"
        if cell.cell_type == "code" and part not in ("given", "widget", "answer", "check"):
            yield f"{where} has no role: given, widget, answer or check, in its metadata `ddpz`"
            return
        if part != "answer" and (BEGIN in cell.source or END in cell.source):
            yield f"{where} holds the marks of a solution, and it is not an answer"
        if task is None and part in (None, "given", "widget"):
            continue
        if task not in there or part not in ROLES:
            yield f"{where}: there is no {part} of a task {task!r}; tasks are {', '.join(there)}"
            return
        seen.append((task, part))
        yield from (f"{where}: {wrong}" for wrong in _cell(cell, there[task], part))
    if seen != wanted:
        missing = [f"{task} {part}" for task, part in wanted if (task, part) not in seen]
        yield (
            f"missing: {', '.join(missing)}"
            if missing
            else "cells are not in the order of the tasks, each with text, answer, check, once"
        )
    first = next((cell for cell in notebook.cells if role(cell) in ("given", "answer")), None)
    if first is None or role(first) != "given" or IMPORT not in first.source:
        yield f"the first code cell must be given and hold {IMPORT!r}"


def _cell(cell: Any, task: Task, part: str) -> Iterator[str]:
    ident = f"{task.id.partition('.')[2]}-{part}"
    if cell.get("id") != ident:
        yield f"its id must be {ident!r}"
    if cell.cell_type != ("markdown" if part == "text" else "code"):
        yield f"a {cell.cell_type} cell cannot be the {part} of a task"
    elif part == "text":
        yield from _text(cell.source, task)
    elif part == "answer":
        yield from _answer(cell.source, task)
    elif cell.source != f'check("{task.id}", {task.answer})':
        yield f'it must be exactly check("{task.id}", {task.answer})'


def _text(source: str, task: Task) -> Iterator[str]:
    if not source.startswith("## "):
        yield "it must begin with a heading, '## ...'"
    for amount, word in ((task.points, "points"), (task.minutes, "minutes")):
        numbers = re.findall(rf"(\d+) {word}", source)
        if str(amount) not in numbers:
            yield f"it says {' and '.join(numbers) or 'no'} {word}; the task has '{amount} {word}'"


def _answer(source: str, task: Task) -> Iterator[str]:
    try:
        body = ast.parse(stubbed(source)).body
    except Malformed as error:
        yield str(error)
    except SyntaxError as error:
        yield f"without its solution it is not Python any more: {error.msg}, line {error.lineno}"
    else:
        names = [part.name for part in body if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
        if task.answer not in names:
            yield f"it does not define {task.answer}"
        yield from _early(body)


def _early(body: list[ast.stmt]) -> Iterator[str]:
    """A stub that the cell itself runs into, before anything is checked."""
    for part in body:
        if isinstance(part, ast.Raise):
            yield f"the solution at line {part.lineno} is in no function: its stub stops the cell"
        elif isinstance(part, ast.ClassDef):
            yield from _early(part.body)


# ---- nbgrader ----


def _mark(notebook: nbformat.NotebookNode) -> None:
    """Give the cells the metadata by which nbgrader knows them, version 3 of its schema."""
    points = {task.id: task.points for task in tasks(notebook.metadata["ddpz"]["exercise"])}
    for cell in notebook.cells:
        part = role(cell)
        cell.metadata.pop("nbgrader", None)
        if part is None:
            continue
        cell.metadata["nbgrader"] = {
            "grade": part == "check",
            "grade_id": cell.id,
            "locked": part != "answer",
            "schema_version": 3,
            "solution": part == "answer",
            "task": False,
        }
        if part == "check":
            cell.metadata["nbgrader"]["points"] = points[of(cell)]


# ---- the two folders ----


def stale(solutions: Path, exercises: Path) -> tuple[dict[Path, str], list[str]]:
    """(the files that differ from what the masters make of them, what is wrong with masters).

    The first maps a path to its text as it should be. The second has one line per bad master, and
    one per exercise that has no master.
    """
    wanted: dict[Path, str] = {}
    wrong: list[str] = []
    masters = sorted(solutions.glob("*.ipynb"))
    for path in masters:
        try:
            wanted[path], wanted[exercises / path.name] = make(path)
        except Malformed as error:
            wrong.append(str(error))
    names = {path.name for path in masters}
    for path in sorted(exercises.glob("*.ipynb")):
        if path.name not in names:
            wrong.append(f"{exercises.name}/{path.name} has no master in {solutions.name}/")
    differ = {
        path: text
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    return differ, wrong


def answered(path: Path) -> list[str]:
    """The tasks of an exercise file whose answer cell no longer has its stub."""
    return [
        str(of(cell))
        for cell in read(path).cells
        if role(cell) == "answer" and STUB not in cell.source
    ]
