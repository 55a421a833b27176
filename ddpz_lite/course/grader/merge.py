"""A student's answers in the pristine exercise: exactly the code that will run.

Only the sources of answer cells are taken, by id. All other cells are the course's.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import nbformat

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.grader.answers import defined
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.submission import Submission

# What IPython understands and Python does not: magics, shell lines, help. Matched after the indent:
# two neighbouring repeats that both take blanks would try every split of them.
MAGIC = re.compile(r"(?:%{1,2}[A-Za-z]|!{1,2}|\?|[\w.]+\?{1,2}\s*$|[\w., ]+=\s*[%!]\s*\w)")

MISSING = re.compile(r"NameError: name '(\w+)' is not defined")


@dataclass(frozen=True)
class Attempt:
    """What a student did about one task: cells to run, or why there is nothing to run."""

    task: str
    cells: tuple[tuple[str, str], ...] = ()  # (id, source), the task's own cell last
    status: str = ""  # where nothing runs: "not attempted", "refused", or "wrong" for no Python
    sentence: str = ""


def merge(exercise: Pristine, submission: Submission) -> list[Attempt]:
    """An attempt per task."""
    given = dict(submission.answers)
    attempts, before = [], []
    for name, stub, task in exercise.cells:
        if task is None:
            before.append((name, stub))
            continue
        attempt = _attempt(exercise, name, given.get(name), tuple(before))
        attempts.append(attempt)
        before.append(attempt.cells[-1] if attempt.cells else (name, stub))
    return attempts


def left_out(exercise: Pristine, submission: Submission, attempts: list[Attempt]) -> dict[str, str]:
    """Name -> why it is not there, for the names that cells define which were not taken."""
    own = "a cell that was not taken, for only answer cells are. Define it in the answer"
    why = dict.fromkeys(submission.elsewhere, own)
    given = {exercise.answers[name]: source for name, source in submission.answers}
    for attempt in attempts:
        if attempt.status in ("refused", "wrong"):
            where = f"the answer to {attempt.task}, which could not be taken"
            why |= dict.fromkeys(defined(given[attempt.task]), where)
    return why


def explained(sentence: str, why: dict[str, str]) -> str:
    """A sentence about a NameError, with where the name was lost if it was lost here."""
    found = MISSING.search(sentence)
    if found is None or found[1] not in why:
        return sentence
    return f"{sentence.rstrip('.')}. The name {found[1]} is defined in {why[found[1]]}."


def merged(exercise: Pristine, submission: Submission) -> nbformat.NotebookNode:
    """The pristine notebook with the submission's answers, for nbval.

    An answer that `read` refuses is left out: no magic and no shell line comes in.
    """
    notebook = nbformat.reads(exercise.notebook, as_version=4)
    given = {name: text for name, text in submission.answers if read(text)[0] != "refused"}
    for cell in notebook.cells:
        if notebooks.role(cell) == "answer":
            cell.source = given.get(cell.id, cell.source)
    return notebook


def _attempt(
    exercise: Pristine, name: str, source: str | None, before: tuple[tuple[str, str], ...]
) -> Attempt:
    task = exercise.answers[name]
    if source is None:
        return Attempt(task, (), "not attempted", "Its answer cell is not in the notebook.")
    if not exercise.attempted(name, source):
        return Attempt(task, (), "not attempted", "The answer cell still holds its stub.")
    status, sentence = read(source)
    return Attempt(task, () if status else (*before, (name, source)), status, sentence)


def read(source: str) -> tuple[str, str]:
    """("", "") for an answer that may run; else its status and a sentence.

    What parses as Python holds no magic, whatever its lines look like.
    """
    try:
        source.encode()
        ast.parse(source)
    except UnicodeEncodeError:
        return "refused", "The answer holds characters that are not text."
    except (RecursionError, MemoryError):
        return "refused", "The answer is nested too deeply to be read."
    except (SyntaxError, ValueError) as error:
        return _not_python(source, error)
    return "", ""


def is_magic(line: str) -> bool:
    return MAGIC.match(line.lstrip()) is not None


def _not_python(source: str, error: SyntaxError | ValueError) -> tuple[str, str]:
    for number, line in enumerate(source.splitlines(), 1):
        if is_magic(line):
            return "refused", (
                f"Line {number} is a magic or a shell line, which only a notebook understands; "
                "an answer is plain Python."
            )
    line = getattr(error, "lineno", None)  # a NUL is in no line
    where = "" if line is None else f", in line {line}"
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return "wrong", f"Python cannot read the answer{where}: {message}."
