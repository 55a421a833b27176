"""`ddpz course`: write what follows from the notebooks' metadata, or compare it."""

from __future__ import annotations

from argparse import Namespace

from ddpz_lite.course.authoring import catalogue, pages
from ddpz_lite.course.cli.shared import UserError, folder


def run(options: Namespace) -> int:
    """Write what differs and name it; with --check only name it, and return 1 if anything does."""
    root = folder("lessons").parent
    try:
        stale = pages.stale(root, catalogue.read(root))
    except (catalogue.Incomplete, FileNotFoundError) as error:
        raise UserError(str(error)) from None
    names = [path.relative_to(root).as_posix() for path in stale]
    if options.check:
        lines = [f"{name} differs from what the notebooks say: make course" for name in names]
    else:
        for path, text in stale.items():
            path.write_text(text, encoding="utf-8")
        lines = [f"wrote {name}" for name in names]
    print("\n".join(lines or ["all are up to date"]))
    return 1 if options.check and names else 0
