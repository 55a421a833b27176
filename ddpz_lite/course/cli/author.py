"""`ddpz author`: what a lesson lacks, or has wrong, in one list."""

from __future__ import annotations

from argparse import Namespace

from ddpz_lite.course.authoring import missing as authoring
from ddpz_lite.course.cli.lessons import choose, find
from ddpz_lite.course.cli.proofs import unproved
from ddpz_lite.course.cli.shared import UserError, folder


def run(options: Namespace) -> int:
    """Print the list; 1 if something is missing or wrong."""
    root = folder("lessons").parent
    try:
        faults, warnings = authoring.faults(root, options.lesson)
    except authoring.NoLesson as error:
        raise UserError(str(error)) from None
    if options.proofs:
        for path in choose(find(str(root / "lessons")), [options.lesson]):
            faults += unproved(path)
    for line in faults:
        print(f"- {line}")
    for line in warnings:
        print(f"- warning: {line}")
    count = f"{len(faults)} {'thing' if len(faults) == 1 else 'things'} to do"
    print(count if faults else "nothing is missing")
    return 1 if faults else 0
