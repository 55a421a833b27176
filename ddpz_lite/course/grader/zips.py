"""Zips as folders: members are read in memory, within limits, and nothing is unpacked to disk.

Some programs on Windows write `\\` between folders; it is read as `/`.
"""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath

from ddpz_lite.course.grader.places import (
    DEPTH,
    LINK,
    MIB,
    NOTEBOOK,
    TOO_DEEP,
    FolderContents,
    NotebookFile,
    capped,
    is_notebook_or_zip,
    junk,
    opened,
)
from ddpz_lite.course.grader.submission import NotTaken
from ddpz_lite.course.grader.text import in_path

ARCHIVE = 512 * MIB  # bytes of one zip
UNPACKED = 2048 * MIB  # bytes of all notebooks of one zip
MEMBERS = 24 * MIB  # bytes of a zip's list of members: about 200,000, which take 200 MB to know
RATIO = 200  # of a notebook's size to its size in the zip, where it is larger than RATIO_FROM
RATIO_FROM = 4 * MIB
NESTED = "a zip inside a zip; unpack the outer one and pass the folder"


@dataclass
class InZip:
    """A folder of a zip."""

    name: str
    path: str
    where: str
    contents: FolderContents = field(default_factory=FolderContents)


class _Bounded(io.FileIO):
    """A file of which no more than MEMBERS is read at once, as zipfile does with the list."""

    def read(self, size: int = -1) -> bytes:
        if size > MEMBERS:
            raise NotTaken(f"the zip's list of members is larger than {MEMBERS // MIB} MiB")
        return super().read(size)


def unzipped(archive_file: NotebookFile, stack: ExitStack) -> InZip:
    """A zip as a folder. Raises NotTaken.

    It stays open in `stack`: opening it for each notebook would read its list each time.
    """
    try:
        if not os.path.lexists(archive_file.path):  # it lies in another zip
            raise NotTaken(NESTED)
        file = stack.enter_context(_Bounded(opened(archive_file.path), "rb"))
        if os.fstat(file.fileno()).st_size > ARCHIVE:
            raise NotTaken(f"the zip is larger than {ARCHIVE // MIB} MiB")
        archive = stack.enter_context(zipfile.ZipFile(file))
        return _tree(archive, archive_file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise NotTaken(f"the zip cannot be read: {in_path(str(error))}") from None


def _tree(archive: zipfile.ZipFile, archive_file: NotebookFile) -> InZip:
    """The folders of a zip. A list that is as long as it likes costs its length, once."""
    members = archive.infolist()
    if not members:
        raise NotTaken("the zip is empty")
    size = sum(member.file_size for member in members if is_notebook_or_zip(member.filename))
    if size > UNPACKED:
        raise NotTaken(f"the zip's notebooks are larger than {UNPACKED // MIB} MiB together")
    top = InZip(archive_file.stem, archive_file.path, archive_file.where)
    folders, seen = {(): top}, set()
    for member in sorted(members, key=lambda member: member.filename):
        member.filename = member.filename.replace("\\", "/")
        parts = PurePosixPath(member.filename).parts
        problem = _unsafe(member, parts)
        if not problem and _junk(parts, member.is_dir()):
            continue
        where = in_path(f"{archive_file.where}/{member.filename}")
        problem = problem or _problem(member, parts, seen)
        seen.add(member.filename)
        safe = () if problem else parts if member.is_dir() else parts[:-1]
        found = _folder(safe, folders).contents
        if problem:
            found.problems.append((where, problem))
        elif not member.is_dir():
            _sort(archive, member, found, where, archive_file)
    return top


def _folder(parts: tuple[str, ...], folders: dict[tuple[str, ...], InZip]) -> InZip:
    if parts not in folders:
        outer = _folder(parts[:-1], folders)
        path, where = f"{outer.path}/{parts[-1]}", in_path(f"{outer.where}/{parts[-1]}")
        folders[parts] = InZip(parts[-1], path, where)
        outer.contents.folders.append(folders[parts])
    return folders[parts]


def _sort(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    found: FolderContents,
    where: str,
    archive_file: NotebookFile,
) -> None:
    path = PurePosixPath(member.filename)
    if is_notebook_or_zip(path.name):
        load, name = partial(_unpacked, archive, member), f"{archive_file.path}/{member.filename}"
        zipped = path.suffix.lower() == ".zip"
        found.files.append(NotebookFile(name, path.stem, where, load, zipped))
    else:
        found.others.append(path.name)


def _junk(parts: tuple[str, ...], folder: bool) -> bool:
    *outer, last = parts or (".",)
    return any(junk(part, True) for part in outer) or junk(last, folder)


def _unsafe(member: zipfile.ZipInfo, parts: tuple[str, ...]) -> str | None:
    """Why a member of a zip is refused for its name."""
    name = member.filename
    if "\0" in member.orig_filename:
        return "its name in the zip holds a NUL; zip it again"
    if not name:
        return "it has no name in the zip; zip it again"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "its name in the zip is an absolute path"
    if ".." in parts:
        return "its name in the zip leads out of the zip (..)"
    return None


def _problem(member: zipfile.ZipInfo, parts: tuple[str, ...], seen: set[str]) -> str | None:
    """Why a member of a zip is refused, whatever it holds."""
    if len(parts) > DEPTH + 1:
        return TOO_DEEP
    if stat.S_ISLNK(member.external_attr >> 16):
        return LINK
    if member.flag_bits & 1 and is_notebook_or_zip(member.filename):
        return "it is encrypted; hand in a zip without a password"
    return "the zip holds two files of this name" if member.filename in seen else None


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member; no more is unpacked than may be, whatever the zip says of it."""
    try:
        with archive.open(member) as file:
            raw = file.read(NOTEBOOK + 1)
    except Exception as error:  # each method of compression has errors of its own
        reason = in_path(str(error) or type(error).__name__)
        raise NotTaken(f"it cannot be unpacked: {reason}") from None
    if len(raw) > RATIO_FROM and len(raw) > RATIO * max(member.compress_size, 1):
        raise NotTaken(f"it unpacks to more than {RATIO} times its size")
    return capped(raw)
