"""A teacher's additional judges, hidden from students: more cases and criteria for tasks.

`ddpz grade --hidden DIR` reads every DIR/*.py. Such a file holds

    from ddpz_lite.course.grader.hidden import More
    from ddpz_lite.course.check.task import Criterion, Case

    MORE = {"03.weighted_mean": More(cases, (Criterion("large batches", 2, judge, on=("large",)),))}

where cases(rng) draws more `Case`s, run by the task's own job, and criteria judge them. A case's
kind says which criteria look at it (see `course/check/task.py`). The points come on top.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddpz_lite.course.check.task import Case, Criterion, Task


class BadHidden(ValueError):
    """A hidden judge that cannot be used: which file, and why."""


@dataclass(frozen=True)
class More:
    """What is added to one task."""

    cases: Callable[[torch.Generator], list[Case]] = lambda rng: []
    criteria: tuple[Criterion, ...] = ()


def load(folder: Path | None) -> dict[str, More]:
    """What the files of a folder add, by task; nothing without a folder. Raises BadHidden."""
    more: dict[str, More] = {}
    if folder is None:
        return more
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise BadHidden(f"there is no .py file in {folder}/")
    for path in paths:
        spec = importlib.util.spec_from_file_location(f"hidden_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            found = dict(module.MORE)
        except Exception as error:
            raise BadHidden(f"{path.name}: {type(error).__name__}: {error}") from error
        if twice := set(found) & set(more):
            raise BadHidden(f"{path.name}: {', '.join(sorted(twice))} is in another file too")
        more.update(found)
    return more


def extend(task: Task, more: dict[str, More]) -> Task:
    """The task with what is hidden about it."""
    if task.id not in more:
        return task
    extra = more[task.id]
    return replace(
        task,
        cases=lambda rng: [*task.cases(rng), *extra.cases(rng)],
        criteria=(*task.criteria, *extra.criteria),
    )
