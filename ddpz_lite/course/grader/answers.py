"""From a notebook's bytes to its answers; nothing else in it is used.

Taken are the bytes, for their SHA-256, and the sources of answer cells. Kernelspec, outputs, tags
and all other cells are dropped here. Of those cells only the names that they define are kept, to
explain an answer that misses one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.submission import NotTaken

CELLS = 1000
SOURCE = 50_000  # characters of one answer
NAMES = 2000  # that cells which are not taken define
NESTING = 60  # of the JSON

# A name at the beginning of a line that is defined there: good enough to explain an error.
DEFINES = re.compile(
    r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=(?!=)"
    r"|^(?:from[ \t]+\S+[ \t]+)?import[ \t]+(.+)",
    re.MULTILINE,
)
LONGEST = 60  # characters of such a name


@dataclass(frozen=True)
class Answers:
    """What a notebook holds of one exercise."""

    lesson: str
    sha256: str
    cells: tuple[tuple[str, str], ...]  # (id of the course's cell, source), each id once
    attempted: int  # answers that are more than their stub
    warnings: tuple[str, ...]
    elsewhere: frozenset[str]


@dataclass(frozen=True)
class _Cell:
    name: str  # its id
    source: str
    task: str  # the task whose answer it is, as its metadata says; "" if they say nothing


@dataclass(frozen=True)
class _Match:
    """A notebook held against one exercise."""

    found: dict[str, list[int]]  # id of an answer -> which cells hold it
    says: int  # how many of the file's name and the notebook's metadata say so
    cells: int  # answer cells whose own metadata say so
    ids: int  # cells with an id of this exercise, those with words too


def read(raw: bytes, stem: str, known: Mapping[str, Pristine]) -> Answers:
    """The answers in a notebook called `stem`. known: the exercises by lesson. Raises NotTaken."""
    notebook = _parsed(raw)
    cells, ids = _cells(notebook)
    exercise, found = _exercise(notebook, cells, ids, stem, known)
    taken = {name: _last(exercise, name, cells, places) for name, places in found.items()}
    if long := [name for name, source in taken.items() if len(source) > SOURCE]:
        raise NotTaken(f"the answer {long[0]} is longer than {SOURCE} characters")
    counts = {name: len(places) for name, places in found.items() if len(places) > 1}
    warnings = (
        f"the cell {name} is there {count} times; the last one that is not a stub counts"
        for name, count in counts.items()
    )
    answers = {place for places in found.values() for place in places}
    others = [cell.source for place, cell in enumerate(cells) if place not in answers]
    names = (name for text in others if len(text) <= SOURCE for name in defined(text))
    return Answers(
        lesson=exercise.lesson,
        sha256=hashlib.sha256(raw).hexdigest(),
        cells=tuple(taken.items()),
        attempted=sum(exercise.attempted(*one) for one in taken.items()),
        warnings=tuple(warnings),
        elsewhere=frozenset(islice(names, NAMES)),
    )


def _last(exercise: Pristine, name: str, cells: Sequence[_Cell], places: Sequence[int]) -> str:
    """The source of the last cell with this answer; a stub counts only if all of them are."""
    sources = [cells[place].source for place in places]
    solved = [source for source in sources if exercise.attempted(name, source)]
    return (solved or sources)[-1]


def defined(source: str) -> list[str]:
    """The names that a cell seems to define, whatever it is."""
    lines = (" ".join(groups) for groups in DEFINES.findall(source))
    names = dict.fromkeys(name for line in lines for name in re.findall(r"\w+", line))
    return [name for name in names if len(name) <= LONGEST]


# ---- which exercise ----


def _exercise(
    notebook: dict[str, Any],
    cells: Sequence[_Cell],
    ids: frozenset[str],
    stem: str,
    known: Mapping[str, Pristine],
) -> tuple[Pristine, dict[str, list[int]]]:
    """(the exercise that the notebook fits best, where its answers are). Raises NotTaken.

    Two exercises may have a cell of the same id, and each of the things looked at may be missing
    or wrong. So no one of them decides against all others.
    """
    tasks = {task for exercise in known.values() for task in exercise.answers.values()}
    matches = {}
    for lesson, exercise in known.items():
        match = _match(notebook, cells, ids, stem, exercise, tasks)
        if match.found:
            matches[lesson] = match
    if not matches:
        _refuse_lesson(notebook, stem, known)
        raise NotTaken(
            "it holds no answer cell of any exercise; cells are known by their ids and metadata, "
            "which a new notebook does not have: hand in the notebook that was handed out"
        )
    most = max(match.cells for match in matches.values())

    def fit(lesson: str) -> tuple[int, ...]:
        match = matches[lesson]
        says = match.says + (match.cells == most > 0)
        return says, match.cells, len(match.found), match.ids

    best, *rest = sorted(matches, key=fit, reverse=True)
    if rest and fit(rest[0]) == fit(best):
        raise NotTaken(
            f"it may be exercise {best} or {rest[0]}; give the file the name of its exercise, "
            f"{known[best].name}.ipynb or {known[rest[0]].name}.ipynb"
        )
    return known[best], matches[best].found


def _refuse_lesson(notebook: dict[str, Any], stem: str, known: Mapping[str, Pristine]) -> None:
    """Raise NotTaken for a lesson, whose metadata have what no exercise's have."""
    about = notebook.get("metadata")
    about = about.get("ddpz") if isinstance(about, dict) else None
    if not isinstance(about, dict) or "learn" not in about:
        return
    # A lesson's file begins with its number; a platform may have written more before it.
    number = next(
        (one for one in re.findall(r"(?<!\d)\d{2}(?=[bc]?_)", stem) if one in known), None
    )
    if number is None:
        raise NotTaken("this is a lesson; hand in the exercise, a notebook of my/exercises/")
    raise NotTaken(f"this is lesson {number}; hand in my/exercises/{known[number].name}.ipynb")


def _match(
    notebook: dict[str, Any],
    cells: Sequence[_Cell],
    ids: frozenset[str],
    stem: str,
    exercise: Pristine,
    tasks: set[str],
) -> _Match:
    """Hold a notebook against an exercise.

    An answer is known by its cell's id, unless the cell says that it is another exercise's. Where
    no cell has the id, as in a notebook whose ids changed, the task in a cell's metadata says it.
    """
    by_task = {task: name for name, task in exercise.answers.items()}
    by_id: dict[str, list[int]] = {}
    by_word: dict[str, list[int]] = {}
    for place, cell in enumerate(cells):
        if cell.name in exercise.answers and cell.task in {"", *by_task, *({cell.task} - tasks)}:
            by_id.setdefault(cell.name, []).append(place)
        elif cell.task in by_task:
            by_word.setdefault(by_task[cell.task], []).append(place)
    about = notebook.get("metadata")
    about = about.get("ddpz") if isinstance(about, dict) else None
    named = isinstance(about, dict) and about.get("exercise") == exercise.lesson
    return _Match(
        found=by_word | by_id,
        says=named + (exercise.name.casefold() in stem.casefold()),
        cells=len({cell.task for cell in cells} & set(by_task)),
        ids=len(ids & exercise.ids),
    )


# ---- the form ----


def _parsed(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise NotTaken("the file is empty")
    try:
        notebook = json.loads(raw.decode("utf-8-sig"), parse_int=_int)
    except UnicodeDecodeError:
        raise NotTaken("the file is not text in UTF-8") from None
    except RecursionError:
        raise NotTaken("its JSON is nested too deeply") from None
    except ValueError as error:
        raise NotTaken(f"it is not a notebook: the JSON is broken ({error})") from None
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4:
        raise NotTaken("it is not a notebook of version 4")
    return notebook


def _int(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError("a number of more than 40 digits")
    return int(digits)


def _cells(notebook: dict[str, Any]) -> tuple[list[_Cell], frozenset[str]]:
    """(the code cells, the ids of all cells)."""
    cells = notebook.get("cells")
    if not isinstance(cells, list):
        raise NotTaken("it is not a notebook: it has no list of cells")
    if len(cells) > CELLS:
        raise NotTaken(f"it has {len(cells)} cells; {CELLS} are allowed")
    if _depth(cells) > NESTING:
        raise NotTaken("its JSON is nested too deeply")
    cells = [cell for cell in cells if isinstance(cell, dict)]
    code = (_cell(cell) for cell in cells if cell.get("cell_type") == "code")
    return [cell for cell in code if cell is not None], frozenset(map(_id, cells))


def _cell(cell: dict[str, Any]) -> _Cell | None:
    source = cell.get("source")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        return None
    about = _metadata(cell).get("ddpz")
    about = about if isinstance(about, dict) and about.get("role") == "answer" else {}
    task = about.get("task")
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    return _Cell(_id(cell), source, task if isinstance(task, str) else "")


def _id(cell: dict[str, Any]) -> str:
    """A cell's id; where the format has none (Colab writes 4.0), the one in its metadata."""
    name = cell.get("id", _metadata(cell).get("id"))
    return name if isinstance(name, str) else ""


def _metadata(cell: dict[str, Any]) -> dict[str, Any]:
    metadata = cell.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _depth(tree: Any) -> int:
    """How deeply lists and dicts are nested; no recursion, for it may be very deep."""
    deepest, todo = 0, [(tree, 1)]
    while todo:
        part, depth = todo.pop()
        deepest = max(deepest, depth)
        if isinstance(part, (list, dict)):
            inside = part.values() if isinstance(part, dict) else part
            todo += [(child, depth + 1) for child in inside if isinstance(child, (list, dict))]
    return deepest
