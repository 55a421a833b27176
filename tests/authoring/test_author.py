"""`ddpz new` makes a lesson whose task works at once; `ddpz author` says what it still lacks."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from ddpz_lite.course.authoring import catalogue, minutes, rules, skeleton
from ddpz_lite.course.authoring import missing as authoring
from ddpz_lite.course.check.task import find
from ddpz_lite.course.cli import main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("lessons", "solutions", "exercises")
NEW = [
    "lessons/18_zero_in_practice.ipynb",
    "solutions/18_zero_in_practice.ipynb",
    "ddpz_lite/course/tasks/lesson18/__init__.py",
    "ddpz_lite/course/tasks/lesson18/job.py",
    "ddpz_lite/course/tasks/lesson18/judge.py",
    "tests/answers/lesson18.py",
    "lessons/plan.json",
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the course, in which a lesson is made by the command itself."""
    root = tmp_path_factory.mktemp("course")
    leave = shutil.ignore_patterns("__pycache__")
    for folder in (*FOLDERS, "ddpz_lite", "tests/answers"):
        shutil.copytree(ROOT / folder, root / folder, ignore=leave)
    for name in ("README.md", "README.zh.md"):
        shutil.copy(ROOT / name, root)
    made = run(root, "new", "18", "ZeRO in practice", "--task", "any_inf")
    assert made.returncode == 0, made.stderr
    assert re.findall(r"^wrote (\S+)$", made.stdout, re.M) == NEW
    return root


def run(root, *words):
    """`ddpz` of the copy, with the copy's own code."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "ddpz_lite", *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)


def test_new_writes_its_files_and_refuses_to_write_them_again(copy):
    assert "18" not in json.loads((copy / "lessons/plan.json").read_text())["planned"]
    texts = {name: (copy / name).read_text() for name in NEW}
    again = run(copy, "new", "18", "Something else")
    assert again.returncode == 2 and "Nothing was written." in again.stderr
    assert {name: (copy / name).read_text() for name in NEW} == texts


@pytest.mark.rest
def test_author_lists_what_a_skeleton_lacks_and_nothing_else(copy):
    done = run(copy, "author", "18")
    assert done.returncode == 1, done.stderr
    kinds = (
        "lessons/18_zero_in_practice.ipynb: TODO in cells 0, 1",
        "lessons/18_zero_in_practice.ipynb: cells were run in the order",
        "no term is defined in 18_zero_in_practice.ipynb",
        "solutions/18_zero_in_practice.ipynb: TODO in cells 0, 2",
        "solutions/18_zero_in_practice.ipynb: cells were run in the order",
        "18.any_inf: title, hints or debrief still say TODO",
        "18_zero_in_practice.ipynb differs from its master: make exercises",
        "differs from what the notebooks say: make course",
        "warning: lessons/18_zero_in_practice.ipynb: the header says 60 minutes",
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("- ")]
    for kind in kinds:
        assert any(kind in line for line in lines), kind
    assert [line for line in lines if not any(kind in line for kind in kinds)] == []
    assert done.stdout.splitlines()[-1] == f"{len(lines) - 1} things to do"  # less the warning


@pytest.mark.rest
def test_the_task_of_a_skeleton_works_at_once(copy):
    """Its solution is right, its wrong answers get their sentences, its right ones full points."""
    env = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "answers", "18"]
    done = subprocess.run(
        command, cwd=copy / "tests", env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3    solution" in done.stdout and "3 of 3    right:" in done.stdout
    assert "0 bad" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["5", "DDP again"], "lesson 05 is there already, as lessons/05_ddp.ipynb"),
        (["123", "Too far"], "a lesson's number is NN"),
        (["18", "?!"], "the title needs words"),
        (["18", "A title", "--task", "two words"], "--task names a function"),
        (["18", "A title", "--task", "class"], "--task names a function"),
    ],
)
def test_new_refuses_in_one_line(words, complaint, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["new", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1
    assert not list(ROOT.glob("lessons/18*"))


def test_a_second_notebook_says_that_it_can_wait():
    names = skeleton.Names("05b", "Buckets: sizes", "x")
    texts = skeleton.files(names, {"learn": "sizes", "makes": "buckets"})
    notebook = nbformat.v4.reads(texts["lessons/05b_buckets.ipynb"])
    assert notebook.metadata.ddpz.second == "can wait" and "can wait" in notebook.cells[0].source
    assert notebook.metadata.ddpz.makes == "buckets"


# ---- our own lessons, and ways to spoil one ----


@pytest.mark.parametrize("lesson", [lesson.number for lesson in catalogue.read(ROOT).written])
def test_our_lessons_lack_nothing(lesson):
    assert authoring.faults(ROOT, lesson)[0] == []


@pytest.fixture
def small(tmp_path):
    """The lessons' pages, and lessons 00 to 03 with the exercise of 03, to be spoilt."""
    for folder in (*FOLDERS, "tests/answers"):
        (tmp_path / folder).mkdir(parents=True)
    for pattern in (
        "lessons/0[0-3]_*",
        "solutions/03_*",
        "exercises/03_*",
        "exercises/*.md",
        "lessons/*.md",
    ):
        for path in ROOT.glob(pattern):
            shutil.copy(path, tmp_path / path.relative_to(ROOT))
    for name in ("README.md", "README.zh.md", "tests/answers/lesson03.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    plan = json.loads((ROOT / "lessons/plan.json").read_text())
    (tmp_path / "lessons/plan.json").write_text(json.dumps({**plan, "way": "03"}))
    shutil.copy(ROOT / "tests/answers/__init__.py", tmp_path / "tests/answers")
    return tmp_path


LESSON = "lessons/03_data_parallel.ipynb"


def metadata(**changes):
    def change(root):
        notebook = json.loads((root / LESSON).read_text())
        notebook["metadata"]["ddpz"].update(changes)
        (root / LESSON).write_text(json.dumps(notebook))

    return change


def text(path, old, new):
    def change(root):
        before = (root / path).read_text()
        assert old in before
        (root / path).write_text(before.replace(old, new))

    return change


SPOILS = [
    (f"{LESSON}: TODO in cells 0", text(LESSON, "# Data parallel", "# Data parallel TODO")),
    (f"{LESSON}: it needs lesson 07", metadata(needs=["00", "07"])),
    (f"{LESSON}: it needs lesson 03", metadata(needs=["03"])),
    ("metadata `ddpz.needs` is missing or has the wrong form: [7]", metadata(needs=[7])),
    ("'needs' of its metadata `ddpz` must be a list of texts", metadata(needs=7)),
    ("`ddpz.second` belongs to NNb notebooks", metadata(second="can wait")),
    ("metadata `ddpz.difficulty` is missing", metadata(difficulty="so-so")),
    ("`ddpz` has no 'makes'", text(LESSON, '"makes"', '"m"')),
    ("code has changed since the stored run", metadata(ran="0" * 16)),
    ("has no 'no-such-term'", text(LESSON, "GLOSSARY.md#", "GLOSSARY.md#no-such-term) [](")),
    ("no term is defined in 03_data", text("lessons/GLOSSARY.md", "03_data_p", "02_data_p")),
    ("'BatchNorm': no Chinese term", text("lessons/GLOSSARY.md", "批归一化", "none")),
    ("tests/answers/lesson03.py is missing", lambda r: (r / "tests/answers/lesson03.py").unlink()),
    ("solutions/03_*.ipynb is missing", lambda r: next(r.glob("solutions/03*")).unlink()),
    (
        "differs from its master: make exercises",
        text("exercises/03_data_parallel.ipynb", "raise NotImplementedError", "pass"),
    ),
    ("differs from what the notebooks say: make course", metadata(minutes=61)),
]


@pytest.mark.parametrize(("expected", "spoil"), SPOILS, ids=[expected for expected, _ in SPOILS])
def test_author_says_what_is_wrong(small, expected, spoil):
    spoil(small)
    found, _ = authoring.faults(small, "03")
    assert any(expected in line for line in found), found


def test_author_warns_of_a_header_whose_minutes_are_not_the_counted_ones(small):
    notebook = rules.read(small / LESSON)
    honest = minutes.counted(notebook)
    for stated, warned in ((honest, False), (round(0.7 * honest), True), (2 * honest, True)):
        notebook.metadata["ddpz"]["minutes"] = stated
        assert bool([*minutes.misstated(notebook)]) is warned
    metadata(minutes=2 * honest)(small)
    _, warnings = authoring.faults(small, "03")
    assert any(f"a learner needs about {honest}" in line for line in warnings)


def test_minutes_are_counted_from_words_lines_questions_and_figures():
    words = nbformat.v4.new_markdown_cell("# A title\n\n" + "word " * 260 + "\n\n| not | read |")
    code = nbformat.v4.new_code_cell("x = show.predict(1)\n" + "y = 1\n\n" * 35)
    assert minutes.counted(nbformat.v4.new_notebook(cells=[words, code])) == round(2 + 3 + 1.5 + 5)
    picture = nbformat.v4.new_output("display_data", {"text/html": "<figure><img src=x></figure>"})
    code.outputs = [picture] * 4
    assert minutes.counted(nbformat.v4.new_notebook(cells=[words, code])) == round(15.5)


def test_a_second_notebook_must_be_needed_by_the_lesson_that_it_names(small):
    notebook = json.loads((small / LESSON).read_text())
    notebook["metadata"]["ddpz"].update(second="needed for 02")
    (small / "lessons/03b_metrics.ipynb").write_text(json.dumps(notebook))
    found, warnings = authoring.faults(small, "03b")
    assert any("it is needed for 02, whose metadata does not say so" in line for line in found)
    assert "lesson 03b has no task of its own" in warnings


def test_a_missing_lesson_is_answered_with_how_to_begin(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["author", "47"]) == 2
    assert 'ddpz new 47 "Its title"' in capsys.readouterr().err


TASK = find("08.state_bytes")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"minutes": 90}, "90 minutes"),
        ({"criteria": TASK.criteria[1:2]}, "two points or more"),
        ({"hints": ("Why?", *TASK.hints[1:])}, "three hints of more than 20"),
        ({"hints": (TASK.hints[1], *TASK.hints[1:])}, "three hints"),
        ({"hints": tuple(reversed(TASK.hints))}, "the first hint is a question"),
        ({"debrief": "Done."}, "the debrief has 5 characters"),
        ({"criteria": TASK.criteria * 2}, "two criteria say the same"),
        ({"title": "TODO: a title"}, "still say TODO"),
    ],
)
def test_a_task_that_lacks_something(changed, expected):
    assert list(authoring.task_faults(TASK)) == []
    assert any(expected in x for x in authoring.task_faults(dataclasses.replace(TASK, **changed)))


def test_answers_that_lack_something():
    module = importlib.import_module("answers.lesson08")
    assert list(authoring.answer_faults(TASK, module)) == []
    wrong, right = module.WRONG[TASK.id], module.RIGHT[TASK.id]

    def expected(wrong=wrong, right=right):
        spoilt = SimpleNamespace(WRONG={TASK.id: wrong}, RIGHT={TASK.id: right})
        return " ".join(authoring.answer_faults(TASK, spoilt))

    assert "fewer than 5 wrong answers with a 'name'" in expected(wrong=wrong[:1] * 9)
    assert "no right answer in another style" in expected(right=[])
    assert "two of one name" in expected(right=right * 2)
    assert "must get a sentence" in expected(
        wrong=[dataclasses.replace(w, says="no") for w in wrong]
    )
    lost = [dataclasses.replace(w, loses=("grace",)) for w in wrong]
    assert "criteria that the task has not: grace" in expected(wrong=lost)
