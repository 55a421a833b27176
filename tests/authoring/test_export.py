"""`ddpz export`: the student's copy works, and gives no answer away."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import tasks
from ddpz_lite.course.cli import export, grade, main, shared

pytestmark = pytest.mark.rest

CHOSEN = ("00", "08", "10")  # tasks of 10 may use a job of lesson 05
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "ours"
    assert main(["export", str(out), "--lessons", *CHOSEN]) == 0
    return out


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def words(path: Path) -> str:
    """The text of a file, of a notebook its sources and outputs; blanks and indents as one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) + json.dumps(c.get("outputs", "")) for c in cells)
    return " ".join(text.split())


def answers(root: Path) -> list[str]:
    """The bodies between the marks of a solution, in all masters; two words are no secret."""
    found = []
    for path in (root / "solutions").glob("*.ipynb"):
        for cell in notebooks.read(path).cells:
            if notebooks.role(cell) == "answer":
                found += cell.source.split(notebooks.BEGIN)[1:]
    bodies = [" ".join(body.partition(notebooks.END)[0].split()) for body in found]
    return [body for body in bodies if body.count(" ") > 2]


def test_no_solution_is_in_it(copy, root):
    texts = {
        path: words(path)
        for path in copy.rglob("*")
        if path.suffix in (".py", ".md", ".ipynb", ".json", ".yml", ".toml", "") and path.is_file()
    }
    marked = {path.name for path, text in texts.items() if notebooks.BEGIN in text}
    assert marked == {"notebooks.py"}, "where the mark is defined"
    bodies = answers(root)
    assert len(bodies) >= 20
    leaks = [
        (path.name, body[:60]) for path, text in texts.items() for body in bodies if body in text
    ]
    assert leaks == []
    wrong = [path for path in texts if "Variant(" in texts[path] or "trying" in path.name]
    assert wrong == [], "tests/answers"


def test_it_has_what_was_chosen_and_what_that_needs(copy):
    there = files(copy)
    folders = {name.partition("/")[0] for name in there}
    assert folders.isdisjoint({"solutions", "tests", "book", ".github"})
    lessons = {name for name in there if re.match(r"lessons/\d", name)}
    exercises = {name for name in there if re.match(r"exercises/\d", name)}
    assert {name[8:10] for name in lessons} == set(CHOSEN)
    assert {name[10:12] for name in exercises} == {"08", "10"}
    tasks = {
        name.split("/")[3] for name in there if name.startswith("ddpz_lite/course/tasks/lesson")
    }
    assert {"lesson08", "lesson10"} <= tasks <= {"lesson08", "lesson10", "lesson05"}
    needed = {"README.md", "Makefile", "requirements.lock", "pyproject.toml", ".ci/environment.py"}
    assert needed | {"environment.yml", ".gitignore", "LICENSE", "exercises/README.md"} <= there
    deploy = {"README.md", "node.sh", "train.sbatch", "train-job.yaml"}
    assert {f"deploy/{name}" for name in deploy} <= there
    assert os.access(copy / "deploy/node.sh", os.X_OK)
    assert not [name for name in there if "__pycache__" in name or "cli/student" in name]
    ignored = (copy / ".gitignore").read_text().splitlines()
    assert "my/" not in ignored and ".venv" in ignored, "students hand in by git"


def test_its_links_lead_somewhere_and_keep_their_words(copy):
    seen = 0
    for path in [*copy.rglob("*.md"), *copy.rglob("*.ipynb")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:|#", target):
                seen += 1
                assert (path.parent / target.partition("#")[0]).exists(), (path.name, target)
    assert seen > 20
    assert "09 ZeRO-1" in (copy / "lessons/README.md").read_text(encoding="utf-8")


def test_a_link_to_nothing_is_its_words(tmp_path):
    (tmp_path / "here.md").write_text("")
    text = "[a](here.md#x) [`b[0]`](gone.md) ![c](gone.png) [d](https://e.f) [g](#h) [i](gone/j.py)"
    kept = "[a](here.md#x) `b[0]` c [d](https://e.f) [g](#h) i"
    assert export.unlinked(text, tmp_path) == kept


def test_its_readme_speaks_to_students(copy):
    for name in ("README.md", "exercises/README.md"):
        text = (copy / name).read_text(encoding="utf-8")
        assert "solutions/" not in text and "teach" not in text and "@" not in text
    readme = (copy / "README.md").read_text(encoding="utf-8")
    assert "| [08 the memory wall](lessons/08_the_memory_wall.ipynb) | [08](exercises/08" in readme
    assert "check.hint(" in (copy / "exercises/README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_its_makefile_works(copy):
    def make(*words):
        done = subprocess.run(
            ["make", *words], cwd=copy, capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stdout

    code, text = make("help")
    assert code == 0 and {"make setup", "make lab", "make check"} <= set(
        re.findall(r"make \w+", text)
    )
    for target in ("lab", "lessons", "progress"):
        code, text = make("-n", target)
        assert code == 0 and re.search(r"\.ci/environment\.py +--for lab$", text, re.M), target
    lab = make("-n", "lab")[1]
    assert "/lab/tree/my/lessons/00_start_here.ipynb" in lab and "ddpz copies" in lab
    assert "ddpz check 08" in make("-n", "check", "EXERCISE=08")[1]


def test_a_check_finds_an_exercise_there(copy, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PYTHONPATH", str(copy))  # the kernel's library is the copy's
    monkeypatch.setenv("DDPZ_HOME", str(tmp_path))
    assert main(["check", "08"]) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"^08\.smallest_world   0 of \d points\n  08.* is not solved yet", printed, re.M
    )
    known = tasks("08")
    points = sum(task.points for task in known)
    assert f"\n0 of {points} points; 0 of {len(known)} tasks solved\n" in printed


def test_with_ci_it_has_the_workflows_and_grades_without_solutions(
    tmp_path, monkeypatch, capsys, root
):
    out = tmp_path / "ours"
    assert main(["export", str(out), "--lessons", "08", "--ci", "uni/our-course"]) == 0
    workflows = out / ".github/workflows"
    text = (root / ".github/workflows/grade.yml").read_bytes()
    assert (workflows / "grade.yml").read_bytes() == text
    text = (workflows / "feedback.yml").read_text()
    caller = yaml.safe_load(text.replace("\non:", '\n"on":'))
    (job,) = caller["jobs"].values()
    assert job["uses"] == "uni/our-course/.github/workflows/grade.yml@main"
    assert job["with"] == {"course": "uni/our-course", "fail-under": "100%"}
    assert job["if"] == "github.repository != 'uni/our-course'", "not in the template itself"
    assert caller["permissions"] == {"contents": "read"} and "@" not in text.replace("@main", "")
    assert "COURSE_TOKEN" in text and "holds\n# solutions" in text
    # The grader of the copy works with the exercises as handed out.
    monkeypatch.chdir(out)
    monkeypatch.setattr(shared, "CHECKOUT", out)
    (copied,) = grade._exercises().values()
    monkeypatch.chdir(root)
    master = grade._exercises()["08"]
    assert copied == replace(master, solutions={}, notebook=copied.notebook)
    assert repr(copied) == repr(master), "the checker's version is the same"
    assert main(["export", str(tmp_path / "x"), "--ci", "our-course"]) == 2
    assert "--ci takes OWNER/COURSE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["full"], "full is not empty; name a new folder. Nothing was written."),
        (["full/file"], "file is not empty"),
        (["new", "--lessons", "00", "77"], "there is no lesson 77; there are 00, 01, 02"),
        (["full/file/new"], "cannot be written (Not a directory)"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path, monkeypatch, capsys, words, complaint):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words]) == 2
    printed = capsys.readouterr().err
    assert complaint in printed and printed.count("\n") == 1
    assert files(tmp_path) == {"full/file"}
