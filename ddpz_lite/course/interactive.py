"""Whether a person is there to answer a question or to see colours."""

from __future__ import annotations

import os
import sys


def notebook() -> bool:
    """Whether a person runs this notebook: what executes stored ones, nbval too, takes no input."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", False))


def colour() -> bool:
    """Whether printed text may have colours: a person's notebook, or a terminal, not a file."""
    return not os.environ.get("NO_COLOR") and (notebook() or sys.stdout.isatty())
