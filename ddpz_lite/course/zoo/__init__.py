"""The bug zoo: twenty bugs of distributed training that people had, each small enough to read.

`visit(3)` shows what somebody saw, the program, what the tools say of a run of it now, and a
question; `run(3)` runs it, `run(3, mended=True)` with its cure. A program lies in `bugs/`, what is
said about it in `guide.py`, and no code of others is in it: each was written here, after the
thread that its guide names.
"""

from __future__ import annotations

import difflib
import html
import linecache
import re
from functools import cache
from importlib import resources
from typing import Any

from ddpz_lite.course.show.page import emit, prose
from ddpz_lite.course.show.quizzes import ask, quiz
from ddpz_lite.course.zoo.guide import GUIDE, TOOLS, Bug, returned
from ddpz_lite.launcher import RankFailed, Run, launch

__all__ = ["GUIDE", "Bug", "beside", "run", "seen", "source", "visit"]


def source(number: int, *, mended: bool = False) -> str:
    """The program of a bug. Raises ValueError for a number that the zoo has not."""
    bug = _bug(number)
    text = (resources.files(__package__) / "bugs" / f"bug_{number:02}.py").read_text()
    if mended:
        for old, new in bug.mend:
            text = _replaced(text, old, new, number)
    return text


def run(number: int, world_size: int | None = None, *, mended: bool = False) -> Run:
    """Run a bug's program on its ranks, or on another number of them.

    Returns what `dz.launch` returns. Raises what it raises: RankFailed where a rank raised or
    all wait for one, ValueError for a number that the zoo has not.
    """
    program = f"bug_{number:02}.py", source(number, mended=mended)
    return launch(on_rank, world_size or _bug(number).world, args=program)


@cache
def beside(number: int) -> tuple[Run, Run]:
    """A bug's program on its ranks, and as one process; run once. Raises as `run` does."""
    return run(number), run(number, 1)


@cache
def seen(number: int) -> list[tuple[str, str]]:
    """What the tools say of a bug, by name: of a program that stops, the launcher's report."""
    bug = _bug(number)
    try:
        found, alone = beside(number)
    except RankFailed as error:
        return [("the launcher's report", re.sub(r" object at 0x[0-9a-f]+", "", str(error)))]
    looks = [(name, TOOLS.get(name) or returned(name)) for name in bug.looks]
    return [(name, look(found, alone, bug.same)) for name, look in looks]


def visit(number: int) -> None:
    """Show a bug: what was seen, the program, what the tools say (folded), and a question.

    Under the question, folded, are the cure and the thread.
    """
    bug = _bug(number)
    tools = seen(number)
    said = "".join(_folded(name, _listing(words)) for name, words in tools)
    emit(
        f"<h4>Bug {number}. {prose(bug.title)}</h4><p>{prose(bug.symptom)}</p>"
        f"{_listing(_numbered(source(number)))}{said}",
        "\n\n".join(
            [
                f"Bug {number}. {bug.title}\n{bug.symptom}",
                _numbered(source(number)),
                *(f"{name}:\n{words}" for name, words in tools),
            ]
        ),
    )
    quiz([ask("What is wrong?", *bug.answers)])
    cure = _changes(number)
    emit(
        _folded(
            "The cure, and where it was met",
            f"{_listing(cure)}<p>{prose(bug.lesson)} Found by: {prose(bug.found_by)}.</p>"
            f'<p><a href="{bug.url}">{bug.thread}</a>: {prose(bug.met)}</p>',
        ),
        f"The cure:\n{cure}\n{bug.lesson} Found by: {bug.found_by}.\n{bug.thread}: {bug.met}",
    )


def on_rank(name: str, text: str) -> Any:
    """Run a program on this rank, under a file name that counts as a learner's."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = {"__name__": name.removesuffix(".py")}
    exec(compile(text, name, "exec"), module)
    return module["train"]()


def _bug(number: int) -> Bug:
    if number not in GUIDE:
        raise ValueError(f"the zoo has bugs 1 to {len(GUIDE)}, and {number!r} was asked for.")
    return GUIDE[number]


def _replaced(text: str, old: str, new: str, number: int) -> str:
    if text.count(old) != 1:
        raise ValueError(f"bug {number}: its cure replaces {old!r}, found {text.count(old)} times.")
    return text.replace(old, new)


def _numbered(text: str) -> str:
    return "\n".join(f"{i:2}  {line}".rstrip() for i, line in enumerate(text.splitlines(), 1))


def _changes(number: int) -> str:
    """The lines that the cure takes out and puts in."""
    old, new = source(number).splitlines(), source(number, mended=True).splitlines()
    diff = difflib.unified_diff(old, new, lineterm="", n=0)
    return "\n".join(line for line in diff if not line.startswith(("---", "+++", "@@")))


def _listing(text: str) -> str:
    style = "font-family:monospace;font-size:0.9em;line-height:1.35;white-space:pre-wrap"
    return f'<pre style="{style}">{html.escape(text)}</pre>'


def _folded(title: str, page: str) -> str:
    return f"<details><summary>{prose(title)}</summary>{page}</details>"
