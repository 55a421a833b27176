"""Who should have handed in: a teacher's list of names beside the names of what came."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddpz_lite.course.grader.text import clean, in_path

COLUMN = "student"  # the name of the column, where the first is not the one


class BadRoster(ValueError):
    """A roster that cannot be used: why, and the cure."""


def load(path: Path) -> list[str]:
    """The names in a roster, as they appear in reports. Raises BadRoster.

    A name a line, or a CSV (commas, semicolons or tabs) with names in the column `student`, or else
    in the first one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadRoster(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise BadRoster(f"{path} is not text in UTF-8; save it as CSV UTF-8") from None
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(row)]
    titles = [title.strip().casefold() for title in rows[0]] if rows else []
    column = titles.index(COLUMN) if COLUMN in titles else 0
    rows = rows[1:] if COLUMN in titles else rows
    names = [clean(row[column]) for row in rows if len(row) > column and row[column].strip()]
    if not names:
        raise BadRoster(f"{path} has no names; write one a line, or a CSV with a column {COLUMN}")
    folded = [name.casefold() for name in names]
    if twice := [name for name in names if folded.count(name.casefold()) > 1]:
        raise BadRoster(
            f"{path} has {in_path(twice[0])} twice; make the names differ, as by numbers"
        )
    return names


def compare(names: Sequence[str], students: Iterable[str]) -> tuple[list[str], list[str]]:
    """(who of the roster is missing, who is not in the roster).

    A learning platform writes more behind a name: `Ada Lovelace_1234_file` is Ada Lovelace. Where
    two names of the roster fit, the longer does.
    """
    by_fold = {name.casefold(): name for name in names}
    came, unlisted = set(), []
    for student in sorted(set(students)):
        parts = student.casefold().split("_")
        heads = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
        found = next((by_fold[head] for head in heads if head in by_fold), None)
        if found is None:
            unlisted.append(student)
        else:
            came.add(found)
    return [name for name in names if name not in came], unlisted
