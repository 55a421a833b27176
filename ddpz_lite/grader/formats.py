"""Grades for other programs: CSV, Gradescope's results.json, JUnit XML.

Whatever a student wrote is text here: no formula in a table, no markup in a page, no control
character anywhere.
"""

from __future__ import annotations

import csv
import html
import io
import json
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

from ..grade.score import Verdict
from ..grade.task import Task
from .batch import Failure, Grade, Terms
from .intake import Refusal

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
MARKDOWN = "\\`*_{}[]()#+-.!|~$:@"
SENTENCE = 2000  # characters


# ---- text that somebody else wrote ----


def plain(text: str) -> str:
    """Text without control characters and without marks that reorder it; not endless."""
    shown = "".join(c if c == "\n" or _visible(c) else "\N{REPLACEMENT CHARACTER}" for c in text)
    return shown if len(shown) <= SENTENCE else shown[: SENTENCE - 3] + "..."


def _visible(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def in_html(text: str) -> str:
    """`plain` text for a page."""
    return html.escape(plain(text)).replace("\n", "<br>")


def in_markdown(text: str) -> str:
    """`plain` text for a line of Markdown, where none of it is markup."""
    line = html.escape(plain(text).replace("\n", " "), quote=False)
    return "".join(f"\\{char}" if char in MARKDOWN else char for char in line)


def in_table(text: str) -> str:
    """`plain` text for a cell of a spreadsheet: never a formula."""
    line = plain(text).replace("\n", " ").strip()
    return f"'{line}" if line.startswith(FORMULA) else line


def in_line(*texts: str) -> str:
    """`plain` texts for one line of print."""
    return ": ".join(plain(text).replace("\n", " ") for text in texts)


# ---- the class ----


def gradebook(
    grades: Sequence[Grade],
    lost: Sequence[Refusal | Failure],
    tasks: Sequence[Task],
    terms: Terms,
) -> str:
    """CSV: a row per student, a column per task (empty: no notebook for it), then the sum."""
    names = sorted({one.student for one in [*grades, *lost]}, key=str.casefold)
    ids = [task.id for task in tasks]
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(
        ["student", *ids, "points", "out of", "remarks", "sha256", "version", "seed", "sandbox"]
    )
    for name in names:
        mine = [grade for grade in grades if grade.student == name]
        points = {verdict.task: verdict.points for grade in mine for verdict in grade.verdicts}
        remarks = [f"{one.where}: {one.reason}" for one in lost if one.student == name]
        rows.writerow(
            [
                in_table(name),
                *(points.get(task, "") for task in ids),
                sum(grade.points for grade in mine),
                sum(grade.out_of for grade in mine),
                in_table("; ".join(remarks)),
                " ".join(grade.sha256 for grade in mine),
                terms.version,
                terms.seed,
                terms.sandbox,
            ]
        )
    return out.getvalue()


def junit(grades: Sequence[Grade], lost: Sequence[Refusal | Failure], terms: Terms) -> str:
    """JUnit XML: a suite per notebook, a case per task; what is refused is an error."""
    root = ElementTree.Element("testsuites", name="ddpz grade")
    for grade in grades:
        suite = _suite(root, f"{grade.student} {grade.lesson}", len(grade.verdicts), grade.seconds)
        stamp = {"sha256": grade.sha256, **stamp_of(terms), "seed": terms.seed}
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in stamp.items():
            ElementTree.SubElement(properties, "property", name=key, value=str(value))
        for verdict in grade.verdicts:
            case = _case(suite, f"{grade.student}.{grade.lesson}", verdict.task)
            if verdict.solved:
                continue
            if verdict.status == "not attempted":
                ElementTree.SubElement(case, "skipped", message="not attempted")
                continue
            message = f"{verdict.status}: {verdict.points} of {verdict.out_of} points"
            failure = ElementTree.SubElement(case, "failure", type=verdict.status, message=message)
            failure.text = plain("\n".join(sentences(verdict)))
        failed = sum(child.find("failure") is not None for child in suite)
        suite.set("failures", str(failed))
        suite.set("skipped", str(sum(child.find("skipped") is not None for child in suite)))
    for one in lost:
        suite = _suite(root, one.student, 1, 0.0)
        suite.set("errors", "1")
        error = ElementTree.SubElement(_case(suite, one.student, plain(one.where)), "error")
        error.set("message", plain(one.reason))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ElementTree.Element, name: str, tests: int, seconds: float) -> ElementTree.Element:
    about = {"name": name, "tests": str(tests), "failures": "0", "errors": "0", "skipped": "0"}
    return ElementTree.SubElement(root, "testsuite", about, time=f"{seconds:.1f}")


def _case(suite: ElementTree.Element, classname: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=classname, name=name)


def stamp_of(terms: Terms) -> dict[str, Any]:
    """What every report says of the terms on which it was made. The seed stands in the teacher's
    alone: who knows it can draw the inputs.
    """
    return {"version": terms.version, "sandbox": terms.sandbox}


def sentences(verdict: Verdict) -> list[str]:
    """What the student is told about a task, in lines."""
    lines = [verdict.sentence] if verdict.sentence else []
    for found in verdict.findings:
        lines.append(f"{found.outcome}: {found.says} ({found.points} of {found.out_of})")
        lines += [f"    {found.sentence}"] if found.sentence else []
    return lines


# ---- Gradescope ----


def gradescope(
    grades: Sequence[Grade], lost: Sequence[Refusal | Failure], terms: Terms, titles: dict[str, str]
) -> str:
    """results.json of one student, in the fields that Gradescope's autograder manual documents.

    titles: task -> title. A notebook that was refused is a test worth nothing, with the reason.
    """
    tests = [_test(verdict, titles) for grade in grades for verdict in grade.verdicts]
    tests += [
        {
            "name": plain(one.where),
            "name_format": "text",
            "score": 0,
            "max_score": 0,
            "status": "failed",
            "output": plain(one.reason),
            "output_format": "text",
            "visibility": "visible",
        }
        for one in lost
    ]
    whole = {
        "score": sum(grade.points for grade in grades),
        "execution_time": round(sum(grade.seconds for grade in grades)),
        "output": stamp(grades, terms),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {"sha256": [grade.sha256 for grade in grades], **stamp_of(terms)},
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _test(verdict: Verdict, titles: dict[str, str]) -> dict[str, Any]:
    return {
        "name": f"{verdict.task}  {titles[verdict.task]}",
        "name_format": "text",
        "score": verdict.points,
        "max_score": verdict.out_of,
        "status": "passed" if verdict.solved else "failed",
        "number": verdict.task,
        "output": plain("\n".join([verdict.status, *sentences(verdict)])),
        "output_format": "text",
        "tags": [verdict.status],
        "visibility": "visible",
    }


def stamp(grades: Sequence[Grade], terms: Terms) -> str:
    """The line under every student's report."""
    digests = ", ".join(grade.sha256 for grade in grades) or "-"
    return f"SHA-256 {digests}; checker {terms.version}; sandbox: {terms.sandbox}"
