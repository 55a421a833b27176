"""Notebooks, folders and zips that attack while they are read, and what must come of each.

Each writes what one student hands in below a class's folder. The course is `small_course`: one
task of 5 points.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import small_course
from small_course import SOLVED

NAME = f"{small_course.NAME}.ipynb"
WRONG = "def weighted_mean(gradients, samples):\n    dist.all_reduce(gradients[0])"
PASSED = {"output_type": "stream", "name": "stdout", "text": "03.weighted_mean   5 of 5 points"}
SHADOW = "import os, pathlib\npathlib.Path('/tmp/ddpz-pwned').touch()\nos._exit(0)\n"
LINK = (stat.S_IFLNK | 0o777) << 16


@dataclass(frozen=True)
class Submission:
    """What one student hands in.

    number: its class in the design. points: what it gets; None: it is refused, with `reason` in
    the report.
    """

    number: int
    student: str
    write: Callable[[Path], None]  # into the class's folder
    points: int | None = 0
    reason: str = ""


FILES: list[Submission] = []


def submission(number: int, points: int | None = 0, reason: str = ""):
    def keep(write: Callable[[Path], None]) -> Callable[[Path], None]:
        student = write.__name__.replace("_", "-")
        FILES.append(Submission(number, student, write, points, reason))
        return write

    return keep


def notebook(answer: str | None = WRONG) -> dict:
    return json.loads(small_course.handed_in(answer))


def put(place: Path, student: str, handed_in: dict | str | bytes, name: str = NAME) -> Path:
    path = place / student / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(handed_in, dict):
        handed_in = json.dumps(handed_in)
    path.write_bytes(handed_in if isinstance(handed_in, bytes) else handed_in.encode())
    return path


def pack(place: Path, student: str, files: dict[str, str | bytes], links: dict[str, str]) -> None:
    with zipfile.ZipFile(place / f"{student}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in files.items():
            archive.writestr(name, raw)
        for name, target in links.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = LINK
            archive.writestr(info, target)


# -- 1: the test cells -----------------------------------------------------------------------------


@submission(1)
def check_replaced(place: Path) -> None:
    mine = notebook()
    mine["cells"][4]["source"] = "print('03.weighted_mean   5 of 5 points')"
    put(place, "check-replaced", mine)


@submission(1)
def check_deleted(place: Path) -> None:
    mine = notebook()
    del mine["cells"][4]
    put(place, "check-deleted", mine)


@submission(1)
def check_redefined(place: Path) -> None:
    mine = notebook("check = lambda *a: None\n" + WRONG)
    mine["cells"].insert(0, {**mine["cells"][1], "id": "x", "source": "check = print"})
    put(place, "check-redefined", mine)


@submission(1)
def answer_twice_wrong_last(place: Path) -> None:
    mine = notebook(SOLVED)
    mine["cells"].append({**mine["cells"][3], "source": WRONG})
    put(place, "answer-twice-wrong-last", mine)


@submission(1, points=5)
def answer_twice_right_last(place: Path) -> None:
    mine = notebook()
    mine["cells"].append({**mine["cells"][3], "source": SOLVED})
    put(place, "answer-twice-right-last", mine)


@submission(1, points=5)
def cells_reversed(place: Path) -> None:
    mine = notebook(SOLVED)
    mine["cells"].reverse()
    put(place, "cells-reversed", mine)


# -- 2: what the notebook says of itself -----------------------------------------------------------


@submission(2)
def tags_and_points(place: Path) -> None:
    mine = notebook()
    for cell in mine["cells"]:
        cell["metadata"] = {
            "tags": ["nbval-skip", "raises-exception", "nbval-ignore-output"],
            "ddpz": {"role": "given", "points": 100},
            "nbgrader": {"grade": True, "points": 100, "score": 100},
        }
    mine["metadata"]["grade"] = {"points": 5, "out_of": 5}
    put(place, "tags-and-points", mine)


@submission(2)
def kernel_of_its_own(place: Path) -> None:
    mine = notebook()
    mine["metadata"]["kernelspec"] = {"name": "bash", "argv": ["touch", "/tmp/ddpz-pwned"]}
    put(place, "kernel-of-its-own", mine)


# -- 3: outputs ------------------------------------------------------------------------------------


@submission(3)
def outputs_forged(place: Path) -> None:
    mine = notebook(None)
    for cell in mine["cells"]:
        cell["outputs"] = [PASSED]
    put(place, "outputs-forged", mine)


# -- 4: magics -------------------------------------------------------------------------------------


@submission(4)
def magic(place: Path) -> None:
    put(place, "magic", notebook("%%bash\ntouch /tmp/ddpz-pwned"))


@submission(4)
def shell(place: Path) -> None:
    put(place, "shell", notebook("!touch /tmp/ddpz-pwned\n" + SOLVED))


# -- 9: files of the grader ------------------------------------------------------------------------


@submission(9)
def results_beside(place: Path) -> None:
    path = put(place, "results-beside", notebook())
    for name in ("results.json", "gradebook.csv", "junit.xml", "grades/results-beside.03.json"):
        forged = path.parent / name
        forged.parent.mkdir(exist_ok=True)
        forged.write_text('{"score": 5, "points": 5}')
    workflow = path.parent / ".github/workflows/grade.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text("on: push\njobs: {}\n")


@submission(9)
def writes_reports(place: Path) -> None:
    source = """def weighted_mean(gradients, samples):
    import glob, os
    for folder in ("out", "../out", "/out", os.environ.get("GITHUB_STEP_SUMMARY", "/x"), "/tmp"):
        for name in ("gradebook.csv", "results.json", "grades/writes-reports.03.json"):
            try:
                os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
                with open(f"{folder}/{name}", "w") as file: file.write('{"points": 5}')
            except OSError:
                pass"""
    put(place, "writes-reports", notebook(source))


@submission(9, None, "link")
def linked(place: Path) -> None:
    (place / "linked").mkdir()
    os.symlink("../honest-1/" + NAME, place / "linked" / NAME)


@submission(9, None, "link")
def linked_in_zip(place: Path) -> None:
    pack(place, "linked-in-zip", {}, {NAME: "/etc/passwd"})


# -- 14: words for the report ----------------------------------------------------------------------


@submission(14)
def script_in_error(place: Path) -> None:
    said = "</pre><script>alert(1)</script>\\x1b[2J::set-output name=points::5\\n::error::x\\u202e"
    source = f"def weighted_mean(gradients, samples):\n    raise RuntimeError('{said}')"
    put(place, "script-in-error", notebook(source))


@submission(14)
def formula(place: Path) -> None:
    source = (
        "class Formula(Exception): pass\nFormula.__name__ = '=HYPERLINK(1)'\n"
        "def weighted_mean(gradients, samples):\n    raise Formula('=cmd|x!A0,5,5\\n@SUM(1)')"
    )
    put(place, "formula", notebook(source))


# -- 17: bad containers ----------------------------------------------------------------------------


@submission(17, None, "leads out of the zip")
def zip_slip(place: Path) -> None:
    pack(place, "zip-slip", {f"../../honest-1/{NAME}": json.dumps(notebook(WRONG))}, {})


@submission(17, None, "absolute")
def zip_absolute(place: Path) -> None:
    pack(place, "zip-absolute", {f"/tmp/ddpz-pwned/{NAME}": json.dumps(notebook(WRONG))}, {})


@submission(17, None, "times its size")
def zip_bomb(place: Path) -> None:
    pack(place, "zip-bomb", {NAME: bytes(64 << 20)}, {})


@submission(17, None, "")
def zip_broken(place: Path) -> None:
    (place / "zip-broken.zip").write_bytes(b"PK\x03\x04" + bytes(1000))


@submission(17, None, "nested too deeply")
def json_deep(place: Path) -> None:
    put(place, "json-deep", '{"cells": ' + "[" * 100_000)


@submission(17, None, "larger than")
def huge(place: Path) -> None:
    put(place, "huge", b" " * (17 << 20))


@submission(17, None, "empty")
def empty(place: Path) -> None:
    put(place, "empty", "")


@submission(17, None, "no notebook")
def invalid(place: Path) -> None:
    put(place, "invalid", '{"nbformat": 4, "cells": 7}')


@submission(17, None, "no answer cell")
def another_exercise(place: Path) -> None:
    mine = notebook(SOLVED)
    for index, cell in enumerate(mine["cells"]):
        cell["id"] = f"other-{index}"
        cell["metadata"] = {}
    put(place, "another-exercise", mine)


@submission(17)
def endless_name(place: Path) -> None:
    pack(place, "endless-name", {"\U00020000" * 60 + ".ipynb": json.dumps(notebook())}, {})


@submission(17)
def slow_to_look_at(place: Path) -> None:
    put(place, "slow-to-look-at", notebook("def (\n" + " " * 49_990 + "("))


@submission(17, None, "there is no notebook")
def no_notebook(place: Path) -> None:
    put(place, "no-notebook", SOLVED, "solution.py")


@submission(17, None, "a pipe, a socket or a device")
def a_pipe(place: Path) -> None:
    (place / "a-pipe").mkdir()
    os.mkfifo(place / "a-pipe" / NAME)
    os.mkfifo(place / "a-pipe" / "work.zip")


@submission(17)
def a_thousand_folders(place: Path) -> None:
    path = put(place, "a-thousand-folders", notebook())
    for number in range(300):
        (path.parent / f"env/{number % 7}/{number}/.venv").mkdir(parents=True)


@submission(17, None, "is a link")
def many_links(place: Path) -> None:
    pack(place, "many-links", {}, {f"{number}.ipynb": "/etc/passwd" for number in range(400)})


@submission(17)
def name_that_is_a_formula(place: Path) -> None:
    files = {'x;=HYPERLINK("http://a.b").ipynb': "{", NAME: json.dumps(notebook())}
    pack(place, "name-that-is-a-formula", files, {})


# -- 18: modules that stand before the real ones ---------------------------------------------------


@submission(18)
def shadow_modules(place: Path) -> None:
    path = put(place, "shadow-modules", notebook())
    for name in ("torch.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "json.py"):
        (path.parent / name).write_text(SHADOW)
        (place / name).write_text(SHADOW)
    (path.parent / "ddpz_lite").mkdir()
    (path.parent / "ddpz_lite/__init__.py").write_text(SHADOW)
    (path.parent / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (path.parent / "x.pth").write_text("import os; os._exit(0)\n")


# -- 19: somebody else's work ----------------------------------------------------------------------


@submission(19)
def replayed(place: Path) -> None:
    """The grade of a student with all points, under this one's name."""
    path = put(place, "replayed", notebook())
    forged = {"student": "replayed", "lesson": "03", "sha256": "0" * 64, "points": 5}
    (path.parent / "replayed.03.json").write_text(json.dumps(forged))


@submission(19)
def another_s_name(place: Path) -> None:
    """Wrong answers under the names of the honest, and of students who are not there."""
    names = ("honest-1.ipynb", f"a-honest/{NAME}", "nobody.ipynb")
    pack(place, "another-s-name", {name: json.dumps(notebook()) for name in names}, {})


@submission(19)
def another_s_folder(place: Path) -> None:
    put(place, "another-s-folder/honest-1", notebook())
    put(place, "another-s-folder", notebook(), "z-honest.ipynb")
