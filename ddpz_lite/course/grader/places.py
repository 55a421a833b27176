"""Folders of submissions: which file is where. No file is opened here, and no link followed."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from ddpz_lite.course.grader.submission import NotTaken
from ddpz_lite.course.grader.text import in_path

MIB = 1 << 20
NOTEBOOK = 16 * MIB  # bytes of one notebook, its outputs included
FILES = 10_000  # of one student, folders counted too; what lies deeper is not looked at
MAX_NOTEBOOKS = 200  # notebooks of one student
DEPTH = 8  # folders within folders
LINK = "it is a link; hand in the file itself"
ODD = "it is not a file but a pipe, a socket or a device; hand in the notebook itself"
TOO_MANY = (
    f"it holds more than {FILES} files, and the rest was not looked at; hand in notebooks alone"
)
TOO_DEEP = f"folders are nested more than {DEPTH} deep; hand in the notebooks in one folder"

# Made by tools and never handed in on purpose. Folders that begin with a dot are skipped too.
JUNK = ("__MACOSX", "__pycache__", "node_modules", "site-packages", "venv")
JUNK_FILES = ("thumbs.db", "desktop.ini")
# A copy of the whole course is known by its folders. Its own notebooks are not answers.
MY = "my"
WORK = ("exercises", MY)  # where a learner works in it
OURS = ("lessons", "solutions", "ddpz_lite")
COURSE = ("exercises", "solutions")  # folders that name no student


@dataclass(frozen=True)
class NotebookFile:
    """A notebook or a zip."""

    path: str  # of this machine, or inside the zip: what it is known by
    stem: str
    where: str  # what the teacher finds it by
    load: Callable[[], bytes]  # raises NotTaken
    zipped: bool = False
    late: bool = False  # by the platform's word
    order: tuple[int, ...] = ()  # of attempts, as the platform counts them


@dataclass
class FolderContents:
    """What lies in a folder, by name."""

    folders: list[Folder] = field(default_factory=list)
    files: list[NotebookFile] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # other files
    problems: list[tuple[str, str]] = field(default_factory=list)  # (where, reason)


class Folder(Protocol):
    """A folder of this machine, or of a zip."""

    name: str
    path: str
    where: str

    @property
    def contents(self) -> FolderContents: ...


@dataclass
class OnDisk:
    """A folder of this machine."""

    name: str
    path: str
    where: str

    @cached_property
    def contents(self) -> FolderContents:
        found = FolderContents()
        try:
            with os.scandir(self.path) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if not junk(entry.name, entry.is_dir(follow_symlinks=False)):
                        self._sort(entry, found)
        except OSError as error:
            found.problems.append((self.where, f"the folder cannot be read ({error.strerror})"))
        return found

    def _sort(self, entry: os.DirEntry, found: FolderContents) -> None:
        where, path = in_path(f"{self.where}/{entry.name}"), Path(entry.path)
        if entry.is_symlink():
            found.problems.append((where, LINK))
        elif entry.is_dir():
            found.folders.append(OnDisk(entry.name, entry.path, where))
        elif not entry.is_file():
            found.problems.append((where, ODD))
        elif is_notebook_or_zip(entry.name):
            found.files.append(on_disk(path, where))
        else:
            found.others.append(entry.name)


def is_notebook_or_zip(name: str) -> bool:
    return name.lower().endswith((".ipynb", ".zip"))


def junk(name: str, folder: bool) -> bool:
    """Whether a file or folder is of no interest, by its name alone."""
    return name.startswith(".") or (
        name in JUNK if folder else name in JUNK or name.lower() in JUNK_FILES
    )


def on_disk(path: Path, where: str) -> NotebookFile:
    """A notebook or zip of this machine."""
    load = partial(_bytes, path)
    return NotebookFile(str(path), path.stem, where, load, zipped=path.suffix.lower() == ".zip")


def opened(path: Path | str) -> int:
    """A descriptor of a regular file; no link is followed, no pipe waited for. Raises NotTaken."""
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        if os.path.islink(path):
            raise NotTaken(LINK)
        handle = os.open(path, os.O_RDONLY | careful)
    except OSError as error:
        known = stat.S_ISREG(os.stat(path).st_mode) if os.path.exists(path) else True
        raise NotTaken(f"it cannot be read ({error.strerror})" if known else ODD) from None
    except ValueError:  # a NUL in the name
        raise NotTaken("it cannot be read (no file has such a name)") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotTaken(ODD)
    return handle


def _bytes(path: Path) -> bytes:
    if path.suffix.lower() != ".ipynb" and not os.path.islink(path) and os.path.exists(path):
        raise NotTaken("it is neither a notebook (.ipynb) nor a folder nor a zip")
    with os.fdopen(opened(path), "rb") as file:
        return capped(file.read(NOTEBOOK + 1))


def capped(raw: bytes) -> bytes:
    if len(raw) > NOTEBOOK:
        raise NotTaken(f"the notebook is larger than {NOTEBOOK // MIB} MiB; clear its outputs")
    return raw


# ---- folders within folders ----


def within(folder: Folder) -> FolderContents:
    """What lies in a folder and its folder `exercises`; of a copy of the course, the work alone."""
    here = folder.contents
    names = {one.name for one in here.folders}
    checkout = bool(names.intersection(WORK) and names.intersection(OURS))
    course = WORK if checkout else COURSE
    found = FolderContents([], list(here.files), list(here.others), list(here.problems))
    for one in here.folders:
        if one.name in course:
            _add(found, _copies(one) if one.name == MY else one.contents)
        elif not checkout:
            found.folders.append(one)
    return found


def _copies(folder: Folder) -> FolderContents:
    """What lies in my/: its exercises, and not its lessons, which are not answers."""
    here = folder.contents
    found = FolderContents([], list(here.files), list(here.others), list(here.problems))
    for one in here.folders:
        if one.name == "exercises":
            _add(found, one.contents)
        elif one.name not in OURS:
            found.folders.append(one)
    return found


def _add(found: FolderContents, inner: FolderContents) -> None:
    found.folders += inner.folders
    found.files += inner.files
    found.others += inner.others
    found.problems += inner.problems


def below(folder: Folder) -> Iterator[FolderContents]:
    """All that lies below a folder, what is nearest first: deep junk hides no notebook above it."""
    seen, todo = 0, deque([(folder, 1)])
    while todo:
        one, depth = todo.popleft()
        found = within(one)
        seen += len(found.folders) + len(found.files) + len(found.others)
        if depth > DEPTH:
            yield FolderContents(problems=[(one.where, TOO_DEEP)])
            continue
        yield found
        if seen > FILES and (found.folders or todo):
            yield FolderContents(problems=[(folder.where, TOO_MANY)])
            return
        todo += [(inner, depth + 1) for inner in found.folders]


def gathered(folder: Folder) -> FolderContents:
    """All that lies below a folder, in the order of names, zips after notebooks."""
    contents = FolderContents()
    for found in below(folder):
        contents.files += found.files
        contents.others += found.others
        contents.problems += found.problems
    contents.files.sort(key=lambda file: (file.zipped, file.path))
    return contents
