"""`ddpz exercises`: make the learner's copies of the exercises from their masters, or compare them.

It never overwrites a copy that holds work.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.cli.shared import UserError, folder


def run(options: Namespace) -> int:
    """Write what differs and name it; with --check only name it.

    Returns 1 if a master has not the form of an exercise, or, with --check, if anything differs.
    """
    solutions = folder("solutions")
    exercises = solutions.parent / "exercises"
    stale, wrong = notebooks.stale(solutions, exercises)
    names = [f"{path.parent.name}/{path.name}" for path in stale]
    if options.check:
        lines = [f"{name} differs from its master: make exercises" for name in names]
    else:
        _spare(exercises, stale)
        _write(exercises, stale)
        lines = [f"wrote {name}" for name in names]
    if not lines and not wrong:
        lines = ["all are up to date"]
    print("\n".join(lines + wrong))
    return 1 if wrong or (options.check and names) else 0


def _write(exercises: Path, texts: dict[Path, str]) -> None:
    exercises.mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def _spare(exercises: Path, stale: dict[Path, str]) -> None:
    for path in stale:
        if path.parent == exercises and path.exists() and (worked := notebooks.answered(path)):
            raise UserError(
                f"exercises/{path.name} holds answers ({', '.join(worked)}), which would be lost. "
                "Move it away first; nothing was written."
            )
