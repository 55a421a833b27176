"""`ddpz grade` from a class that was handed in to the reports."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile

import nbformat
import pytest
import small_course
from answers import trying
from small_course import SOLVED

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import Observed, find
from ddpz_lite.course.cli import grade as command
from ddpz_lite.course.cli import main
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.sandbox.limits import Probe

STUB = small_course.handed_in()
EXERCISE = f"{small_course.NAME}.ipynb"


def rows(folder):
    with open(folder / "gradebook.csv", encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_all_reports_are_written_and_stamped(class_of, no_ranks, course, capsys):
    place = class_of(ada=SOLVED, bob=None)
    (course / "class" / "bad.ipynb").write_text("{")
    assert main(["grade", place, "--out", "out", "--seed", "7"]) == 1, "one could not be graded"
    out = capsys.readouterr().out
    assert "ada  03  0 of 5 points" in out and "bad  not graded: class/bad.ipynb: it is no" in out
    files = {str(path.relative_to(course / "out")) for path in (course / "out").rglob("*.*")}
    for student in ("ada", "bob", "bad"):
        names = ("feedback.html", "feedback.md", "results.json")
        assert {f"students/{student}/{name}" for name in names} <= files
    together = {"gradebook.csv", "junit.xml", "summary.md", "similarity.md"}
    assert together | {"grades/ada.03.json", "grades/batch.json"} <= files
    for path in (course / "out").rglob("*.*"):
        if path.name not in ("batch.json", "similarity.md"):
            text = path.read_text(encoding="utf-8").replace("\\", "")
            assert re.search(r"0\.1\.0\+[0-9a-f]{12}", text), path
            teacher_s = "students" not in path.parts
            assert teacher_s == bool(re.search(r"seed\W+(name=|value=)?\W*7|,7,yes", text)), path
            assert "sandbox" in text and "yes" in text, path


def test_a_batch_keeps_its_seed_and_refuses_another(class_of, no_ranks, course, capsys):
    place = class_of(ada=SOLVED)
    seeds = []
    for _ in range(2):
        assert main(["grade", place, "--out", "out"]) == 0
        seeds.append(json.loads((course / "out/grades/batch.json").read_text())["seed"])
    assert seeds[0] == seeds[1]
    assert main(["grade", place, "--out", "out", "--seed", str(seeds[0])]) == 0
    capsys.readouterr()
    before = (course / "out/gradebook.csv").read_bytes()
    assert main(["grade", place, "--out", "out", "--seed", "5"]) == 2, "it would mix two seeds"
    assert "was graded with another seed" in capsys.readouterr().err
    assert (course / "out/gradebook.csv").read_bytes() == before
    for path in (course / "out" / "students").rglob("*.*"):
        assert str(seeds[0]) not in path.read_text() and "seed" not in path.read_text()
    main(["grade", place, "--out", "other"])
    assert json.loads((course / "other/grades/batch.json").read_text())["seed"] != seeds[0]


def test_a_seed_that_is_drawn_is_long(course):
    seeds = [command._seed(course / str(n), None) for n in range(8)]
    assert len(set(seeds)) == 8 and max(seeds) > 2**56


def test_no_name_of_a_file_stops_the_batch(class_of, no_ranks, course):
    place = class_of(zoe=SOLVED)
    for name, member in {"one": "\U00020000" * 64, "two": "\ufa6c" * 64}.items():
        with zipfile.ZipFile(course / place / f"{name}.zip", "w") as archive:
            archive.writestr(f"{member}.ipynb", STUB)
    (course / place / ("\ufa6c" * 60)).mkdir()
    (course / place / ("\ufa6c" * 60) / EXERCISE).write_text(STUB)
    with zipfile.ZipFile(course / "all.zip", "w") as archive:
        archive.writestr("\U00020000" * 60 + ".ipynb", STUB)
        archive.writestr("zoe.ipynb", STUB)
    assert main(["grade", place, "--out", "out"]) == 0
    assert main(["grade", "all.zip", "--out", "out"]) == 0
    assert set(rows(course / "out")) == {"\U00020000" * 30, "zoe"}


def test_feedback_that_cannot_be_written_is_a_line_of_the_summary(class_of, no_ranks, course):
    place = class_of(ada=SOLVED, bob=SOLVED, cem=SOLVED)
    (course / "out" / "students").mkdir(parents=True)
    (course / "out" / "students" / "bob").write_text("in the way")
    assert main(["grade", place, "--out", "out"]) == 1
    assert list(rows(course / "out")) == ["ada", "bob", "cem"]
    summary = (course / "out" / "summary.md").read_text().replace("\\", "")
    assert "- bob: students/bob/: the feedback could not be written (File exists)" in summary
    assert (course / "out" / "students" / "cem" / "feedback.html").exists()


def test_a_name_that_two_have_is_in_the_summary(class_of, no_ranks, course):
    class_of(ada=SOLVED)
    (course / "ada.ipynb").write_text(STUB)
    assert main(["grade", "ada.ipynb", "class", "--out", "out"]) == 0
    summary = (course / "out" / "summary.md").read_text().replace("\\", "")
    complaint_text = "ada.ipynb: another hand-in is called ada too, so this one is called ada-2"
    assert f"- ada-2: {complaint_text}" in summary
    assert list(rows(course / "out")) == ["ada", "ada-2"]


def test_secure_refuses_without_a_sandbox(class_of, monkeypatch, course, capsys):
    monkeypatch.setattr(command, "probe", lambda: Probe(False, "unshare: not permitted"))
    assert main(["grade", class_of(ada=SOLVED), "--secure", "--out", "out"]) == 2
    complaint_text = capsys.readouterr().err
    assert "nothing was graded. unshare: not permitted." in complaint_text
    assert not (course / "out").exists()


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("words", [[], ["--secure"], ["--nbval"]])
def test_elsewhere_than_on_linux_it_says_so_before_all_else(
    class_of, monkeypatch, course, capsys, system, words
):
    def nothing_else(*_):
        raise AssertionError("something was done before")

    monkeypatch.setattr(command, "probe", nothing_else)
    monkeypatch.setattr(command, "_exercises", nothing_else)
    monkeypatch.setattr(command.sys, "platform", system)
    assert main(["grade", class_of(ada=SOLVED), "--out", "out", *words]) == 2
    complaint_text = capsys.readouterr().err
    assert complaint_text.startswith(
        "ddpz grade: grading needs Linux for its sandbox, and this is " + system
    )
    assert complaint_text.count("\n") == 1
    assert not (course / "out").exists()


def test_without_a_sandbox_the_reports_say_so(class_of, no_ranks, monkeypatch, course, capsys):
    monkeypatch.setattr(command, "probe", lambda: Probe(False, "unshare: not permitted"))
    assert main(["grade", class_of(ada=SOLVED), "--out", "out"]) == 0
    assert "sandbox: none" in capsys.readouterr().out
    assert rows(course / "out")["ada"]["sandbox"] == "none"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--hidden", "nowhere"], "--hidden: there is no .py file in nowhere/"),
        (["--hidden", "judges"], "--hidden: there are no tasks 03.other"),
        (["--out", "file"], "--out: file/ cannot be written"),
        (["--only", "03.other"], "--only: there is no task 03.other; name one as 03.weighted_mean"),
        (["--roster", "nobody.csv"], "--roster: nobody.csv cannot be read (No such file"),
    ],
)
def test_a_wrong_option_is_one_line(class_of, no_ranks, course, capsys, words, complaint):
    (course / "file").write_text("")
    (course / "judges").mkdir()
    (course / "judges" / "mine.py").write_text("MORE = {'03.other': None}")
    assert main(["grade", class_of(ada=SOLVED), *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_malformed_master_is_one_line(course, capsys, no_ranks):
    master = small_course.master()
    master.cells.pop()
    nbformat.write(master, course / "solutions" / EXERCISE)
    assert main(["grade", "class"]) == 2
    assert "missing: 03.weighted_mean check" in capsys.readouterr().err


# ---- who, what, how much ----


def test_only_some_tasks_are_graded_and_the_others_later(class_of, monkeypatch, course, no_ranks):
    ran = []

    def observe(task, cells, cases, limits, sandboxed):
        ran.append(task.id)
        return [Observed(case, "raised", "rank 0 raised") for case in cases]

    two = find("03.weighted_mean"), find("03.same_start")
    second = Pristine(
        "03",
        small_course.NAME,
        "Mean",
        (("a", notebooks.STUB, two[0].id), ("b", notebooks.STUB, two[1].id)),
    )
    monkeypatch.setattr(command, "_exercises", lambda: {"03": second})
    monkeypatch.setattr(command, "observe_in_sandbox", observe)
    cells = [
        {"cell_type": "code", "id": name, "metadata": {}, "source": "x = 1"} for name in ("a", "b")
    ]
    (course / "class").mkdir()
    text = json.dumps({"nbformat": 4, "metadata": {}, "cells": cells})
    (course / "class/ada.ipynb").write_text(text)

    def points(*words):
        ran.clear()
        assert main(["grade", "class", "--out", "out", *words]) == 0
        row = rows(course / "out")["ada"]
        return list(dict.fromkeys(ran)), [key for key in row if key[:3] == "03."], row["out of"]

    first, last = (task.id for task in two)
    both = str(two[0].points + two[1].points)
    assert points("--only", last) == ([last], [last], str(two[1].points))
    assert points() == ([first], [first, last], both), "what is graded is not graded again"
    assert points("--only", first) == ([], [first], str(two[0].points))
    assert points("--only", "03") == ([], [first, last], both)


def test_who_is_missing_and_who_has_too_few_points(class_of, no_ranks, course, capsys):
    place = class_of(ada=SOLVED, zoe=None)
    (course / "names.csv").write_text("student;mail\nAda;a@x\nBob;b@x\n")
    words = ["grade", place, "--out", "out", "--roster", "names.csv"]
    assert main(words) == 0, "who is missing is named, and no fault of the grader"
    out = capsys.readouterr().out
    assert "Bob  handed in nothing" in out and "zoe  is not in the roster" in out
    assert set(rows(course / "out")) == {"Ada", "Bob", "zoe"}, "as the roster writes it"
    assert rows(course / "out")["Ada"]["mail"] == "a@x", "the roster's columns are carried through"
    assert main([*words, "--fail-under", "0"]) == 0
    capsys.readouterr()
    assert main([*words, "--fail-under", "0.5"]) == 1
    out = capsys.readouterr().out
    assert [f"{name}  0 points, fewer than 0.5" in out for name in ("Ada", "Bob", "zoe")] == [
        True
    ] * 3


def test_what_was_handed_in_without_a_notebook_is_named(class_of, no_ranks, course, capsys):
    place = class_of(zoe=SOLVED)
    (course / place / "ada").mkdir()
    (course / place / "ada/solution.py").write_text("x = 1")
    assert main(["grade", place, "--out", "out"]) == 1
    complaint_text = (
        "ada  not graded: class/ada: there is no notebook (.ipynb) in it, but solution.py; ask"
    )
    assert complaint_text in capsys.readouterr().out
    assert "solution.py" in rows(course / "out")["ada"]["remarks"]
    assert "solution.py" in (course / "out/students/ada/feedback.html").read_text()


def test_names_that_a_terminal_cannot_write_stop_nothing(class_of, no_ranks, course, monkeypatch):
    place = class_of(**{"李小龙": SOLVED})
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["grade", place, "--out", "out"]) == 0
    terminal.flush()
    assert b"???  03  0 of 5 points" in terminal.buffer.getvalue()
    assert (course / "out/students/李小龙/feedback.html").exists()
    assert set(rows(course / "out")) == {"李小龙"}


@pytest.mark.rest
def test_a_class_gets_the_points_that_its_answers_are_worth(class_of, course):
    """Real ranks, and the same points in a second run with the same seed."""
    wrong = {w.name: w.source for w in trying.variants("03.weighted_mean")}
    place = class_of(
        ada=SOLVED,
        bob=None,
        cem=wrong["the sum of the ranks' means"],
        dan=wrong["the mean of the ranks' means"],
        eve="def weighted_mean(gradients, samples):\n    raise SystemExit('5 of 5 points')",
        fay="!pip install torch",
    )
    points = {}
    for out, paths in (("two", ["class/ada", "class/dan"]), ("one", [place])):
        assert main(["grade", *paths, "--out", out, "--seed", "7", "--jobs", "2"]) == 0
        points[out] = {name: int(row["points"]) for name, row in rows(course / out).items()}
    assert points["two"] == {"ada": 5, "dan": 3}
    assert points["one"] == {"ada": 5, "bob": 0, "cem": 0, "dan": 3, "eve": 0, "fay": 0}
    for name, sentence in {
        "dan": "the mean of the ranks&#x27; means",
        "eve": "<b",
        "fay": "a magic or a shell line",
    }.items():
        assert sentence in (course / "one" / "students" / name / "feedback.html").read_text()


# ---- the manual ----


@pytest.fixture
def manual(root):
    return (root / "exercises" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "CLASS.md"])
def test_every_command_of_the_manual_exists(root, page):
    from ddpz_lite.course.cli import _parser

    text = (root / "exercises" / page).read_text(encoding="utf-8")
    commands = re.findall(r"^ *(?:\.venv/bin/)?ddpz (.*)$", text, re.M)
    commands += re.findall(r"`ddpz ([^`]+)`", text)
    commands = [words for words in commands if words != "grade"]  # the command's name alone
    assert len(commands) >= 6
    for words in commands:
        assert _parser().parse_args(words.split()).command, words


@pytest.mark.rest
def test_the_manual_s_own_judge_judges(manual, class_of, course):
    (course / "judges").mkdir()
    (text,) = re.findall(r"```python\n(.*?)```", manual, re.S)
    (course / "judges" / "mine.py").write_text(text)
    mean = next(
        wrong.source
        for wrong in trying.variants("03.weighted_mean")
        if wrong.name == "the mean of the ranks' means"
    )
    place = class_of(ada=SOLVED, dan=mean)
    assert main(["grade", place, "--out", "out", "--hidden", "judges", "--seed", "7"]) == 0
    points = {name: (row["points"], row["out of"]) for name, row in rows(course / "out").items()}
    assert points == {"ada": ("7", "7"), "dan": ("3", "7")}
    page = (course / "out" / "students" / "dan" / "feedback.html").read_text()
    assert "far from the gradient of the rank that had nearly all samples" in page
