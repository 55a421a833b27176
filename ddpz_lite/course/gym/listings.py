"""Names of libraries that the course does not install, from their own files."""

from __future__ import annotations

import tomllib
from pathlib import Path

FILE = Path(__file__).with_name("listings.toml")


def listing(of: str) -> tuple[list[str], str]:
    """(the names, the file that has them) of a module, an enumeration, a function's arguments.

    Raises KeyError for one that is not kept here.
    """
    with FILE.open("rb") as file:
        kept = tomllib.load(file)
    if of not in kept:
        raise KeyError(f"there is no listing of {of!r}. Fix: one of {', '.join(kept)}.")
    return kept[of]["names"], kept[of]["from"]
