"""nbval on a merged notebook: a report for the student to read, worth no points.

The run is one process tree under the student's control, so its report is not trusted. It is read as
data, with limits, and shown as text. Grades are made earlier, without it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.grader.batch import Terms, write
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.merge import merged
from ddpz_lite.course.grader.sandbox.frames import without_paths
from ddpz_lite.course.grader.sandbox.handle import NoRanks
from ddpz_lite.course.grader.sandbox.notebook import NoReport
from ddpz_lite.course.grader.sandbox.notebook import run as run_notebook
from ddpz_lite.course.grader.sandbox.pool import SandboxPool
from ddpz_lite.course.grader.submission import Submission

NEEDED = ("pytest", "nbval", "ipykernel", "jupyter_client")  # packages, to run it
LINES, WIDTH = 8, 200  # what is kept of a failure
COLOUR = re.compile(r"(?:#x1B|\x1b)\[[0-9;]*m")
LEAD = "Notebook cell execution failed"  # nbval's; other texts are tracebacks of pytest itself
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "not run"}


@dataclass(frozen=True)
class Cell:
    """What nbval said about one check cell."""

    task: str
    outcome: str  # "passed", "failed", "not run", or "" where the report does not name it
    says: str = ""  # the first lines of a failure


@dataclass(frozen=True)
class NbvalReport:
    """What nbval said about one submission; `trouble`: why there is no report."""

    sha256: str
    version: str
    cells: tuple[Cell, ...] = ()
    trouble: str = ""


Reports = dict[tuple[str, str], NbvalReport]  # (student, lesson) -> what nbval said


def summed(reports: Reports) -> str:
    """A class in a line."""
    outcomes = [cell.outcome for found in reports.values() for cell in found.cells]
    without = sum(bool(found.trouble) for found in reports.values())
    return (
        f"nbval, worth no points: {outcomes.count('passed')} of {len(outcomes)} check cells passed;"
        f" notebooks without a report: {without}"
    )


def missing() -> list[str]:
    """The packages without which nbval cannot run."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


# ---- many ----


def run_all(
    submissions: Sequence[Submission],
    exercises: dict[str, Pristine],
    terms: Terms,
    out: Path,
    pool: SandboxPool,
    *,
    jobs: int,
) -> Reports:
    """Run nbval on what it has not seen yet, `jobs` at a time: (student, lesson) -> what it said.

    Each report is written to out/nbval/ as soon as it is known.
    """
    found: Reports = {}
    stop = threading.Event()

    def one(submission: Submission) -> tuple[Submission, NbvalReport]:
        return submission, run(submission, exercises[submission.lesson], terms, pool, stop)

    with ThreadPoolExecutor(jobs, thread_name_prefix="nbval") as executor:
        running = []
        for submission in submissions:
            if (kept := _load(_path(out, submission), submission, terms)) is not None:
                found[submission.student, submission.lesson] = kept
            else:
                running.append(executor.submit(one, submission))
        total = len(submissions)
        with tqdm(total=total, initial=len(found), unit="nbval run", disable=None) as bar:
            try:
                for done in as_completed(running):
                    submission, report = done.result()
                    found[submission.student, submission.lesson] = report
                    text = json.dumps(asdict(report), indent=1, ensure_ascii=False)
                    write(_path(out, submission), text + "\n")
                    bar.update()
            except BaseException:
                stop.set()
                executor.shutdown(wait=False, cancel_futures=True)
                raise
    return found


def _path(out: Path, submission: Submission) -> Path:
    return out / "nbval" / f"{submission.student}.{submission.lesson}.json"


def _load(path: Path, submission: Submission, terms: Terms) -> NbvalReport | None:
    """What nbval said about exactly this submission with this checker, if it is there."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        kept = NbvalReport(**{**tree, "cells": tuple(Cell(**cell) for cell in tree["cells"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    same = (kept.sha256, kept.version) == (submission.sha256, terms.version)
    return kept if same else None


# ---- one ----


def run(
    submission: Submission,
    exercise: Pristine,
    terms: Terms,
    pool: SandboxPool,
    stop: threading.Event,
) -> NbvalReport:
    """Run nbval on the merged notebook, in a sandbox that is gone afterwards."""
    notebook = merged(exercise, submission)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    checks = {
        f"Cell {number}": notebooks.of(cell)
        for number, cell in enumerate(code)
        if notebooks.role(cell) == "check"
    }
    try:
        raw = notebooks.write_text(notebook).encode()
        found = read(run_notebook(raw, f"{exercise.name}.ipynb", pool, stop))
    except (NoReport, NoRanks, OSError) as error:
        return NbvalReport(submission.sha256, terms.version, trouble=str(error))
    cells = tuple(Cell(task, *found.get(name, ("", ""))) for name, task in checks.items())
    return NbvalReport(submission.sha256, terms.version, cells)


# ---- the report ----


def read(raw: bytes) -> dict[str, tuple[str, str]]:
    """Cell's name -> (outcome, first lines of a failure), of a JUnit report. Raises NoReport.

    pytest writes no declarations; without them XML has no entities to expand.
    """
    try:
        text = raw.decode()
        if "<!" in text:
            raise NoReport("it holds a declaration, which pytest never writes")
        root = ElementTree.fromstring(text)
    except (UnicodeDecodeError, ElementTree.ParseError) as error:
        raise NoReport(f"it is not XML ({error})") from None
    return {case.get("name", ""): _outcome(case) for case in root.iter("testcase")}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for part in case:
        if part.tag in OUTCOMES:
            own = (part.text or "").startswith(LEAD)
            return OUTCOMES[part.tag], _first_lines(part.text if own else part.get("message", ""))
    return "passed", ""


def _first_lines(text: str) -> str:
    """A failure without what nbval writes around it, and cut."""
    text = without_paths(COLOUR.sub("", text).removeprefix(LEAD))
    _, _, traceback = text.partition("Traceback:\n")
    lines = [line.rstrip() for line in (traceback or text).splitlines() if line.strip("- ")]
    return "\n".join(line[:WIDTH] for line in lines[:LINES])
