"""`ddpz grade`: points and feedback for what a class handed in."""

from __future__ import annotations

import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from ddpz_lite.cli.machine import cores
from ddpz_lite.cli.shared import UserError, folder
from ddpz_lite.grade.notebooks import Malformed
from ddpz_lite.grade.task import Task
from ddpz_lite.grader import batch, formats, nbval, report, similarity
from ddpz_lite.grader.arena.observe import Grounds, observe_in_sandbox, probe
from ddpz_lite.grader.batch import Failure, Grade, Terms
from ddpz_lite.grader.hidden import BadHidden, More, load
from ddpz_lite.grader.intake import Refusal, Submission, take
from ddpz_lite.grader.merge import Pristine, pristine
from ddpz_lite.grader.sandbox.limits import Limits

PATIENCE = 2.0  # times a case's timeout: many ranks share this machine

Lost = list[Refusal | Failure]


def run(options: Namespace) -> int:
    """Grade, write the reports, print a line per notebook; 1 if something was not graded."""
    _refuse_other_systems()
    sandbox = _sandbox(options.secure)
    if options.nbval:
        _refuse_nbval(sandbox)
    exercises = _exercises()
    more = _hidden(options.hidden, exercises)
    out = Path(options.out)
    terms = Terms(
        batch.version(list(exercises.values()), options.hidden and Path(options.hidden)),
        _seed(out, options.seed),
        sandbox,
    )
    taken = take([Path(path) for path in options.submissions], exercises)
    submissions = [one for one in taken if isinstance(one, Submission)]
    with Grounds() as grounds:
        results = batch.grade_all(
            submissions,
            exercises,
            terms,
            out,
            jobs=options.jobs or cores().usable,
            more=more,
            observe=partial(observe_in_sandbox, limits=Limits(patience=PATIENCE)),
        )
        said = _nbval(options, submissions, results, exercises, terms, grounds)
    grades = [one for one in results if isinstance(one, Grade)]
    lost: Lost = [one for one in [*taken, *results] if isinstance(one, (Refusal, Failure))]
    lost += _write_students(out, grades, lost, exercises, terms, said)
    _write(out, grades, lost, exercises, terms, submissions, said)
    print(_table(grades, lost, terms, out, said))
    return 1 if lost else 0


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
            "Install with the extras lab and test, as `make setup` does, or grade without --nbval."
        )


def _nbval(
    options: Namespace,
    submissions: Sequence[Submission],
    results: Sequence[Grade | Failure],
    exercises: dict[str, Pristine],
    terms: Terms,
    grounds: Grounds,
) -> nbval.Reports:
    """What nbval says about each notebook that was graded; nothing where it was not asked for."""
    if not options.nbval:
        return {}
    both = zip(submissions, results, strict=True)
    graded = [submission for submission, one in both if isinstance(one, Grade)]
    # A run is a kernel and up to four ranks, and a check's own deadlines know no patience.
    jobs = max(1, (options.jobs or cores().usable) // 2)
    return nbval.run_all(graded, exercises, terms, Path(options.out), grounds, jobs=jobs)


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


def _write_students(
    out: Path,
    grades: Sequence[Grade],
    lost: Lost,
    exercises: dict[str, Pristine],
    terms: Terms,
    said: nbval.Reports,
) -> list[Failure]:
    """Write what is given back, and name those whose files could not be written."""
    titles = {task.id: task.title for e in exercises.values() for task in e.tasks}
    failed = []
    for student in sorted({one.student for one in [*grades, *lost]}):
        mine = [grade for grade in grades if grade.student == student]
        gone = [one for one in lost if one.student == student]
        place = out / "students" / student
        told = student, mine, gone, exercises, terms, said
        try:
            batch.write(place / "feedback.html", report.page(*told))
            batch.write(place / "feedback.md", report.markdown(*told))
            batch.write(place / "results.json", formats.gradescope(mine, gone, terms, titles))
        except OSError as error:
            reason = f"the feedback could not be written ({error.strerror})"
            failed.append(Failure(student, "", f"students/{student}/", reason))
    return failed


def _write(
    out: Path,
    grades: Sequence[Grade],
    lost: Lost,
    exercises: dict[str, Pristine],
    terms: Terms,
    submissions: Sequence[Submission],
    said: nbval.Reports,
) -> None:
    about: dict[str, Task] = {t.id: t for e in exercises.values() for t in e.tasks}
    lessons = {grade.lesson for grade in grades}
    tasks = [task for task in about.values() if task.lesson in lessons]
    batch.write(out / "gradebook.csv", formats.gradebook(grades, lost, tasks, terms))
    batch.write(out / "junit.xml", formats.junit(grades, lost, terms))
    batch.write(out / "summary.md", report.summary(grades, lost, terms, said))
    pairs, common = similarity.pairs(submissions, exercises)
    batch.write(out / "similarity.md", similarity.report(pairs, common, terms))


def _table(
    grades: Iterable[Grade], lost: Lost, terms: Terms, out: Path, said: nbval.Reports
) -> str:
    lines = [
        f"{grade.student}  {grade.lesson}  {grade.points} of {grade.out_of} points"
        for grade in grades
    ]
    lines += [
        f"{one.student}  not graded: {formats.in_line(one.where, one.reason)}" for one in lost
    ]
    lines += [nbval.summed(said)] if said else []
    lines.append(f"seed {terms.seed}, checker {terms.version}, sandbox: {terms.sandbox}")
    lines.append(f"reports in {out}/: gradebook.csv, summary.md, similarity.md, students/")
    return "\n".join(lines)
