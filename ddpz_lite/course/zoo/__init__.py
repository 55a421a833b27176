"""The bug zoo: twenty bugs of distributed training that users reported, each small enough to read.

`visit(3)` shows the symptom, the program, what the tools report of a run, and a question. `run(3)`
runs the program, `run(3, fixed=True)` the fixed one. `bugs/` has each program and, in a TOML file
of the same name, what is known about it. The programs were written for this course, after the
threads that the files name.
"""

from __future__ import annotations

import difflib
import html
import linecache
import re
from functools import cache
from typing import Any

from ddpz_lite.course.show.page import emit, prose
from ddpz_lite.course.show.quizzes import ask, quiz
from ddpz_lite.course.zoo.guide import BUGS, GUIDE, TOOLS, Bug, returned
from ddpz_lite.launcher import RankFailed, Run, launch

__all__ = ["GUIDE", "Bug", "run", "runs", "seen", "source", "visit"]


def source(number: int, *, fixed: bool = False) -> str:
    """The program of a bug. Raises ValueError for an unknown number."""
    bug = _bug(number)
    text = (BUGS / f"bug_{number:02}.py").read_text(encoding="utf-8")
    if fixed:
        for old, new in bug.fix:
            text = _replaced(text, old, new, number)
    return text


def run(number: int, world_size: int | None = None, *, fixed: bool = False) -> Run:
    """Run a bug's program on its ranks, or on another number of them.

    Returns what `dz.launch` returns. Raises what it raises: RankFailed where a rank raised or
    all wait for one, ValueError for an unknown number.
    """
    program = f"bug_{number:02}.py", source(number, fixed=fixed)
    return launch(on_rank, world_size or _bug(number).world, args=program)


@cache
def runs(number: int) -> tuple[Run, Run]:
    """A bug's program on its ranks, and as one process; run once. Raises as `run` does."""
    return run(number), run(number, 1)


@cache
def seen(number: int) -> list[tuple[str, str]]:
    """What the tools report of a bug, by name; for a program that stops, the launcher's report."""
    bug = _bug(number)
    try:
        found, alone = runs(number)
    except RankFailed as error:
        return [("the launcher's report", re.sub(r" object at 0x[0-9a-f]+", "", str(error)))]
    looks = [(name, TOOLS.get(name) or returned(name)) for name in bug.looks]
    return [(name, look(found, alone, bug.same)) for name, look in looks]


def visit(number: int) -> None:
    """Show a bug: what was seen, the program, what the tools say (folded), and a question.

    The learner types a line before the choices appear. The fix and the thread are folded below.
    """
    bug = _bug(number)
    tools = seen(number)
    folded = "".join(_folded(name, _listing(words)) for name, words in tools)
    emit(
        f"<h4>Bug {number}. {prose(bug.title)}</h4><p>{prose(bug.symptom)}</p>"
        f"{_listing(_numbered(source(number)))}{folded}",
        "\n\n".join(
            [
                f"Bug {number}. {bug.title}\n{bug.symptom}",
                _numbered(source(number)),
                *(f"{name}:\n{words}" for name, words in tools),
            ]
        ),
    )
    quiz(
        [ask("What is wrong?", *bug.answers)],
        first="In which line is the mistake? Type its number; then the choices appear.",
    )
    fix = _changes(number)
    emit(
        _folded(
            "The fix, and where it was met",
            f"{_listing(fix)}<p>{prose(bug.lesson)} Found by: {prose(bug.found_by)}.</p>"
            f'<p><a href="{bug.url}">{bug.thread}</a>: {prose(bug.met)}</p>',
        ),
        f"The fix:\n{fix}\n{bug.lesson} Found by: {bug.found_by}.\n{bug.thread}: {bug.met}",
    )


def on_rank(name: str, text: str) -> Any:
    """Run a program on this rank, under a file name that counts as user code."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = {"__name__": name.removesuffix(".py")}
    exec(compile(text, name, "exec"), module)
    return module["train"]()


def _bug(number: int) -> Bug:
    if number not in GUIDE:
        raise ValueError(f"the zoo has no bug {number!r}. Fix: choose 1 to {len(GUIDE)}.")
    return GUIDE[number]


def _replaced(text: str, old: str, new: str, number: int) -> str:
    if text.count(old) != 1:
        raise ValueError(f"bug {number}: its fix replaces {old!r}, found {text.count(old)} times.")
    return text.replace(old, new)


def _numbered(text: str) -> str:
    return "\n".join(f"{i:2}  {line}".rstrip() for i, line in enumerate(text.splitlines(), 1))


def _changes(number: int) -> str:
    """The lines that the fix removes and adds."""
    old, new = source(number).splitlines(), source(number, fixed=True).splitlines()
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    return "\n".join(line for line in diff if not line.startswith(("---", "+++", "@@")))


def _listing(text: str) -> str:
    style = "font-family:monospace;font-size:0.9em;line-height:1.35;white-space:pre-wrap"
    return f'<pre style="{style}">{html.escape(text)}</pre>'


def _folded(title: str, page: str) -> str:
    return f"<details><summary>{prose(title)}</summary>{page}</details>"
