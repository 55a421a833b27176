"""How long a lesson takes a learner, counted from its notebook.

Reading takes a minute for 130 words and for 12 lines of code, a prediction or a quiz 1.5 minutes,
a figure one, and running the cells five. Readers of the course took about as long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

WORDS, LINES = 130, 12  # a minute's reading
QUESTION, FIGURE, RUNNING = 1.5, 1, 5  # minutes
TOLERANCE = 0.15

ASKS = re.compile(r"\b(?:quiz|predict)\(")
PICTURE = re.compile(r"<img\b", re.I)
FORMULA = re.compile(r"\$\$.*?\$\$|<!--.*?-->", re.S)
TABLE_OR_HEADING = re.compile(r"<[^>\n]+>|^\|.*$|^#+ .*$", re.M)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SYMBOLS = re.compile(r"\$[^$]*\$|`[^`]*`")
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


def counted(notebook: Any) -> int:
    """The minutes that a learner needs for a notebook, rounded."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    text = SYMBOLS.sub(" X ", LINK.sub(r"\1", TABLE_OR_HEADING.sub(" ", FORMULA.sub(" ", text))))
    lines = sum(bool(line.strip()) for cell in code for line in cell.source.splitlines())
    asks = sum(len(ASKS.findall(cell.source)) for cell in code)
    figures = sum(_is_figure(output) for cell in code for output in cell.get("outputs", []))
    reading = len(WORD.findall(text)) / WORDS + lines / LINES
    return round(reading + QUESTION * asks + FIGURE * figures + RUNNING)


def misstated(notebook: Any) -> Iterator[str]:
    """A sentence if the header's minutes differ from the counted ones by more than TOLERANCE."""
    stated, honest = notebook.metadata.get("ddpz", {}).get("minutes"), counted(notebook)
    if isinstance(stated, int) and abs(stated - honest) > TOLERANCE * honest:
        yield f"the header says {stated} minutes, and a learner needs about {honest}"


def _is_figure(output: Any) -> bool:
    data = output.get("data", {})
    return "image/png" in data or bool(PICTURE.search(data.get("text/html", "")))
