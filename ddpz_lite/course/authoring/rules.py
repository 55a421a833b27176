"""The rules that every lesson keeps, each as a function that yields what is wrong with it.

What a lesson's metadata holds (notebook metadata, key `ddpz`):

    "ddpz": {"title": "Start here",               the only `#` heading says the same
             "can_do": ["start four ranks", ...], 3 to 5, each a line of the header cell's list
             "minutes": 40,                       the header cell says "40 minutes"
             "difficulty": "easy",                one of DIFFICULTIES
             "needs": ["01", "02"],               numbers of earlier lessons; [] if none
             "learn": "ranks from a cell",        one line, for the tables
             "makes": "four ranks",               a few words, for the map
             "second": "can wait",                of NNb and NNc; or "needed for 05"
             "ran": "5f0c..."}                    written by `ddpz lessons --write`

A cell says in its own metadata which of the ten parts it begins, and what it settles by its run:
"ddpz": {"part": "myths", "answers": ["Q65"], "busts": ["M020"], "teaches": ["T041"]}.
Beside them stand the changes under which the cell must fail (`counterfactuals`, see that module)
and, as `"source": ["M033"]`, the attributions, names and dates, which no run can prove.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

from ddpz_lite.course.authoring.catalogue import CAN_WAIT, NUMBER
from ddpz_lite.course.authoring.counterfactuals import counterfactuals
from ddpz_lite.course.authoring.start import START, without
from ddpz_lite.course.gym import bank, proofs

PARTS = (
    "header",
    "recall",
    "problem",
    "idea",
    "predict",
    "picture",
    "break",
    "production",
    "myths",
    "summary",
)
ANYWHERE = {"predict", "picture"}  # between the problem and the bug, wherever they teach best
LEAST_PREDICTIONS = 4
DIFFICULTIES = ("easy", "medium", "hard")
MOST_LEARN, MOST_MAKES = 90, 30  # characters that the tables and the picture have room for
SETTLES = {"answers": "Q", "busts": "M", "teaches": "T"}  # what a cell may settle, and its letter
BY_RUN = ("answers", "busts")  # and what takes a cell that runs
MOST_CELLS, MOST_CODE_LINES = 70, 500  # an honest hour; blank lines do not count
SHORTER = "drawing goes into show/, what stood before into built/, or make it two notebooks"
LEAST_ALT = 15  # characters: shorter says that there is a picture, not what it shows
WIDGET = "application/vnd.jupyter.widget-view+json"
TIMING = ("execution", "ExecuteTime")

IMG = re.compile(r"<img\b[^>]*>", re.I)
SVG = re.compile(r"<svg\b[^>]*>", re.I)
ALT = re.compile(r"""\balt\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.I)
LABEL = re.compile(
    r"""\baria-label(?:ledby)?\s*=\s*["'][^"']+["']|\baria-hidden=["']true["']""", re.I
)
MARKDOWN_IMAGE = re.compile(r"!\[([^\]]*)\]\(")
PREDICTION = re.compile(r"\bpredict\(")
COMMENT = re.compile(r"<!--.*?-->", re.S)
BASE64 = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s]+")
WIDGET_REPR = re.compile(r"^\s*[A-Z]\w*\(.*\)\s*$", re.S)
WARNING = re.compile(r"\b\w*Warning:|\bwarnings\.warn\(")
MACHINE_PATH = re.compile(
    r"(?<![\w.])/(?:home|tmp|root|Users|opt|mnt|srv|private|var|usr|work|workspace|github)/"
    r"|[A-Z]:\\\\?\w|(?:site|dist)-packages|ipykernel_\d"
)


def malformed(notebook) -> str | None:
    """What of the facts about the lesson is missing or has the wrong form; None if nothing."""
    facts = notebook.metadata.get("ddpz")
    if not isinstance(facts, dict):
        return "the notebook's metadata has no `ddpz`"

    def a_text(x, most=None):
        return isinstance(x, str) and 0 < len(x.strip()) <= (most or len(x))

    def texts(x):
        return isinstance(x, list) and all(map(a_text, x))

    for name, right in {
        "title": a_text,
        "can_do": lambda x: texts(x) and 3 <= len(x) <= 5,
        "minutes": lambda x: type(x) is int and 5 <= x <= 120,
        "difficulty": lambda x: x in DIFFICULTIES,
        "needs": lambda x: texts(x) and all(re.fullmatch(NUMBER, n) for n in x),
        "learn": lambda x: a_text(x, MOST_LEARN),
        "makes": lambda x: a_text(x, MOST_MAKES),
        "second": lambda x: (
            x in (None, CAN_WAIT) or (a_text(x) and re.fullmatch(f"needed for {NUMBER}", x))
        ),
    }.items():
        if (name not in facts and name != "second") or not right(facts.get(name)):
            return f"metadata `ddpz.{name}` is missing or has the wrong form: {facts.get(name)!r}"
    return None


def header_metadata(notebook) -> Iterator[str]:
    """The facts about the lesson are there, have the right form, and stand in the header cell."""
    if wrong := malformed(notebook):
        yield wrong
        return
    facts = notebook.metadata["ddpz"]
    text = notebook.cells[0].source if notebook.cells else ""
    if f"# {facts['title']}" not in text.splitlines():
        yield f"the header cell's heading is not {facts['title']!r}"
    wanted = [*facts["can_do"], f"{facts['minutes']} minutes", facts["difficulty"], *facts["needs"]]
    wanted += [facts["second"]] if facts.get("second") else []
    for words in wanted:
        if words.lower() not in text.lower():
            yield f"the header cell does not say {words!r}, which the metadata does"


def headings(notebook) -> Iterator[str]:
    """One `#` heading, in the first cell, and no level left out on the way down."""
    levels = []
    for position, cell in enumerate(notebook.cells):
        for level, text in proofs.headings(cell):
            if level == 1 and position > 0:
                yield f"cell {position}: a second title, {text!r}"
            if levels and level > levels[-1] + 1:
                yield f"cell {position}: {text!r} jumps from level {levels[-1]} to {level}"
            levels.append(level)
    if not levels or levels[0] != 1:
        yield "the notebook does not begin with its title, a `#` heading"


def alt_text(notebook) -> Iterator[str]:
    """Every picture, in text and in outputs, says in words what it shows."""
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            alts = [*MARKDOWN_IMAGE.findall(cell.source), *_alts(cell.source)]
            for alt in alts:
                if len(alt.strip()) < LEAST_ALT:
                    yield f"cell {position}: a picture with the alternative text {alt!r}"
        for data in _bundles(cell):
            html = data.get("text/html", "")
            for alt in _alts(html):
                if len(alt.strip()) < LEAST_ALT:
                    yield f"cell {position}: a figure with the alternative text {alt!r}"
            for tag in SVG.findall(html):
                if not LABEL.search(tag):
                    yield f"cell {position}: an <svg> without aria-label"
            if any(kind.startswith("image/") for kind in data) and not IMG.search(html):
                yield f"cell {position}: a bare image; show_figure gives it a text"


def widget_fallback(notebook) -> Iterator[str]:
    """Where no kernel runs, a widget still shows something: a picture, HTML, or words.

    It stands in the widget's own output or in the one before, as ddpz_lite.course.show writes it.
    """
    for position, cell in enumerate(notebook.cells):
        before = {}
        for data in _bundles(cell):
            if (
                WIDGET in data
                and not _still(data)
                and "dz-still" not in before.get("text/html", "")
            ):
                yield f"cell {position}: a widget without a still picture or text"
            before = data


def _still(data) -> bool:
    """Whether an output shows anything to a reader without a kernel."""
    if any(kind.startswith("image/") for kind in data):
        return True
    if "text/html" in data:
        return bool(COMMENT.sub("", data["text/html"]).strip())
    text = data.get("text/plain", "").strip()
    return len(text) >= LEAST_ALT and not WIDGET_REPR.match(text) and "when run" not in text


def clean_outputs(notebook) -> Iterator[str]:
    """No output holds an error, a warning, or a path of the machine that made it."""
    for position, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield f"cell {position}: a stored error, {output.ename}"
            if output.output_type == "stream" and output.name == "stderr":
                yield f"cell {position}: text on stderr, {output.text[:60]!r}"
            shown = BASE64.sub("", _shown(output))
            if found := WARNING.search(shown):
                yield f"cell {position}: a warning, {found.group()!r}"
            if found := MACHINE_PATH.search(shown):
                start = found.start()
                yield f"cell {position}: a path of a machine, {shown[start : start + 40]!r}"
    states = json.dumps(notebook.metadata.get("widgets", {}))
    if found := MACHINE_PATH.search(BASE64.sub("", states)):
        yield f"the stored widgets hold a path of a machine, {found.group()!r}"


def executed_in_order(notebook) -> Iterator[str]:
    """All code cells were run, once, from top to bottom."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"cells were run in the order {counts}: ddpz lessons NN --write [--dir solutions]"
    for cell in cells:
        if not cell.source.strip():
            yield "an empty code cell"


def plain_file(notebook) -> Iterator[str]:
    """Nothing of a session or a machine in the file: timing, kernels, cells without an identity."""
    spec = dict(notebook.metadata.get("kernelspec", {}))
    if spec.get("name") != "python3" or spec.get("display_name") not in ("Python 3", None):
        yield f"the kernel is {spec}, not plain python3"
    ids = [cell.get("id") for cell in notebook.cells]
    if not all(ids) or len(set(ids)) != len(ids):
        yield "cells without an id, or two with the same"
    for position, cell in enumerate(notebook.cells):
        for key in TIMING:
            if key in cell.metadata:
                yield f"cell {position}: stored times ({key}); ddpz lessons --write leaves them out"
        if found := re.search(r"[\x00-\x08\x0b-\x1f]", cell.source):
            yield f"cell {position}: control character {found[0]!r}; a script ate a backslash"


def ten_parts(notebook) -> Iterator[str]:
    """The parts of a lesson are all there, in the order of the course."""
    marked = [cell.metadata.get("ddpz", {}).get("part") for cell in notebook.cells]
    parts = [part for part in marked if part is not None]
    for part in parts:
        if part not in PARTS:
            yield f"there is no part called {part!r}"
    for part in PARTS:
        if part not in parts:
            yield f"the part {part!r} is missing"
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    predictions = sum(len(PREDICTION.findall(source)) for source in code)
    if predictions < LEAST_PREDICTIONS:
        yield f"{predictions} predictions in code; a lesson asks for at least {LEAST_PREDICTIONS}"
    first = [part for part in dict.fromkeys(parts) if part in PARTS and part not in ANYWHERE]
    wanted = [part for part in PARTS if part in first]
    if first != wanted:
        yield f"the parts come in the order {first}, not {wanted}"
    if not marked or marked[0] != "header":
        yield "the first cell is not marked as the header"


def settles(notebook) -> Iterator[str]:
    """What cells say that they answer, bust or teach stands in the bank, and was run."""
    there = bank.cards().keys() | bank.topics().keys()
    for position, cell in enumerate(notebook.cells):
        metadata = cell.metadata.get("ddpz", {})
        for key, letter in SETTLES.items():
            for number in metadata.get(key, []):
                where = f"cell {position}: {key!r} {number!r}"
                if number not in there or not number.startswith(letter):
                    yield f"{where} is not a {letter} of ddpz_lite/course/gym/bank/"
                elif key in BY_RUN and cell.cell_type != "code":
                    yield f"{where} stands in text; it takes a cell that runs"


def provable(notebook) -> Iterator[str]:
    """Counterfactuals can be applied, and what is marked as a source is settled there."""
    try:
        counterfactuals(notebook)
    except ValueError as error:
        yield str(error)
    for position, cell in enumerate(notebook.cells):
        metadata = cell.metadata.get("ddpz", {})
        settled = {id_ for key in SETTLES for id_ in metadata.get(key, [])}
        if others := set(metadata.get("source", [])) - settled:
            yield f"cell {position}: `source` names {sorted(others)}, which it does not settle"


def fresh(notebook) -> Iterator[str]:
    """The stored outputs are those of the code that stands there now."""
    ran = notebook.metadata.get("ddpz", {}).get("ran")
    if ran is not None and ran != code_hash(notebook):
        yield "code has changed since the stored run: ddpz lessons NN --write"


def code_hash(notebook) -> str:
    """A short hash of all code that an author wrote, in order."""
    return hashlib.sha256("\0".join(_authors_code(notebook)).encode()).hexdigest()[:16]


def size(notebook) -> Iterator[str]:
    """A lesson is an honest hour at most, for a learner."""
    code = "\n".join(_authors_code(notebook))
    lines = sum(bool(line.strip()) for line in code.splitlines())
    if len(notebook.cells) > MOST_CELLS:
        yield f"{len(notebook.cells)} cells; an hour has {MOST_CELLS} at most: {SHORTER}"
    if lines > MOST_CODE_LINES:
        yield f"{lines} lines of code; an hour has {MOST_CODE_LINES} at most: {SHORTER}"


EVERYWHERE = (headings, alt_text, widget_fallback, clean_outputs, executed_in_order, plain_file)
LESSON = (*EVERYWHERE, header_metadata, ten_parts, settles, provable, fresh, size)


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook as it lies in the file, cells without an id included."""
    return nbformat.v4.reads(path.read_text(encoding="utf-8"))


def _authors_code(notebook) -> list[str]:
    """The sources of code cells, less what `ddpz course` writes."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.id != START]
    return [without(cell.source) for cell in code]


def _alts(html: str) -> list[str]:
    """The alternative text of each <img>; empty where there is none."""
    found = [ALT.search(tag) for tag in IMG.findall(html)]
    return [(alt.group(1) or alt.group(2) or "") if alt else "" for alt in found]


def _bundles(cell) -> Iterator[dict]:
    for output in cell.get("outputs", []):
        if "data" in output:
            yield output.data


def _shown(output) -> str:
    texts = [output.get("text", "")]
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/") or kind == "application/javascript":
            texts.append(data)
    return "\n".join(texts)
