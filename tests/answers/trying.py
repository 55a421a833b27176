"""Runs answers as their notebook would, and judges them: for the tests and for the table."""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat

from answers import Wrong
from ddpz_lite.grade import notebooks
from ddpz_lite.grade.run import draw, observe
from ddpz_lite.grade.score import Verdict, score
from ddpz_lite.grade.task import Task

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"


def lessons() -> list[str]:
    """The numbers of the lessons that have solutions."""
    return sorted(path.stem.partition("_")[0] for path in SOLUTIONS.glob("*.ipynb"))


def master(lesson: str) -> nbformat.NotebookNode:
    (path,) = SOLUTIONS.glob(f"{lesson}_*.ipynb")
    return notebooks.read(path)


def variants(task_id: str) -> list[Wrong]:
    """The wrong answers to a task; none where its lesson has no such file."""
    try:
        module = importlib.import_module(f"answers.lesson{task_id.partition('.')[0]}")
    except ModuleNotFoundError:
        return []
    return module.WRONG.get(task_id, [])


def judge(task: Task, notebook: nbformat.NotebookNode, source: str | None = None) -> Verdict:
    """The verdict on the notebook's own answer, or on `source` in its place."""
    cells = notebooks.program(notebook, task.id)
    if source is not None:
        given = [c.id for c in notebook.cells if notebooks.role(c) == "given"]
        cells = [cell for cell in cells if cell[0] in given] + [("wrong", source)]
    return score(task, observe(task, run(cells)[task.answer], draw(task)))


def run(cells: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What is defined after running the sources in one namespace, as a notebook's cells."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for name, source in cells:
        file = f"<{name} {hash(source) & 0xFFFFFF:x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), space)
    return space


def sentences(verdict: Verdict) -> str:
    """All that the verdict says to the learner, in one line."""
    return " ".join([verdict.sentence, *(found.sentence for found in verdict.findings)]).strip()


def failed(verdict: Verdict) -> set[str]:
    """The aspects that failed, by what they say."""
    return {found.says for found in verdict.findings if found.outcome == "fail"}


def missed(task: Task, wrong: Wrong, verdict: Verdict) -> str:
    """What a wrong answer should have got and did not; empty if it got its own sentence."""
    loses = set(wrong.loses or (task.aspects[0].says,))
    if unknown := loses - {aspect.says for aspect in task.aspects}:
        return f"the task has no aspects {unknown}"
    if not loses <= failed(verdict) or verdict.solved:
        return f"should lose {loses}, lost {failed(verdict)}"
    if wrong.says not in sentences(verdict):
        return f"should hear {wrong.says!r}, heard {sentences(verdict)!r}"
    return ""
