"""An exercise as it was handed out. A submission is compared with it and merged into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import nbformat

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import Task, find


@dataclass(frozen=True)
class Pristine:
    """An exercise as it was handed out."""

    lesson: str
    name: str  # "03_data_parallel"
    title: str
    cells: tuple[tuple[str, str, str | None], ...]  # id, source, task (None: a given cell)
    notebook: str = field(default="", repr=False)  # the learner's copy, as a file's text
    # answer cell's id -> the official source, where solutions/ is there; leaves the grader never
    solutions: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def answers(self) -> dict[str, str]:
        """Answer cell's id -> its task."""
        return {name: task for name, _, task in self.cells if task is not None}

    @cached_property
    def ids(self) -> frozenset[str]:
        """The ids of all its cells, those with words too."""
        if not self.notebook:
            return frozenset(name for name, _, _ in self.cells)
        return frozenset(cell.id for cell in nbformat.v4.reads(self.notebook).cells)

    @property
    def tasks(self) -> list[Task]:
        return [find(task) for task in self.answers.values()]

    def attempted(self, cell: str, source: str) -> bool:
        """Whether an answer cell holds more than blanks and its stub."""
        stub = next(text for name, text, _ in self.cells if name == cell)
        return bool(source.strip()) and source.split() != stub.split()


def pristine(path: Path) -> Pristine:
    """The exercise in a file: a master of solutions/, or a learner's copy of exercises/.

    Raises notebooks.Malformed.
    """
    notebook = notebooks.read(path)
    code = [cell for cell in notebook.cells if notebooks.role(cell) == "answer"]
    solved = any(notebooks.BEGIN in cell.source for cell in code)
    copy = notebooks.blank(notebooks.master(path)) if solved else notebook
    cells = tuple(
        (cell.id, cell.source, notebooks.of(cell))
        for cell in copy.cells
        if notebooks.role(cell) in ("given", "answer")
    )
    about = notebook.metadata["ddpz"]
    text = notebooks.write_text(copy)
    solutions = {cell.id: cell.source for cell in code} if solved else {}
    return Pristine(about["exercise"], path.stem, about["title"], cells, text, solutions)
