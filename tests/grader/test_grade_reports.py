"""What the grader writes: for students, teachers and other programs, whatever students wrote."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import nbformat
import pytest
import small_course

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.score import Finding, Verdict
from ddpz_lite.course.check.task import find
from ddpz_lite.course.grader import formats, pages, text
from ddpz_lite.course.grader.batch import Grade, Terms
from ddpz_lite.course.grader.exercise import pristine
from ddpz_lite.course.grader.nbval import Cell, NbvalReport
from ddpz_lite.course.grader.report import Report
from ddpz_lite.course.grader.submission import NotGraded

TASK = find("03.weighted_mean")
TERMS = Terms("0.1.0+test", 7, "none")
EVIL = (
    "<script>alert(1)</script> <img src=x onerror=y> [a](javascript:b) ![i](http://x) `c` | d\n"
    "::error::e\n# f \x1b[31m \u202eg\u2066 \x00 \ud800 =cmd() **h** </p></section>"
)


def verdict(status="ok", sentence="", says=""):
    def outcome(index):
        return "pass" if status == "ok" else "fail" if index == 0 and not sentence else "not judged"

    findings = tuple(
        Finding(
            criterion.says,
            criterion.points if status == "ok" else 0,
            criterion.points,
            outcome(index),
            says if outcome(index) == "fail" else "",
        )
        for index, criterion in enumerate(TASK.criteria)
    )
    return Verdict(TASK.id, status, findings, sentence)


def graded(student="ada", one=None, **changed):
    about = {"lesson": "03", "where": f"{student}.ipynb", "sha256": "ab" * 32, "terms": TERMS}
    about |= {"verdicts": (one or verdict(),), "seconds": 2.5}
    return Grade(student=student, **(about | changed))


GRADES = [
    graded("ada"),
    graded("eve", verdict("wrong", says=EVIL), warnings=(EVIL,)),
    graded("bob", verdict("not attempted", "The answer cell still holds its stub.")),
]
NBVAL = {
    ("ada", "03"): NbvalReport("ab" * 32, "v", (Cell(TASK.id, "passed"),)),
    ("eve", "03"): NbvalReport("ab" * 32, "v", (Cell(TASK.id, "failed", EVIL), Cell(TASK.id, ""))),
    ("bob", "03"): NbvalReport("ab" * 32, "v", trouble=EVIL),
}
LOST = [
    NotGraded("cem", EVIL, "the file is empty"),
    NotGraded("dan", "dan.ipynb", f"the grader could not grade it: {EVIL}"),
]


@pytest.fixture
def exercises(monkeypatch, tmp_path):
    monkeypatch.setattr(notebooks, "tasks", lambda lesson: [TASK])
    path = tmp_path / f"{small_course.NAME}.ipynb"
    nbformat.write(small_course.master(), path)
    return {"03": pristine(path)}


class Tags(HTMLParser):
    """The tags and attributes of a page, and whether each is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


# ---- for students ----


@pytest.mark.parametrize("one", GRADES, ids=lambda one: one.student)
def test_a_page_holds_no_markup_of_a_student(one, exercises):
    page = pages.html(one.student, Report([one], LOST, exercises, TERMS, NBVAL))
    assert "What nbval says" in page
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "img", "a", "iframe", "object"} & tags.tags
    assert tags.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class"} | {
        "role",
        "aria-label",
        "dir",
    }
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800]", page)


def test_a_page_has_the_findings_and_the_next_step(exercises):
    page = pages.html("ada", Report(GRADES[:1], [], exercises, TERMS))
    assert "5 of 5 points" in page and text.in_html(TASK.debrief) in page
    page = pages.html("bob", Report(GRADES[2:], [], exercises, TERMS))
    assert "0 of 5 points, not attempted" in page and "still holds its stub" in page
    assert text.in_html(TASK.hints[0]) in page and text.in_html(TASK.hints[2]) not in page
    for content in (page, pages.markdown("bob", Report(GRADES[2:], [], exercises, TERMS))):
        assert "ab" * 32 in content and "seed" not in content
        assert "sandbox: none" in content.replace("\\", "")


def test_markdown_holds_no_markup_of_a_student(exercises):
    content = pages.markdown("eve", Report([GRADES[1]], LOST, exercises, TERMS, NBVAL))
    content += pages.markdown("bob", Report([GRADES[2]], [], exercises, TERMS, NBVAL))
    content += pages.summary(Report(GRADES, LOST, exercises, TERMS, NBVAL)).partition("|")[0]
    assert "<script" not in content and "\n::error" not in content and "\n# f" not in content
    assert not re.search(r"(?<!\\)[`\[*|]", content.replace("###", "").replace("##", ""))
    assert "Hint" in content and "0 of 5 points, wrong" in content


def test_html_and_markdown_say_the_same(exercises):
    def words(content):
        return set(re.findall(r"[a-z]{4,}", content))

    page = pages.html("bob", Report(GRADES[2:], [], exercises, TERMS, NBVAL))
    body = re.sub(r"<[^>]+>", " ", page.partition("<body>")[2])
    content = pages.markdown("bob", Report(GRADES[2:], [], exercises, TERMS, NBVAL))
    assert words(content) == words(body)


# ---- for teachers ----


def test_the_gradebook_has_a_row_per_student_and_a_column_per_task(exercises):
    rows = list(
        csv.DictReader(io.StringIO(formats.gradebook(Report(GRADES, LOST, exercises, TERMS))))
    )
    assert [row["student"] for row in rows] == ["ada", "bob", "cem", "dan", "eve"]
    by_name = {row["student"]: row for row in rows}
    assert by_name["ada"][TASK.id] == "5" and by_name["bob"][TASK.id] == "0"
    assert by_name["cem"][TASK.id] == "" and "the file is empty" in by_name["cem"]["remarks"]
    assert by_name["ada"]["sha256"] == "ab" * 32
    assert (by_name["ada"]["seed"], by_name["ada"]["sandbox"]) == ("7", "none")


@pytest.mark.parametrize("content", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_no_cell_of_a_table_is_a_formula(content, exercises):
    cell = text.in_table(content)
    assert cell.startswith(("'", "\N{REPLACEMENT CHARACTER}")) and "\n" not in cell
    rows = formats.gradebook(Report([], [NotGraded("ada", content, "")], exercises, TERMS))
    remarks = next(csv.DictReader(io.StringIO(rows)))["remarks"]
    assert not remarks.startswith(text.FORMULA)


def test_the_summary_has_a_line_per_notebook_and_all_that_was_not_graded(exercises):
    content = pages.summary(Report(GRADES, LOST, exercises, TERMS))
    assert "3 notebooks graded, 1 with full points; 2 not graded." in content
    rows = [line for line in content.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 3 and all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    assert "- cem:" in content and "## To look at" in content and "sandbox\\: none" in content


# ---- for other programs ----


def test_junit_is_xml_and_counts(exercises):
    root = ElementTree.fromstring(
        formats.junit(Report(GRADES, LOST, exercises, TERMS)).partition("\n")[2]
    )
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["ada 03", "eve 03", "bob 03", "cem", "dan"]
    assert suites["eve 03"].get("failures") == "1" and suites["bob 03"].get("skipped") == "1"
    assert suites["cem"].get("errors") == "1"
    failure = suites["eve 03"].find("testcase/failure")
    assert failure.get("type") == "wrong" and "alert(1)" in failure.text
    stamp = {p.get("name"): p.get("value") for p in suites["ada 03"].iter("property")}
    assert stamp == {
        "sha256": "ab" * 32,
        "version": "0.1.0+test",
        "seed": "7",
        "sandbox": "none",
    }


# The fields of results.json that Gradescope documents for autograders, and what each may hold:
# https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format
VISIBILITY = {"hidden", "after_due_date", "after_published", "visible"}
FORMATS = {"text", "html", "simple_format", "md", "ansi"}
WHOLE = {
    "score": (int, float),
    "execution_time": (int, float),
    "output": str,
    "output_format": FORMATS,
    "test_output_format": FORMATS,
    "test_name_format": FORMATS,
    "visibility": VISIBILITY,
    "stdout_visibility": VISIBILITY,
    "extra_data": dict,
    "tests": list,
    "leaderboard": list,
}
TEST = {
    "score": (int, float),
    "max_score": (int, float),
    "status": {"passed", "failed"},
    "name": str,
    "name_format": FORMATS,
    "number": str,
    "output": str,
    "output_format": FORMATS,
    "tags": list,
    "visibility": VISIBILITY,
    "extra_data": dict,
}


def documented(part, fields):
    for key, value in part.items():
        allowed = fields[key]
        if isinstance(allowed, set):
            assert value in allowed, key
        else:
            assert isinstance(value, allowed) and not isinstance(value, bool), key


@pytest.mark.parametrize("one", GRADES, ids=lambda one: one.student)
def test_gradescope_finds_only_fields_that_it_documents(one, exercises):
    results = json.loads(formats.gradescope(Report([one], LOST, exercises, TERMS)))
    documented(results, WHOLE)
    for test in results["tests"]:
        documented(test, TEST)
    assert results["score"] == sum(test["score"] for test in results["tests"]) == one.points
    assert "seed" not in json.dumps(results) and "sandbox: none" in results["output"]
    assert results["tests"][0]["max_score"] == 5


# ---- text of students ----


def test_text_is_cut_and_has_no_characters_that_hide_or_reorder():
    assert text.plain("a\x1b[0m\u202eb\u200bc\nd") == "a�[0m�b�c\nd"
    assert len(text.plain("x" * 10_000)) == text.SENTENCE
    assert text.in_line(EVIL, "b").count("\n") == 0
