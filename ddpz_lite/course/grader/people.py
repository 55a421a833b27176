"""Students: senders as platforms name them, a roster, and the join between the two."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property


class BadRoster(ValueError):
    """A roster that cannot be used: why, and the fix."""


@dataclass(frozen=True)
class Sender:
    """Who handed in a file or folder, as a platform's name for it says."""

    platform: str
    name: str
    id: str  # the platform's number for the student (Canvas) or the submission (Moodle)
    late: bool = False
    order: tuple[int, ...] = ()  # of attempts: the largest is the last


@dataclass(frozen=True)
class Student:
    """A row of a roster."""

    name: str  # in reports; no two students of a roster share it
    keys: frozenset[str]  # identifiers and names by which a submission is joined
    row: Mapping[str, str] = field(default_factory=dict)  # column -> value, as in the file


@dataclass(frozen=True)
class Roster:
    """The students of a class. columns: those that reports repeat."""

    platform: str  # "canvas", "moodle", "gradescope", "github", or "" for a plain list
    columns: tuple[str, ...]
    titles: tuple[str, ...]  # all columns of the file
    students: tuple[Student, ...]

    @cached_property
    def by_name(self) -> dict[str, Student]:
        return {student.name: student for student in self.students}

    @cached_property
    def _by_key(self) -> dict[str, list[Student]]:
        found: dict[str, list[Student]] = {}
        for student in self.students:
            for key in student.keys:
                found.setdefault(key, []).append(student)
        return found

    def find(self, name: str, sender: Sender | None = None) -> Student | None:
        """The student who handed in under `name`; None if there is none, or more than one."""
        for key in _candidates(name, sender):
            if len(found := self._by_key.get(key, ())) == 1:
                return found[0]
        return None

    def compare(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """(students of the roster who are missing, names that are not in the roster)."""
        there = {name: self.by_name.get(name) or self.find(name) for name in sorted(set(names))}
        here = {student.name for student in there.values() if student}
        missing = [student.name for student in self.students if student.name not in here]
        return missing, [name for name, student in there.items() if student is None]


def _candidates(name: str, sender: Sender | None) -> Iterator[str]:
    """Keys to look a submission up by, the surest first."""
    if sender:
        yield f"{sender.platform}:{sender.id}"
        name = sender.name
    parts = name.split("_")
    # A platform may append to a name: `Ada Lovelace_1234_file` is Ada Lovelace.
    for count in range(len(parts), 0, -1):
        head = "_".join(parts[:count])
        yield folded(head)
        yield squashed(head)
    words = name.casefold().split("-")
    for count in range(1, len(words)):  # GitHub Classroom: assignment-username
        yield f"github:{'-'.join(words[count:])}"


def folded(text: str) -> str:
    """Text for comparison: Unicode's form C, without case, single blanks."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def squashed(name: str) -> str:
    """A name for comparison: letters and digits only, since platforms drop other characters."""
    return "name:" + "".join(c for c in folded(full_name(name)) if c.isalnum())


def full_name(text: str) -> str:
    """`Lovelace, Ada` and `Ada Lovelace` are both Ada Lovelace."""
    last, _, first = (part.strip() for part in text.partition(","))
    return f"{first} {last}" if first and last else text.strip()


def keys(name: str, *identifiers: str) -> frozenset[str]:
    """The keys of a student with this name and these identifiers (numbers, logins, addresses)."""
    return frozenset({squashed(name), *(folded(one) for one in identifiers if one.strip())})
