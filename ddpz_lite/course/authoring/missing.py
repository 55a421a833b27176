"""What a lesson still lacks, or has wrong, in one list: for `ddpz author`.

Nothing here runs an answer or a notebook: those are the tests' work.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpz_lite.course.authoring import catalogue, glossary, minutes, pages, rules
from ddpz_lite.course.authoring.skeleton import TODO
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.run import draw
from ddpz_lite.course.check.task import TASKS, Task, lessons, tasks

LEAST_WRONG = 5  # wrong answers to a task, each with its name and a sentence of its own
LEAST_HINT, LEAST_DEBRIEF, LEAST_SAYS = 20, 60, 6  # characters
PROMISING = re.compile(
    r"\b(must|exactly|never|all|each|every|same|no|none|nothing|anything|only|alone|both|without"
    r"|at most|at least|no more|stays?)\b"
)
NEW = 'make its skeleton: ddpz new {} "Its title"'


class NoLesson(ValueError):
    """There is no lesson of that number."""


def faults(root: Path, number: str) -> tuple[list[str], list[str]]:
    """(what is missing or wrong, what is worth a look) with a lesson and its tasks, a line each.

    Raises NoLesson if it has neither a notebook nor tasks.
    """
    path = _notebook(root, "lessons", number)
    if path is None and number not in lessons():
        raise NoLesson(f"there is no lesson {number}. To begin one, {NEW.format(number)}.")
    found, warnings = [], []
    if path is None:
        found.append(f"lessons/{number}_*.ipynb is missing")
    else:
        found += _lesson(root, path)
        misstated = minutes.misstated(rules.read(path))
        warnings += (f"{_named(path)}: {wrong}" for wrong in misstated)
    if number in lessons() or _notebook(root, "solutions", number):
        found += exercise(root, number)
    else:
        warnings.append(f"lesson {number} has no task of its own")
    found += list(_generated(root))
    return found, warnings


# ---- the lesson ----


def _lesson(root: Path, path: Path) -> Iterator[str]:
    notebook = rules.read(path)
    for rule in rules.LESSON:
        yield from (f"{_named(path)}: {fault}" for fault in rule(notebook))
    yield from _todo(path)
    yield from _neighbours(root, path)
    yield from _glossary(root, path)


def _todo(path: Path) -> Iterator[str]:
    left = [str(i) for i, cell in enumerate(rules.read(path).cells) if TODO in cell.source]
    if left:
        yield f"{_named(path)}: {TODO} in cells {', '.join(left)}"


def _neighbours(root: Path, path: Path) -> Iterator[str]:
    """What a lesson says of others: those that it needs, and that need it."""
    notebook = rules.read(path)
    if rules.malformed(notebook):
        return
    facts = notebook.metadata["ddpz"]
    there = {catalogue.number_of(other): other for other in root.glob("lessons/*.ipynb")}
    number = catalogue.number_of(path)
    for need in facts["needs"]:
        if need not in there or need >= number:
            yield f"{_named(path)}: it needs lesson {need}, which is not an earlier one"
    second = facts.get("second")
    if catalogue.is_further(number) != bool(second):
        yield (
            f"{_named(path)}: metadata `ddpz.second` belongs to NNb and NNc notebooks, "
            f"and is {second!r}"
        )
    elif second and second != catalogue.CAN_WAIT:
        later = second.removeprefix("needed for ")
        if later not in there or number not in rules.read(there[later]).metadata["ddpz"]["needs"]:
            yield f"{_named(path)}: it is {second}, whose metadata does not say so"


def _glossary(root: Path, path: Path) -> Iterator[str]:
    entries = glossary.entries(root)
    own = [entry for entry in entries if entry.file == path.name]
    if not own:
        yield f"lessons/GLOSSARY.md: no term is defined in {path.name}"
    for entry in own:
        wrongs = glossary.faults(root, entry)
        yield from (f"lessons/GLOSSARY.md: {entry.term!r}: {wrong}" for wrong in wrongs)
    anchors = {entry.anchor for entry in entries}
    for position, cell in enumerate(rules.read(path).cells):
        for anchor in glossary.LINK.findall(cell.source):
            if anchor not in anchors:
                yield f"{_named(path)}: cell {position}: the glossary has no {anchor!r}"


# ---- its exercise ----


def exercise(root: Path, number: str) -> Iterator[str]:
    """What is wrong with the exercise of a lesson: master, tasks, answers."""
    package = f"{TASKS.replace('.', '/')}/lesson{number}"
    path = _notebook(root, "solutions", number)
    if number not in lessons():
        yield f"{package}/ is missing: its job.py and judge.py"
        return
    if path is None:
        yield f"solutions/{number}_*.ipynb is missing"
        return
    notebook = rules.read(path)
    yield from _todo(path)
    yield from (f"{_named(path)}: {fault}" for fault in notebooks.complaints(notebook, path.stem))
    for rule in rules.EVERYWHERE:
        yield from (f"{_named(path)}: {fault}" for fault in rule(notebook))
    for task in tasks(number):
        yield from (f"{package}/judge.py: {task.id}: {fault}" for fault in task_faults(task))
    yield from _answers(root, number)
    stale, _ = notebooks.stale(root / "solutions", root / "exercises")
    for other in stale:
        if catalogue.number_of(other) == number:
            yield f"{_named(other)} differs from its master: make exercises"


def task_faults(task: Task) -> Iterator[str]:
    """What every task has: minutes, points, three hints of which one asks, a debrief."""
    if not 3 <= task.minutes <= 60:
        yield f"{task.minutes} minutes, and 3 to 60 were expected"
    if task.points < 2:
        yield "a task has two points or more"
    if len({*task.hints}) != 3 or any(len(hint) <= LEAST_HINT for hint in task.hints):
        yield f"it takes three hints of more than {LEAST_HINT} characters"
    if "?" not in task.hints[0]:
        yield "the first hint is a question"
    if len(task.debrief) <= LEAST_DEBRIEF:
        yield f"the debrief has {len(task.debrief)} characters; what does production do?"
    if len({criterion.says for criterion in task.criteria}) != len(task.criteria):
        yield "two criteria say the same"
    for criterion in task.criteria:
        if criterion.points < 1:
            yield f"the criterion {criterion.says!r} is worth no point"
    for case in draw(task):
        if not any(not criterion.on or case.kind in criterion.on for criterion in task.criteria):
            yield f"no criterion looks at the case {case.says!r}"
    if TODO in " ".join([task.title, *task.hints, task.debrief]):
        yield f"title, hints or debrief still say {TODO}"


def _answers(root: Path, number: str) -> Iterator[str]:
    """Five wrong answers by name and a right one in another style, for each task."""
    path = root / f"tests/answers/lesson{number}.py"
    if not path.exists():
        yield f"tests/answers/lesson{number}.py is missing: WRONG, RIGHT and PROMISES"
        return
    module, notebook = _loaded(path), rules.read(_notebook(root, "solutions", number))
    for task in tasks(number):
        where = f"tests/answers/lesson{number}.py: {task.id}"
        yield from (f"{where}: {fault}" for fault in answer_faults(task, module))
        promises = module.PROMISES.get(task.id, {})
        yield from (f"{where}: {fault}" for fault in promise_faults(task, notebook, promises))


def answer_faults(task: Task, module: Any) -> Iterator[str]:
    """What is wrong with a task's answers in the module of its lesson (see tests/answers)."""
    wrong = module.WRONG.get(task.id, [])
    for what in ("name", "says"):
        if len({getattr(one, what) for one in wrong}) < LEAST_WRONG:
            yield f"fewer than {LEAST_WRONG} wrong answers with a {what!r} of their own"
    criteria = {criterion.says for criterion in task.criteria}
    for one in wrong:
        if len(one.says) < LEAST_SAYS:
            yield f"{one.name!r} must get a sentence, not {one.says!r}"
        if unknown := set(one.loses) - criteria:
            yield f"{one.name!r} loses criteria that the task has not: {', '.join(sorted(unknown))}"
    right = [name for name, _ in module.RIGHT.get(task.id, [])]
    if not right or len({*right}) != len(right):
        yield "no right answer in another style, or two of one name"


def promise_faults(task: Task, notebook: Any, promises: dict[str, Any]) -> Iterator[str]:
    """Sentences of a task's text that promise something, and that no criterion is named for.

    promises: words of the text -> (the criterion, the kind of case) that judges them, or None for
    words that promise nothing.
    """
    sentences = texts(task, notebook)
    criteria, kinds = {a.says: a for a in task.criteria}, {case.kind for case in draw(task)}
    for quotation, judged in promises.items():
        if not any(quotation in sentence for sentence in sentences):
            yield f"{quotation!r} is promised, and does not stand in the text"
        if judged is None:
            continue
        criterion, kind = judged
        looks = (
            criterion in criteria and kind in (criteria[criterion].on or kinds) and kind in kinds
        )
        if not looks:
            yield f"{quotation!r} is judged by {judged}, and no criterion looks at such a case"
    for sentence in filter(PROMISING.search, sentences):
        if not any(quotation in sentence for quotation in promises):
            yield f"nothing says who judges this: {sentence!r}"


def texts(task: Task, notebook: Any) -> list[str]:
    """The sentences that tell a learner what is asked: the task's text, and docstrings."""
    cells = [cell for cell in notebook.cells if notebooks.of(cell) == task.id]
    words = [cell.source.partition("\n")[2] for cell in cells if notebooks.role(cell) == "text"]
    for cell in cells:
        if notebooks.role(cell) == "answer":
            kinds = (ast.FunctionDef, ast.ClassDef)
            nodes = [n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, kinds)]
            words += [ast.get_docstring(node) or "" for node in nodes]
    paragraphs = (" ".join(part.split()) for part in "\n\n".join(words).split("\n\n"))
    return [s for part in paragraphs for s in re.split(r"(?<=[.!?;])\s+", part) if s]


def _loaded(path: Path) -> ModuleType:
    """The module of a lesson's answers, which imports its neighbours as `answers`."""
    tests = str(path.parents[1])
    sys.path.insert(0, tests)
    try:
        spec = importlib.util.spec_from_file_location(f"_{path.stem}_answers", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(tests)


# ---- what is generated ----


def _generated(root: Path) -> Iterator[str]:
    try:
        stale = pages.stale(root, catalogue.read(root))
    except catalogue.Incomplete as error:
        yield str(error)
        return
    for path in stale:
        name = path.relative_to(root).as_posix()
        yield f"{name} differs from what the notebooks say: make course"


def _notebook(root: Path, folder: str, number: str) -> Path | None:
    found = [p for p in root.glob(f"{folder}/*.ipynb") if catalogue.number_of(p) == number]
    return found[0] if found else None


def _named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
