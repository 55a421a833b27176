"""Grades for people: a page for each student, and a summary for the teacher.

A page says what was looked at, what was found and where to go on. It never says what was expected:
the sentences come from the judges, and a hint is the task's own first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..grade.score import Finding, Verdict
from ..grade.task import Task
from .batch import Failure, Grade, Terms
from .formats import in_html, in_markdown, stamp
from .intake import Refusal
from .merge import Pristine
from .nbval import Reports, Said, summed

MARKS = {"pass": "✓", "fail": "✗", "not judged": "–"}
NBVAL = {"passed": "pass", "failed": "fail"}  # its words -> ours; others are not judged
NBVAL_HEAD = "What nbval says"
NBVAL_ABOUT = (
    "pytest ran the whole notebook with these answers, cell by cell, as you can: pytest "
    "--nbval-lax. This is for you to read. It is worth no points, and changes none of those above."
)
LATER = "not judged: the first must be right before it"

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


def page(
    student: str,
    grades: Sequence[Grade],
    lost: Sequence[Refusal | Failure],
    exercises: dict[str, Pristine],
    terms: Terms,
    said: Reports | None = None,
) -> str:
    """A student's feedback as one HTML file, without scripts, that needs nothing beside it."""
    points, out_of = sum(g.points for g in grades), sum(g.out_of for g in grades)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">",
        f"<title>{in_html(student)}: {points} of {out_of} points</title><style>{STYLE}</style>",
        f"</head><body><h1>{in_html(student)}</h1><p>{points} of {out_of} points</p>",
    ]
    for grade in grades:
        exercise = exercises[grade.lesson]
        about = {task.id: task for task in exercise.tasks}
        head = f"{grade.lesson} {exercise.title}: {grade.points} of {grade.out_of} points"
        parts.append(f"<h2>{in_html(head)}</h2>")
        parts += [f'<p class="open">{in_html(_capital(text))}.</p>' for text in grade.warnings]
        parts += [_section(verdict, about[verdict.task]) for verdict in grade.verdicts]
        if told := (said or {}).get((student, grade.lesson)):
            parts += [f"<h2>{NBVAL_HEAD}</h2><p>{in_html(NBVAL_ABOUT)}</p>", _nbval_section(told)]
    for one in lost:
        parts.append(f"<h2>{in_html(one.where)}</h2><p>{in_html(f'Not graded: {one.reason}.')}</p>")
    parts.append(f"<footer><small>{in_html(stamp(grades, terms))}</small></footer></body></html>\n")
    return "\n".join(parts)


def _section(verdict: Verdict, task: Task) -> str:
    word = "ok" if verdict.solved else "open"
    rows = [
        f"<section><h3>{in_html(f'{task.id}  {task.title}')}"
        f'<span class="{word}">{in_html(_word(verdict))}</span></h3>'
    ]
    if verdict.sentence:
        rows.append(f"<p>{in_html(verdict.sentence)}</p>")
    rows.append("<ul>")
    for found in verdict.findings:
        kind = found.outcome.replace(" ", "-")
        rows.append(
            f'<li class="{kind}"><b role="img" aria-label="{found.outcome}">'
            f"{MARKS[found.outcome]}</b>{in_html(_aspect(found, verdict))}"
            + (f"<p>{in_html(_capital(found.sentence))}</p>" if found.sentence else "")
            + "</li>"
        )
    rows.append(f'</ul><p class="quiet">{in_html(_onward(verdict, task))}</p></section>')
    return "\n".join(rows)


def _nbval_section(told: Said) -> str:
    rows = ["<section><ul>"]
    for kind, text, says in _nbval_rows(told):
        rows.append(
            f'<li class="{kind.replace(" ", "-")}"><b role="img" aria-label="{kind}">{MARKS[kind]}'
            f"</b>{in_html(text)}" + (f"<p>{in_html(says)}</p>" if says else "") + "</li>"
        )
    return "\n".join([*rows, "</ul></section>"])


def _nbval_rows(told: Said) -> Iterator[tuple[str, str, str]]:
    """(kind of mark, which cell and what became of it, the first lines of a failure)."""
    if told.trouble:
        yield "not judged", f"nbval gave no report: {told.trouble}", ""
    for cell in told.cells:
        outcome = cell.outcome or "not in the report"
        yield NBVAL.get(outcome, "not judged"), f"{cell.task}: {outcome}", cell.says


def markdown(
    student: str,
    grades: Sequence[Grade],
    lost: Sequence[Refusal | Failure],
    exercises: dict[str, Pristine],
    terms: Terms,
    said: Reports | None = None,
) -> str:
    """The same feedback as Markdown."""
    points, out_of = sum(g.points for g in grades), sum(g.out_of for g in grades)
    lines = [f"# {in_markdown(student)}: {points} of {out_of} points", ""]
    for grade in grades:
        exercise = exercises[grade.lesson]
        about = {task.id: task for task in exercise.tasks}
        head = f"{grade.lesson} {exercise.title}: {grade.points} of {grade.out_of} points"
        lines += [f"## {in_markdown(head)}", ""]
        lines += [f"{in_markdown(_capital(text))}.\n" for text in grade.warnings]
        for verdict in grade.verdicts:
            task = about[verdict.task]
            head = f"{task.id} {task.title}: {_word(verdict)}"
            lines += [f"### {in_markdown(head)}", ""]
            lines += [f"{in_markdown(verdict.sentence)}\n"] if verdict.sentence else []
            for found in verdict.findings:
                lines.append(f"- {MARKS[found.outcome]} {in_markdown(_aspect(found, verdict))}")
                lines += [f"  {in_markdown(_capital(found.sentence))}"] if found.sentence else []
            lines += ["", in_markdown(_onward(verdict, task)), ""]
        if told := (said or {}).get((student, grade.lesson)):
            lines += [f"## {NBVAL_HEAD}", "", in_markdown(NBVAL_ABOUT), ""]
            for kind, text, says in _nbval_rows(told):
                lines.append(f"- {MARKS[kind]} {in_markdown(text)}")
                lines += [f"  {in_markdown(says)}"] if says else []
            lines.append("")
    for one in lost:
        lines += [f"## {in_markdown(one.where)}", "", in_markdown(f"Not graded: {one.reason}."), ""]
    lines += ["---", "", in_markdown(stamp(grades, terms)), ""]
    return "\n".join(lines)


def _word(verdict: Verdict) -> str:
    return f"{verdict.points} of {verdict.out_of} points, {verdict.status}"


def _aspect(found: Finding, verdict: Verdict) -> str:
    later = found.outcome == "not judged" and not verdict.sentence
    return f"{found.says}: {found.points} of {found.out_of}" + (f" ({LATER})" if later else "")


def _onward(verdict: Verdict, task: Task) -> str:
    return task.debrief if verdict.solved else f"Hint: {task.hints[0]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- the teacher's ----


def summary(
    grades: Sequence[Grade],
    lost: Sequence[Refusal | Failure],
    terms: Terms,
    said: Reports | None = None,
) -> str:
    """A CI job's summary in Markdown: a line per notebook, what was not graded, what to look at."""
    full = sum(grade.points == grade.out_of for grade in grades)
    lines = [
        "# Grades",
        "",
        f"{len(grades)} notebooks graded, {full} with full points; {len(lost)} not graded.",
        *([f"{in_markdown(summed(said))}."] if said else []),
        "",
        "| student | exercise | points | tasks |",
        "|---|---|---:|---|",
    ]
    for grade in grades:
        tasks = ", ".join(
            f"{v.task.partition('.')[2]} {v.points}/{v.out_of}"
            + ("" if v.solved else f" ({v.status})")
            for v in grade.verdicts
        )
        lines.append(
            f"| {in_markdown(grade.student)} | {grade.lesson} | {grade.points} of {grade.out_of} "
            f"| {in_markdown(tasks)} |"
        )
    if lost:
        lines += ["", "## Not graded", ""]
        lines += [
            f"- {in_markdown(one.student)}: {in_markdown(f'{one.where}: {one.reason}')}"
            for one in lost
        ]
    warnings = [(grade.student, text) for grade in grades for text in grade.warnings]
    if warnings:
        lines += ["", "## To look at", ""]
        lines += [f"- {in_markdown(student)}: {in_markdown(text)}" for student, text in warnings]
    lines += ["", in_markdown(f"{terms.version}, seed {terms.seed}, sandbox: {terms.sandbox}"), ""]
    return "\n".join(lines)
