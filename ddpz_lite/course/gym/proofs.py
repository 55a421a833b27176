"""Where the lessons prove a card: in the cells whose metadata say that they answer or bust it.

No list of cells is kept by hand: a cell that moves, or a lesson that is written, is found.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpz_lite.course.gym.bank import Card

LABELS = ("proves", "illustrates", "source")
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
    asserts   whether it can fail on purpose
    label     "proves": it fails under a counterfactual that its metadata name (a test runs it);
              "source": an attribution, a name or a date, which is cited and not run;
              "illustrates": it shows the thing
    """

    lesson: str
    title: str
    file: str
    cell: str
    section: str
    code: bool
    ran: bool
    asserts: bool
    label: str

    @property
    def link(self) -> str:
        """From another lesson, as JupyterLab follows it."""
        return f"{self.file}#cell-id={self.cell}"

    @property
    def name(self) -> str:
        return f"{self.lesson} {self.title}"


def proofs(lessons: Path) -> dict[str, list[Proof]]:
    """For each id that a cell names (of a question, a myth, a topic): its cells, in order.

    lessons: the folder of the notebooks. Cells that prove come first, then those that assert.
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
                found[id_].append(_proof(id_, path.name, title, section, cell))
    return {id_: sorted(cells, key=_weakness) for id_, cells in found.items()}


def _weakness(proof: Proof) -> tuple[int, bool]:
    return LABELS.index(proof.label), not proof.asserts


def of(card: Card, proved: Mapping[str, Sequence[Proof]]) -> list[Proof]:
    """The cells that settle a card: its own, and those of the cards that it rests on."""
    return [proof for id_ in (card.id, *card.rests_on) for proof in proved.get(id_, ())]


def label(cells: Sequence[Proof]) -> str:
    """What these cells do together: the most that one of them does; "source" without cells."""
    return min((proof.label for proof in cells), key=LABELS.index, default="source")


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


def _label(id_: str, metadata: dict) -> str:
    changes = metadata.get("counterfactuals", [])
    if any(id_ in change["of"] for change in changes):
        return "proves"
    return "source" if id_ in metadata.get("source", []) else "illustrates"


def _proof(id_: str, file: str, title: str, section: str, cell: dict) -> Proof:
    code = cell["cell_type"] == "code"
    source = "".join(cell["source"])
    errors = [o for o in cell.get("outputs", []) if o["output_type"] == "error"]
    ran = code and cell["execution_count"] is not None and not errors
    number = file.partition("_")[0]
    asserts = code and _asserts(source)
    named = _label(id_, cell["metadata"]["ddpz"])
    return Proof(number, title, file, cell["id"], section, code, ran, asserts, named)


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
            if name.startswith("assert_") or ast.unparse(node.func) == "dz.check.times":
                return True
    return False
