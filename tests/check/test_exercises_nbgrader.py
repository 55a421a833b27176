"""A class that runs nbgrader can take the exercises as they are: its own autograder says so.

nbgrader pins parts of Jupyter, so it lives in a separate environment:

    python -m venv nbg && nbg/bin/pip install nbgrader
    DDPZ_NBGRADER=nbg/bin/nbgrader pytest tests/test_exercises_nbgrader.py
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from answers import trying

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.notebooks import of, role
from ddpz_lite.course.check.task import tasks

NBGRADER = os.environ.get("DDPZ_NBGRADER") or shutil.which("nbgrader")
LESSON = "03"

pytestmark = [
    pytest.mark.rest,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        NBGRADER is None,
        reason="no nbgrader: set DDPZ_NBGRADER to the program, in a separate environment",
    ),
]


@pytest.fixture
def nbgrader(tmp_path):
    """Run the program in a course folder, with the kernel of this Python: nbgrader("list")."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": start, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    course = tmp_path / "course"
    course.mkdir()
    environment = {name: value for name, value in os.environ.items() if "JUPYTER" not in name}
    environment |= {
        "HOME": str(tmp_path),
        "PATH": f"{Path(NBGRADER).absolute().parent}{os.pathsep}{os.environ['PATH']}",  # alembic
        "JUPYTER_PATH": str(tmp_path / "jupyter"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "DDPZ_HOME": str(tmp_path / "home"),
    }

    def run(*words: str) -> Path:
        done = subprocess.run(
            [str(Path(NBGRADER).absolute()), *words],
            cwd=course,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return course

    run.course = course
    return run


def filled(exercise, keep):
    """The exercise with the solutions of the tasks in `keep` typed in."""
    sources = {cell.id: cell.source for cell in trying.master(LESSON).cells}
    for cell in exercise.cells:
        if role(cell) == "answer" and of(cell) in keep:
            cell.source = sources[cell.id]
    return exercise


def test_its_autograder_gives_the_points_of_the_tasks(nbgrader):
    (path,) = trying.SOLUTIONS.glob(f"{LESSON}_*.ipynb")
    master, exercise = notebooks.make(path)
    ids = [task.id for task in tasks(LESSON)]
    answers = {"all": ids, "half": ids[::2], "none": []}
    source = nbgrader.course / "source" / "ps1" / path.name
    source.parent.mkdir(parents=True)
    source.write_text(master)
    nbgrader("generate_assignment", "ps1")
    released = notebooks.read(nbgrader.course / "release" / "ps1" / path.name)
    assert not any("SOLUTION" in cell.source for cell in released.cells)
    for student, keep in answers.items():
        submitted = nbgrader.course / "submitted" / student / "ps1" / path.name
        submitted.parent.mkdir(parents=True)
        nbformat.write(filled(nbformat.v4.reads(exercise), keep), submitted)
    nbgrader("autograde", "ps1", "--ExecutePreprocessor.timeout=90")
    nbgrader("export")
    with open(nbgrader.course / "grades.csv") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    worth = {task.id: task.points for task in tasks(LESSON)}
    for student, keep in answers.items():
        assert float(rows[student]["max_score"]) == sum(worth.values())
        assert float(rows[student]["score"]) == sum(worth[task] for task in keep), student
