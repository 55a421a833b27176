"""Build the course as a static site: `make book`, or `python book/build.py --to FOLDER`.

Notebooks are shown with the results that are stored in them. Nothing runs and nothing is fetched.

Sphinx reads one folder, so the pages are gathered in one first: this folder's, `lessons/` and
`exercises/`. In the copies of notebooks the title has the lesson's number, for the list beside the
page; code that JupyterLab keeps folded is folded here too; the words for a kernel without the
course are left out; some widgets can be turned (see states.py); and the cells that prove an answer
have a mark, to which the pages of questions lead (see questions.py). The page of options is made of
a stored table (see options.py). The search page gets a list of the cards that hold what is asked
(see find.js).
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import options
import questions
import states
from sphinx.cmd.build import build_main

from ddpz_lite.course.authoring import catalogue, pages, start
from ddpz_lite.course.gym.proofs import proofs

ROOT = Path(__file__).resolve().parent.parent
PY = ("conf.py", "docstrings.py", "searching.py")
BOOK = ("*.md", "*.rst", "*.png", "*.svg", "*.css", "*.js", *PY)
PAGES = {"book": BOOK, "lessons": ("*",), "exercises": ("*.ipynb", "*.md")}
MERMAID = re.compile(r"^```mermaid\n.*?^```\n", re.M | re.S)  # needs a script: code hosts draw it
WIDGET = """\
<div class="dz-states" data-states="{}"></div>
<script src="../_static/states.js"></script><script src="../_static/widgets.js"></script>"""


def gather(source: Path) -> None:
    """Copy the pages to the folder `source`, those of book/ to its top."""
    widgets: dict[str, dict] = {}
    proved = proofs(ROOT / "lessons")
    marks = questions.targets(proved)
    for folder, patterns in PAGES.items():
        into = source if folder == "book" else source / folder
        into.mkdir(parents=True, exist_ok=True)
        for path in (path for pattern in patterns for path in (ROOT / folder).glob(pattern)):
            if path.suffix == ".ipynb":
                notebook = json.loads(path.read_text(encoding="utf-8"))
                adapt(notebook, path.name.partition("_")[0], widgets)
                if folder == "lessons":
                    mark(notebook, path.name, marks)
                (into / path.name).write_text(json.dumps(notebook), encoding="utf-8")
            elif path.is_file():
                shutil.copy(path, into)
    page = source / "lessons/README.md"
    page.write_text(MERMAID.sub("", page.read_text(encoding="utf-8")), encoding="utf-8")
    if (ROOT / "lessons/plan.json").exists():
        outline = pages.outline(catalogue.read(ROOT), "lessons/")
        (source / "map.inc").write_text(outline, encoding="utf-8")
    if (ROOT / "README.md").exists():
        shutil.copy(ROOT / "README.md", source / "README.inc")  # parts of it are in pages
    (source / "questions").mkdir(exist_ok=True)
    for name, page in questions.pages(proved).items():
        (source / f"questions/{name}.md").write_text(page, encoding="utf-8")
    (source / "options.md").write_text(options.page(), encoding="utf-8")
    text = f"window.dzStates = {json.dumps(widgets)};\n"
    (source / "states.js").write_text(text, encoding="utf-8")
    text = f"window.dzCards = {json.dumps(questions.searched(), ensure_ascii=False)};\n"
    (source / "cards.js").write_text(text, encoding="utf-8")


def adapt(notebook: dict, number: str, widgets: dict[str, dict]) -> None:
    """Number the title of a notebook, mark the cells whose code is folded, and make widgets turn.

    widgets: is given the states of those that the notebook has.
    """
    first = notebook["cells"][0]
    text = "".join(first["source"])
    if not text.startswith("# "):
        raise ValueError(f"book: notebook {number} should begin with its title, not {text[:40]!r}")
    first["source"] = f"# {number} {text.removeprefix('# ')}"
    notebook["cells"] = [cell for cell in notebook["cells"] if cell.get("id") != start.START]
    for cell in notebook["cells"]:
        cell["source"] = source = start.without("".join(cell["source"]))
        for tells, name in states.TELLS.items():
            if cell["cell_type"] == "code" and tells in f"\n{source}":
                shown = [output.get("data", {}).get("text/html", "") for output in cell["outputs"]]
                widgets[name] = states.widget(name, "".join("".join(page) for page in shown))
                page = {"text/html": WIDGET.format(name)}
                made = {"output_type": "display_data", "metadata": {}, "data": page}
                cell["outputs"].append(made)
        folded = cell["metadata"].get("jupyter", {})
        for part, tag in {"source_hidden": "hide-input", "outputs_hidden": "hide-output"}.items():
            if folded.get(part):
                cell["metadata"].setdefault("tags", []).append(tag)


def mark(notebook: dict, file: str, marks: dict[tuple[str, str], str]) -> None:
    """Put a mark before each cell that the questions link to, and lead cards to the marks."""
    marked = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if "text/html" in (page := output.get("data", {})):
                page["text/html"] = relink("".join(page["text/html"]), marks)
        if (file, cell.get("id")) in marks:
            name = marks[file, cell["id"]]
            words = f"({name})=\n<span></span>"  # something must follow a mark
            marked.append({"cell_type": "markdown", "id": name, "metadata": {}, "source": words})
        marked.append(cell)
    notebook["cells"] = marked


def relink(page: str, marks: dict[tuple[str, str], str]) -> str:
    """JupyterLab's links to cells of notebooks, as links to the marks in their pages.

    A cell without a mark is a KeyError: its link would be a reader's dead end.
    """

    def link(found: re.Match[str]) -> str:
        file, cell = found.groups()
        return f'href="{Path(file).stem}.html#{marks[file, cell]}"'

    return re.sub(r'href="([^"/#]+\.ipynb)#cell-id=([^"]+)"', link, page)


# Where the markup of Sphinx, its theme and MyST-NB lacks a name or a level for screen readers.
NAMED = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer': '<aside aria-label="This page" class="toc-drawer',
    '<summary aria-label="Toggle hidden content">': "<summary>",
}
NO_HEADING = re.compile(r"<th\b[^>]*>(?:<p></p>)?</th>")
PARAMETERS = re.compile(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>")  # of a signature: a list without terms


def name_parts(page: str) -> str:
    """A page whose headings have levels, whose regions have names and whose lists have items."""
    for old, new in NAMED.items():
        page = page.replace(old, new)

    def listed(found: re.Match[str]) -> str:
        items = found[1].replace("<dd>", "<li>").replace("</dd>", "</li>")
        return f'<ul class="dz-parameters">\n{items}</ul>'

    return PARAMETERS.sub(listed, NO_HEADING.sub("<td></td>", page))


def build(to: Path) -> int:
    """Write the site to the folder `to`/html; returns 0 if there was nothing to complain about."""
    source, pages = to / "source", to / "html"
    for folder in (source, pages):
        shutil.rmtree(folder, ignore_errors=True)
    gather(source)
    # A warning is an error, for every warning here is a reader's dead end.
    words = ["--quiet", "--fail-on-warning", "--builder=html", f"--doctree-dir={to / 'doctrees'}"]
    status = build_main([*words, "--fresh-env", str(source), str(pages)])
    for path in pages.rglob("*.html"):
        path.write_text(name_parts(path.read_text(encoding="utf-8")), encoding="utf-8")
    if status == 0:
        print(f"book: open {pages / 'index.html'}")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the course as a static site.")
    parser.add_argument("--to", type=Path, default=ROOT / "build/book", help="build/book")
    sys.exit(build(parser.parse_args().to))
