"""Submissions as they come: files, folders, zips, of which nothing is believed.

Of a notebook only this is taken: its bytes, for their SHA-256, and the sources of code cells that
bear the id of an answer. Kernelspec, outputs, tags, metadata and all other cells are dropped here;
of those cells the names that they define are kept, to say so where an answer misses one.
Whatever else lies beside it (a `torch.py`, a `conftest.py`) is not even opened.

Who the student is: the folder or zip that a notebook lies in (`ada/anything.ipynb`), for all that
lies in there. A notebook's own name (`ada.ipynb`) says it only at the top of what was handed to the
grader, where no student chooses what lies beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from .merge import Pristine, defined

MIB = 1 << 20
NOTEBOOK = 16 * MIB  # bytes of one notebook, its outputs included
ARCHIVE = 512 * MIB  # bytes of one zip
UNPACKED = 2048 * MIB  # bytes of all notebooks of one zip
RATIO = 200  # of a notebook's size to its size in the zip, where it is larger than RATIO_FROM
RATIO_FROM = 4 * MIB
FILES = 20_000  # in one folder or zip
DEPTH = 8  # folders within folders
CELLS = 1000
SOURCE = 50_000  # characters of one answer
NAMES = 2000  # that cells which are not taken define
NESTING = 60  # of the JSON
NAME = 64  # characters of a student's name
NAME_BYTES = 120  # of it in UTF-8: a file's name of 255 has room for "-2" and ".03.json"
COURSE = ("exercises", "solutions")  # folders of the course, which name no student
LINK = "it is a link; hand in the file itself"
IGNORED = ("__MACOSX", ".ipynb_checkpoints")


@dataclass(frozen=True)
class Submission:
    """One notebook of one student, reduced to what counts."""

    student: str  # safe in file names, tables and pages
    lesson: str
    where: str  # what the teacher finds it by
    sha256: str
    answers: tuple[tuple[str, str], ...]  # (cell id, source) in the order of the notebook
    warnings: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()  # names that cells which are not taken seem to define


@dataclass(frozen=True)
class Refusal:
    """What was handed in and cannot be graded, and why."""

    student: str
    where: str
    reason: str


class Refused(Exception):
    """The reason, in one line."""


@dataclass(frozen=True)
class _Found:
    """A place in a folder or zip: a notebook, or what is refused."""

    path: str  # of this machine, or inside the zip
    folders: tuple[str, ...]  # it lies in, within what was handed in
    stem: str
    where: str
    load: Callable[[], bytes]  # raises Refused
    bad: bool = False  # known to be refused

    def refused(self, reason: Refused) -> _Found:
        """The same place, refused."""

        def refuse() -> bytes:
            raise reason

        return replace(self, load=refuse, bad=True)


@dataclass(frozen=True)
class _Claim:
    """What was taken, and from where its student has the name."""

    place: str  # a path: what lies there is one student's
    own: bool  # the name is the notebook's own, which the student may have chosen
    one: Submission | Refusal


def take(paths: Iterable[Path], known: dict[str, Pristine]) -> list[Submission | Refusal]:
    """All that the paths hold, in the order of their names; a student's last notebook counts.

    known: the exercises by lesson. Nothing here raises for what a student handed in.
    """
    taken: list[_Claim] = []
    for path in paths:
        for place, student, found in _items(path, tuple(e.name for e in known.values())):
            try:
                one = _read(found.load(), student, found.where, known)
            except Refused as reason:
                one = Refusal(student, found.where, str(reason))
            own = place == found.path and not found.bad
            taken.append(_Claim(place, own, one))
    return _last_of_each(_told_apart(taken))


# ---- from places to bytes ----


def _items(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str, _Found]]:
    """(what identifies the student, the student's name, what was found) for all below a path."""
    whole = path.absolute()
    if path.is_dir() and not path.is_symlink():
        inside = list(_folder(whole))
        shared = _shared(inside, names)
        for found in inside:
            if not _is_zip(found):
                yield _named(found, str(whole), _owner(whole), names, shared)
        for found in inside:
            if _is_zip(found):  # a student's: so is all in it
                with ExitStack() as stack:
                    owner, place = (*found.folders, found.stem)[shared], found.path
                    if len(found.folders) > shared:
                        place = _place(str(whole), found, shared)
                    for member in _zip(found, stack):
                        yield place, clean(owner), member
        return
    found = _Found(str(whole), (), path.stem, _shown(path.name), partial(_bytes, whole))
    if path.suffix.lower() == ".zip" and not path.is_symlink():
        with ExitStack() as stack:
            members = _zip(found, stack)
            shared = _common(members)
            for member in members:
                yield _named(member, found.path, path.stem, names, shared)
    else:
        yield _named(found, str(whole.parent), _owner(whole.parent), names, 0)


def _is_zip(found: _Found) -> bool:
    return found.path.lower().endswith(".zip") and not found.bad


def _owner(folder: Path) -> str:
    """Whose folder it is: a folder of the course is that of whoever has the checkout."""
    return folder.parent.name if folder.name in COURSE else folder.name


def _named(
    found: _Found, root: str, owner: str, names: tuple[str, ...], shared: int
) -> tuple[str, str, _Found]:
    """Name the student of a notebook below root, which is the owner's.

    It is the first folder that not all share. Where there is none, it is the owner if the notebook
    is called as the exercise, and else the notebook's own name.
    """
    if len(found.folders) > shared:
        return _place(root, found, shared), clean(found.folders[shared]), found
    if found.stem.startswith(names) or found.bad:
        return _place(root, found, shared), clean(owner), found
    return found.path, clean(found.stem), found


def _place(root: str, found: _Found, shared: int) -> str:
    return "/".join((root, *found.folders[: shared + 1]))


def _common(inside: Sequence[_Found]) -> int:
    """How many outer folders all notebooks and zips lie in."""
    alike = [len(set(level)) == 1 for level in zip(*(f.folders for f in inside), strict=False)]
    return [*alike, False].index(False)


def _shared(inside: Sequence[_Found], names: tuple[str, ...]) -> int:
    """How many outer folders of a class's folder say nothing of the student.

    The innermost that all lie in is the only student's, if an exercise lies in it by its name or
    nothing else was handed in. Else it holds a class.
    """
    common = _common(inside)
    here = [found for found in inside if len(found.folders) == common]
    a_student_s = len(inside) == 1 or any(found.stem.startswith(names) for found in here)
    return max(0, common - 1) if a_student_s else common


def _folder(top: Path) -> Iterator[_Found]:
    """The notebooks and zips below a folder, and what is refused."""
    for number, (path, problem) in enumerate(_walk(top, 0)):
        inside = path.relative_to(top)
        folders = tuple(part for part in inside.parts[:-1] if part not in COURSE)
        where = _shown(f"{top.name}/{inside.as_posix()}")
        found = _Found(str(path), folders, path.stem, where, partial(_bytes, path))
        if number >= FILES:
            yield found.refused(Refused(f"the folder holds more than {FILES} files"))
            return
        if problem is not None:
            yield found.refused(problem)
        elif path.suffix.lower() in (".ipynb", ".zip"):
            yield found


def _walk(folder: Path, depth: int) -> Iterator[tuple[Path, Refused | None]]:
    """Files below a folder, and what is refused; links are never followed."""
    if depth > DEPTH:
        yield folder, Refused(f"folders are nested more than {DEPTH} deep")
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield folder, Refused(f"the folder cannot be read ({error.strerror})")
        return
    for entry in entries:
        path = folder / entry.name
        if entry.name in IGNORED or entry.name.startswith("._"):
            continue
        if entry.is_symlink():
            yield path, Refused(LINK)
        elif entry.is_dir():
            yield from _walk(path, depth + 1)
        else:
            yield path, None


def _bytes(path: Path) -> bytes:
    """The bytes of a regular file, opened without following a link or waiting on a pipe."""
    if path.is_symlink():
        raise Refused(LINK)
    if path.suffix.lower() != ".ipynb":
        raise Refused("it is neither a notebook (.ipynb) nor a folder nor a zip")
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, os.O_RDONLY | careful)
    except OSError as error:
        raise Refused(f"it cannot be read ({error.strerror})") from None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused("it is not a regular file")
        return _capped(file.read(NOTEBOOK + 1))


def _capped(raw: bytes) -> bytes:
    if len(raw) > NOTEBOOK:
        raise Refused(f"the notebook is larger than {NOTEBOOK // MIB} MiB; clear its outputs")
    return raw


def _zip(whole: _Found, stack: ExitStack) -> list[_Found]:
    """The notebooks of a zip and what is refused of it, or the zip itself, refused.

    It stays open in `stack`: to open it anew for each notebook is to read its list each time.
    """
    try:
        if os.path.getsize(whole.path) > ARCHIVE:
            raise Refused(f"the zip is larger than {ARCHIVE // MIB} MiB")
        archive = stack.enter_context(zipfile.ZipFile(whole.path))
        return list(_members(archive, whole))
    except Refused as reason:
        return [whole.refused(reason)]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        return [whole.refused(Refused(f"the zip cannot be read: {_shown(str(error))}"))]


def _members(archive: zipfile.ZipFile, whole: _Found) -> Iterator[_Found]:
    members = [member for member in archive.infolist() if not member.is_dir()]
    notebooks = [member for member in members if member.filename.lower().endswith(".ipynb")]
    if not members:
        raise Refused("the zip is empty")
    if len(members) > FILES:
        raise Refused(f"the zip holds more than {FILES} files")
    if sum(member.file_size for member in notebooks) > UNPACKED:
        raise Refused(f"the zip's notebooks are larger than {UNPACKED // MIB} MiB together")
    seen = set()
    for member in members:
        name, path = member.filename, PurePosixPath(member.filename)
        if any(part in IGNORED or part.startswith("._") for part in path.parts):
            continue
        found = _Found(
            path=f"{whole.path}/{name}",
            folders=tuple(part for part in path.parts[:-1] if part not in COURSE),
            stem=path.stem,
            where=_shown(f"{whole.where}/{name}"),
            load=partial(_unpacked, archive, member),
        )
        problem = _refuse(member, path.parts)
        if problem is None and name in seen:
            problem = Refused("the zip holds two files of this name")
        seen.add(name)
        if problem is not None:
            yield found.refused(problem)
        elif name.lower().endswith(".ipynb"):
            yield found


def _refuse(member: zipfile.ZipInfo, parts: tuple[str, ...]) -> Refused | None:
    """Why a member of a zip is refused, whatever it holds."""
    name = member.filename
    if name.startswith("/") or "\\" in name or re.match(r"[A-Za-z]:", name):
        return Refused("its name in the zip is an absolute path or one of another system")
    if ".." in parts:
        return Refused("its name in the zip leads out of the zip (..)")
    if len(parts) > DEPTH:
        return Refused(f"folders are nested more than {DEPTH} deep")
    if stat.S_ISLNK(member.external_attr >> 16):
        return Refused(LINK)
    if member.flag_bits & 1:
        return Refused("it is encrypted")
    if name.lower().endswith(".zip"):
        return Refused("a zip inside a zip; unpack it first")
    return None


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """The bytes of a member; no more is unpacked than may be, whatever the zip says of it."""
    try:
        with archive.open(member) as file:
            raw = file.read(NOTEBOOK + 1)
    except Exception as error:  # each method of compression has errors of its own
        reason = _shown(str(error) or type(error).__name__)
        raise Refused(f"it cannot be unpacked: {reason}") from None
    if len(raw) > RATIO_FROM and len(raw) > RATIO * max(member.compress_size, 1):
        raise Refused(f"it unpacks to more than {RATIO} times its size")
    return _capped(raw)


# ---- from bytes to answers ----


def _read(raw: bytes, student: str, where: str, known: dict[str, Pristine]) -> Submission:
    """The answers in a notebook. Raises Refused."""
    cells = _cells(_parsed(raw))
    found = {
        lesson: [(name, source) for name, source in cells if name in exercise.answers]
        for lesson, exercise in known.items()
    }
    lesson = max(found, key=lambda lesson: len({name for name, _ in found[lesson]}))
    if not found[lesson]:
        raise Refused(
            "it holds no answer cell of any exercise; cells are known by their ids, which a new "
            "notebook or a copy of cells into one does not have"
        )
    long = [name for name, source in found[lesson] if len(source) > SOURCE]
    if long:
        raise Refused(f"the answer {long[0]} is longer than {SOURCE} characters")
    digest = hashlib.sha256(raw).hexdigest()
    others = [text for name, text in cells if name not in known[lesson].answers]
    names = (name for text in others if len(text) <= SOURCE for name in defined(text))
    answers, elsewhere = tuple(found[lesson]), frozenset(islice(names, NAMES))
    return Submission(student, lesson, where, digest, answers, elsewhere=elsewhere)


def _parsed(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise Refused("the file is empty")
    try:
        notebook = json.loads(raw.decode("utf-8-sig"), parse_int=_int)
    except UnicodeDecodeError:
        raise Refused("the file is not text in UTF-8") from None
    except RecursionError:
        raise Refused("its JSON is nested too deeply") from None
    except ValueError as error:
        raise Refused(f"it is no notebook: the JSON is broken ({error})") from None
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4:
        raise Refused("it is no notebook of version 4")
    return notebook


def _int(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError("a number of more than 40 digits")
    return int(digits)


def _cells(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """(id, source) of the code cells that have both."""
    cells = notebook.get("cells")
    if not isinstance(cells, list):
        raise Refused("it is no notebook: it has no list of cells")
    if len(cells) > CELLS:
        raise Refused(f"it has {len(cells)} cells; {CELLS} are allowed")
    if _depth(cells) > NESTING:
        raise Refused("its JSON is nested too deeply")
    found = []
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        name, source = _id(cell), cell.get("source")
        if isinstance(source, list) and all(isinstance(line, str) for line in source):
            source = "".join(source)
        if isinstance(name, str) and isinstance(source, str):
            found.append((name, source))
    return found


def _id(cell: dict[str, Any]) -> Any:
    """A cell's id; where the format has none (Colab writes 4.0), the one in its metadata."""
    metadata = cell.get("metadata")
    return cell.get("id", metadata.get("id") if isinstance(metadata, dict) else None)


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


# ---- names ----


def clean(name: str) -> str:
    """A name for files, tables and pages: letters, digits and a few marks, at most NAME of them
    and NAME_BYTES of their bytes.
    """
    plain = unicodedata.normalize("NFKC", name)
    kept = "".join(c if c.isalnum() or c in "-_.@+ " else "_" for c in plain)
    short = re.sub(r"[_ ]{2,}", "_", kept).strip(" .-_+@")[:NAME]
    return short.encode()[:NAME_BYTES].decode(errors="ignore").rstrip(" .") or "unnamed"


def _shown(text: str) -> str:
    """Text of a student in one line of print: no control characters, no endless names."""
    plain = "".join(c if c.isprintable() else "_" for c in text)
    return plain if len(plain) <= 200 else plain[:197] + "..."


def _told_apart(taken: Sequence[_Claim]) -> list[Submission | Refusal]:
    """Two places whose names became the same, or differ by case alone: one gets a number, and says
    so. A folder's or zip's name comes before a notebook's own.
    """
    owner: dict[str, str] = {}
    for claim in sorted(taken, key=lambda claim: claim.own):
        owner.setdefault(claim.one.student.casefold(), claim.place)
    result = []
    for claim in taken:
        name, number = claim.one.student, 2
        while owner.setdefault(name.casefold(), claim.place) != claim.place:
            name, number = f"{claim.one.student}-{number}", number + 1
        result.append(_renamed(claim.one, name))
    return result


def _renamed(one: Submission | Refusal, name: str) -> Submission | Refusal:
    if name == one.student:
        return one
    said = f"{one.where}: the name {one.student} is another hand-in's too; this one is {name} here"
    if isinstance(one, Refusal):
        return replace(one, student=name, reason=f"{one.reason} ({said})")
    return replace(one, student=name, warnings=(*one.warnings, said))


def _last_of_each(taken: Iterable[Submission | Refusal]) -> list[Submission | Refusal]:
    """Of two notebooks of a student for one exercise the last counts, with a warning."""
    last: dict[tuple[str, str], int] = {}
    result: list[Submission | Refusal | None] = []
    for one in taken:
        if isinstance(one, Submission):
            key = (one.student, one.lesson)
            if key in last:
                before, result[last[key]] = result[last[key]], None
                one = replace(
                    one,
                    warnings=(
                        *before.warnings,
                        f"{before.where} was handed in too; this one counts",
                    ),
                )
            last[key] = len(result)
        result.append(one)
    return [one for one in result if one is not None]
