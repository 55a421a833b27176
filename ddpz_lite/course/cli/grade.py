"""`ddpz grade`: points and feedback for the submissions of a class."""

from __future__ import annotations

import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from ddpz_lite.course.check.notebooks import Malformed
from ddpz_lite.course.cli.machine import cores
from ddpz_lite.course.cli.shared import UserError, folder
from ddpz_lite.course.grader import (
    batch,
    formats,
    nbval,
    pages,
    platforms,
    policy,
    roster,
    similarity,
    text,
)
from ddpz_lite.course.grader.arena.observe import SandboxPool, observe_in_sandbox, probe
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.exercise import Pristine, pristine
from ddpz_lite.course.grader.hidden import BadHidden, More, load
from ddpz_lite.course.grader.intake import take
from ddpz_lite.course.grader.people import BadRoster, Roster
from ddpz_lite.course.grader.platforms import moodle
from ddpz_lite.course.grader.policy import BadPolicy, Note, Policy
from ddpz_lite.course.grader.report import MISSING, NO_STUDENT, UNLISTED, Report
from ddpz_lite.course.grader.sandbox.limits import Limits
from ddpz_lite.course.grader.submission import NotGraded, Submission

# In --out: the seed, and where ungraded work came from, for later runs and `ddpz release`.
BATCH = Path("grades", "batch.json")
TIMEOUT_FACTOR = 2.0  # of a case's timeout, because many ranks share this machine


@dataclass(frozen=True)
class People:
    """What the teacher says about the class."""

    roster: Roster | None
    policy: Policy
    notes: Sequence[Note]


def run(options: Namespace) -> int:
    """Grade, write the reports, print a line per notebook.

    Returns 1 if something was not graded, or a student has fewer points than --fail-under.
    """
    _refuse_other_systems()
    sandbox = _sandbox(options.secure)
    if options.nbval:
        _refuse_nbval(sandbox)
    exercises = _exercises()
    more = _hidden(options.hidden, exercises)
    tasks = _only(options.only, exercises)
    out = Path(options.out)
    people = _people(options, out, exercises)
    hidden = Path(options.hidden) if options.hidden else None
    version = batch.version(list(exercises.values()), hidden)
    terms = Terms(version, _seed(out, options.seed), sandbox)
    taken = take([Path(path) for path in options.submissions], exercises, people.roster)
    submissions = [one for one in taken if isinstance(one, Submission)]
    submissions = [one for one in submissions if _has(exercises[one.lesson], tasks)]
    report = _graded(options, submissions, exercises, terms, more, tasks)
    lost = [*(one for one in taken if isinstance(one, NotGraded)), *report.lost]
    report = _with_people(replace(report, lost=lost), people, taken)
    report = replace(report, lost=[*lost, *_write_students(out, report)])
    _write(out, report, submissions, options.platform)
    low = _low(report, options.fail_under)
    _say(_table(report, low, options.fail_under, out))
    return 1 if report.lost or low else 0


# ---- what was asked for ----


def _refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise UserError(
            f"grading needs Linux for its sandbox, and this is {sys.platform}; nothing was graded. "
            "Fix: grade on a Linux machine, real or virtual."
        )


def _refuse_nbval(sandbox: str) -> None:
    if sandbox == "none":
        raise UserError(
            f"--nbval: no sandbox is possible here, so nothing was graded. {probe().why}. "
            "Fix: grade on a Linux machine that allows user namespaces, or without --nbval."
        )
    if missing := nbval.missing():
        raise UserError(
            f"--nbval: {' and '.join(missing)} cannot be imported, so nothing was graded. "
            "Fix: install with the extra lab, as `make setup` does, or grade without --nbval."
        )


def _sandbox(secure: bool) -> str:
    found = probe()
    if secure and not found.ok:
        raise UserError(
            f"--secure: no sandbox is possible here, so nothing was graded. {found.why}. "
            "Fix: grade on a Linux machine that allows user namespaces; what you trust, also "
            "without --secure."
        )
    return "yes" if found.ok else "none"


def _exercises() -> dict[str, Pristine]:
    """The exercises of the course, as they were handed out. A student's copy has no solutions."""
    try:
        place = folder("solutions")
    except UserError:
        place = folder("exercises")
    try:
        made = [pristine(path) for path in sorted(place.glob("*.ipynb"))]
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


def _people(options: Namespace, out: Path, exercises: dict[str, Pristine]) -> People:
    """The roster, the policy and the notes; the latter two lie in --out unless named."""
    tasks = [task for one in exercises.values() for task in one.answers.values()]
    for asked in (options.policy, options.notes):
        if asked and not Path(asked).exists():
            raise UserError(f"there is no file {asked}")
    try:
        people = People(
            roster.load(Path(options.roster)) if options.roster else None,
            policy.load_policy(Path(options.policy or out / "policy.toml")),
            policy.load_notes(Path(options.notes or out / "notes.csv"), tasks),
        )
    except BadRoster as error:
        raise UserError(f"--roster: {error}") from None
    except BadPolicy as error:
        raise UserError(str(error)) from None
    if options.platform and (people.roster is None or people.roster.platform != options.platform):
        raise UserError(
            f"--for {options.platform} needs the list of students that {options.platform} exports. "
            "Fix: pass it with --roster"
        )
    return people


def _seed(out: Path, asked: int | None) -> int:
    """The seed of the batch in `out`, else the one asked for, else a fresh one."""
    try:
        kept = json.loads((out / BATCH).read_text(encoding="utf-8"))
        seed = int(kept["seed"])
    except (OSError, ValueError, TypeError, KeyError):
        seed = secrets.randbits(64) if asked is None else asked
        kept = {"seed": seed, "not_graded": []}
    if asked not in (None, seed):
        raise UserError(
            f"--seed: {out}/ was graded with another seed, and its reports would mix the two. "
            "Fix: choose another --out, or leave --seed out"
        )
    try:
        batch.write(out / BATCH, json.dumps(kept) + "\n")
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
            # A run is a kernel and up to four ranks, and a check's own deadlines are short.
            jobs = max(1, (options.jobs or cores().usable) // 2)
            nbval_reports = nbval.run_all(graded, exercises, terms, out, pool, jobs=jobs)
    grades = [one for one in results if isinstance(one, Grade)]
    lost = [one for one in results if isinstance(one, NotGraded)]
    return Report(grades, lost, exercises, terms, nbval_reports)


def _with_people(report: Report, people: People, taken: Sequence[Submission | NotGraded]) -> Report:
    """The report with the teacher's decisions, and with who is missing."""
    names = [one.student for one in taken if one.student]
    missing, unlisted = people.roster.compare(names) if people.roster else ((), ())
    late = {(one.student, one.lesson) for one in taken if isinstance(one, Submission) and one.late}
    times = _times(people.roster, report)
    grades = policy.apply(report.grades, people.policy, people.notes, times, late)
    look = [
        (note.student, f"notes.csv speaks of {note.task}, which was not graded for this name")
        for note in policy.unused(people.notes, grades)
    ]
    return replace(
        report,
        grades=grades,
        missing=missing,
        unlisted=unlisted,
        roster=people.roster,
        look=look,
    )


def _times(known: Roster | None, report: Report) -> Mapping[policy.Key, datetime]:
    """When submissions came, as a Moodle grading worksheet says: it is about one exercise."""
    if known is None or known.platform != moodle.NAME or len(report.heads) != 1:
        return {}
    times = {student.name: moodle.submitted(student.row) for student in known.students}
    (lesson,) = report.heads
    return {(name, lesson): at for name, at in times.items() if at is not None}


def _low(report: Report, asked: str | None) -> list[tuple[str, float]]:
    """(student, points) of those with fewer points than --fail-under, a number or a percentage."""
    if asked is None:
        return []
    number = float(asked.removesuffix("%"))
    low = [(name, 0.0) for name in report.missing if number > 0]
    for name, one in report.students.items():
        least = number * one.out_of / 100 if asked.endswith("%") else number
        if one.points < least or not one.grades:
            low.append((name, one.points))
    return low


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


def _write(
    out: Path, report: Report, submissions: Sequence[Submission], platform: str | None
) -> None:
    not_graded = [(one.student, one.where) for one in report.lost if one.student]
    kept = {"seed": report.terms.seed, "not_graded": not_graded}
    batch.write(out / BATCH, json.dumps(kept) + "\n")
    batch.write(out / "gradebook.csv", formats.gradebook(report))
    batch.write(out / "junit.xml", formats.junit(report))
    batch.write(out / "summary.md", pages.summary(report))
    found = similarity.find(submissions, report.exercises)
    batch.write(out / "similarity.md", similarity.report(found, report.terms))
    if platform:
        try:
            rows = platforms.MARKS[platform].marks(report, report.roster)
        except BadRoster as error:
            raise UserError(f"--for: {error}") from None
        batch.write(out / f"{platform}.csv", formats.table(rows))


def _table(report: Report, low: Sequence[tuple[str, float]], least: str | None, out: Path) -> str:
    lines = [
        f"{grade.student}  {grade.lesson}  {grade.points} of {grade.out_of} points"
        for grade in report.grades
    ]
    lines += [
        f"{one.student or NO_STUDENT}  not graded: {text.in_line(one.where, one.reason)}"
        for one in report.lost
    ]
    lines += [f"{name}  {MISSING}" for name in report.missing]
    lines += [f"{name}  {UNLISTED}" for name in report.unlisted]
    lines += [f"{name}  {points:g} points, fewer than {least}" for name, points in low]
    lines += [nbval.summed(report.nbval)] if report.nbval else []
    terms = report.terms
    lines.append(f"seed {terms.seed}, checker {terms.version}, sandbox: {terms.sandbox}")
    lines.append(f"reports in {out}/: gradebook.csv, summary.md, similarity.md, students/")
    return "\n".join(lines)


def _say(lines: str) -> None:
    """Print, on a terminal too that cannot write the names of all students."""
    encoding = sys.stdout.encoding or "utf-8"
    print(lines.encode(encoding, errors="replace").decode(encoding))
