"""The learner's copies: running a lesson never hinders `git pull`, and nothing written is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from ddpz_lite.course.authoring import copies
from ddpz_lite.course.authoring.copies import outcome_lines, update, written
from ddpz_lite.course.cli import check as command_check
from ddpz_lite.course.cli import main

LESSON, EXERCISE = "lessons/05_ddp.ipynb", "exercises/05_ddp.ipynb"


def notebook(*sources: str, output: str = "", answer: str = "raise NotImplementedError") -> str:
    """A notebook's text: cells of code, the last of them the answer of a task."""
    cells = [nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)]
    if output:
        cells[0].outputs = [nbformat.v4.new_output("stream", text=output)]
        cells[0].execution_count = 7
    about = {"ddpz": {"role": "answer", "task": "05.hooks"}}
    cells.append(nbformat.v4.new_code_cell(answer, id="answer", metadata=about))
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells)) + "\n"


@pytest.fixture
def course(tmp_path):
    """A small course: `course(name, text)` writes a file of it, as a new version would."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    write(LESSON, notebook("first"))
    write(EXERCISE, notebook("given"))
    write("lessons/GLOSSARY.md", "# Words\n")
    write.root = tmp_path
    return write


def copy_of(course, name: str) -> Path:
    return course.root / "my" / name


def printed(course) -> str:
    return "\n".join(outcome_lines(update(course.root)))


def test_copies_are_made_once_and_again_where_one_was_deleted(course):
    assert printed(course).startswith("my/: copies made: 3. Work in them")
    for name in (LESSON, EXERCISE, "lessons/GLOSSARY.md"):
        assert copy_of(course, name).read_bytes() == (course.root / name).read_bytes()
    assert printed(course) == "my/ is up to date"
    copy_of(course, LESSON).write_text(notebook("something else"))
    copy_of(course, LESSON).unlink()
    assert "copies made: 1" in printed(course)
    assert copy_of(course, LESSON).read_text() == notebook("first")


@pytest.mark.parametrize("ran", [None, notebook("first", "", output="what a run printed")])
def test_what_was_only_read_or_run_is_brought_up_to_date(course, ran):
    update(course.root)
    if ran:
        copy_of(course, LESSON).write_text(ran)
    course(LESSON, notebook("second"))
    course("lessons/GLOSSARY.md", "# More words\n")
    outcome = update(course.root)
    assert outcome.updated == ["lessons/05_ddp.ipynb", "lessons/GLOSSARY.md"]
    assert copy_of(course, LESSON).read_text() == notebook("second")
    assert printed(course) == "my/ is up to date"


def test_new_outputs_alone_replace_nothing(course):
    update(course.root)
    copy_of(course, LESSON).write_text(theirs := notebook("first", output="their own run"))
    course(LESSON, notebook("first", output="the course's new run"))
    assert printed(course) == "my/ is up to date"
    assert copy_of(course, LESSON).read_text() == theirs


def test_work_is_kept_and_the_new_version_is_laid_beside(course):
    update(course.root)
    copy_of(course, LESSON).write_text(theirs := notebook("first", "a cell of mine"))
    assert printed(course) == "my/ is up to date"
    course(LESSON, notebook("second"))
    assert (
        "my/lessons/05_ddp.ipynb: yours is kept. The new version: my/lessons/new-05_ddp"
        in printed(course)
    )
    beside = copy_of(course, "lessons/new-05_ddp.ipynb")
    assert copy_of(course, LESSON).read_text() == theirs and beside.read_text() == notebook(
        "second"
    )
    assert printed(course) == "my/ is up to date", "it is reported once"

    course(LESSON, notebook("third"))  # the one next to holds no work: it is replaced
    update(course.root)
    assert beside.read_text() == notebook("third")
    beside.write_text(notebook("third, and mine"))
    course(LESSON, notebook("fourth"))
    assert "new-2-05_ddp.ipynb" in printed(course)
    assert beside.read_text() == notebook("third, and mine")
    assert copy_of(course, LESSON).read_text() == theirs

    copy_of(course, "lessons/new-2-05_ddp.ipynb").replace(copy_of(course, LESSON))  # they take it
    course(LESSON, notebook("fifth"))
    assert update(course.root).updated == [LESSON]


def test_a_new_exercise_lies_beside_with_the_answers_in_it(course):
    update(course.root)
    answer = "def hooks():\n    return 1"
    copy_of(course, EXERCISE).write_text(theirs := notebook("given", answer=answer))
    course(EXERCISE, notebook("given again"))
    assert "The new version, with your answers in it: my/exercises/new-05_ddp.ipynb" in printed(
        course
    )
    beside = copy_of(course, "exercises/new-05_ddp.ipynb").read_text()
    assert json.loads(beside) == json.loads(notebook("given again", answer=answer))
    assert copy_of(course, EXERCISE).read_text() == theirs

    course(EXERCISE, notebook("given", answer="raise NotImplementedError  # as ever"))
    assert printed(course) == "my/ is up to date", "theirs is that version with their answers"


def test_a_notebook_that_broke_is_kept(course):
    update(course.root)
    copy_of(course, EXERCISE).write_text("{")
    course(EXERCISE, notebook("given again"))
    assert "yours is kept" in printed(course) and copy_of(course, EXERCISE).read_text() == "{"


def test_a_lesson_that_is_gone_leaves_its_copy(course):
    update(course.root)
    (course.root / LESSON).unlink()
    assert printed(course) == "my/lessons/05_ddp.ipynb: no longer in the course; your copy stays"
    assert copy_of(course, LESSON).exists() and printed(course) == "my/ is up to date"


def test_without_its_list_everything_is_kept(course):
    update(course.root)
    copy_of(course, LESSON).write_text(theirs := notebook("mine"))
    record = copy_of(course, copies.MADE_FROM)
    record.write_text("{]")
    with pytest.raises(copies.Damaged, match=r"my/.made-from.json is damaged .* Delete it: your"):
        update(course.root)
    record.unlink()
    assert "yours is kept" in printed(course)
    assert copy_of(course, LESSON).read_text() == theirs


def test_empty_cells_and_outputs_are_nothing_written():
    assert written(notebook("a", output="b").encode()) == written(notebook("a", "", "  ").encode())
    assert written(notebook("a").encode()) != written(notebook("b").encode())
    assert written(b"no notebook") == b"no notebook"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_work_from_before_there_were_copies_is_taken_over_and_never_replaced(course):
    def git(*words):
        names = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", *names, *words]
        subprocess.run(command, cwd=course.root, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "the course")
    course(EXERCISE, theirs := notebook("given", answer="my answer"))
    assert f"git checkout {EXERCISE}" in printed(course)
    assert copy_of(course, EXERCISE).read_text() == theirs
    for _ in ("while it is changed", "and when it is not"):
        assert printed(course) == "my/ is up to date"
        git("checkout", EXERCISE)
    course(EXERCISE, notebook("given again"))
    git("commit", "-am", "a new version")
    assert "with your answers in it" in printed(course)
    assert copy_of(course, EXERCISE).read_text() == theirs


# ---- the commands ----


def test_the_command_finds_the_course_from_inside_the_copies_too(course, monkeypatch, capsys):
    monkeypatch.chdir(course.root)
    assert main(["copies"]) == 0
    monkeypatch.chdir(course.root / "my")
    assert main(["copies"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "my/ is up to date"
    copy_of(course, copies.MADE_FROM).write_text("[1]")
    assert main(["copies"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_check_takes_the_copy_and_without_copies_the_exercise(course, monkeypatch):
    monkeypatch.chdir(course.root)
    assert command_check._find("05", None)[1] == course.root / EXERCISE
    update(course.root)
    copy_of(course, "exercises/new-05_ddp.ipynb").write_text(notebook("beside"))
    assert command_check._find("05", None)[1] == copy_of(course, EXERCISE)
    copy_of(course, EXERCISE).unlink()
    assert command_check._find("05", None)[1] == course.root / EXERCISE
    monkeypatch.chdir(course.root / "my")
    update(course.root)
    assert command_check._find("05", None)[1] == copy_of(course, EXERCISE)


def test_check_takes_a_notebook_by_its_path_and_no_other_in_its_place(course, monkeypatch, capsys):
    monkeypatch.chdir(course.root)
    update(course.root)
    assert command_check._find(EXERCISE, None) == ("05", Path(EXERCISE))
    assert main(["check", "elsewhere/05_ddp.ipynb"]) == 2
    assert capsys.readouterr().err == "ddpz check: there is no notebook elsewhere/05_ddp.ipynb.\n"
    assert main(["check", EXERCISE, "--dir", "my"]) == 2
    assert "Leave --dir out" in capsys.readouterr().err


def test_git_ignores_the_copies(root):
    assert "my/" in (root / ".gitignore").read_text().splitlines()
