"""Reports for other programs: CSV, Gradescope's results.json, JUnit XML."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from typing import Any

from ddpz_lite.course.check.score import Verdict
from ddpz_lite.course.grader.batch import Grade
from ddpz_lite.course.grader.report import MISSING, NO_STUDENT, Report, sentences
from ddpz_lite.course.grader.submission import NotGraded
from ddpz_lite.course.grader.text import in_table, plain

STAMPS = ("sha256", "version", "seed", "sandbox")


def gradebook(report: Report) -> str:
    """CSV: a row per student with the roster's columns, then a column per task, then the sum.

    A task's cell is empty where no notebook came. `late` is what lateness takes off; points have it
    taken off already.
    """
    carried = report.roster.columns if report.roster else ()
    own = {"student", "late", "points", "out of", "remarks", *STAMPS, *report.tasks}
    titles = [f"roster {title}" if title.casefold() in own else title for title in carried]
    head = ["student", *titles, *report.tasks, "late", "points", "out of", "remarks", *STAMPS]
    terms = [report.terms.version, report.terms.seed, report.terms.sandbox]
    rows: list[list[Any]] = [head]
    students = {**dict.fromkeys(report.missing), **report.students}
    for name in sorted(students, key=lambda name: (name.casefold(), name)):
        known = report.roster.by_name.get(name) if report.roster else None
        about = [known.row.get(title, "") if known else "" for title in carried]
        rows.append([name, *about, *_results(students[name], report), *terms])
    return table(rows)


def _results(one: Report | None, report: Report) -> list[Any]:
    """A student's cells of the gradebook, from the first task to the hashes."""
    if one is None:
        return [*[""] * len(report.tasks), "", 0, 0, MISSING, ""]
    points = {v.task: v.points for grade in one.grades for v in grade.verdicts}
    lost = [f"{lost.where}: {lost.reason}" for lost in one.lost]
    notes = [text for grade in one.grades for text in (*grade.warnings, *grade.notes)]
    return [
        *(points.get(task, "") for task in report.tasks),
        sum(grade.late for grade in one.grades) or "",
        one.points,
        one.out_of,
        " | ".join([*lost, *notes]),
        " ".join(grade.sha256 for grade in one.grades),
    ]


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV. A cell of text never is a formula; a platform's leading blanks are kept."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    for row in rows:
        write([_cell(value) for value in row])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str) or value == "-":  # Moodle's sign for nothing
        return value
    return value[: len(value) - len(value.lstrip(" "))] + in_table(value)


# ---- JUnit ----


def junit(report: Report) -> str:
    """JUnit XML: a suite per notebook, a case per task; what is not graded is an error."""
    root = ElementTree.Element("testsuites", name="ddpz grade")
    for grade in report.grades:
        _graded(root, grade, {**report.stamps, "seed": report.terms.seed})
    for one in report.lost:
        suite = _suite(root, one.student or NO_STUDENT, 1, 0.0)
        suite.set("errors", "1")
        error = ElementTree.SubElement(
            _case(suite, one.student or NO_STUDENT, plain(one.where)), "error"
        )
        error.set("message", plain(one.reason))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _graded(root: ElementTree.Element, grade: Grade, stamps: dict[str, Any]) -> None:
    suite = _suite(root, f"{grade.student} {grade.lesson}", len(grade.verdicts), grade.seconds)
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in {"sha256": grade.sha256, **stamps}.items():
        ElementTree.SubElement(properties, "property", name=key, value=str(value))
    for verdict in grade.verdicts:
        case = _case(suite, f"{grade.student}.{grade.lesson}", verdict.task)
        if verdict.status == "not attempted":
            ElementTree.SubElement(case, "skipped", message="not attempted")
        elif not verdict.solved:
            message = f"{verdict.status}: {verdict.points} of {verdict.out_of} points"
            about = {"type": verdict.status, "message": message}
            failure = ElementTree.SubElement(case, "failure", about)
            failure.text = plain("\n".join(sentences(verdict)))
    for kind, name in (("failure", "failures"), ("skipped", "skipped")):
        suite.set(name, str(sum(child.find(kind) is not None for child in suite)))


def _suite(root: ElementTree.Element, name: str, tests: int, seconds: float) -> ElementTree.Element:
    about = {"name": name, "tests": str(tests), "failures": "0", "errors": "0", "skipped": "0"}
    return ElementTree.SubElement(root, "testsuite", about, time=f"{seconds:.1f}")


def _case(suite: ElementTree.Element, classname: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=classname, name=name)


# ---- Gradescope ----


def gradescope(report: Report) -> str:
    """results.json of one student, in the fields that Gradescope's autograder manual documents.

    What was not graded is a test worth nothing, with the reason.
    """
    tests = [_task(v, report) for grade in report.grades for v in grade.verdicts]
    tests += [_lost(one) for one in report.lost]
    results = {
        "score": report.points,
        "execution_time": round(sum(grade.seconds for grade in report.grades)),
        "output": report.stamp,
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {"sha256": [grade.sha256 for grade in report.grades], **report.stamps},
    }
    return json.dumps(results, indent=1, ensure_ascii=False) + "\n"


def _task(verdict: Verdict, report: Report) -> dict[str, Any]:
    return {
        **_test(f"{verdict.task}  {report.tasks[verdict.task].title}", verdict.solved),
        "score": verdict.points,
        "max_score": verdict.out_of,
        "number": verdict.task,
        "output": plain("\n".join([verdict.status, *sentences(verdict)])),
        "tags": [verdict.status],
    }


def _lost(one: NotGraded) -> dict[str, Any]:
    about = {"score": 0, "max_score": 0, "output": plain(one.reason)}
    return {**_test(plain(one.where), False), **about}


def _test(name: str, passed: bool) -> dict[str, Any]:
    return {
        "name": name,
        "name_format": "text",
        "status": "passed" if passed else "failed",
        "output_format": "text",
        "visibility": "visible",
    }
