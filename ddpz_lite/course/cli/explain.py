"""`ddpz explain`: which call differed, which rank was missing or late, what was exposed."""

from __future__ import annotations

import argparse

from ddpz_lite.course.cli.shared import UserError


def run(options: argparse.Namespace) -> int:
    """Print what the files say. Raises UserError for what cannot be read."""
    from ddpz_lite.meter import explain

    try:
        print(explain(*options.files, step=options.step, data=options.data))
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    return 0
