"""`ddpz grade`: points and feedback for what a class handed in."""

from __future__ import annotations

import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ddpz_lite.course.check.notebooks import Malformed
from ddpz_lite.course.cli.machine import cores
from ddpz_lite.course.cli.shared import UserError, folder
from ddpz_lite.course.grader import batch, formats, nbval, pages, roster, similarity, text
from ddpz_lite.course.grader.arena.observe import SandboxPool, observe_in_sandbox, probe
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.exercise import Pristine, pristine
from ddpz_lite.course.grader.hidden import BadHidden, More, load
from ddpz_lite.course.grader.intake import take
from ddpz_lite.course.grader.report import MISSING, UNLISTED, Report
from ddpz_lite.course.grader.sandbox.limits import Limits
from ddpz_lite.course.grader.submission import NotGraded, Submission

TIMEOUT_FACTOR = 2.0  # times a case's timeout: many ranks share this machine


def run(options: Namespace) -> int:
    """Grade, write the reports, print a line per notebook.

    Returns 1 if something was not graded, or somebody has fewer points than --fail-under.
    """
    _refuse_other_systems()
    sandbox = _sandbox(options.secure)
    if options.nbval:
        _refuse_nbval(sandbox)
    exercises = _exercises()
    more = _hidden(options.hidden, exercises)
    tasks = _only(options.only, exercises)
    names = _roster(options.roster)
    out = Path(options.out)
    hidden = Path(options.hidden) if options.hidden else None
    version = batch.version(list(exercises.values()), hidden)
    terms = Terms(version, _seed(out, options.seed), sandbox)
    taken = take([Path(path) for path in options.submissions], exercises)
    submissions = [one for one in taken if isinstance(one, Submission)]
    submissions = [one for one in submissions if _has(exercises[one.lesson], tasks)]
    report = _graded(options, submissions, exercises, terms, more, tasks)
    lost = [*(one for one in taken if isinstance(one, NotGraded)), *report.lost]
    missing, unlisted = _compared(names, taken)
    report = replace(report, lost=lost, missing=missing, unlisted=unlisted)
    report = replace(report, lost=[*lost, *_write_students(out, report)])
    _write(out, report, submissions)
    low = _low(report, options.fail_under)
    _say(_table(report, low, options.fail_under, out))
    return 1 if report.lost or low else 0


# ---- what was asked for ----


def _refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise UserError(
            f"grading needs Linux for its sandbox, and this is {sys.platform}; nothing was graded. "
            "Grade on a Linux machine, real or virtual."
        )


def _refuse_nbval(sandbox: str) -> None:
    if sandbox == "none":
        raise UserError(
            f"--nbval: no sandbox can be had here, so nothing was graded. {probe().why}. "
            "Grade on a Linux machine that allows user namespaces, or without --nbval."
        )
    if missing := nbval.missing():
        raise UserError(
            f"--nbval: {' and '.join(missing)} cannot be imported, so nothing was graded. "
            "Install with the extra lab, as `make setup` does, or grade without --nbval."
        )


def _sandbox(secure: bool) -> str:
    found = probe()
    if secure and not found.ok:
        raise UserError(
            f"--secure: no sandbox can be had here, so nothing was graded. {found.why}. "
            "Grade on a Linux machine that allows user namespaces, or without --secure what you "
            "trust."
        )
    return "yes" if found.ok else "none"


def _exercises() -> dict[str, Pristine]:
    """The exercises of the course, as they were handed out."""
    try:
        made = [pristine(path) for path in sorted(folder("solutions").glob("*.ipynb"))]
    except Malformed as error:
        raise UserError(str(error)) from None
    return {exercise.lesson: exercise for exercise in made}


def _hidden(folder: str | None, exercises: dict[str, Pristine]) -> dict[str, More]:
    try:
        more = load(Path(folder) if folder else None)
    except BadHidden as error:
        raise UserError(f"--hidden: {error}") from None
    known = {task for exercise in exercises.values() for task in exercise.answers.values()}
    if unknown := set(more) - known:
        raise UserError(f"--hidden: there are no tasks {', '.join(sorted(unknown))}")
    return more


def _only(asked: Sequence[str] | None, exercises: dict[str, Pristine]) -> list[str] | None:
    """The tasks that count: those asked for, where a lesson's number stands for all of its own."""
    if asked is None:
        return None
    tasks: list[str] = []
    for word in asked:
        answers = exercises[word].answers.values() if word in exercises else ()
        known = [task for e in exercises.values() for task in e.answers.values() if task == word]
        if not answers and not known:
            raise UserError(
                f"--only: there is no task {word}; name one as 03.weighted_mean, or all of a "
                f"lesson by its number, of {', '.join(exercises)}"
            )
        tasks += [*answers, *known]
    return tasks


def _has(exercise: Pristine, tasks: Sequence[str] | None) -> bool:
    return tasks is None or bool(set(exercise.answers.values()) & set(tasks))


def _roster(path: str | None) -> list[str] | None:
    try:
        return roster.load(Path(path)) if path else None
    except roster.BadRoster as error:
        raise UserError(f"--roster: {error}") from None


def _compared(
    names: Sequence[str] | None, taken: Sequence[Submission | NotGraded]
) -> tuple[list[str], list[str]]:
    return roster.compare(names, (one.student for one in taken)) if names else ([], [])


def _seed(out: Path, asked: int | None) -> int:
    """The seed asked for; else that of the batch in `out`, which goes on; else a fresh one."""
    kept = out / "grades" / "batch.json"
    seed = asked
    if seed is None:
        try:
            seed = int(json.loads(kept.read_text(encoding="utf-8"))["seed"])
        except (OSError, ValueError, TypeError, KeyError):
            seed = secrets.randbits(64)
    try:
        batch.write(kept, json.dumps({"seed": seed}) + "\n")
    except OSError as error:
        raise UserError(f"--out: {out}/ cannot be written ({error.strerror})") from None
    return seed


# ---- the grades ----


def _graded(
    options: Namespace,
    submissions: Sequence[Submission],
    exercises: dict[str, Pristine],
    terms: Terms,
    more: dict[str, More],
    tasks: Sequence[str] | None,
) -> Report:
    """What became of the submissions, with what nbval says where it was asked for."""
    out = Path(options.out)
    with SandboxPool() as pool:
        results = batch.grade_all(
            submissions,
            exercises,
            terms,
            out,
            jobs=options.jobs or cores().usable,
            more=more,
            observe=partial(observe_in_sandbox, limits=Limits(timeout_factor=TIMEOUT_FACTOR)),
            tasks=tasks,
        )
        nbval_reports: nbval.Reports = {}
        if options.nbval:
            both = zip(submissions, results, strict=True)
            graded = [submission for submission, one in both if isinstance(one, Grade)]
            # A run is a kernel and up to four ranks, and a check's own deadlines know no patience.
            jobs = max(1, (options.jobs or cores().usable) // 2)
            nbval_reports = nbval.run_all(graded, exercises, terms, out, pool, jobs=jobs)
    grades = [one for one in results if isinstance(one, Grade)]
    lost = [one for one in results if isinstance(one, NotGraded)]
    return Report(grades, lost, exercises, terms, nbval_reports)


def _low(report: Report, least: float | None) -> list[tuple[str, int]]:
    """(student, points) of those who have fewer points than asked for."""
    if least is None:
        return []
    points = {name: one.points for name, one in report.students.items()}
    points |= dict.fromkeys(report.missing, 0)
    return [(name, own) for name, own in points.items() if own < least]


# ---- the reports ----


def _write_students(out: Path, report: Report) -> list[NotGraded]:
    """Write what is given back, and name those whose files could not be written."""
    failed = []
    for student, own in report.students.items():
        place = out / "students" / student
        try:
            batch.write(place / "feedback.html", pages.html(student, own))
            batch.write(place / "feedback.md", pages.markdown(student, own))
            batch.write(place / "results.json", formats.gradescope(own))
        except OSError as error:
            reason = f"the feedback could not be written ({error.strerror})"
            failed.append(NotGraded(student, f"students/{student}/", reason))
    return failed


def _write(out: Path, report: Report, submissions: Sequence[Submission]) -> None:
    batch.write(out / "gradebook.csv", formats.gradebook(report))
    batch.write(out / "junit.xml", formats.junit(report))
    batch.write(out / "summary.md", pages.summary(report))
    pairs, common = similarity.pairs(submissions, dict(report.exercises))
    batch.write(out / "similarity.md", similarity.report(pairs, common, report.terms))


def _table(report: Report, low: Sequence[tuple[str, int]], least: float | None, out: Path) -> str:
    lines = [
        f"{grade.student}  {grade.lesson}  {grade.points} of {grade.out_of} points"
        for grade in report.grades
    ]
    lines += [
        f"{one.student}  not graded: {text.in_line(one.where, one.reason)}" for one in report.lost
    ]
    lines += [f"{name}  {MISSING}" for name in report.missing]
    lines += [f"{name}  {UNLISTED}" for name in report.unlisted]
    lines += [f"{name}  {points} points, fewer than {least:g}" for name, points in low]
    lines += [nbval.summed(report.nbval)] if report.nbval else []
    terms = report.terms
    lines.append(f"seed {terms.seed}, checker {terms.version}, sandbox: {terms.sandbox}")
    lines.append(f"reports in {out}/: gradebook.csv, summary.md, similarity.md, students/")
    return "\n".join(lines)


def _say(lines: str) -> None:
    """Print, on a terminal too that cannot write the names of all students."""
    encoding = sys.stdout.encoding or "utf-8"
    print(lines.encode(encoding, errors="replace").decode(encoding))
