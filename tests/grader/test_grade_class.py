"""A class as it really hands in: whose a notebook is, which exercise, one line for each student."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zipfile
from pathlib import Path

import pytest

from ddpz_lite.course.check.task import tasks
from ddpz_lite.course.grader import exercise, formats, intake, owners, pages, people, places, roster
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.report import Report
from ddpz_lite.course.grader.submission import NotGraded, Submission
from ddpz_lite.course.grader.text import clean, plain

ONE, EIGHT = "01_one_device", "08_the_memory_wall"
IN_01, IN_08 = (len(tasks(lesson)) for lesson in ("01", "08"))
ANSWER = "def state_bytes():\n    return {number}"
TERMS = Terms("0.1.0+test", 7, "yes")


@pytest.fixture(scope="module")
def known(root):
    """Two exercises of the course that both have a cell state_bytes-answer."""
    made = [exercise.pristine(root / "solutions" / f"{name}.ipynb") for name in (ONE, EIGHT)]
    return {one.lesson: one for one in made}


@pytest.fixture
def notebook(root):
    """A student's notebook: every answer, or those that are named, holds more than its stub."""

    def make(name=ONE, answered=None, *, drop=(), ids=True, cells=True, about=True, number=1):
        tree = json.loads((root / "exercises" / f"{name}.ipynb").read_text(encoding="utf-8"))
        tree["cells"] = [cell for cell in tree["cells"] if cell["id"] not in drop]
        for count, cell in enumerate(tree["cells"]):
            role = cell["metadata"].get("ddpz", {}).get("role")
            if role == "answer" and (answered is None or cell["id"] in answered):
                cell["source"] = ANSWER.format(number=number)
            cell["id"] = cell["id"] if ids else f"c{count}"
            cell["metadata"] = cell["metadata"] if cells else {}
        tree["metadata"] = tree["metadata"] if about else {}
        return json.dumps(tree)

    return make


def found(taken):
    """(student, lesson, how many answers) of what was taken."""
    return sorted(
        (one.student, one.lesson, len(one.answers)) for one in taken if isinstance(one, Submission)
    )


def lines(taken):
    """student -> (where, reason), of what was not."""
    return {one.student: (one.where, one.reason) for one in taken if isinstance(one, NotGraded)}


# ---- which exercise it is ----


@pytest.mark.parametrize(
    ("stem", "changed"),
    [
        (EIGHT, {}),
        ("work", {}),
        ("work", {"cells": False}),  # the notebook's metadata say it
        ("work", {"about": False}),  # the cells' metadata say it
        (f"{EIGHT} (1)", {"about": False, "cells": False}),  # its name says it
        ("work", {"about": False, "cells": False}),  # its other cells say it
        (ONE, {}),  # the name is wrong, all else is right
    ],
)
def test_a_notebook_that_lacks_a_cell_is_still_of_its_exercise(take, put, notebook, stem, changed):
    """08 without its second answer was taken as 01, for both have a cell state_bytes-answer."""
    put(f"class/ada/{ONE}.ipynb", notebook(ONE))
    lacking = notebook(EIGHT, drop=("smallest_world-answer",), **changed)
    put(f"class/ada/z/{stem}.ipynb", lacking)
    put(f"class/bob/{EIGHT}.ipynb", notebook(EIGHT))
    assert found(take("class")) == [
        ("ada", "01", IN_01),
        ("ada", "08", IN_08 - 1),
        ("bob", "08", IN_08),
    ]


def test_an_exercise_that_is_ambiguous_is_not_guessed(take, put):
    cell = {"cell_type": "code", "id": "state_bytes-answer", "metadata": {}, "source": "x = 1"}
    tree = {"nbformat": 4, "metadata": {}, "cells": [cell]}
    put("class/ada/work.ipynb", json.dumps(tree))
    put(f"class/bob/{EIGHT}.ipynb", json.dumps(tree))
    taken = take("class")
    assert found(taken) == [("bob", "08", 1)]
    assert "may be exercise" in lines(taken)["ada"][1] and ONE in lines(taken)["ada"][1]


def test_a_notebook_whose_cells_have_other_ids_is_known_by_its_metadata(take, put, notebook):
    put("class/ada/work.ipynb", notebook(EIGHT, ids=False, number=3))
    put("class/bob/work.ipynb", notebook(EIGHT, ids=False, cells=False))
    taken = take("class")
    (ada,) = (one for one in taken if isinstance(one, Submission))
    own = [f"{task.id.partition('.')[2]}-answer" for task in tasks("08")]
    assert [name for name, _ in ada.answers] == own
    assert dict(ada.answers)["state_bytes-answer"].endswith("return 3")
    assert "no answer cell of any exercise" in lines(taken)["bob"][1]


def test_a_cell_of_another_exercise_is_not_taken_for_one_of_this(take, put, notebook):
    """It says which task it answers; its id says it of both."""
    tree = json.loads(notebook(EIGHT))
    (other,) = (
        c for c in json.loads(notebook(ONE, number=9))["cells"] if "state_bytes-a" in c["id"]
    )
    tree["cells"].append(other)
    put(f"ada/{EIGHT}.ipynb", json.dumps(tree))
    (one,) = take("ada")
    assert one.lesson == "08" and dict(one.answers)["state_bytes-answer"].endswith("return 1")
    assert one.warnings == ()


def test_of_two_notebooks_the_one_with_more_answers_counts(take, put, notebook):
    put(f"ada/{ONE}.ipynb", notebook(ONE, number=5))
    put(f"ada/{ONE}_empty.ipynb", notebook(ONE, answered=()))
    put(f"ada/{ONE}_half.ipynb", notebook(ONE, answered=("accumulate-answer",)))
    (one,) = take("ada")
    assert one.where == f"ada/{ONE}.ipynb"
    assert one.warnings == (
        f"ada/{ONE}.ipynb counts (it has the most answers); ada/{ONE}_empty.ipynb, "
        f"ada/{ONE}_half.ipynb were handed in too",
    )


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(take, put, notebook):
    text = notebook(ONE).replace("():\\n", "():\\r\\n")
    put("class/ada/a.ipynb", b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    put("class/bob/a.ipynb", notebook(ONE, answered=()).replace("\\n", "\\r\\n"))
    ada, bob = take("class")
    assert dict(ada.answers)["state_bytes-answer"] == ANSWER.format(number=1)
    assert all("\r" not in source for _, source in bob.answers)


# ---- whose it is ----


def test_a_week_of_flat_notebooks_is_a_class_beside_one_called_as_the_exercise(take, put, notebook):
    for name in ("a", "b", "c"):
        put(f"one/week8/{name}.ipynb", notebook(ONE))
        put(f"two/week8/{name}.ipynb", notebook(ONE))
    put(f"one/week8/{ONE}.ipynb", notebook(ONE))
    put(f"two/{ONE}.ipynb", notebook(ONE))
    for top, owner in (("one", "week8"), ("two", "two")):
        taken = take(top)
        assert {student for student, _, _ in found(taken)} == {"a", "b", "c", owner}
        assert lines(taken) == {}


def checkout(name: str) -> dict[str, str]:
    """Files of a copy of the course, without notebooks."""
    return {f"{name}/{file}": "" for file in ("README.md", "ddpz_lite/model.py", "tests/x.py")}


def test_of_a_copy_of_the_course_only_the_work_counts(take, put, notebook, tmp_path):
    solved, empty = notebook(ONE, number=7), notebook(ONE, answered=())
    trees = {}
    for name, work in (("ada", "exercises"), ("bob", "my"), ("cem", "exercises/week1")):
        trees |= checkout(name) | {
            f"{name}/solutions/{ONE}.ipynb": solved,
            f"{name}/lessons/{ONE}.ipynb": solved,
            f"{name}/exercises/{ONE}.ipynb": empty,
            f"{name}/{work}/{ONE}.ipynb": notebook(ONE, number=2),
        }
    trees["dan/solutions/mine.ipynb"] = notebook(ONE, number=2)  # no copy, only a folder's name
    for name, text in trees.items():
        put(f"class/{name}", text)
    with zipfile.ZipFile(tmp_path / "class.zip", "w") as archive:
        for name, text in trees.items():
            archive.writestr(name, text)
    for top in ("class", "class.zip"):
        taken = take(top)
        assert found(taken) == [(name, "01", IN_01) for name in ("ada", "bob", "cem", "dan")]
        assert all(dict(one.answers)["state_bytes-answer"].endswith("n 2") for one in taken)
    assert [one.student for one in take("class/ada")] == ["ada"]
    assert take("class/ada/solutions")[0].answers[0][1].endswith("n 7"), "asked for by name"


@pytest.mark.parametrize("top", ["class", "class/eve", "class/eve/my", "class/eve/my/exercises"])
def test_the_copies_of_a_learner_are_their_work_and_those_of_lessons_are_not(
    take, put, notebook, top
):
    for name, text in checkout("eve").items():
        put(f"class/{name}", text)
    put(f"class/eve/exercises/{ONE}.ipynb", notebook(ONE, answered=()))
    put(f"class/eve/my/exercises/{ONE}.ipynb", notebook(ONE, number=2))
    put(f"class/eve/my/lessons/{ONE}.ipynb", notebook(ONE, number=9))
    put("class/eve/my/.made-from.json", "{}")
    taken = take(top)
    assert found(taken) == [("eve", "01", IN_01)] and lines(taken) == {}
    assert dict(taken[0].answers)["state_bytes-answer"].endswith("n 2")


# ---- a row or a line for everything that was handed in ----


def test_every_entry_has_a_row_or_a_line(take, put, notebook, tmp_path):
    put(f"class/zoe/{ONE}.ipynb", notebook(ONE))
    put("class/ada/solution.py", "x = 1")
    put("class/bob/x.ipynb.txt", notebook(ONE))
    (tmp_path / "class/cem").mkdir()
    put("class/dan.py", "x = 1")
    put("class/eve.ipynb.txt", notebook(ONE))
    put("class/ida/notes/a.txt")
    put(f"class/jon.ipynb/{ONE}.ipynb", notebook(ONE))
    put("class/kim/work.zip", b"")
    put("class/.DS_Store")
    put("class/lea/.git/config")
    for name, members in (("fay", {"a.py": "", "b.py": "", "c.md": "", "d.md": ""}), ("gus", {})):
        with zipfile.ZipFile(tmp_path / f"class/{name}.zip", "w") as archive:
            for member, text in members.items():
                archive.writestr(member, text)
    with zipfile.ZipFile(tmp_path / "class/hal.zip", "w") as archive:
        archive.writestr("hal/inner.zip", b"PK\x05\x06" + bytes(18))
        archive.writestr("01.ipynbX.txt", notebook(ONE))
    raw = (tmp_path / "class/hal.zip").read_bytes().replace(b"01.ipynbX", b"01.ipynb\0")
    (tmp_path / "class/hal.zip").write_bytes(raw)
    taken = take("class")
    assert [student for student, _, _ in found(taken)] == ["jon.ipynb", "zoe"]
    by_student = lines(taken)
    folders = {"ada", "bob", "cem", "ida", "kim", "lea"}
    assert set(by_student) == folders | {"dan", "eve.ipynb", "fay", "gus", "hal"}
    ask = "; ask for the notebook itself"
    assert by_student["ada"] == (
        "class/ada",
        f"there is no notebook (.ipynb) in it, but solution.py{ask}",
    )
    assert "but x.ipynb.txt;" in by_student["bob"][1] and "but a.txt;" in by_student["ida"][1]
    assert by_student["cem"][1] == by_student["lea"][1] == owners.EMPTY
    assert (
        by_student["dan"] == ("class/dan.py", owners.NO_FILE)
        and by_student["eve.ipynb"][1] == owners.NO_FILE
    )
    assert by_student["fay"][1].startswith(
        "there is no notebook (.ipynb) in it, but a.py, b.py, c.md and 1"
    )
    assert (
        by_student["gus"][1] == "the zip is empty" and "zip cannot be read" in by_student["kim"][1]
    )
    reasons = {one.reason for one in taken if one.student == "hal"}
    assert {reason.partition(";")[0] for reason in reasons} == {
        "a zip inside a zip",
        "its name in the zip holds a NUL",
    }


def test_paths_that_no_file_can_have_get_a_line(take, tmp_path, known):
    for path in ("x" * 300 + ".ipynb", "a\0b.ipynb", "a\0.zip", "nowhere", "y" * 5000):
        (one,) = intake.take([tmp_path / path], known)
        assert isinstance(one, NotGraded) and len(one.student) <= 64 and len(one.where) <= 200


@pytest.mark.parametrize("where", ["class", "class.zip"])
def test_a_folder_or_zip_without_a_notebook_is_one_line(take, put, tmp_path, where):
    put("class/README.md")
    with zipfile.ZipFile(tmp_path / "class.zip", "w") as archive:
        archive.writestr("README.md", "")
    (one,) = take(where)
    assert one.student == "class" and "README.md" in one.reason


def test_what_cannot_be_read_is_a_line_and_the_others_are_graded(
    take, put, notebook, tmp_path, monkeypatch
):
    """By a stand-in for the system's answer: the tests may run as root, who may read everything."""
    for name in ("ada", "bob", "cem"):
        put(f"class/{name}/{ONE}.ipynb", notebook(ONE))
    real_open, real_scan = os.open, os.scandir

    def refuse(function, name):
        def maybe(path, *more):
            if name in str(path):
                raise PermissionError(13, "Permission denied")
            return function(path, *more)

        return maybe

    monkeypatch.setattr(os, "open", refuse(real_open, "class/ada"))
    monkeypatch.setattr(os, "scandir", refuse(real_scan, "class/bob"))
    taken = take("class")
    monkeypatch.undo()
    assert found(taken) == [("cem", "01", IN_01)]
    assert lines(taken) == {
        "ada": (f"class/ada/{ONE}.ipynb", "it cannot be read (Permission denied)"),
        "bob": ("class/bob", "the folder cannot be read (Permission denied)"),
    }


def test_what_happens_often_is_one_line_with_a_count(take, put, notebook, tmp_path):
    tree = json.loads(notebook(ONE))
    (answer,) = (cell for cell in tree["cells"] if cell["id"] == "state_bytes-answer")
    tree["cells"] += [answer] * 900
    put(f"class/ada/{ONE}.ipynb", json.dumps(tree))
    for number in range(50):
        put(f"class/ada/old/{number}.ipynb", notebook(ONE, answered=()))
        (tmp_path / f"class/ada/{number}.lnk").symlink_to("/etc/passwd")
    with zipfile.ZipFile(tmp_path / "class/ada/links.zip", "w") as archive:
        for number in range(40):
            info = zipfile.ZipInfo(f"{number}.ipynb")
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "/etc/passwd")
    put(f"class/bob/{ONE}.ipynb", notebook(ONE))
    ada, line, bob = take("class")
    assert line.where.endswith(" and 87 more") and "it is a link" in line.reason
    copies, others = ada.warnings
    assert (
        copies
        == "the cell state_bytes-answer is there 901 times; the last one that is not a stub counts"
    )
    assert others.startswith(f"class/ada/{ONE}.ipynb counts (it has the most answers); ")
    assert others.endswith(" and 47 more were handed in too")
    assert bob.warnings == ()


def test_a_stub_below_a_solved_cell_does_not_count(take, put, notebook):
    tree, empty = json.loads(notebook(ONE, number=4)), json.loads(notebook(ONE, answered=()))
    (stub,) = (cell for cell in empty["cells"] if cell["id"] == "state_bytes-answer")
    put(f"ada/{ONE}.ipynb", json.dumps(tree | {"cells": [*tree["cells"], stub]}))
    (one,) = take("ada")
    assert dict(one.answers)["state_bytes-answer"] == ANSWER.format(number=4)
    assert "is there 2 times; the last one that is not a stub counts" in one.warnings[0]


@pytest.mark.parametrize("name", ["{}", "lovelaceada_LATE_4711_90001_{}-1", "my work"])
def test_a_lesson_handed_in_for_its_exercise_gets_that_reason(take, put, root, name):
    lesson = (root / "lessons" / f"{ONE}.ipynb").read_text(encoding="utf-8")
    put(f"class/{name.format(ONE)}.ipynb", lesson)
    put("class/zoe/x.ipynb.txt")
    (reason,) = (reason for name, (_, reason) in lines(take("class")).items() if name != "zoe")
    known_name = f"this is lesson 01; hand in my/exercises/{ONE}.ipynb"
    unknown = "this is a lesson; hand in the exercise, a notebook of my/exercises/"
    assert reason == (known_name if "{}" in name else unknown)


def test_a_zip_with_backslashes_has_folders(take, notebook, tmp_path):
    with zipfile.ZipFile(tmp_path / "class.zip", "w") as archive:
        for name in ("ada", "bob"):
            archive.writestr(zipfile.ZipInfo(f"week\\{name}\\{ONE}.ipynb"), notebook(ONE))
        archive.writestr(zipfile.ZipInfo("..\\..\\evil.ipynb"), notebook(ONE))
        archive.writestr(zipfile.ZipInfo("C:\\evil.ipynb"), notebook(ONE))
    taken = take("class.zip")
    assert found(taken) == [("ada", "01", IN_01), ("bob", "01", IN_01)]
    reasons = {one.reason for one in taken if isinstance(one, NotGraded)}
    assert reasons == {
        "its name in the zip leads out of the zip (..)",
        "its name in the zip is an absolute path",
    }


def test_a_link_at_the_top_is_not_a_student(take, put, notebook, tmp_path, known):
    for name in ("ada", "bob"):
        put(f"class/{name}/{ONE}.ipynb", notebook(ONE))
    (tmp_path / "class/latest").symlink_to(tmp_path / "class/ada")
    (tmp_path / "all").symlink_to(tmp_path / "class")
    taken = take("class")
    assert found(taken) == [("ada", "01", IN_01), ("bob", "01", IN_01)]
    assert lines(taken) == {"": ("class/latest", places.LINK)}
    assert lines(take("all")) == {"": ("all", places.LINK)}
    report = Report([], [NotGraded("", "class/latest", places.LINK)], known, TERMS)
    assert formats.gradebook(report).count("\n") == 1 and report.students == {}
    assert "- no student: class/latest\\: it is a link" in pages.summary(report)


# ---- names ----

NAMES = {
    "李小龙": "李小龙",
    "Дмитрий Иванов": "Дмитрий Иванов",
    "محمد علي": "محمد علي",
    "दीपिका": "दीपिका",  # vowel signs are marks
    "ශ්‍රී": "ශ්‍රී",  # a joiner behind a virama is part of the letter
    "Nguye\u0302\u0303n": "Nguyễn",  # form C
    "김민준": "김민준",
    "O'Brien-Łukasz": "O'Brien-Łukasz",
    "اَلْعَرَبِيَّة": "اَلْعَرَبِيَّة",
    "a\u202eb\u2066c\u200d": "abc",  # what reorders or hides is dropped
    "\u0301ada": "ada",  # a mark with nothing to stand on
    "a\x00b\x1b[0m\n": "a_b_0m",
    "a;=1": "a_1",
}


def test_names_of_all_scripts_stay_as_they_are(take, put, notebook, tmp_path):
    for name, shown in NAMES.items():
        assert clean(name) == shown == clean(shown), ascii(name)
        assert plain(shown) == shown, "reports show it as it is"
    kept = [name for name in NAMES if clean(name) == name]
    assert len(kept) >= 8
    for name in kept:
        put(f"class/{name}/{ONE}.ipynb", notebook(ONE))
        (tmp_path / "out" / clean(name)).mkdir(parents=True)
    taken = take("class")
    assert {one.student for one in taken} == set(kept)
    assert {Path(one.where).parts[1] for one in taken} == set(kept)


def test_names_that_look_alike_get_numbers(take, put, notebook):
    for name in ("ZOE\u0308", "zoë", "Zo\u200bë"):
        put(f"class/{name}/{ONE}.ipynb", notebook(ONE))
    taken = take("class")
    assert {one.student.casefold() for one in taken} == {"zoë", "zoë-2", "zoë-3"}


# ---- tables ----

FORMULAS = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")


@pytest.mark.parametrize("start", FORMULAS)
def test_no_cell_is_a_formula_whatever_a_table_is_split_at(take, tmp_path, known, start):
    evil = f'x;{start}HYPERLINK("http://a.b")|;{start}1\t{start}2,{start}3'
    with zipfile.ZipFile(tmp_path / "class.zip", "w") as archive:
        for folder in ("ada", f"{evil};bob"):
            archive.writestr(f"{folder}/{evil}.ipynb", "{")
    lost = [*take("class.zip"), NotGraded("eve", f"{start}1", f"{evil};{start}1")]
    assert len(lost) == 3
    table = formats.gradebook(Report([], lost, known, TERMS))
    for delimiter in ",;\t":
        for row in csv.reader(io.StringIO(table), delimiter=delimiter):
            assert not [cell for cell in row if cell.strip().startswith(FORMULAS)], (delimiter, row)


# ---- the roster ----


@pytest.mark.parametrize(
    "text",
    [
        "李小龙\nAda Lovelace\nAda\nbob\n",
        "\ufeffstudent,mail\r\n李小龙,l@x\r\nAda Lovelace,a@x\r\nAda,b@x\r\nbob,c@x\r\n",
        "id;Student\n1;李小龙\n2;Ada Lovelace\n\n3;Ada\n4;bob\n",
    ],
)
def test_a_roster_says_who_is_missing_and_who_is_not_in_it(put, text):
    names = roster.load(put("names.csv", text))
    assert list(names.by_name) == ["李小龙", "Ada Lovelace", "Ada", "bob"]
    came = ["Ada Lovelace_123_assignsubmission_file", "BOB", "李小龙", "adam", "bob-2"]
    assert names.compare(came) == (["Ada"], ["adam", "bob-2"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no names. Fix: write one name per line"),
        ("student\n", "has no names"),
        ("ada\nbob\nADA\n", "has ada twice. Fix: make the names differ"),
        (b"\xff\xfea", "is not UTF-8 text. Fix: save it as CSV UTF-8"),
        (None, "cannot be read (No such file"),
    ],
)
def test_a_roster_that_cannot_be_used_says_why(put, tmp_path, text, complaint):
    path = tmp_path / "names.csv" if text is None else put("names.csv", text)
    with pytest.raises(people.BadRoster) as error:
        roster.load(path)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_who_is_missing_is_in_the_gradebook_and_in_the_summary(known):
    here = Grade("ada", "08", "ada.ipynb", "ab" * 32, TERMS, ())
    report = Report([here], [], known, TERMS, missing=["bob"], unlisted=["ada"])
    rows = {row["student"]: row for row in csv.DictReader(io.StringIO(formats.gradebook(report)))}
    assert rows["bob"]["points"] == "0" and rows["bob"]["remarks"].startswith("handed in nothing")
    text = pages.summary(report)
    assert (
        "## Missing\n\n- bob: handed in nothing" in text and "- ada: is not in the roster" in text
    )


def test_the_weights_of_the_page_for_teachers_add_up(root, tmp_path, monkeypatch, capsys):
    """Its program, on a gradebook of two: all points in 01, half of those in 02, nothing in 03."""
    page = (root / "exercises/CLASS.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    points = {task.id: task.points for lesson in ("01", "02") for task in tasks(lesson)}
    halved = {name: p if name < "02" else p / 2 for name, p in points.items()}
    (tmp_path / "grades").mkdir()
    with (tmp_path / "grades/gradebook.csv").open("w") as file:
        book = csv.DictWriter(file, ["student", *points, "points"])
        book.writeheader()
        book.writerows([{"student": "ada", **halved}, {"student": "bob", "points": 0}])
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out == "ada: 35.0 of 100\nbob: 0.0 of 100\n"
