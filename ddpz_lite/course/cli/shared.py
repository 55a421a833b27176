"""What the subcommands share: the user's errors, and where the course is."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from ddpz_lite.course.authoring.copies import MY

CHECKOUT = Path(__file__).resolve().parents[3]  # where this package's course lies, if it has one
IMPORTED_AS = {"PIL": "pillow"}  # import name: name of the package


class UserError(Exception):
    """What the user can put right: shown as one line, without a traceback."""


def folder(name: str) -> Path:
    """The course's folder of that name here, or else in the checkout of this package.

    Raises UserError where neither has a notebook in it.
    """
    for place in (Path.cwd(), CHECKOUT):
        if any((place / name).glob("*.ipynb")):
            return place / name
    raise UserError(f"no notebook in {name}/. Run it in the folder of the course.")


def exercises() -> list[Path]:
    """Where exercises may lie, first of all the learner's own copies."""
    blank = folder("exercises")
    own = blank.parent / MY / "exercises"
    return [own, blank] if any(own.glob("*.ipynb")) else [blank]


def shown(path: Path) -> str:
    """A path, as short as possible from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def lesson_number(text: str) -> str:
    """A lesson's number as its file has it: "3" is "03", and "3b" is "03b"."""
    return text.zfill(2 + text[-1].isalpha()) if re.fullmatch(r"\d{1,2}[bc]?", text) else text


def missing(error: ModuleNotFoundError) -> UserError | None:
    """What to install where an extra's package is not there; None for a module of another kind."""
    module = (error.name or "").partition(".")[0]
    package = IMPORTED_AS.get(module, module).replace("_", "-")
    try:
        wanted = metadata.requires("ddpz-lite") or []
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return None
    for line in wanted:
        if found := re.match(rf"{re.escape(package)}\b(?!-).*extra == [\"'](\w+)", line):
            fix = f'in the folder of the course: pip install ".[{found[1]}]", or make setup'
            return UserError(f"{package} is not installed. Fix: {fix}.")
    return None
