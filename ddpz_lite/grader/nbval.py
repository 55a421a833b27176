"""What nbval says about a merged notebook: for the student to read, and worth no point.

The run is one process tree under the student's control, so nothing of its report is believed. It is
read as data, with limits, and shown as text. Grades are made before, and elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import selectors
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from ..grade import notebooks
from .arena.frames import Channel, Inbox, Refused, order
from .arena.observe import PASSED_ON, Grounds
from .arena.peer import Peer
from .batch import Terms, write
from .exercise import Pristine
from .merge import merged
from .sandbox import leash
from .sandbox.leash import NoRanks
from .sandbox.limits import MIB, NOTEBOOK, NOTEBOOK_SECONDS
from .sandbox.usage import memory
from .submission import Submission

NEEDED = ("pytest", "nbval", "ipykernel", "jupyter_client")  # packages, to run it
TICK = 0.1  # seconds between two looks at the clock and the memory
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
class Said:
    """What nbval said about one submission; `trouble`: why there is no report."""

    sha256: str
    version: str
    cells: tuple[Cell, ...] = ()
    trouble: str = ""


Reports = dict[tuple[str, str], Said]  # (student, lesson) -> what nbval said


def summed(reports: Reports) -> str:
    """A class in a line."""
    outcomes = [cell.outcome for said in reports.values() for cell in said.cells]
    without = sum(bool(said.trouble) for said in reports.values())
    return (
        f"nbval, worth no points: {outcomes.count('passed')} of {len(outcomes)} check cells passed;"
        f" notebooks without a report: {without}"
    )


class NoReport(Exception):
    """nbval gave no report that can be read: why, in words."""


def missing() -> list[str]:
    """The packages without which nbval cannot run."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


# ---- many ----


def run_all(
    submissions: Sequence[Submission],
    exercises: dict[str, Pristine],
    terms: Terms,
    out: Path,
    grounds: Grounds,
    *,
    jobs: int,
) -> Reports:
    """Run nbval on what it has not seen yet, `jobs` at a time: (student, lesson) -> what it said.

    Each report is written to out/nbval/ as soon as it is known.
    """
    said: Reports = {}
    stop = threading.Event()

    def one(submission: Submission) -> tuple[Submission, Said]:
        return submission, run(submission, exercises[submission.lesson], terms, grounds, stop)

    with ThreadPoolExecutor(jobs, thread_name_prefix="nbval") as pool:
        running = []
        for submission in submissions:
            if (kept := _load(_path(out, submission), submission, terms)) is not None:
                said[submission.student, submission.lesson] = kept
            else:
                running.append(pool.submit(one, submission))
        total = len(submissions)
        with tqdm(total=total, initial=len(said), unit="nbval run", disable=None) as bar:
            try:
                for done in as_completed(running):
                    submission, told = done.result()
                    said[submission.student, submission.lesson] = told
                    text = json.dumps(asdict(told), indent=1, ensure_ascii=False)
                    write(_path(out, submission), text + "\n")
                    bar.update()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return said


def _path(out: Path, submission: Submission) -> Path:
    return out / "nbval" / f"{submission.student}.{submission.lesson}.json"


def _load(path: Path, submission: Submission, terms: Terms) -> Said | None:
    """What nbval said about exactly this submission with this checker, if it is there."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        kept = Said(**{**tree, "cells": tuple(Cell(**cell) for cell in tree["cells"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    same = (kept.sha256, kept.version) == (submission.sha256, terms.version)
    return kept if same else None


# ---- one ----


def run(
    submission: Submission,
    exercise: Pristine,
    terms: Terms,
    grounds: Grounds,
    stop: threading.Event,
) -> Said:
    """Run nbval on the merged notebook, in a sandbox that is gone afterwards."""
    notebook = merged(exercise, submission)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    checks = {
        f"Cell {number}": notebooks.of(cell)
        for number, cell in enumerate(code)
        if notebooks.role(cell) == "check"
    }
    try:
        found = read(_report(notebooks.write_text(notebook).encode(), exercise.name, grounds, stop))
    except (NoReport, NoRanks, OSError) as error:
        return Said(submission.sha256, terms.version, trouble=str(error))
    cells = tuple(Cell(task, *found.get(name, ("", ""))) for name, task in checks.items())
    return Said(submission.sha256, terms.version, cells)


def _report(notebook: bytes, name: str, grounds: Grounds, stop: threading.Event) -> bytes:
    """The report that comes out of the sandbox. Raises NoReport, NoRanks."""
    raw = order(1, NOTEBOOK_SECONDS, NOTEBOOK, True, "notebook", "/tmp")
    ((line, own_leash, output),) = grounds.start(1, raw)
    peer = Peer(0, Inbox(line, NOTEBOOK.message), own_leash, output)
    orders = {
        "name": f"{name}.ipynb",
        "cell": NOTEBOOK.cell,
        "most": NOTEBOOK.message,
        "environ": _environment(),
    }
    try:
        line.settimeout(NOTEBOOK.start)
        Channel(line).send(orders, notebook)
        return _await(peer, stop)
    except Refused as refused:
        raise NoReport(f"what came in its place {refused}") from None
    finally:
        leash.let_go([peer])


def _await(peer: Peer, stop: threading.Event) -> bytes:
    """Drain what is printed, watch time and memory, until there is a report."""
    deadline = time.monotonic() + NOTEBOOK_SECONDS
    with selectors.DefaultSelector() as selector:
        for sock in (peer.inbox.sock, peer.leash, peer.output):
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ)
        while not stop.is_set():
            ready = {key.fileobj for key, _ in selector.select(TICK)}
            if peer.output in ready and not leash.printed(peer, NOTEBOOK.output):
                selector.unregister(peer.output)
            if peer.leash in ready:
                leash.news(peer)
                if not peer.leashed:
                    selector.unregister(peer.leash)
            try:
                taken = peer.inbox.take()
            except EOFError:
                if peer.leashed:  # it may say why there was no run
                    peer.leash.settimeout(leash.LEAVE)
                    leash.news(peer)
                raise NoReport("the run ended without one") from None
            if taken is not None:
                return _content(peer, bytes(taken[1]))
            if time.monotonic() > deadline:
                raise NoReport(f"the run took longer than {NOTEBOOK_SECONDS:g} s")
            if peer.pid is not None and memory(peer.pid, NOTEBOOK.memory) > NOTEBOOK.memory:
                raise NoReport(f"the run used more than {NOTEBOOK.memory // MIB} MiB of memory")
    raise NoReport("it was interrupted")


def _content(peer: Peer, report: bytes) -> bytes:
    if report:
        return report
    lines = peer.printed.decode(errors="replace").strip().splitlines() or ["nothing"]
    raise NoReport(f"pytest wrote none. It said last: {lines[-1][:WIDTH]}")


def _environment() -> dict[str, str]:
    """pytest's environment, and so the kernel's: nothing that is secret."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        **kept,
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "rank",
        "PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
        "DDPZ_WARM": "0",  # pytest needs no fork server; the kernel's starts with its first job
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


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
        raise NoReport(f"it is no XML ({error})") from None
    return {case.get("name", ""): _outcome(case) for case in root.iter("testcase")}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for part in case:
        if part.tag in OUTCOMES:
            own = (part.text or "").startswith(LEAD)
            return OUTCOMES[part.tag], _first_lines(part.text if own else part.get("message", ""))
    return "passed", ""


def _first_lines(text: str) -> str:
    """A failure without what nbval writes around it, and cut."""
    text = COLOUR.sub("", text).removeprefix(LEAD)
    _, _, traceback = text.partition("Traceback:\n")
    lines = [line.rstrip() for line in (traceback or text).splitlines() if line.strip("- ")]
    return "\n".join(line[:WIDTH] for line in lines[:LINES])
