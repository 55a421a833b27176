"""Grade a class: every submission once, in parallel, independently of the others.

A grade is bound to the submission's SHA-256, the checker's version, the seed and whether there was
a sandbox. Each grade is written to a separate file at once, so an interrupted batch resumes, and a
graded submission is not graded again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ddpz_lite
from ddpz_lite.course.check.progress import write_whole as write
from ddpz_lite.course.check.run import draw
from ddpz_lite.course.check.score import Finding, Judging, Verdict
from ddpz_lite.course.check.task import Observed, Task
from ddpz_lite.course.grader.arena.observe import turn
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.hidden import More, extend
from ddpz_lite.course.grader.merge import Attempt, explained, left_out, merge
from ddpz_lite.course.grader.submission import NotGraded, Submission

# (task, cells, cases, sandboxed) -> what was seen
Observe = Callable[..., Sequence[Observed]]


@dataclass(frozen=True)
class Terms:
    """What a grade depends on besides the submission."""

    version: str
    seed: int
    sandbox: str  # "yes" or "none"


@dataclass(frozen=True)
class Grade:
    """The grade of one submission."""

    student: str
    lesson: str
    where: str
    sha256: str
    terms: Terms
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    late: float = 0  # points that lateness takes off, negative; of reports, see `policy`
    notes: tuple[str, ...] = ()  # a teacher's words, and those about lateness; of reports

    @property
    def points(self) -> float:
        return sum(verdict.points for verdict in self.verdicts) + self.late

    @property
    def out_of(self) -> int:
        return sum(verdict.out_of for verdict in self.verdicts)


def version(exercises: Sequence[Pristine], folder: Path | None = None) -> str:
    """The library's version, and a digest of what decides points: code, exercises, torch."""
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
    tasks: Sequence[str] | None = None,
    kept: Grade | None = None,
) -> Grade:
    """Grade one submission. An exception here is the machine's or the checker's, not a verdict.

    tasks: the only ones that are wanted. kept: a grade of the same on the same terms, for some of
    its tasks: what it says is not graded again.
    """
    started = time.monotonic()
    attempts = merge(exercise, submission)
    why = left_out(exercise, submission, attempts)
    known = {verdict.task: verdict for verdict in kept.verdicts} if kept else {}
    for task, attempt in zip(exercise.tasks, attempts, strict=True):
        if task.id in known or (tasks is not None and task.id not in tasks):
            continue
        task = extend(task, more)
        verdict = _verdict(task, attempt, key_of(terms, submission, task), observe, terms)
        findings = (replace(f, sentence=explained(f.sentence, why)) for f in verdict.findings)
        known[task.id] = replace(verdict, findings=tuple(findings))
    return Grade(
        student=submission.student,
        lesson=submission.lesson,
        where=submission.where,
        sha256=submission.sha256,
        terms=terms,
        verdicts=tuple(known[task.id] for task in exercise.tasks if task.id in known),
        warnings=submission.warnings,
        seconds=round((kept.seconds if kept else 0.0) + time.monotonic() - started, 1),
    )


def _verdict(task: Task, attempt: Attempt, key: str, observe: Observe, terms: Terms) -> Verdict:
    if attempt.status:
        blank = tuple(Finding(a.says, 0, a.points, "not judged") for a in task.criteria)
        return Verdict(task.id, attempt.status, blank, attempt.sentence)
    judging = Judging(task, draw(task, key))
    while (index := _next(judging)) is not None:
        case = judging.cases[index]
        (seen,) = observe(task, attempt.cells, [case], sandboxed=terms.sandbox == "yes")
        judging.add(index, seen)
    with turn():
        return judging.verdict()


def _next(judging: Judging) -> int | None:
    """The case to run next. To say so, it judges those that were run."""
    with turn():
        return judging.wanted()


# ---- many ----


def grade_all(
    submissions: Sequence[Submission],
    exercises: dict[str, Pristine],
    terms: Terms,
    out: Path,
    *,
    jobs: int,
    more: dict[str, More],
    observe: Observe,
    tasks: Sequence[str] | None = None,
) -> list[Grade | NotGraded]:
    """Grade what is not graded yet, `jobs` at a time; all of them, in the order given.

    Each grade is written to out/grades/ as soon as it is known. tasks: the only ones wanted.
    """
    results: dict[int, Grade | NotGraded] = {}
    with ThreadPoolExecutor(jobs, thread_name_prefix="grade") as pool:
        running: dict[Future, int] = {}
        for index, one in enumerate(submissions):
            exercise, kept = exercises[one.lesson], load(path_of(out, one), one, terms)
            if kept is not None and _wanted(exercise, tasks) <= {v.task for v in kept.verdicts}:
                results[index] = kept
                continue
            task = pool.submit(grade, one, exercise, terms, more, observe, tasks, kept)
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
    return [_only(results[index], tasks) for index in range(len(submissions))]


def _wanted(exercise: Pristine, tasks: Sequence[str] | None) -> set[str]:
    """The tasks of an exercise that are wanted."""
    every = set(exercise.answers.values())
    return every if tasks is None else every & set(tasks)


def _only(result: Grade | NotGraded, tasks: Sequence[str] | None) -> Grade | NotGraded:
    """A grade without the tasks that were not asked for."""
    if tasks is None or isinstance(result, NotGraded):
        return result
    return replace(result, verdicts=tuple(v for v in result.verdicts if v.task in tasks))


def _keep(done: Future, submission: Submission, out: Path) -> Grade | NotGraded:
    try:
        graded = done.result()
        save(path_of(out, submission), graded)
        return graded
    except Exception as error:
        reason = f"the grader could not grade it: {type(error).__name__}: {error}"
        return NotGraded(submission.student, submission.where, reason)


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
    about = {"student": submission.student, "where": submission.where}
    return replace(kept, **about, warnings=submission.warnings) if same else None


def _grade(tree: dict[str, Any]) -> Grade:
    verdicts = tuple(
        Verdict(**{**verdict, "findings": tuple(Finding(**f) for f in verdict["findings"])})
        for verdict in tree["verdicts"]
    )
    texts = {name: tuple(tree[name]) for name in ("warnings", "notes")}
    changed = {"terms": Terms(**tree["terms"]), **texts}
    return Grade(**{**tree, **changed, "verdicts": verdicts})
