"""A class at a time: every submission graded once, side by side, whatever one of them does.

A grade is bound to the submission's SHA-256, the checker's version, the seed and whether there was
a sandbox. It lies in a file of its own from the moment it is known, so an interrupted batch goes on
where it was, and what is graded is not graded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ddpz_lite

from ..grade.run import draw
from ..grade.score import Finding, Verdict, score
from ..grade.task import Observed, Task
from .arena.observe import turn
from .hidden import More, extend
from .intake import Submission
from .merge import Attempt, Pristine, explained, left_out, merge

# (task, cells, cases, sandboxed) -> what was seen
Observe = Callable[..., Sequence[Observed]]


@dataclass(frozen=True)
class Terms:
    """What a grade depends on beside the submission."""

    version: str
    seed: int
    sandbox: str  # "yes" or "none"


@dataclass(frozen=True)
class Grade:
    """What became of one submission."""

    student: str
    lesson: str
    where: str
    sha256: str
    terms: Terms
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def points(self) -> int:
        return sum(verdict.points for verdict in self.verdicts)

    @property
    def out_of(self) -> int:
        return sum(verdict.out_of for verdict in self.verdicts)


def version(exercises: Sequence[Pristine], folder: Path | None = None) -> str:
    """The library's version, and a digest of all that decides points: this package, exercises,
    hidden judges, torch.
    """
    digest = hashlib.sha256(torch.__version__.encode())
    here = Path(ddpz_lite.__file__).resolve().parent
    for path in [*sorted(here.rglob("*.py")), *(sorted(folder.glob("*.py")) if folder else ())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for exercise in exercises:
        digest.update(repr(exercise).encode())
    return f"{ddpz_lite.__version__}+{digest.hexdigest()[:12]}"


def key_of(terms: Terms, submission: Submission, task: Task) -> str:
    """What a task's inputs follow from: fresh for every submission, the same for the same one.

    A student knows all of it but the seed, which therefore stands in no student's file.
    """
    return f"{terms.seed}:{submission.sha256}:{task.id}"


def grade(
    submission: Submission,
    exercise: Pristine,
    terms: Terms,
    more: dict[str, More],
    observe: Observe,
) -> Grade:
    """Grade one submission. An exception here is the machine's or the checker's, not a verdict."""
    started = time.monotonic()
    attempts, warnings = merge(exercise, submission)
    why = left_out(exercise, submission, attempts)
    verdicts = []
    for task, attempt in zip(exercise.tasks, attempts, strict=True):
        task = extend(task, more)
        verdict = _verdict(task, attempt, key_of(terms, submission, task), observe, terms)
        findings = (replace(f, sentence=explained(f.sentence, why)) for f in verdict.findings)
        verdicts.append(replace(verdict, findings=tuple(findings)))
    return Grade(
        student=submission.student,
        lesson=submission.lesson,
        where=submission.where,
        sha256=submission.sha256,
        terms=terms,
        verdicts=tuple(verdicts),
        warnings=tuple(warnings),
        seconds=round(time.monotonic() - started, 1),
    )


def _verdict(task: Task, attempt: Attempt, key: str, observe: Observe, terms: Terms) -> Verdict:
    if attempt.status:
        blank = tuple(Finding(a.says, 0, a.points, "not judged") for a in task.aspects)
        return Verdict(task.id, attempt.status, blank, attempt.sentence)
    seen: list[Observed] = []
    for case in draw(task, key):
        seen += observe(task, attempt.cells, [case], sandboxed=terms.sandbox == "yes")
        if _hopeless(task, seen[-1]):
            break
    with turn():
        return score(task, seen)


def _hopeless(task: Task, seen: Observed) -> bool:
    """Whether no further case can earn a point: the first aspect failed, so no other will count."""
    kinds = task.aspects[0].on
    return seen.outcome != "ok" and (not kinds or seen.case.kind in kinds)


# ---- many ----


@dataclass(frozen=True)
class Failure:
    """A submission that the grader could not grade: its own trouble, for a person to look at."""

    student: str
    lesson: str
    where: str
    reason: str


def grade_all(
    submissions: Sequence[Submission],
    exercises: dict[str, Pristine],
    terms: Terms,
    out: Path,
    *,
    jobs: int,
    more: dict[str, More],
    observe: Observe,
) -> list[Grade | Failure]:
    """Grade what is not graded yet, `jobs` at a time; all of them, in the order given.

    Each grade is written to out/grades/ as soon as it is known.
    """
    results: dict[int, Grade | Failure] = {}
    with ThreadPoolExecutor(jobs, thread_name_prefix="grade") as pool:
        running: dict[Future, int] = {}
        for index, one in enumerate(submissions):
            if (kept := load(path_of(out, one), one, terms)) is not None:
                results[index] = kept
                continue
            task = pool.submit(grade, one, exercises[one.lesson], terms, more, observe)
            running[task] = index
        total, before = len(submissions), len(results)
        with tqdm(total=total, initial=before, unit="notebook", disable=None) as bar:
            try:
                for done in as_completed(running):
                    one = submissions[running[done]]
                    results[running[done]] = _keep(done, one, out)
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [results[index] for index in range(len(submissions))]


def _keep(done: Future, submission: Submission, out: Path) -> Grade | Failure:
    try:
        graded = done.result()
        save(path_of(out, submission), graded)
        return graded
    except Exception as error:
        reason = f"the grader could not grade it: {type(error).__name__}: {error}"
        return Failure(submission.student, submission.lesson, submission.where, reason)


def path_of(out: Path, submission: Submission) -> Path:
    """Where a submission's grade is kept."""
    return out / "grades" / f"{submission.student}.{submission.lesson}.json"


def save(path: Path, graded: Grade) -> None:
    """Write the grade, whole or not at all."""
    write(path, json.dumps(asdict(graded), indent=1, ensure_ascii=False) + "\n")


def load(path: Path, submission: Submission, terms: Terms) -> Grade | None:
    """The grade of exactly this submission on these terms, if it is there and readable."""
    try:
        kept = _grade(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    same = (kept.sha256, kept.lesson, kept.terms) == (submission.sha256, submission.lesson, terms)
    return replace(kept, student=submission.student, where=submission.where) if same else None


def _grade(tree: dict[str, Any]) -> Grade:
    verdicts = tuple(
        Verdict(**{**verdict, "findings": tuple(Finding(**f) for f in verdict["findings"])})
        for verdict in tree["verdicts"]
    )
    changed = {"terms": Terms(**tree["terms"]), "warnings": tuple(tree["warnings"])}
    return Grade(**{**tree, **changed, "verdicts": verdicts})


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
