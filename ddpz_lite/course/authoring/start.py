"""What a notebook says first where its kernel does not have the course: which command to run.

The words are code, for only code can look. In a lesson they begin the first code cell, which is
folded; cells keep their numbers, which stored outputs name. An exercise shows its first code cell
to be read, so there they are a folded cell of their own.
"""

from __future__ import annotations

import re
from string import Template

import nbformat

START = "start"  # the id of such a cell, and what its metadata says
BEGIN, END = "# Where the course is not installed, this says what to run.", "# ----"
BLOCK = re.compile(rf"{re.escape(BEGIN)}\n.*?\n{END}\n+", re.S)
CODE = Template(
    """\
$begin
import importlib.util
import os

if importlib.util.find_spec("ddpz_lite") is None:
    if {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & os.environ.keys():
        fix = (
            "$install in a separate cell, "
            "restart the session, and run this again."
        )
    else:
        fix = (
            "run `make lab` in its folder; for VS Code run `make copies` there, "
            "and choose the kernel of its .venv."
        )
    raise RuntimeError(f"This kernel does not have the course: {fix}")
$end
"""
)
FROM_GIT = "run `%pip install git+{}`"
UPLOADED = "upload its folder, run `%pip install ./ddpz-lite`"


def words(repository: str) -> str:
    """The code, with a line that ends it. repository: its address, or "" if it has none yet."""
    install = FROM_GIT.format(repository) if repository else UPLOADED
    return CODE.substitute(begin=BEGIN, end=END, install=install)


def begin_lesson(notebook: nbformat.NotebookNode, repository: str) -> None:
    """Let the first code cell begin with the words, and be folded."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = words(repository) + without(first.source)
    first.metadata.setdefault("jupyter", {})["source_hidden"] = True


def begin_exercise(notebook: nbformat.NotebookNode, repository: str) -> None:
    """Put a folded cell with the words before the first code cell."""
    source = words(repository).rstrip().removesuffix(END).rstrip()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if code[0].id == START:
        code[0].source = source
        return
    about = {"ddpz": {"generated": START}, "jupyter": {"source_hidden": True}}
    made = nbformat.v4.new_code_cell(source, id=START, metadata=about)
    notebook.cells.insert(notebook.cells.index(code[0]), made)
    for number, cell in enumerate([made, *code], 1):  # it runs first and prints nothing
        cell.execution_count = number if code[0].execution_count else None


def without(source: str) -> str:
    """A cell's code without the words."""
    return BLOCK.sub("", source)
