"""Every lesson keeps the rules of the course, and every rule catches what it is for."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from ddpz_lite.course.authoring import rules

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))


@pytest.mark.parametrize("path", [*LESSONS, *SOLUTIONS], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_notebook_keeps_the_rules(path):
    notebook = rules.read(path)
    of_its_kind = rules.LESSON if path in LESSONS else rules.EVERYWHERE
    complaints = [f"{rule.__name__}: {text}" for rule in of_its_kind for text in rule(notebook)]
    assert not complaints, "\n".join(complaints)


def test_what_the_capstone_asserts_up_to_a_share_is_close_for_a_learner_too():
    (path,) = (ROOT / "lessons").glob("16b_*.ipynb")
    cells = {cell.id: cell.source for cell in rules.read(path).cells}
    within, *_ = re.findall(r"show\.predict\(.*?within=([\d.]+)", cells["recipe"], re.DOTALL)
    assert "step_kb.reveal" in cells["kill"] and f" - 1) < {within}\n" in cells["kill"] + "\n"


@pytest.mark.parametrize("folder", ["lessons", "solutions"])
def test_no_file_beside_a_notebook_can_change_how_it_is_tested(folder):
    names = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
    assert not [name for name in names if (ROOT / folder / name).exists()]


# ---- the rules themselves: one good notebook, and every way to spoil it ----

FACTS = {
    "title": "Start here",
    "can_do": ["start four ranks", "say who is who", "write an all-reduce"],
    "minutes": 40,
    "difficulty": "easy",
    "needs": [],
    "learn": "ranks from a cell",
    "makes": "four ranks",
}
HEADER = """# Start here

You will be able to

- start four ranks
- say who is who
- write an all-reduce

About 40 minutes, easy, needs nothing."""
FIGURE = (
    '<figure><img alt="Four ranks, one bar each" src="data:image/png;base64,/tmp/AAAA"></figure>'
)
HTML = {"text/html": FIGURE, "text/plain": "a figure of four ranks"}


def good_notebook() -> nbformat.NotebookNode:
    order = list(rules.PARTS)
    cells = [new_markdown_cell(HEADER)]
    cells += [new_markdown_cell(f"## {part}\n\n```\n# not a heading\n```") for part in order[1:]]
    for cell, part in zip(cells, order, strict=True):
        cell.metadata["ddpz"] = {"part": part}
    code = new_code_cell("show(*(predict(x, 1) for x in 'ab'))\n" * 4, execution_count=1)
    code.outputs = [
        new_output("stream", name="stdout", text="rank 0 of 4\n"),
        new_output("display_data", {rules.WIDGET: {"model_id": "1"}, **HTML}),
    ]
    metadata = {"ddpz": copy.deepcopy(FACTS), "kernelspec": {"name": "python3"}}
    metadata["kernelspec"]["display_name"] = "Python 3"
    return nbformat.v4.new_notebook(cells=[*cells, code], metadata=metadata)


def code(notebook):
    return notebook.cells[-1]


def show(notebook, **data):
    """Give the code cell one output: show(n, html="...") sets text/html."""
    kinds = {"html": "text/html", "plain": "text/plain", "png": "image/png", "widget": rules.WIDGET}
    code(notebook).outputs = [new_output("display_data", {kinds[k]: v for k, v in data.items()})]


def printed(notebook, text, name="stdout"):
    code(notebook).outputs = [new_output("stream", name=name, text=text)]


def failed(notebook):
    code(notebook).outputs = [new_output("error", ename="ValueError", evalue="x", traceback=[])]


def facts(**changes):
    return lambda notebook: notebook.metadata["ddpz"].update(changes)


def part(position, name):
    return lambda notebook: notebook.cells[position].metadata.update(ddpz={"part": name})


def settled(position, **what):
    return lambda notebook: notebook.cells[position].metadata.update(ddpz=what)


def source(position, text):
    return lambda notebook: notebook.cells[position].update(source=text)


SPOILS = [
    (rules.header_metadata, "no `ddpz`", lambda n: n.metadata.pop("ddpz")),
    (rules.header_metadata, "ddpz.title", facts(title="")),
    (rules.header_metadata, "ddpz.can_do", facts(can_do=["start four ranks"])),
    (rules.header_metadata, "ddpz.can_do", facts(can_do=["a"] * 6)),
    (rules.header_metadata, "ddpz.minutes", facts(minutes="40")),
    (rules.header_metadata, "ddpz.difficulty", facts(difficulty="so-so")),
    (rules.header_metadata, "ddpz.can_do", facts(can_do=[1, 2, 3])),
    (rules.header_metadata, "ddpz.needs", facts(needs=["lesson 1"])),
    (rules.header_metadata, "ddpz.needs", facts(needs=[1])),
    (rules.header_metadata, "ddpz.learn", facts(learn="")),
    (rules.header_metadata, "ddpz.makes", facts(makes="more than the picture has room for")),
    (rules.header_metadata, "ddpz.second", facts(second="later")),
    (rules.header_metadata, "ddpz.second", facts(second=3)),
    (rules.header_metadata, "'can wait'", facts(second="can wait")),
    (rules.header_metadata, "'03b'", facts(needs=["03b"])),
    (rules.header_metadata, "heading is not 'Begin'", facts(title="Begin")),
    (rules.header_metadata, "'fly'", facts(can_do=["start four ranks", "say who is who", "fly"])),
    (rules.header_metadata, "'50 minutes'", facts(minutes=50)),
    (rules.header_metadata, "'hard'", facts(difficulty="hard")),
    (rules.header_metadata, "'07'", facts(needs=["07"])),
    (rules.headings, "a second title", source(2, "# Again")),
    (rules.headings, "jumps from level 2 to 4", source(2, "#### Deep")),
    (rules.headings, "does not begin with its title", source(0, "## Start here")),
    (rules.headings, "does not begin with its title", lambda n: n.cells.clear()),
    (rules.alt_text, "alternative text ''", source(2, "## A\n\n![](a.png)")),
    (rules.alt_text, "alternative text ''", source(2, "## A\n\n<img src='a.png'>")),
    (rules.alt_text, "alternative text 'a figure'", lambda n: show(n, html="<img alt='a figure'>")),
    (rules.alt_text, "alternative text ''", lambda n: show(n, html="<figure><img></figure>")),
    (rules.alt_text, "<svg> without", lambda n: show(n, html="<svg viewBox='0 0 1 1'></svg>")),
    (rules.alt_text, "a bare image", lambda n: show(n, png="AAAA", plain="<Figure size 1x1>")),
    (rules.widget_fallback, "without a still", lambda n: show(n, widget={"model_id": "1"})),
    (rules.widget_fallback, "without a still", lambda n: show(n, widget={}, plain="VBox(a=(1,))")),
    (rules.widget_fallback, "without a still", lambda n: show(n, widget={}, html="<!-- above -->")),
    (rules.clean_outputs, "a stored error, ValueError", failed),
    (rules.clean_outputs, "text on stderr", lambda n: printed(n, "hm", name="stderr")),
    (rules.clean_outputs, "a warning", lambda n: printed(n, "x.py:1: FutureWarning: old name")),
    (rules.clean_outputs, "a warning", lambda n: show(n, html="<pre>UserWarning: careful</pre>")),
    (rules.clean_outputs, "a path", lambda n: printed(n, "saved to /home/ada/model.pt")),
    (rules.clean_outputs, "a path", lambda n: printed(n, 'File "/tmp/ipykernel_12/3.py", line 1')),
    (rules.clean_outputs, "a path", lambda n: printed(n, r"C:\Users\ada")),
    (rules.clean_outputs, "a path", lambda n: show(n, plain="lib/site-packages/torch")),
    (rules.clean_outputs, "stored widgets", lambda n: n.metadata.update(widgets={"a": "/root/x"})),
    (rules.executed_in_order, "[None]", lambda n: code(n).update(execution_count=None)),
    (rules.executed_in_order, "[7]", lambda n: code(n).update(execution_count=7)),
    (rules.executed_in_order, "an empty code cell", lambda n: code(n).update(source=" ")),
    (rules.plain_file, "the kernel is", lambda n: n.metadata.kernelspec.update(name="my-env")),
    (rules.plain_file, "the kernel is", lambda n: n.metadata.pop("kernelspec")),
    (rules.plain_file, "cells without an id", lambda n: code(n).pop("id")),
    (rules.plain_file, "two with the same", lambda n: code(n).update(id=n.cells[0].id)),
    (rules.plain_file, "control", lambda n: n.cells[1].update(source="$\frac12$")),
    (rules.plain_file, "stored times", lambda n: code(n).metadata.update(execution={})),
    (rules.ten_parts, "no part called 'intro'", part(1, "intro")),
    (rules.ten_parts, "'myths' is missing", part(-3, "production")),
    (rules.ten_parts, "3 predictions", lambda n: code(n).update(source="predict('a', 1)\n" * 3)),
    (rules.ten_parts, "'predict' is missing", part(4, "idea")),
    (rules.ten_parts, "come in the order", part(1, "production")),
    (rules.ten_parts, "not marked as the header", part(0, "recall")),
    (
        rules.settles,
        "'Q999' is not a Q of ddpz_lite/course/gym/bank/",
        settled(-1, answers=["Q01", "Q999"]),
    ),
    (rules.settles, "'M999' is not a M of", settled(-1, busts=["M999"])),
    (rules.settles, "'65' is not a Q of", settled(-1, answers=["65"])),
    (rules.settles, "'T999' is not a T of", settled(2, teaches=["T119", "T999"])),
    (rules.settles, "'M020' stands in text", settled(2, busts=["M020"])),
    (
        rules.provable,
        "does not say that it settles ['M020']",
        settled(-1, counterfactuals=[{"of": ["M020"], "replace": "1", "by": "2"}]),
    ),
    (rules.provable, "`source` names ['M033']", settled(-1, source=["M033"])),
    (rules.fresh, "has changed since the stored run", facts(ran="0" * 16)),
    (
        rules.size,
        "71 cells",
        lambda n: n.cells.extend([new_markdown_cell("")] * 60),
    ),
    (rules.size, "501 lines of code", lambda n: code(n).update(source="x = 1\n\n" * 501)),
]


def through_a_file(notebook, tmp_path):
    path = tmp_path / "notebook.ipynb"
    path.write_text(nbformat.v4.writes(notebook), encoding="utf-8")
    return rules.read(path)


def test_a_good_notebook_keeps_all_rules(tmp_path):
    notebook = through_a_file(good_notebook(), tmp_path)
    assert [text for rule in rules.LESSON for text in rule(notebook)] == []


@pytest.mark.parametrize("rule", rules.LESSON, ids=lambda rule: rule.__name__)
def test_each_way_to_break_a_rule_is_found(rule, tmp_path):
    spoils = [(complaint, spoil) for of, complaint, spoil in SPOILS if of is rule]
    assert spoils
    for complaint, spoil in spoils:
        notebook = good_notebook()
        spoil(notebook)
        complaints = list(rule(through_a_file(notebook, tmp_path)))
        assert any(complaint in text for text in complaints), complaint
