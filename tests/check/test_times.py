"""A claim about measured seconds asserts where notebooks are stored, and nowhere else."""

from __future__ import annotations

import nbformat
import pytest

import ddpz_lite as dz
from ddpz_lite.course.cli.lessons import execute


def test_a_busy_machine_is_an_error_only_where_the_author_asks(monkeypatch, capsys):
    monkeypatch.delenv("DDPZ_TIMES", raising=False)
    dz.check.times(True)
    assert capsys.readouterr().out == ""
    dz.check.times(False)
    assert "Run the cell again" in capsys.readouterr().out
    monkeypatch.setenv("DDPZ_TIMES", "assert")
    dz.check.times(True)
    with pytest.raises(AssertionError, match="measured times"):
        dz.check.times(False)


def test_ddpz_lessons_asserts_times(tmp_path):
    notebook = nbformat.v4.new_notebook()
    source = "import ddpz_lite as dz\ndz.check.times(False)"
    notebook.cells.append(nbformat.v4.new_code_cell(source))
    nbformat.write(notebook, tmp_path / "01_busy.ipynb")
    outcome = execute(tmp_path / "01_busy.ipynb", timeout=60)
    assert "measured times" in outcome.error
