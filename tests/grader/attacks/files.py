"""Files next to a notebook that attack the grader, and what must come of each.

Each writes what one student hands in below a class's folder. The course is `small_course`: one
task of 5 points. What the intake takes and refuses is tested in test_grade_intake.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import small_course

NAME = f"{small_course.NAME}.ipynb"
WRONG = "def weighted_mean(gradients, samples):\n    dist.all_reduce(gradients[0])"
SHADOW = "import os, pathlib\npathlib.Path('/tmp/ddpz-pwned').touch()\nos._exit(0)\n"


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
