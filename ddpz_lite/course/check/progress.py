"""What a learner has solved, kept from day to day in one small file of their own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Mark:
    """What is known of one task: the most points it had, out of how many, and hints asked for."""

    points: int = 0
    out_of: int = 0
    hints: int = 0
    tries: int = 0


@dataclass
class Progress:
    """The marks of all tasks. `path` is where they are kept."""

    path: Path
    marks: dict[str, Mark] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None = None) -> Progress:
        """The progress kept at `path` (by default the learner's own); empty if there is none.

        Raises ValueError, and changes nothing, where the file is not one of ours.
        """
        path = path or home() / "progress.json"
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, {task: Mark(**mark) for task, mark in kept.items()})
        except FileNotFoundError:
            return cls(path)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold the progress of exercises ({error}). "
                "Move it away, and a new one begins."
            ) from None

    def of(self, task: str) -> Mark:
        return self.marks.setdefault(task, Mark())

    def copy(self) -> Path:
        """Copy the file as it is now to one next to it, and return that."""
        beside = self.path.with_name("progress-before-reset.json")
        shutil.copy(self.path, beside)
        return beside

    def save(self) -> None:
        """Write the file whole or not at all."""
        marks = {task: asdict(mark) for task, mark in sorted(self.marks.items())}
        write_whole(self.path, json.dumps(marks, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all; its folder is made if need be.

    What UTF-8 cannot say, as half of a pair of surrogates, becomes a question mark.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def own_seed() -> int:
    """The learner's seed: drawn once, kept next to the progress. Never 0, which lessons use.

    Raises ValueError, and changes nothing, where the file does not hold one.
    """
    path = home() / "seed"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        text = str(1 + secrets.randbelow(2**31 - 1))
        write_whole(path, f"{text}\n")
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ValueError(f"{path} does not hold a seed. Move it away, and a new one is drawn.")
    return int(text)


def own_work() -> bool:
    """Whether what runs here is the learner's: not in solutions/, and not a copy of a solution.

    A notebook's kernel keeps the cells that have run in `In` of its main module.
    """
    if cells := getattr(sys.modules["__main__"], "In", None):
        from ddpz_lite.course.check.notebooks import BEGIN  # it imports this module

        if any(BEGIN in cell for cell in cells):
            return False
    try:
        return Path.cwd().name != "solutions"
    except FileNotFoundError:  # the folder has been deleted
        return True


def home() -> Path:
    """The folder for what the course keeps of a learner: $DDPZ_HOME, or the system's place."""
    if own := os.environ.get("DDPZ_HOME"):
        return Path(own)
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "ddpz-lite"
