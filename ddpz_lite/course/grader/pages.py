"""Reports for people: a student's page, as HTML and as Markdown, and the teacher's summary.

Plain Python and no template engine: nearly every word goes through the escapes of `text`, which a
template would have to name at each place too.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddpz_lite.course.grader.nbval import summed
from ddpz_lite.course.grader.report import (
    MISSING,
    NO_STUDENT,
    UNLISTED,
    Box,
    Chapter,
    Report,
    chapters,
)
from ddpz_lite.course.grader.text import in_html, in_markdown

MARKS = {"pass": "✓", "fail": "✗", "not judged": "–"}

STYLE = """
:root { color-scheme: light dark; --line: #8888884d; --quiet: #6a737d; --good: #0a7d55;
  --bad: #c0440e; }
@media (prefers-color-scheme: dark) { :root { --quiet: #9aa4af; --good: #3fbf8f; --bad: #ff8a5c; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
section { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0; }
h3 { font-size: 1rem; margin: 0; display: flex; gap: 1rem; justify-content: space-between; }
h3 span { white-space: nowrap; font-variant-numeric: tabular-nums; }
ul { list-style: none; padding: 0; margin: .5rem 0 0; }
li { padding-left: 1.6rem; margin: .2rem 0; }
li b { display: inline-block; width: 1.6rem; margin-left: -1.6rem; }
.pass b, .ok { color: var(--good); } .fail b, .open { color: var(--bad); }
p { margin: .5rem 0 0; overflow-wrap: anywhere; } .quiet, .not-judged { color: var(--quiet); }
small { color: var(--quiet); overflow-wrap: anywhere; } footer { margin-top: 2rem; }
"""


def html(student: str, report: Report) -> str:
    """A student's feedback as one HTML file, without scripts, that needs no other file."""
    points = f"{report.points} of {report.out_of} points"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">",
        f"<title>{in_html(student)}: {points}</title><style>{STYLE}</style>",
        f'</head><body><h1 dir="auto">{in_html(student)}</h1><p>{points}</p>',
    ]
    for chapter in chapters(report):
        parts += _html_chapter(chapter)
    parts.append(f"<footer><small>{in_html(report.stamp)}</small></footer></body></html>\n")
    return "\n".join(parts)


def _html_chapter(chapter: Chapter) -> Iterator[str]:
    yield f"<h2>{in_html(chapter.head)}</h2>"
    yield from (f'<p class="open">{in_html(text)}</p>' for text in chapter.notes)
    if chapter.about:
        yield f"<p>{in_html(chapter.about)}</p>"
    for box in chapter.boxes:
        yield from _html_box(box)


def _html_box(box: Box) -> Iterator[str]:
    yield "<section>"
    if box.title:
        word = f'<span class="{"ok" if box.solved else "open"}">{in_html(box.word)}</span>'
        yield f"<h3>{in_html(box.title)}{word}</h3>"
    if box.sentence:
        yield f"<p>{in_html(box.sentence)}</p>"
    yield "<ul>"
    for item in box.items:
        mark = f'<b role="img" aria-label="{item.mark}">{MARKS[item.mark]}</b>'
        says = f"<p>{in_html(item.says)}</p>" if item.says else ""
        yield f'<li class="{item.mark.replace(" ", "-")}">{mark}{in_html(item.text)}{says}</li>'
    yield "</ul>"
    if box.onward:
        yield f'<p class="quiet">{in_html(box.onward)}</p>'
    yield "</section>"


def markdown(student: str, report: Report) -> str:
    """The same feedback as Markdown."""
    head = f"# {in_markdown(student)}: {report.points} of {report.out_of} points"
    lines = [head, "", *(line for chapter in chapters(report) for line in _md_chapter(chapter))]
    return "\n".join([*lines, "---", "", in_markdown(report.stamp), ""])


def _md_chapter(chapter: Chapter) -> Iterator[str]:
    yield f"## {in_markdown(chapter.head)}\n"
    yield from (f"{in_markdown(text)}\n" for text in chapter.notes)
    if chapter.about:
        yield f"{in_markdown(chapter.about)}\n"
    for box in chapter.boxes:
        yield from _md_box(box)


def _md_box(box: Box) -> Iterator[str]:
    if box.title:
        yield f"### {in_markdown(f'{box.title}: {box.word}')}\n"
    if box.sentence:
        yield f"{in_markdown(box.sentence)}\n"
    for item in box.items:
        line_break = "\\" if item.says else ""
        yield f"- {MARKS[item.mark]} {in_markdown(item.text)}{line_break}"
        if item.says:
            yield f"  {in_markdown(item.says)}"
    yield ""
    if box.onward:
        yield f"{in_markdown(box.onward)}\n"


# ---- the teacher's ----


def summary(report: Report) -> str:
    """A CI job's summary in Markdown: a line per notebook, what was not graded, what to look at."""
    full = sum(grade.points == grade.out_of for grade in report.grades)
    counts = f"{len(report.grades)} notebooks graded, {full} with full points"
    lines = [
        "# Grades",
        "",
        f"{counts}; {len(report.lost)} not graded.",
        *([f"{in_markdown(summed(report.nbval))}."] if report.nbval else []),
        "",
        "| student | exercise | points | tasks |",
        "|---|---|---:|---|",
        *_rows(report),
    ]
    lost = [(one.student or NO_STUDENT, f"{one.where}: {one.reason}") for one in report.lost]
    texts = [(g.student, text) for g in report.grades for text in (*g.warnings, *g.notes)]
    look = [*texts, *((name, UNLISTED) for name in report.unlisted), *report.look]
    missing = [(name, MISSING) for name in report.missing]
    for head, found in (("Not graded", lost), ("Missing", missing), ("To look at", look)):
        if found:
            lines += ["", f"## {head}", ""]
            lines += [f"- {in_markdown(name)}: {in_markdown(text)}" for name, text in found]
    terms = report.terms
    lines += ["", in_markdown(f"{terms.version}, seed {terms.seed}, sandbox: {terms.sandbox}"), ""]
    return "\n".join(lines)


def _rows(report: Report) -> Iterator[str]:
    for grade in report.grades:
        tasks = ", ".join(
            f"{v.task.partition('.')[2]} {v.points}/{v.out_of}"
            + ("" if v.solved else f" ({v.status})")
            for v in grade.verdicts
        )
        yield (
            f"| {in_markdown(grade.student)} | {grade.lesson} | {grade.points} of {grade.out_of} "
            f"| {in_markdown(tasks)} |"
        )
