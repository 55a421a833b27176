"""`ddpz export`: the student's copy of the course, without what gives the answers away.

It holds the chosen lessons, their exercises with blanks, the library, the judges of these
exercises, which a check needs, and deploy/. It holds no solutions, no tests (whose answers are
solutions too), and no judge of another lesson. Links to something left out become plain text.

With --ci it also holds two workflows: grade.yml, which grades a repository, and feedback.yml, which
calls it on each push of a student's repository. The grader takes the exercises from this copy, so
the workflow reads no repository that holds solutions.
"""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import nbformat

from ddpz_lite.course.authoring.copies import MY
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.cli.shared import UserError, folder

AS_THEY_ARE = (
    ".ci/environment.py",
    ".devcontainer/devcontainer.json",
    ".gitattributes",
    "AGENTS.md",
    "LICENSE",
    "environment.yml",
    "pyproject.toml",
    "requirements.lock",
)
WORDS = ("README.md", "GLOSSARY.md", "lesson.png")  # of lessons/
TEMPLATES = Path("course", "cli", "student")  # in ddpz_lite/
WORKFLOW, CALLER = ".github/workflows/grade.yml", ".github/workflows/feedback.yml"
TEACHERS = "## If you teach"  # from here on exercises/README.md is not for students
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def run(options: Namespace) -> int:
    """Write the copy into a folder that is new or empty, and say what is in it."""
    root = folder("solutions").parent
    lessons = _chosen(root, options.lessons)
    if options.ci and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.ci):
        raise UserError(f"--ci takes OWNER/COURSE, a repository on GitHub, not {options.ci!r}")
    out = Path(options.dir)
    if out.resolve() == root or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserError(f"{out} is not empty; name a new folder. Nothing was written.")
    try:
        exercises = _write(root, out, lessons)
        if options.ci:
            _workflows(root, out, options.ci)
    except OSError as error:
        raise UserError(f"{out}/ cannot be written ({error.strerror})") from None
    except notebooks.Malformed as error:
        raise UserError(str(error)) from None
    print(
        f"wrote {out}/: {len(lessons)} lessons, {len(exercises)} exercises, no solutions, no tests"
    )
    print(f"try it: cd {out} && make lab")
    if options.ci:
        print(f"push it to github.com/{options.ci}; {CALLER} says which settings it needs")
    return 0


def _chosen(root: Path, asked: Sequence[str] | None) -> list[Path]:
    """The notebooks of the lessons asked for, all of them by default."""
    every = sorted((root / "lessons").glob("*.ipynb"))
    numbers = sorted({path.name[:2] for path in every})
    if unknown := [number for number in asked or () if number not in numbers]:
        raise UserError(f"there is no lesson {', '.join(unknown)}; there are {', '.join(numbers)}")
    return [path for path in every if not asked or path.name[:2] in asked]


def _write(root: Path, out: Path, lessons: Sequence[Path]) -> list[str]:
    """Write everything, and return the names of the exercises."""
    numbers = {path.name[:2] for path in lessons}
    masters = [p for p in sorted((root / "solutions").glob("*.ipynb")) if p.name[:2] in numbers]
    deploy = sorted(path.relative_to(root) for path in (root / "deploy").glob("*"))  # lesson 16's
    for name in (*AS_THEY_ARE, *(f"lessons/{name}" for name in WORDS), *deploy):
        if (root / name).exists():
            _copy(root / name, out / name)
    _text(out / ".gitignore", _ignored((root / ".gitignore").read_text(encoding="utf-8")))
    for path in lessons:
        _copy(path, out / "lessons" / path.name)
    (out / "exercises").mkdir()
    for path in masters:
        _text(out / "exercises" / path.name, notebooks.make(path)[1])
    _text(out / "exercises" / "README.md", _for_learners(root / "exercises" / "README.md"))
    _library(root / "ddpz_lite", out / "ddpz_lite", numbers)
    exercises = [path.name for path in masters]
    table = [_row(path.name, exercises) for path in lessons]
    for name in ("Makefile", "README.md"):
        text = (root / "ddpz_lite" / TEMPLATES / name).read_text(encoding="utf-8")
        filled = text.replace("@TABLE@", "\n".join(table)).replace("@FIRST@", lessons[0].name)
        _text(out / name, filled)
    _unlink(out)
    return exercises


def _workflows(root: Path, out: Path, course: str) -> None:
    """What grades in a student's repository, and what calls it on each push."""
    _copy(root / WORKFLOW, out / WORKFLOW)
    text = (root / "ddpz_lite" / TEMPLATES / "feedback.yml").read_text(encoding="utf-8")
    _text(out / CALLER, text.replace("@COURSE@", course))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _row(lesson: str, exercises: Sequence[str]) -> str:
    words = lesson.removesuffix(".ipynb").replace("_", " ")
    number = lesson[:2]
    links = [f"[{name[:2]}](exercises/{name})" for name in exercises if name[:2] == number]
    return f"| [{words}](lessons/{lesson}) | {' '.join(links)} |"


def _ignored(text: str) -> str:
    """What git ignores in a student's repository: not their work, which they hand in with git."""
    parts = text.split("\n\n")
    return "\n\n".join(part for part in parts if f"\n{MY}/" not in part)


def _for_learners(path: Path) -> str:
    """What exercises/README.md says to learners, without where the solutions are."""
    text = path.read_text(encoding="utf-8").partition(TEACHERS)[0]
    items = re.split(r"(?m)^(?=- |$)", text)
    return "".join(item for item in items if "solutions/" not in item).rstrip() + "\n"


# ---- the library ----


def _library(source: Path, target: Path, numbers: set[str]) -> None:
    tasks = source / "course" / "tasks"
    wanted = {f"lesson{number}" for number in numbers}

    def left_out(folder: str, names: list[str]) -> set[str]:
        here = {"__pycache__"}
        if Path(folder) == source / TEMPLATES.parent:
            here.add(TEMPLATES.name)
        if Path(folder) == tasks:
            here |= {name for name in names if name.startswith("lesson")} - wanted
        return here & set(names)

    shutil.copytree(source, target, ignore=left_out)


# ---- links ----


def _unlink(out: Path) -> None:
    """Make plain text of each link to what was left out."""
    for path in out.rglob("*.md"):
        _text(path, unlinked(path.read_text(encoding="utf-8"), path.parent))
    for path in out.rglob("*.ipynb"):
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = unlinked(cell.source, path.parent)
        _text(path, notebooks.write_text(notebook))


def unlinked(text: str, folder: Path) -> str:
    """Markdown in which what links to no file, seen from `folder`, is its words alone."""

    def plain(link: re.Match) -> str:
        target = link[3].partition("#")[0]
        outside = not target or re.match(r"[a-z]+:", target)
        return link[0] if outside or (folder / target).exists() else link[2]

    return LINK.sub(plain, text)
