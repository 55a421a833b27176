"""The learner's own copies: `my/lessons` and `my/exercises`, which git does not see.

Running a notebook changes its file, and a changed file would stand in the way of `git pull`. So a
learner works in copies. Each is brought up to date as long as it holds no work; what a
learner has written is never replaced, and the course's new version is laid next to it.

[Note: what counts as written] The cells of a notebook, not their outputs: a lesson that was only
run is replaced by the new one. Of another kind of file every byte counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

MY = "my"
FOLDERS = ("lessons", "exercises")
KINDS = (".ipynb", ".md", ".svg", ".png")
MADE_FROM = ".made-from.json"  # in my/: what is Known
NEW = "new-"  # begins the name of a version that is laid beside

# By name of a copy, the marks of what it was last made from: (the file, what is written in it).
Known = dict[str, tuple[str, str]]


class Damaged(ValueError):
    """my/ does not hold what this file writes there: one line, with the fix."""


@dataclass
class Outcome:
    """What `update` did. Names are those of copies, as "lessons/05_ddp.ipynb"."""

    made: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # the course has them no more; the copy stays
    taken: list[str] = field(default_factory=list)  # of those made: with work from the course's own


@dataclass(frozen=True)
class Beside:
    """A copy that was kept, and the name of the new version that lies next to it."""

    copy: str
    new: str
    answers: bool  # the learner's answers are in the new version


def update(root: Path) -> Outcome:
    """Bring `my/` of the course in `root` up to date.

    Raises Damaged if what it wrote there the last time cannot be read.
    """
    my_folder, outcome = root / MY, Outcome()
    known = _known(my_folder / MADE_FROM)
    dirty = worked_in(root)
    names = list(_names(root))
    for name in names:
        _one(root, name, known, outcome, name in dirty)
    for name in sorted(known.keys() - names):
        if not (my_folder / name).exists():
            del known[name]
        elif not _is_new(name):
            outcome.gone.append(name)
            del known[name]
    _replace(my_folder / MADE_FROM, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())
    return outcome


def _names(root: Path) -> Iterator[str]:
    """What there is a copy of."""
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*")):
            if path.suffix in KINDS and path.is_file():
                yield f"{folder}/{path.name}"


def _one(root: Path, name: str, known: Known, outcome: Outcome, dirty: bool) -> None:
    """Bring one copy up to date, and note in `known` what it was made from."""
    copy, raw = root / MY / name, _course(root, name, dirty)
    before, now = known.get(name), (_mark(raw), _mark(written(raw)))
    if not copy.exists():
        _replace(copy, (root / name).read_bytes())
        outcome.made.append(name)
        if dirty:
            outcome.taken.append(name)
    elif before != now:
        own = copy.read_bytes()
        theirs = _mark(written(own))
        if before is not None and theirs == before[1] != now[1]:
            _replace(copy, raw)
            outcome.updated.append(name)
        elif before is None or before[1] != now[1]:
            _lay_beside(root / MY, name, raw, own, known, outcome)
    known[name] = now


def _course(root: Path, name: str, dirty: bool) -> bytes:
    """A file as the course has it: from git, if the file itself holds work."""
    if dirty:
        done = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True)
        if done.returncode == 0:
            return done.stdout
    return (root / name).read_bytes()


def _lay_beside(
    my_folder: Path, name: str, raw: bytes, own: bytes, known: Known, outcome: Outcome
) -> None:
    """Write the course's version under another name, with the learner's answers in it.

    Nothing is to do where that is what the learner has already.
    """
    folder, _, file = name.partition("/")
    content = answered(raw, own) if file.endswith(".ipynb") else raw
    if written(content) == written(own):
        return
    new = f"{folder}/{NEW}{file}"
    for number in count(2):
        path = my_folder / new
        if not path.exists() or known.get(new) == (_mark(path.read_bytes()), ""):
            break
        new = f"{folder}/{NEW}{number}-{file}"  # that one holds work, too
    _replace(path, content)
    known[new] = (_mark(content), "")
    outcome.beside.append(Beside(name, new, content != raw))


def _is_new(name: str) -> bool:
    return name.partition("/")[2].startswith(NEW)


def written(raw: bytes) -> bytes:
    """What a person writes in a file: of a notebook the cells, empty ones and outputs left out."""
    try:
        cells = json.loads(raw)["cells"]
        kept = [[cell["cell_type"], source] for cell in cells if (source := _source(cell).strip())]
    except (ValueError, KeyError, TypeError):
        return raw  # no notebook, or one that broke: all of it counts
    return json.dumps(kept).encode()


def answered(raw: bytes, own: bytes) -> bytes:
    """The notebook `raw` with the answers of the notebook `own`, found by task."""
    notebook = json.loads(raw)
    try:
        cells = json.loads(own)["cells"]
        theirs = {task: _source(cell) for cell in cells if (task := _answers(cell))}
    except (ValueError, KeyError, TypeError):
        return raw
    changed = False
    for cell in notebook["cells"]:
        source = theirs.get(_answers(cell))
        if source is not None and source.strip() != _source(cell).strip():
            cell["source"], changed = source.splitlines(keepends=True), True
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode() if changed else raw


def _answers(cell: dict[str, Any]) -> str | None:
    """The task whose answer a cell holds."""
    about = cell["metadata"].get("ddpz", {})
    return about.get("task") if about.get("role") == "answer" else None


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def worked_in(root: Path) -> set[str]:
    """The course's own files that differ from what git has of them; none where there is no git."""
    command = ["git", "-c", "core.quotepath=off", "diff", "--name-only", "--relative", "HEAD"]
    try:
        done = subprocess.run(
            [*command, "--", *FOLDERS], cwd=root, capture_output=True, text=True, timeout=30
        )
    except FileNotFoundError:
        return set()
    return set(done.stdout.splitlines()) if done.returncode == 0 else set()


def _known(path: Path) -> Known:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {name: (str(file), str(cells)) for name, (file, cells) in known.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise Damaged(
            f"{MY}/{path.name} is damaged ({error}). Delete it: your copies stay, and where they "
            "differ from the course, its version is laid beside them."
        ) from None


def _mark(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


# ---- what happened, in sentences ----


def outcome_lines(outcome: Outcome) -> list[str]:
    """The outcome, a line each."""
    lines = []
    if outcome.made:
        lines.append(
            f"{MY}/: copies made: {len(outcome.made)}. Work in them; git pull leaves them alone."
        )
    if outcome.taken:
        lines.append(
            f"They hold what you wrote in {', '.join(outcome.taken)}. So that git pull finds these "
            f"as they were: git checkout {' '.join(outcome.taken)}"
        )
    if outcome.updated:
        lines.append(
            f"{MY}/: brought up to date, as you had written nothing in them: "
            f"{', '.join(outcome.updated)}"
        )
    for one in outcome.beside:
        answers = ", with your answers in it" if one.answers else ""
        lines.append(f"{MY}/{one.copy}: yours is kept. The new version{answers}: {MY}/{one.new}")
    lines += [f"{MY}/{name}: no longer in the course; your copy stays" for name in outcome.gone]
    return lines or [f"{MY}/ is up to date"]
