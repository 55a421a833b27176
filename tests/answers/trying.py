"""Runs answers as their notebook would, and judges them: for the tests and for the table."""

from __future__ import annotations

import functools
import importlib
import linecache
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat

from answers import Wrong
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.run import draw, judge_all
from ddpz_lite.course.check.score import Judging, Verdict
from ddpz_lite.course.check.task import Task

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"


def lessons() -> list[str]:
    """The numbers of the lessons that have solutions."""
    return sorted(path.stem.partition("_")[0] for path in SOLUTIONS.glob("*.ipynb"))


def master(lesson: str) -> nbformat.NotebookNode:
    (path,) = SOLUTIONS.glob(f"{lesson}_*.ipynb")
    return notebooks.read(path)


def answers(lesson: str) -> ModuleType:
    """The module of a lesson's answers: WRONG, RIGHT, PROMISES, EQUIVALENT."""
    return importlib.import_module(f"answers.lesson{lesson}")


def variants(task_id: str) -> list[Wrong]:
    """The wrong answers to a task."""
    return answers(task_id.partition(".")[0]).WRONG.get(task_id, [])


def right(task_id: str) -> list[tuple[str, str]]:
    """The right answers to a task beside its solution: (what is different, the answer cell)."""
    return answers(task_id.partition(".")[0]).RIGHT.get(task_id, [])


def define(task: Task, notebook: nbformat.NotebookNode, source: str | None = None) -> Any:
    """The notebook's own answer, or what `source` defines in its place."""
    cells = notebooks.program(notebook, task.id)
    if source is not None:
        given = [c.id for c in notebook.cells if notebooks.role(c) == "given"]
        cells = [cell for cell in cells if cell[0] in given] + [("wrong", source)]
    return run(cells)[task.answer]


# An answer to a task: its kind ("wrong", "right" or "solution") and its name.
SOLUTION = ("solution", "")


def every(task: Task) -> list[tuple[str, str]]:
    """All answers to a task."""
    wrong = [("wrong", one.name) for one in variants(task.id)]
    return [*wrong, *(("right", name) for name, _ in right(task.id)), SOLUTION]


@functools.cache
def tried(task: Task, chosen: frozenset[tuple[str, str]]) -> dict[tuple[str, str], Verdict]:
    """The chosen answers to a task, run together; a wrong one until it has heard its sentence."""
    notebook = master(task.lesson)
    wrong_ones = {("wrong", one.name): one for one in variants(task.id)}
    sources = {key: one.source for key, one in wrong_ones.items()}
    sources |= {("right", name): source for name, source in right(task.id)} | {SOLUTION: None}
    names = [key for key in every(task) if key in chosen]

    def heard(number: int, judging: Judging) -> bool:
        wrong, failed = wrong_ones.get(names[number]), judging.failed()
        if wrong is None:
            return False
        said = " ".join(failed.values())
        return lost(task, wrong) <= failed.keys() and wrong.says in said

    answers = [define(task, notebook, sources[key]) for key in names]
    verdicts = judge_all(task, answers, draw(task), enough=heard)
    return dict(zip(names, verdicts, strict=True))


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


def words(verdict: Verdict) -> list[str]:
    """All of a verdict, in no order: of two ranks that differ, chance says which came first."""
    return sorted(re.findall(r"\w+", repr(verdict).replace("called", "calls")))


def failed(verdict: Verdict) -> set[str]:
    """The criteria that failed, by what they say."""
    return {found.says for found in verdict.findings if found.outcome == "fail"}


def lost(task: Task, wrong: Wrong) -> set[str]:
    """The criteria that a wrong answer fails, by what they say."""
    return set(wrong.loses or (task.criteria[0].says,))


def missed(task: Task, wrong: Wrong, verdict: Verdict) -> str:
    """What a wrong answer should have got and did not; empty if it got its own sentence."""
    loses = lost(task, wrong)
    if unknown := loses - {criterion.says for criterion in task.criteria}:
        return f"the task has no criteria {unknown}"
    if not loses <= failed(verdict) or verdict.solved:
        return f"should lose {loses}, lost {failed(verdict)}"
    if wrong.says not in sentences(verdict):
        return f"should hear {wrong.says!r}, heard {sentences(verdict)!r}"
    return ""
