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
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ddpz_lite.launcher import RankFailed, Run, launch
from ddpz_lite.show.page import emit, prose
from ddpz_lite.show.quizzes import Quiz, ask, quiz
from ddpz_lite.wire import CollectiveMismatch
from ddpz_lite.zoo.guide import GUIDE, Bug

__all__ = ["GUIDE", "Bug", "run", "source", "table", "visit"]


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
    text = source(number, mended=mended)
    name = f"bug_{number:02}.py"
    return launch(
        _on_rank, world_size or _bug(number).world, args=(name, text), timeout=_bug(number).timeout
    )


def seen(number: int) -> list[tuple[str, str]]:
    """Run a bug, and one process of it where that helps: what each tool says."""
    bug = _bug(number)
    try:
        found = run(number)
    except (RankFailed, CollectiveMismatch) as error:
        return [("the launcher's report", re.sub(r" object at 0x[0-9a-f]+", "", str(error)))]
    alone = run(number, 1) if bug.compare else None
    return [(name, look(found, alone)) for name, look in bug.looks]


def visit(number: int) -> Quiz:
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
    shown = quiz([ask("What is wrong?", *bug.answers)])
    cure = _changes(number)
    emit(
        _folded(
            "The cure, and where it was met",
            f"{_listing(cure)}<p>{prose(bug.lesson)} "
            f'Found by: {prose(bug.found_by)}. Thread: <a href="{bug.url}">{bug.thread}</a>.</p>',
        ),
        f"The cure:\n{cure}\n{bug.lesson}\nFound by: {bug.found_by}. Thread: {bug.thread}.",
    )
    return shown


def table() -> list[Sequence[Any]]:
    """Number, title, thread and what finds it, of all bugs; the first row is the header."""
    rows: list[Sequence[Any]] = [("bug", "what was seen", "thread", "found by")]
    return rows + [(n, bug.title, bug.thread, bug.found_by) for n, bug in GUIDE.items()]


def _on_rank(name: str, text: str) -> Any:
    """Run a program on this rank under a name of its own, so that it counts as a learner's."""
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
