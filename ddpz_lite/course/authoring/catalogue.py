"""The lessons of the course, as the folder and the notebooks' own metadata say.

A lesson is `lessons/NN_name.ipynb`; its second notebook, where it has one, `NNb_name.ipynb`. What
is not written yet stands in `lessons/plan.json`, next to the names of the groups and the addresses
of the course.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
NUMBER = r"\d\db?"
NAME = re.compile(rf"({NUMBER})_\w+\.ipynb")
CAN_WAIT = "can wait"


class Incomplete(ValueError):
    """A notebook or plan.json that does not say what the map needs: one line, with the fix."""


@dataclass(frozen=True)
class Lesson:
    """One notebook of the course, or one that is planned.

    number   "03"; "03b" for a lesson's second notebook
    learn    what one learns, in a line for the tables
    makes    the same in a few words, for the picture
    second   of a second notebook: "can wait", or "needed for 05"
    file     None while it is planned, and then it has no minutes, needs and so on
    """

    number: str
    title: str
    learn: str
    makes: str
    file: str | None = None
    minutes: int = 0
    difficulty: str = ""
    needs: tuple[str, ...] = ()
    can_do: tuple[str, ...] = ()
    second: str = ""

    @property
    def name(self) -> str:
        """Number and short title: "09 ZeRO-1"."""
        return f"{self.number} {self.title.partition(':')[0]}"

    @property
    def can_wait(self) -> bool:
        return self.second == CAN_WAIT


@dataclass(frozen=True)
class Exercise:
    """The exercise notebook of a lesson: its file's name, and the sums over its tasks."""

    file: str
    name: str  # number and title
    minutes: int
    points: int


@dataclass(frozen=True)
class Course:
    """All lessons in order, written and planned.

    exercises   by the number of the lesson
    groups      (the number of its first lesson, its name)
    way         the lesson at which the short way to ZeRO ends
    chinese     by number: a lesson's title and what one learns, in Chinese
    repository  the address of the course's repository; "" as long as it has none
    site        and of its pages
    """

    lessons: tuple[Lesson, ...]
    exercises: dict[str, Exercise]
    groups: tuple[tuple[str, str], ...]
    way: str
    chinese: dict[str, tuple[str, str]]
    repository: str = ""
    site: str = ""

    @property
    def written(self) -> list[Lesson]:
        return [lesson for lesson in self.lessons if lesson.file]

    @property
    def planned(self) -> list[Lesson]:
        return [lesson for lesson in self.lessons if not lesson.file]

    def exercise(self, lesson: Lesson) -> Exercise | None:
        """A lesson's own exercise, or for a second notebook that of the first."""
        return self.exercises.get(lesson.number) or self.exercises.get(lesson.number[:2])

    def group(self, lesson: Lesson) -> str:
        """The name of the group that a lesson is in."""
        return [name for first, name in self.groups if first <= lesson.number][-1]


def number_of(path: Path) -> str:
    """The number at the beginning of a notebook's name: "03b" of 03b_metrics.ipynb."""
    return path.name.partition("_")[0]


def read(root: Path) -> Course:
    """The course in the folder `root`. Raises Incomplete for what the map cannot be made of."""
    plan = json.loads((root / "lessons/plan.json").read_text(encoding="utf-8"))
    written = {number_of(path): _lesson(path) for path in sorted(root.glob("lessons/*.ipynb"))}
    if both := sorted(written.keys() & plan["planned"].keys()):
        raise Incomplete(f"lessons/plan.json still plans {both[0]}, which is written: delete it.")
    planned = {number: Lesson(number, **fields) for number, fields in plan["planned"].items()}
    return Course(
        tuple(lesson for _, lesson in sorted((written | planned).items())),
        {number_of(path): _exercise(path) for path in sorted(root.glob("solutions/*.ipynb"))},
        tuple(sorted(plan["groups"].items())),
        plan["way"],
        {number: tuple(words) for number, words in plan["chinese"].items()},
        **plan["addresses"],
    )


def _lesson(path: Path) -> Lesson:
    where = f"lessons/{path.name}"
    if not NAME.fullmatch(path.name):
        raise Incomplete(f"{where}: the name of a lesson is NN_name.ipynb, or NNb_name.ipynb.")
    fields = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("ddpz", {})
    wanted = ["title", "learn", "makes", "minutes", "difficulty", "needs", "can_do"]
    wanted += ["second"] if number_of(path).endswith("b") else []
    for name in wanted:
        if name not in fields:
            raise Incomplete(f"{where}: its metadata `ddpz` has no {name!r}.")
    lists = {}
    for name in ("needs", "can_do"):
        texts = fields[name]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Incomplete(f"{where}: {name!r} of its metadata `ddpz` must be a list of texts.")
        lists[name] = tuple(texts)
    rest = {name: fields[name] for name in wanted if name not in lists}
    return Lesson(number_of(path), file=path.name, **rest, **lists)


def _exercise(path: Path) -> Exercise:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    points = 0
    for cell in notebook["cells"]:
        if cell["metadata"].get("ddpz", {}).get("role") == "text":
            # grade.notebooks compares what the text says with the task
            found = re.search(r"(\d+) points", "".join(cell["source"]))
            points += int(found[1]) if found else 0
    fields = notebook["metadata"]["ddpz"]
    return Exercise(path.name, f"{fields['exercise']} {fields['title']}", fields["minutes"], points)
