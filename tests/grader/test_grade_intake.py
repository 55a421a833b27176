"""What students hand in: who they are, what is taken, and one clear reason for each refusal."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import struct
import zipfile
from pathlib import Path

import nbformat
import pytest
import small_course

from ddpz_lite.course.grader import answers, intake, merge, places, zips
from ddpz_lite.course.grader.exercise import pristine
from ddpz_lite.course.grader.submission import NotGraded, Submission
from ddpz_lite.course.grader.text import clean

pytestmark = pytest.mark.usefixtures("one_task")
STUB = small_course.handed_in()
EXERCISE = f"{small_course.NAME}.ipynb"
FOLDER = 0o40755 << 16
LINK = (stat.S_IFLNK | 0o777) << 16


@pytest.fixture
def known(tmp_path):
    path = tmp_path / "course" / f"{small_course.NAME}.ipynb"
    path.parent.mkdir()
    nbformat.write(small_course.master(), path)
    return {"03": pristine(path)}


@pytest.fixture
def pack(tmp_path):
    """Write a zip: pack("class.zip", {"ada/03_mean.ipynb": text}, links={"x": "/etc/passwd"})."""

    def write(name: str, files: dict[str, str | bytes], links=()) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, text in files.items():
                archive.writestr(zipfile.ZipInfo(member), text, zipfile.ZIP_DEFLATED)
            for member in links:
                info = zipfile.ZipInfo(member)
                info.external_attr = LINK
                archive.writestr(info, "/etc/passwd")
        return path

    return write


def students(taken):
    return {one.student for one in taken if isinstance(one, Submission)}


def reason(taken):
    (one,) = taken
    assert isinstance(one, NotGraded), one
    assert "\n" not in one.reason
    return one.reason


# ---- who the student is ----


BOTH = ("ada", "bob")
OLD = f"{small_course.NAME} (1).ipynb"  # a browser's second copy
WORK = "my work.ipynb"
# What is handed in (a zip: its name and its members), what the teacher passes, and whose it is.
LAYOUTS = [
    ([f"ada/{EXERCISE}"], f"ada/{EXERCISE}", "ada"),
    ([f"ada/{OLD}"], "ada", "ada"),
    ([f"class/ada/{EXERCISE}"], "class", "ada"),
    (["class/ada/my work.ipynb"], "class", "ada"),
    ([("class/ada/work.zip", [EXERCISE])], "class", "ada"),
    *(([("ada.zip", [f"{inside}{EXERCISE}"])], "ada.zip", "ada") for inside in ("", "a/b/")),
    # a file for each student
    (["class/ada.ipynb", "class/bob.ipynb"], "class", BOTH),
    (["outer/class/ada_123_456_03_mean.ipynb", "outer/class/bob.ipynb"], "outer", BOTH),  # Canvas
    ([("flat.zip", ["ada.ipynb", "bob.ipynb"])], "flat.zip", BOTH),
    ([("wrapped.zip", ["in/ada.ipynb", "in/bob.ipynb"])], "wrapped.zip", BOTH),
    # a folder for each
    ([f"class/{n}/exercises/{EXERCISE}" for n in BOTH] + ["class/ada/README.md"], "class", BOTH),
    ([f"class/{name}/{WORK}" for name in BOTH], "class", BOTH),
    ([f"outer/class/{name}/{WORK}" for name in BOTH], "outer", BOTH),
    ([("class.zip", [f"{name}/{WORK}" for name in BOTH])], "class.zip", BOTH),
    ([("all.zip", [f"class/{name}/{EXERCISE}" for name in BOTH])], "all.zip", BOTH),
    # a zip for each
    (
        [("c/ada.zip", [EXERCISE]), ("c/bob_1_file/work.zip", [EXERCISE])],
        "c",
        ("ada", "bob_1_file"),
    ),
    ([(f"flat/in/{name}.zip", [EXERCISE]) for name in BOTH], "flat", BOTH),
    ([(f"class/in/{name}/work.zip", [EXERCISE]) for name in BOTH], "class", BOTH),
    # all kinds
    ([f"c/in/ada/{EXERCISE}", "c/in/bob.ipynb", ("c/in/cem.zip", [WORK])], "c", (*BOTH, "cem")),
    *(
        ([f"class/ada/{EXERCISE}", f"class/ada/{beside}"], "class", "ada")
        for beside in (WORK, f"sub/{EXERCISE}", "sub/bob.ipynb")
    ),
]


@pytest.mark.parametrize(("files", "passed", "whose"), LAYOUTS)
def test_whose_a_notebook_is_follows_from_the_layout(put, pack, take, files, passed, whose):
    for file in files:
        if isinstance(file, str):
            put(file)
        else:
            pack(file[0], dict.fromkeys(file[1], STUB))
    assert students(take(passed)) == ({whose} if isinstance(whose, str) else {*whose})


def test_a_student_s_own_checkout(put, take):
    put(f"ada/exercises/{EXERCISE}")
    put("ada/exercises/more/notes.txt")
    notebooks = (f"ada/exercises/{EXERCISE}", f"ada/exercises/more/../{EXERCISE}")
    for path in ("ada", "ada/exercises", "ada/exercises/..", *notebooks):
        assert students(take(path)) == {"ada"}


def test_two_places_of_one_name_are_two_students(put, take):
    put(f"monday/ada/{EXERCISE}")
    put(f"friday/ada/{EXERCISE}")
    put(f"friday/Ada/{EXERCISE}")
    assert students(take("monday", "friday")) == {"ada", "Ada-2", "ada-3"}


# ---- no student takes another one's name ----


def by_name(taken):
    """student -> the answer that counts."""
    return {one.student: one.answers[0][1] for one in taken if isinstance(one, Submission)}


A, B = (small_course.handed_in(f"x = {letter!r}") for letter in "ab")
AARON, BOB = "x = 'a'", "x = 'b'"


def test_what_lies_in_a_student_s_zip_is_that_student_s(pack, take):
    pack("class/aaron.zip", {"bob.ipynb": A, f"cem/{EXERCISE}": A, "dan/eve.ipynb": A})
    pack("class/bob.zip", {EXERCISE: B})
    assert by_name(take("class")) == {"aaron": AARON, "bob": BOB}


@pytest.mark.parametrize("his_own", ["bob.ipynb", f"bob/{EXERCISE}", "bob/bob.ipynb"])
@pytest.mark.parametrize("other", [f"bob/{EXERCISE}", "bob/solution.ipynb", "bob.ipynb"])
def test_what_lies_in_a_student_s_folder_is_that_student_s(put, take, his_own, other):
    put(f"class/aaron/{his_own}", A)
    put(f"class/{other}", B)
    assert by_name(take("class")) == {"aaron": AARON, "bob": BOB}


def test_a_folder_beside_a_zip_is_that_student_s_too(put, pack, take):
    put(f"class/aaron/bob/{EXERCISE}", A)
    put(f"class/aaron/cem/{EXERCISE}", A)
    pack("class/bob.zip", {EXERCISE: B})
    assert by_name(take("class")) == {"aaron": AARON, "bob": BOB}


def test_the_same_in_a_zip_of_a_class(pack, take):
    his_own = {"all/aaron/bob.ipynb": A, f"all/aaron/bob/{EXERCISE}": A}
    pack("class.zip", {**his_own, "all/bob/work.ipynb": B})
    assert by_name(take("class.zip")) == {"aaron": AARON, "bob": BOB}


def test_a_folder_or_zip_of_a_name_comes_before_a_notebook_that_took_it(put, pack, take):
    """Where each student's is passed alone, a notebook's own name counts in each."""
    pack("aaron.zip", {"bob.ipynb": A})
    pack("bob.zip", {EXERCISE: B})
    put("one/bob.ipynb", A)
    aaron, bob, one = take("aaron.zip", "bob.zip", "one/bob.ipynb")
    assert (bob.student, bob.answers[0][1], bob.warnings) == ("bob", BOB, ())
    assert (aaron.student, one.student) == ("bob-2", "bob-3")
    assert aaron.warnings == (
        "aaron.zip/bob.ipynb: another hand-in is called bob too, so this one is called bob-2",
    )


def test_a_numbered_name_never_collides_with_a_student(put, take):
    for path in (f"monday/bob/{EXERCISE}", f"friday/bob/{EXERCISE}"):
        put(path, A)
    put(f"sunday/bob-2/{EXERCISE}", B)
    put(f"sunday/zoe/{EXERCISE}", B)
    taken = take("monday", "friday", "sunday")
    assert [one.student for one in taken] == ["bob", "bob-3", "bob-2", "zoe"]
    assert [len(one.warnings) for one in taken] == [0, 1, 0, 0]


def test_what_is_refused_says_that_it_was_renamed(put, take):
    put("monday/bob.ipynb")
    put("friday/bob.ipynb", "")
    _, bad = take("monday", "friday")
    assert bad.student == "bob-2" and reason([bad]).startswith("the file is empty (friday/bob")


def test_one_zip_makes_one_student(put, pack, take):
    pack(
        "class/aaron.zip", {f"{n}.ipynb": A for n in range(50)} | {f"s{n}/x.ipynb": A for n in "ab"}
    )
    put(f"class/bob/{EXERCISE}", B)
    assert students(take("class")) == {"aaron", "bob"}


# ---- which notebook of a student counts ----


def test_a_zip_and_a_notebook_in_one_folder_are_of_one_student(put, pack, take):
    put(f"class/ada/{EXERCISE}", A)
    pack("class/ada/again.zip", {EXERCISE: B})
    put(f"class/bob/{EXERCISE}", B)
    taken = take("class")
    assert by_name(taken) == {"ada": BOB, "bob": BOB}
    (ada,) = (one for one in taken if one.student == "ada")
    assert ada.warnings == (
        f"class/ada/again.zip/{EXERCISE} counts (the last by name); class/ada/{EXERCISE} was "
        "handed in too",
    )


def test_of_two_notebooks_the_last_counts_with_a_warning(put, take):
    put(f"ada/{EXERCISE}")
    put(f"ada/{small_course.NAME}_new.ipynb", small_course.handed_in("x = 1"))
    (one,) = take("ada")
    assert one.where.endswith("_new.ipynb") and one.answers[0][1] == "x = 1"
    assert one.warnings == (
        f"ada/{small_course.NAME}_new.ipynb counts (the last by name); ada/{EXERCISE} was handed "
        "in too",
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Ada Lovelace", "Ada Lovelace"),
        ("Zoë_Müller-7", "Zoë_Müller-7"),
        ("=HYPERLINK(1)", "HYPERLINK_1"),
        ("../../etc", "etc"),
        ("<script>", "script"),
        ("\u202eada", "ada"),
        ("a\nb", "a_b"),
        ("...", "unnamed"),
        ("@everyone", "everyone"),
        ("x" * 200, "x" * 64),
        ("\U00020000" * 64, "\U00020000" * 30),
        ("\ufa6c" * 64, "\U000242ee" * 30),
        ("é" * 70, "é" * 60),
        ("a" + "é" * 70, "a" + "é" * 59),
    ],
)
def test_names_are_made_safe(name, shown):
    assert clean(name) == shown


def test_what_is_passed_twice_counts_once(put, pack, take):
    """Two submissions of one place had a student's points twice."""
    put(f"class/ada/{EXERCISE}", A)
    put("class/bad/x.ipynb", "{")
    pack("class/bob.zip", {EXERCISE: B})
    once = take("class")
    assert take("class", "class") == once
    assert len(once) == 3 and not any(one.warnings for one in once if isinstance(one, Submission))
    for inner in ("class/ada", f"class/ada/{EXERCISE}", "class/bob.zip"):
        assert take("class", inner) == once
        assert by_name(take(inner, "class")) == {"ada": AARON, "bob": BOB}


# ---- what is taken ----


def test_only_answers_are_taken(put, take):
    notebook = json.loads(small_course.handed_in("x = 1"))
    notebook["metadata"] = {"kernelspec": {"name": "mine"}, "deep": {"er": 1}}
    notebook["cells"][3]["metadata"] = {"tags": ["nbval-skip"], "points": 99}
    notebook["cells"][4]["source"] = "print('all passed')"
    put(f"ada/{EXERCISE}", json.dumps(notebook))
    (one,) = take("ada")
    assert one.answers == ((small_course.CELL, "x = 1"),) and one.lesson == "03"


def outputs(notebook):
    forged = {"output_type": "stream", "name": "stdout", "text": "03.weighted_mean   5 of 5 points"}
    for cell in notebook["cells"]:
        cell["outputs"] = [forged]


def own_given(notebook):
    notebook["cells"][1]["source"] = "import torch\ntorch.allclose = lambda *a, **k: True"
    notebook["cells"].insert(0, {**notebook["cells"][1], "id": "first"})


def lines_for_pytest(notebook):
    notebook["cells"][3]["metadata"] = {"tags": ["nbval-skip", "raises-exception"]}
    notebook["cells"][4]["source"] = "# NBVAL_SKIP"


def points(notebook):
    for cell in notebook["cells"]:
        cell["metadata"] = {"ddpz": {"role": "given"}, "nbgrader": {"points": 100, "grade": True}}


TAMPERED = [
    lambda n: n["cells"].pop(4),  # the check is gone
    lambda n: n["cells"][4].update(source="print('5 of 5 points')"),
    lambda n: n["cells"].append(n["cells"][4]),
    lambda n: n["cells"].reverse(),
    lambda n: n["cells"].insert(0, {**n["cells"][3], "id": "weighted_mean-check"}),
    lambda n: n["metadata"].update(kernelspec={"name": "bash", "language": "bash"}),
    lambda n: n["metadata"].clear(),
    outputs,
    own_given,
    lines_for_pytest,
    points,
]


@pytest.mark.parametrize("tamper", TAMPERED)
def test_nothing_around_an_answer_changes_what_runs(put, take, known, tamper):
    def program(text):
        put(f"ada/{EXERCISE}", text)
        return merge.merge(known["03"], take("ada")[0])

    honest = small_course.handed_in("x = 1")
    notebook = json.loads(honest)
    tamper(notebook)
    assert program(json.dumps(notebook)) == program(honest)


def test_other_cells_leave_only_their_names(put, take):
    notebook = json.loads(small_course.handed_in("def mine(): pass"))
    for source in (
        "%load_ext autoreload\ndef helper(): pass",
        "import numpy as np\nx = 1",
        "#" * 60_000,
    ):
        notebook["cells"].append({**notebook["cells"][3], "id": "new", "source": source})
    put(f"ada/{EXERCISE}", json.dumps(notebook))
    (one,) = take("ada")
    assert {"helper", "np", "x"} <= one.elsewhere and "mine" not in one.elsewhere
    lines = "\n".join(f"n{n} = 1" for n in range(3000))
    notebook["cells"].append({**notebook["cells"][3], "id": "many", "source": lines})
    put(f"ada/{EXERCISE}", json.dumps(notebook))
    assert answers.NAMES - 9 < len(take("ada")[0].elsewhere) <= answers.NAMES


def test_an_id_in_the_metadata_counts_where_the_format_has_none(put, take):
    notebook = json.loads(small_course.handed_in("x = 1"))
    for cell in notebook["cells"]:
        cell["metadata"] = {"id": cell.pop("id")}
    put(f"ada/{EXERCISE}", json.dumps({**notebook, "nbformat_minor": 0}))
    assert take("ada")[0].answers == ((small_course.CELL, "x = 1"),)


def test_sources_may_be_lists_of_lines(put, take):
    notebook = json.loads(STUB)
    notebook["cells"][3]["source"] = ["x = 1\n", "y = 2"]
    put(f"ada/{EXERCISE}", json.dumps(notebook))
    assert take("ada")[0].answers[0][1] == "x = 1\ny = 2"


def test_files_beside_a_notebook_are_not_opened(put, take, tmp_path):
    put(f"ada/{EXERCISE}")
    for name in ("torch.py", "conftest.py", "ddpz_lite/__init__.py", ".ipynb_checkpoints/a.ipynb"):
        os.chmod(put(f"ada/{name}", "raise SystemExit"), 0)
    assert len(take("ada")) == 1


# ---- what is refused, and that the others go on ----


def cells(count):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": "", "outputs": []}
    return [cell] * count


def nested(depth):
    return STUB.replace('"metadata": {}', f'"metadata": {{"a": {"[" * depth}{"]" * depth}}}', 1)


BAD = [
    (b"", "the file is empty"),
    (b"\xff\xfe\x00", "not text in UTF-8"),
    (b"{", "the JSON is broken"),
    (b"[]", "not a notebook of version 4"),
    (b'{"nbformat": 3, "worksheets": []}', "not a notebook of version 4"),
    (b'{"nbformat": 4}', "no list of cells"),
    (b'{"nbformat": 4, "cells": {"a": 1}}', "no list of cells"),
    (b'{"nbformat": 4, "cells": [1, null, {}, {"cell_type": "code"}]}', "no answer cell"),
    (b'{"nbformat": 4, "cells": []}', "no answer cell"),
    (b'{"nbformat": 4, "x": ' + b"9" * 5000 + b"}", "the JSON is broken"),
    (b"[" * 100_000, "nested too deeply"),
    (nested(100).encode(), "nested too deeply"),
    (json.dumps({"nbformat": 4, "cells": cells(1001)}).encode(), "1001 cells; 1000 are allowed"),
    (small_course.handed_in("#" * 50_001).encode(), "longer than 50000 characters"),
    (b" " * (places.NOTEBOOK + 1), "larger than 16 MiB"),
]


@pytest.mark.parametrize(("raw", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_bad_notebook_is_refused_and_the_next_one_taken(put, take, raw, complaint):
    put("class/bad.ipynb", raw)
    put("class/good.ipynb")
    bad, good = take("class")
    assert complaint in reason([bad]) and bad.student == "bad"
    assert good.student == "good"


def test_a_notebook_of_another_course_is_refused(put, take):
    strange = STUB.replace("weighted_mean-answer", "cell-7").replace("03.weighted_mean", "a.task")
    put("ada.ipynb", strange)
    assert "no answer cell of any exercise" in reason(take("ada.ipynb"))


def test_what_is_not_there_or_no_notebook_is_refused(put, take):
    put("notes.txt")
    assert "cannot be read (No such file" in reason(take("nobody.ipynb"))
    assert "neither a notebook" in reason(take("notes.txt"))


def test_links_are_refused_and_not_followed(put, take, tmp_path):
    secret = put("secret.ipynb")
    put(f"class/ada/{EXERCISE}")
    (tmp_path / "class" / "link.ipynb").symlink_to(secret)
    (tmp_path / "class" / "loop").symlink_to(tmp_path / "class")
    (tmp_path / "all.zip").symlink_to(secret)
    taken = take("class", "all.zip")
    assert students(taken) == {"ada"}
    refused = [(one.where, one.reason) for one in taken if isinstance(one, NotGraded)]
    assert refused == [
        ("class/link.ipynb, class/loop", places.LINK),
        ("all.zip", places.LINK),
    ]


def test_a_pipe_a_socket_or_a_device_stops_nothing(put, pack, take, tmp_path):
    for name in ("ada.ipynb", "bob.zip"):
        os.mkfifo(tmp_path / name)
        assert reason(take(name)) == places.ODD
    put(f"class/cem/{EXERCISE}")
    put(f"class/dan/{EXERCISE}")
    for name in ("class/bob.zip", "class/cem/a.zip", "class/cem/b.ipynb", "class/cem/log"):
        os.mkfifo(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "class/cem/c.ipynb"))
        taken = take("class")
    assert students(taken) == {"cem", "dan"}
    refused = {one.student: (one.where, one.reason) for one in taken if isinstance(one, NotGraded)}
    assert refused == {
        "": ("class/bob.zip", places.ODD),
        "cem": ("class/cem/a.zip, class/cem/b.ipynb, class/cem/c.ipynb and 1 more", places.ODD),
    }


def test_folders_may_be_nested_eight_deep(put, take):
    put("class/" + "a/" * 12 + EXERCISE)
    assert "nested more than 8 deep" in reason(take("class"))


def test_many_files_of_one_student_do_not_hide_the_others(put, take, monkeypatch):
    """The walk ended at the 20,000th file of a class, and with it all who sort behind."""
    monkeypatch.setattr(places, "FILES", 30)
    for name in ("ada", "zoe"):
        put(f"class/{name}/{EXERCISE}")
    for number in range(40):
        for folder in (".venv/lib", "venv/bin", "node_modules/x", "env/lib/site-packages/t"):
            put(f"class/ada/{folder}/{number}.py", "")
        put(f"class/bob/a/b/{number}.txt", "")
        put(f"class/cem/{number}/x.ipynb", "")
    put(f"class/bob/a/{EXERCISE}")
    put(f"class/bob/a/b/c/{EXERCISE}", "")
    put(f"class/zoe/.venv/{EXERCISE}", "{")
    taken = take("class")
    assert students(taken) == {"ada", "bob", "zoe"}
    assert len(taken) == 5, "one line each for what was not looked at"
    refused = [(one.student, one.reason) for one in taken if isinstance(one, NotGraded)]
    assert refused == [("bob", places.TOO_MANY), ("cem", places.TOO_MANY)]
    assert f"class/bob/a/{EXERCISE}" in [one.where for one in taken]


def test_a_student_s_many_notebooks_are_looked_at_up_to_a_number(pack, take, monkeypatch):
    monkeypatch.setattr(intake, "MAX_NOTEBOOKS", 5)
    pack("class/ada.zip", {f"{n}.ipynb": "" for n in range(50)} | {f"z/{EXERCISE}": STUB})
    pack("class/bob.zip", {EXERCISE: STUB})
    taken = take("class")
    assert students(taken) == {"bob"}
    lines = [(one.where, one.reason) for one in taken if isinstance(one, NotGraded)]
    some = "class/ada.zip/0.ipynb, class/ada.zip/1.ipynb, class/ada.zip/10.ipynb and 2 more"
    assert lines == [(some, "the file is empty"), ("class/ada.zip", intake.TOO_MANY)]


# ---- zips ----


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("../evil.ipynb", "leads out of the zip"),
        ("a/../../evil.ipynb", "leads out of the zip"),
        ("/etc/evil.ipynb", "an absolute path"),
        ("C:/evil.ipynb", "an absolute path"),
        ("..\\evil.ipynb", "leads out of the zip"),
        ("a/" * 12 + "evil.ipynb", "nested more than 8 deep"),
        ("inner.zip", "a zip inside a zip"),
    ],
)
def test_a_zip_slip_is_refused_and_the_rest_taken(pack, take, tmp_path, name, complaint):
    pack("class.zip", {name: STUB, f"ada/{EXERCISE}": STUB, f"bob/{EXERCISE}": STUB})
    before = set(tmp_path.rglob("*"))
    taken = take("class.zip")
    assert students(taken) == {"ada", "bob"}
    assert complaint in reason([one for one in taken if isinstance(one, NotGraded)])
    assert set(tmp_path.rglob("*")) == before, "nothing is unpacked to disk"


def test_a_link_in_a_zip_is_refused(pack, take):
    pack("ada.zip", {EXERCISE: STUB}, links=["x.ipynb"])
    taken = take("ada.zip")
    assert [one.reason for one in taken if isinstance(one, NotGraded)] == [places.LINK]


def test_a_bomb_is_refused_without_unpacking_it(pack, take):
    pack("ada.zip", {EXERCISE: b" " * (8 << 20)})
    assert "more than 200 times its size" in reason(take("ada.zip"))
    pack("bob.zip", {EXERCISE: os.urandom(1 << 20) + b" " * (40 << 20)})
    assert "larger than 16 MiB" in reason(take("bob.zip"))


def test_many_notebooks_that_are_too_much_together_are_refused(pack, take, monkeypatch):
    monkeypatch.setattr(zips, "UNPACKED", 3 * len(STUB))
    pack("class.zip", {f"{name}/{EXERCISE}": STUB for name in "abcd"})
    assert "MiB together" in reason(take("class.zip"))


def test_a_zip_may_not_hold_too_many_files_or_be_too_large(pack, take, monkeypatch):
    """What a zip lists is known at once: its length is bounded before that, its students' later."""
    monkeypatch.setattr(places, "FILES", 30)
    deep = {f"ada/a/b/{number}.txt": "" for number in range(40)} | {"ada/a/b/c/x.ipynb": STUB}
    junk = {f"bob/.venv/lib/{number}.py": "" for number in range(40)}
    ends = {f"{name}/{EXERCISE}": STUB for name in ("bob", "zoe")}
    pack("class.zip", {**deep, **junk, **ends})
    taken = take("class.zip")
    assert students(taken) == {"bob", "zoe"}
    assert reason([one for one in taken if isinstance(one, NotGraded)]) == places.TOO_MANY
    with monkeypatch.context() as patch:
        patch.setattr(zips, "MEMBERS", 5000)
        assert "list of members is larger" in reason(take("class.zip"))
    monkeypatch.setattr(zips, "ARCHIVE", 10)
    assert "the zip is larger than" in reason(take("class.zip"))


def test_a_zip_that_lies_about_a_size_is_refused(pack, take):
    path = pack("ada.zip", {EXERCISE: STUB})
    raw = bytearray(path.read_bytes())
    central = raw.index(b"PK\x01\x02")
    struct.pack_into("<I", raw, central + 24, 10)  # the size after unpacking
    path.write_bytes(raw)
    assert "cannot be unpacked" in reason(take("ada.zip"))


def test_broken_encrypted_and_empty_zips_are_refused(pack, put, take):
    put("broken.zip", b"PK\x03\x04 nothing")
    assert "the zip cannot be read" in reason(take("broken.zip"))
    pack("empty.zip", {})
    assert "the zip is empty" in reason(take("empty.zip"))
    path = pack("locked.zip", {EXERCISE: STUB})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    assert "it is encrypted" in reason(take("locked.zip"))


def test_the_list_of_a_zip_is_read_once_and_not_for_each_notebook(pack, take, monkeypatch):
    """Else a zip of many small notebooks takes an hour."""
    path, opened = pack("ada.zip", {f"{n}.ipynb": "" for n in range(50)}), []

    class Counted(zipfile.ZipFile):
        def __init__(self, *args, **kwargs):
            opened.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(zips.zipfile, "ZipFile", Counted)
    assert len(take(path.name)) == 50
    assert len(opened) == 1 and opened[0].fp is None, "one, and it is closed"


def test_two_files_of_one_name_in_a_zip(take, tmp_path):
    buffer = io.BytesIO()
    with pytest.warns(UserWarning), zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(EXERCISE, small_course.handed_in("x = 1"))
        archive.writestr(EXERCISE, small_course.handed_in("x = 2"))
    (tmp_path / "ada.zip").write_bytes(buffer.getvalue())
    first, second = take("ada.zip")
    assert first.answers[0][1] == "x = 1" and "two files of this name" in reason([second])


def test_a_file_without_a_name_in_a_zip_stops_nothing(pack, take):
    """Python 3.11 looks at the last letter of every name."""
    path = pack("class.zip", {f"ada/{EXERCISE}": STUB, "?": "", f"bob/{EXERCISE}": STUB})
    raw = bytearray(path.read_bytes())
    central = raw.rindex(b"PK\x01\x02", 0, raw.rindex(b"PK\x01\x02"))  # the last but one
    struct.pack_into("<HH", raw, central + 28, 0, 1)  # the "?" is no name but an extra field
    path.write_bytes(raw)
    taken = take("class.zip")
    assert students(taken) == {"ada", "bob"}
    assert "no name in the zip" in reason([one for one in taken if isinstance(one, NotGraded)])
