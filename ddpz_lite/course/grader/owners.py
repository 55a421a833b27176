"""Who handed in what.

The student is the folder or zip that a notebook lies in (`ada/anything.ipynb`), for all that lies
in there. A notebook's own name (`ada.ipynb`) says it only at the top of what was handed to the
grader, where no student chooses what lies beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddpz_lite.course.grader.places import (
    COURSE,
    WORK,
    Folder,
    FolderContents,
    NotebookFile,
    OnDisk,
    below,
    gathered,
    on_disk,
    within,
)
from ddpz_lite.course.grader.submission import NotTaken
from ddpz_lite.course.grader.text import in_path
from ddpz_lite.course.grader.zips import InZip, unzipped

NO_FILE = "it is no notebook (.ipynb), no folder and no zip; ask for the notebook itself"
EMPTY = "there is nothing in it; ask for the notebook"
LISTED = 3  # names in a line


@dataclass(frozen=True)
class HandIn:
    """What one student handed in, as it lies there."""

    name: str  # as it was written
    place: str  # what lies there is one student's
    where: str
    files: Sequence[NotebookFile] = ()
    others: Sequence[str] = ()
    problems: Sequence[tuple[str, str]] = ()  # (where, reason)
    own: bool = False  # the name is the notebook's own, which the student may have chosen


def hand_ins(path: Path, names: Sequence[str], stack: ExitStack) -> Iterator[HandIn]:
    """All that lies at a path. names: of the exercises."""
    if os.path.isdir(path) and not os.path.islink(path):
        whole = Path(os.path.realpath(path))  # ".." is nobody's name
        yield from _class(OnDisk(whole.name, str(whole), in_path(whole.name)), names, stack)
        return
    whole = Path(os.path.realpath(path.parent), path.name)
    file = on_disk(whole, in_path(path.name))
    if file.zipped:
        try:
            yield from _class(unzipped(file, stack), names, stack)
        except NotTaken as reason:
            problem = (file.where, str(reason))
            yield HandIn(file.stem, file.path, file.where, problems=[problem])
        return
    own = not is_exercise(file.stem, names) and path.suffix.lower() == ".ipynb"
    place = file.path if own else str(whole.parent)
    yield HandIn(file.stem if own else _owner(place), place, file.where, [file], own=own)


def is_exercise(stem: str, names: Sequence[str]) -> bool:
    """Whether a notebook has the name of an exercise, a browser's or Colab's second copy too."""
    return stem.casefold().removeprefix("copy of ").startswith(tuple(n.casefold() for n in names))


def _owner(place: str) -> str:
    """Whose folder it is: a folder of the course is that of whoever has the checkout."""
    path = Path(place)
    while path.name in (*COURSE, *WORK):
        path = path.parent
    return path.name


def _class(top: Folder, names: Sequence[str], stack: ExitStack) -> Iterator[HandIn]:
    """A class or one student: each thing in the innermost folder that says nothing of a student."""
    folder, contents = top, within(top)
    while (inner := _only(contents, names)) is not None:
        of_a_zip = isinstance(folder, InZip) and not contents.files  # whose name is the student's
        if not of_a_zip and not _holds_a_class(inner, names):
            break
        if contents.files or contents.problems:
            yield _rest(folder, top, contents.files, [], contents.problems)
        folder, contents = inner, within(inner)
    own_files = [one for one in contents.files if not one.zipped and is_exercise(one.stem, names)]
    students_files = [one for one in contents.files if one not in own_files]
    found = {one.path: gathered(one) for one in contents.folders}
    a_class = bool(
        students_files or any(one.files for one in found.values()) or (found and not own_files)
    )
    if own_files or contents.problems or not a_class:
        yield _rest(folder, top, own_files, () if a_class else contents.others, contents.problems)
    if not a_class:
        return
    for one in students_files:
        yield HandIn(one.stem, one.path, one.where, [one], own=not one.zipped)
    for one in contents.folders:
        all_of_it = found[one.path]
        lines = all_of_it.others, all_of_it.problems
        yield HandIn(one.name, one.path, one.where, all_of_it.files, *lines)
    for name in contents.others if students_files or not own_files else ():
        where = in_path(f"{folder.where}/{name}")
        yield HandIn(Path(name).stem, f"{folder.path}/{name}", where, problems=[(where, NO_FILE)])


def _rest(
    folder: Folder,
    top: Folder,
    files: Sequence[NotebookFile],
    others: Sequence[str],
    problems: Sequence[tuple[str, str]],
) -> HandIn:
    """What lies in a folder and names nobody: it is the folder's, or the zip's that it lies in."""
    name = top.name if isinstance(folder, InZip) else _owner(folder.path)
    return HandIn(name, folder.path, folder.where, files, others, problems)


def _only(contents: FolderContents, names: Sequence[str]) -> Folder | None:
    """The only folder, where nothing beside it has a student's name."""
    named = [one for one in contents.files if one.zipped or not is_exercise(one.stem, names)]
    return contents.folders[0] if len(contents.folders) == 1 and not named else None


def _holds_a_class(folder: Folder, names: Sequence[str]) -> bool:
    """Whether a folder holds students' work, and is no student's.

    It does if several notebooks have names of their own, or none is called as the exercise. The
    folder of a single notebook is its student's.
    """
    here = within(folder)
    own = [one for one in here.files if not one.zipped and not is_exercise(one.stem, names)]
    if len(own) > 1:
        return True
    if len(here.files) > len(own) + sum(one.zipped for one in here.files):
        return False
    files = (file for found in below(folder) for file in found.files)
    many = len(list(islice(files, 2)))
    if many == 0:
        return len(here.folders) > 1
    return many > 1 or not here.files


def nothing(hand_in: HandIn) -> str:
    """Why a hand-in without a notebook has no grade."""
    if not hand_in.others:
        return EMPTY
    some = ", ".join(in_path(name) for name in sorted(hand_in.others)[:LISTED])
    more = f" and {len(hand_in.others) - LISTED} more" if len(hand_in.others) > LISTED else ""
    return f"there is no notebook (.ipynb) in it, but {some}{more}; ask for the notebook itself"
