"""The docstrings of the library, which are plain text, as Sphinx wants them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

SECTION = re.compile(r"(Args|Returns|Raises):$")
NAMED = re.compile(r"(\*{0,2}\w[\w., ]*): +(.*)")  # in a section:   world_size: N, the ranks ...
ALIGNED = re.compile(r"(\w+) {2,}(\S.*)")  # without one:    timeout   seconds from the start ...


def as_rst(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText. Between blank lines stands one of four things.

    code       every line indented
    section    "Args:", "Returns:" or "Raises:" alone on its line, then names with their meaning
    table      a name, two spaces or more, its meaning
    prose      anything else
    """
    found = []
    for blank, group in groupby(lines, lambda line: not line.strip()):
        if blank:
            continue
        block = list(group)
        if all(line.startswith("    ") for line in block):
            found += ["::", "", *block, ""]
        elif SECTION.match(block[0]):
            found += [f"**{block[0]}**", ""]
            found += _definitions(textwrap.dedent("\n".join(block[1:])).splitlines(), NAMED)
        elif ALIGNED.match(block[0]):
            found += _definitions(block, ALIGNED)
        else:
            found += [_prose(" ".join(block)), ""]
    return found


def _definitions(lines: list[str], entry: re.Pattern[str]) -> Iterator[str]:
    """A name that begins a line, and its meaning, which goes on in the indented lines below."""
    for line in lines:
        if not line.startswith(" "):
            if not (parts := entry.match(line)):
                raise ValueError(f"book: expected a name and its meaning, got {line!r}")
            yield from ("", f"``{parts.group(1)}``", f"    {_prose(parts.group(2))}")
        else:
            yield f"    {_prose(line.strip())}"
    yield ""


def _prose(text: str) -> str:
    """Text with its `code` marked, and every other sign as itself."""
    words = re.split(r"`([^`]+)`", text)
    plain = [re.sub(r"([\\*_|`])", r"\\\1", word) for word in words[::2]]
    code = [f"``{word}``\\ " for word in words[1::2]] + [""]
    return "".join(a + b for a, b in zip(plain, code, strict=True))
