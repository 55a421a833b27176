"""`ddpz copies`: bring the learner's own copies, `my/lessons` and `my/exercises`, up to date."""

from __future__ import annotations

from argparse import Namespace

from ddpz_lite.course.authoring import copies
from ddpz_lite.course.cli.shared import UserError, folder


def run(options: Namespace) -> int:
    """Make what is missing, update those without work in them, and say what happened."""
    root = folder("lessons").parent
    root = root.parent if root.name == copies.MY else root
    try:
        print("\n".join(copies.outcome_lines(copies.update(root))))
    except copies.Damaged as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error.strerror})") from None
    return 0
