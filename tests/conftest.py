"""What all tests share: the folders of the project, and notebooks made for one test."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
import small_course

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import find
from ddpz_lite.launcher.forkserver import SERVER

ROOT = Path(__file__).resolve().parent.parent

# A kernel of the same name elsewhere on the machine must not stand in for the one under test.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
# A rank imports the module of the function that a test has launched, and with it pytest.
SERVER.preload = ("pytest",)


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture
def own_temporary(monkeypatch):
    """What the test's processes leave in the temporary folder, as torchrun its logs, ends with the
    test run.
    """
    monkeypatch.setenv("TMPDIR", os.environ["DDPZ_HOME"])


@pytest.fixture
def make_notebook(tmp_path):
    """Write code cells to a notebook and return its path: make_notebook("name", "x = 1", ...)."""

    def make(name: str, *sources: str, folder: Path = tmp_path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        path = folder / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return make


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of one task, and the command at work in it."""
    monkeypatch.setattr(notebooks, "tasks", lambda lesson: [find("03.weighted_mean")])
    (tmp_path / "solutions").mkdir()
    nbformat.write(small_course.master(), tmp_path / "solutions" / f"{small_course.NAME}.ipynb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def class_of(course):
    """Write what students handed in: class_of(ada=answer, bob=None)."""

    def write(**answers):
        for name, answer in answers.items():
            path = course / "class" / name / f"{small_course.NAME}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_text(small_course.handed_in(answer))
        return "class"

    return write
