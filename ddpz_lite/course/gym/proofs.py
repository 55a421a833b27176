"""Where the lessons prove a card: in the cells whose metadata say that they answer or bust it.

No list of cells is kept by hand: a cell that moves, or a lesson that is written, is found.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTLING = ("answers", "busts", "teaches")  # the keys of a cell's metadata, under `ddpz`
HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
FENCE = re.compile(r"\s*(```|~~~)")


@dataclass(frozen=True)
class Proof:
    """A cell that settles something.

    lesson    its number, "11b"
    title     of the lesson
    file      "11b_zero3_in_practice.ipynb"
    cell      the cell's id in the file
    section   the heading under which it stands
    code      whether it runs, or is text
    ran       whether it was run, and stored no error
    asserts   whether it would fail where the claim does not hold
    """

    lesson: str
    title: str
    file: str
    cell: str
    section: str
    code: bool
    ran: bool
    asserts: bool

    @property
    def link(self) -> str:
        """From another lesson, as JupyterLab follows it."""
        return f"{self.file}#cell-id={self.cell}"

    @property
    def name(self) -> str:
        return f"{self.lesson} {self.title}"


def proofs(lessons: Path) -> dict[str, list[Proof]]:
    """For each id that a cell names (of a question, a myth, a topic): its cells, in order.

    lessons: the folder of the notebooks. Cells that assert come first.
    """
    found: dict[str, list[Proof]] = defaultdict(list)
    for path in sorted(lessons.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        title = notebook["metadata"].get("ddpz", {}).get("title", path.stem)
        section = title
        for cell in notebook["cells"]:
            section = [section, *(text for _, text in headings(cell))][-1]
            metadata = cell["metadata"].get("ddpz", {})
            for id_ in dict.fromkeys(id_ for key in SETTLING for id_ in metadata.get(key, [])):
                found[id_].append(_proof(path.name, title, section, cell))
    return {id_: sorted(cells, key=lambda p: not p.asserts) for id_, cells in found.items()}


def headings(cell: dict) -> Iterator[tuple[int, str]]:
    """(level, text) of each heading in a cell of Markdown; what is fenced is none."""
    if cell["cell_type"] != "markdown":
        return
    fenced = False
    for line in "".join(cell["source"]).splitlines():
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced and (found := HEADING.match(line)):
            yield len(found[1]), found[2]


def _proof(file: str, title: str, section: str, cell: dict) -> Proof:
    code = cell["cell_type"] == "code"
    source = "".join(cell["source"])
    errors = [o for o in cell.get("outputs", []) if o["output_type"] == "error"]
    ran = code and cell["execution_count"] is not None and not errors
    number = file.partition("_")[0]
    return Proof(number, title, file, cell["id"], section, code, ran, code and _asserts(source))


def _asserts(source: str) -> bool:
    """Whether code can fail on purpose: it asserts, calls what does, or raises AssertionError."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with a magic: look at its lines
        return any(line.lstrip().startswith("assert ") for line in source.splitlines())
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.startswith("assert_"):
                return True
    return False
