"""A notebook opened without the course: its first code says in a sentence what to run."""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import pytest

from ddpz_lite.course.authoring import rules, start
from ddpz_lite.course.check import notebooks

BARE = [sys.executable, "-I", "-S", "-c"]  # neither PYTHONPATH nor installed packages
REPOSITORY = "https://example.org/ddpz-lite"


def first_code(path) -> nbformat.NotebookNode:
    return next(cell for cell in rules.read(path).cells if cell.cell_type == "code")


@pytest.mark.parametrize(
    ("place", "repository", "fix"),
    [
        ({}, REPOSITORY, "run `make lab` in its folder; for VS Code run `make copies` there"),
        (
            {"COLAB_RELEASE_TAG": "1"},
            REPOSITORY,
            f"run `%pip install git+{REPOSITORY}` in a separate",
        ),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "", "upload its folder, run `%pip install ./ddpz-"),
    ],
)
def test_without_the_course_one_sentence_says_what_to_run(place, repository, fix):
    """In a Python that really does not have it."""
    env = {**os.environ, **place}
    command = [*BARE, start.words(repository) + "print('went on')"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "went on" not in done.stdout
    assert last.startswith(f"RuntimeError: This kernel does not have the course: {fix}")


def test_with_the_course_it_says_nothing(capsys):
    exec(start.words(REPOSITORY), {})
    assert capsys.readouterr() == ("", "")


def test_every_notebook_begins_with_it(root):
    lessons, exercises = sorted(root.glob("lessons/*.ipynb")), sorted(root.glob("*s/*.ipynb"))
    assert len(lessons) > 5 and len(exercises) > 2 * len(lessons) - 5
    for path in exercises:
        cell = first_code(path)
        assert cell.source.startswith(start.BEGIN), path
        assert cell.metadata["jupyter"]["source_hidden"], path
    for path in lessons:
        assert start.without(first_code(path).source).startswith(("import", "from")), path


def notebook(*sources: str) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_markdown_cell("# Title")]
    for number, source in enumerate(sources, 1):
        cells.append(nbformat.v4.new_code_cell(source, execution_count=number))
    return nbformat.v4.new_notebook(cells=cells)


def test_a_lesson_keeps_its_cells_and_what_was_run():
    lesson, before = notebook("x = 1", "y = 2"), notebook("x = 1", "y = 2")
    for repository in ("", REPOSITORY, REPOSITORY):
        start.begin_lesson(lesson, repository)
        code = [cell for cell in lesson.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == [1, 2]
        assert code[0].source == start.words(repository) + "x = 1"
        assert rules.code_hash(lesson) == rules.code_hash(before), "nothing is to be run again"


def test_the_cell_that_an_exercise_gets_is_not_graded(root):
    exercise = notebook("given = 1", "answer = 2")
    for repository in ("", REPOSITORY):
        start.begin_exercise(exercise, repository)
        code = [cell for cell in exercise.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == [1, 2, 3]
        assert f"{code[0].source}\n{start.END}\n" == start.words(repository)
        assert code[1].source == "given = 1"
    path = next(root.glob("solutions/*.ipynb"))
    task = next(filter(None, map(notebooks.of, notebooks.read(path).cells)))
    program = notebooks.program(notebooks.read(path), task)
    assert start.START not in dict(program) and not any(start.BEGIN in code for _, code in program)
