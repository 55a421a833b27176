"""Which student handed in which files.

Where a platform wrote the name of a file or folder, it names the student (`platforms.sender`).
Otherwise the student is the folder or zip that a notebook lies in (`ada/anything.ipynb`). A
notebook's own name (`ada.ipynb`) counts only at the top of what was passed to the grader, where no
student chooses the neighbouring files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ddpz_lite.course.grader import platforms
from ddpz_lite.course.grader.people import Sender
from ddpz_lite.course.grader.places import (
    COURSE,
    LINK,
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

NO_FILE = "it is not a notebook (.ipynb), folder or zip; ask for the notebook itself"
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
    sender: Sender | None = None  # where a platform wrote the name


def hand_ins(path: Path, names: Sequence[str], stack: ExitStack) -> Iterator[HandIn]:
    """Everything at a path, by student. names: of the exercises. "" names no student."""
    by_sender: dict[tuple[str, str], list[HandIn]] = {}
    for one in _as_it_lies(path, names, stack):
        if sender := platforms.sender(one.name):
            by_sender.setdefault((sender.platform, sender.id), []).append(_sent(one, sender))
        else:
            yield one
    for sent in by_sender.values():
        yield _together(sent)


def _sent(one: HandIn, sender: Sender) -> HandIn:
    """A hand-in of a sender, with what the platform's name says about its files."""
    files = [replace(file, late=sender.late, order=sender.order) for file in one.files]
    place = f"{sender.platform} {sender.id}"
    return replace(one, name=sender.name, place=place, files=files, own=False, sender=sender)


def _together(sent: Sequence[HandIn]) -> HandIn:
    """What one student sent, in one hand-in: notes next to a notebook are not a problem."""
    files = [file for one in sent for file in one.files]
    problems = [problem for one in sent for problem in one.problems]
    others = [other for one in sent for other in one.others]
    if files:
        problems = [problem for problem in problems if problem[1] != NO_FILE]
    return replace(sent[0], files=files, problems=problems, others=others)


def _as_it_lies(path: Path, names: Sequence[str], stack: ExitStack) -> Iterator[HandIn]:
    """Everything at a path, by the folders and files that it lies in."""
    if os.path.islink(path):
        where = in_path(path.name)
        yield HandIn("", str(path), where, problems=[(where, LINK)])
        return
    if os.path.isdir(path):
        real = Path(os.path.realpath(path))  # ".." is not a name
        yield from _class(OnDisk(real.name, str(real), in_path(real.name)), names, stack)
        return
    real = Path(os.path.realpath(path.parent), path.name)
    file = on_disk(real, in_path(path.name))
    if file.zipped:
        try:
            yield from _class(unzipped(file, stack), names, stack)
        except NotTaken as reason:
            problem = (file.where, str(reason))
            yield HandIn(file.stem, file.path, file.where, problems=[problem])
        return
    own = not is_exercise(file.stem, names) and path.suffix.lower() == ".ipynb"
    place = file.path if own else str(real.parent)
    yield HandIn(file.stem if own else _owner(place), place, file.where, [file], own=own)


def is_exercise(stem: str, names: Sequence[str]) -> bool:
    """Whether a notebook has the name of an exercise, a browser's or Colab's second copy too."""
    return stem.casefold().removeprefix("copy of ").startswith(tuple(n.casefold() for n in names))


def _owner(place: str) -> str:
    """The folder's student: for a folder of the course, the folder that the checkout is in."""
    path = Path(place)
    while path.name in (*COURSE, *WORK):
        path = path.parent
    return path.name


def _class(top: Folder, names: Sequence[str], stack: ExitStack) -> Iterator[HandIn]:
    """A class or one student: each thing in the innermost folder that says nothing of a student."""
    folder, contents = top, within(top)
    while (inner := _only(contents, names)) is not None:
        if platforms.sender(inner.name):
            break
        of_a_zip = isinstance(folder, InZip) and not contents.files  # whose name is the student's
        if not of_a_zip and not _holds_a_class(inner, names):
            break
        if contents.files:
            yield _rest(folder, top, contents.files, [], contents.problems)
        elif contents.problems:
            yield HandIn("", folder.path, folder.where, problems=contents.problems)
        folder, contents = inner, within(inner)
    own_files = [one for one in contents.files if not one.zipped and is_exercise(one.stem, names)]
    students_files = [one for one in contents.files if one not in own_files]
    found = {one.path: gathered(one) for one in contents.folders}
    a_class = bool(
        students_files or any(one.files for one in found.values()) or (found and not own_files)
    )
    problems = contents.problems
    if a_class and not own_files and problems:
        yield HandIn("", folder.path, folder.where, problems=problems)
        problems = []
    if own_files or problems or not a_class:
        yield _rest(folder, top, own_files, () if a_class else contents.others, problems)
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
    """Files that name no student: they are the folder's, or the surrounding zip's."""
    name = top.name if isinstance(folder, InZip) else _owner(folder.path)
    return HandIn(name, folder.path, folder.where, files, others, problems)


def _only(contents: FolderContents, names: Sequence[str]) -> Folder | None:
    """The only folder, if nothing next to it has a student's name."""
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
