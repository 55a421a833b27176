"""What all tests share: the folders of the project, and notebooks made for one test."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent

# A kernel of the same name elsewhere on the machine must not stand in for the one under test.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


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
