"""Answers that resemble each other: an aid for reading them, not a verdict.

Four lists. Notebooks whose files are identical. Answers whose source is the same after formatting,
however short. Answers that report a run with the same seed: each learner has a seed, so at most one
of them made that run. And pairs of longer answers whose syntax trees resemble each other, with the
names that an answer defines replaced by their order of appearance and without docstrings, comments
and layout, so renaming and moving lines changes little. Short answers to one question are alike
without copying, so each number stands next to the usual one for its task. Copies of the official
solution are listed separately.

Not compare50: it compares folders of files, and here the unit is one answer cell per task, next to
the usual similarity of that task.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ddpz_lite.course.grader.batch import Terms
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.submission import Submission
from ddpz_lite.course.grader.text import in_markdown

WIDTH = 6  # nodes of the tree in one piece
LEAST = 40  # pieces: a shorter answer is too short to compare
ALIKE = 0.9  # from here on a pair is listed
LISTED = 200  # pairs
NAMED = 20  # students in one row
BLOCK = 4096  # pieces that are counted at once: 32 MB for 1,000 answers


@dataclass(frozen=True)
class Pair:
    """Two answers to a task: how alike they are, and how alike two answers to it usually are."""

    task: str
    first: str
    second: str
    alike: float  # 0 to 1: shared pieces of all pieces
    usual: float


@dataclass(frozen=True)
class Group:
    """Students with the same notebook or the same answer."""

    about: str  # the exercise or the task
    students: tuple[str, ...]
    lines: int = 0  # of the answer


@dataclass
class Similarity:
    """What resembles what in a class."""

    files: list[Group] = field(default_factory=list)  # identical notebooks
    sources: list[Group] = field(default_factory=list)  # equal answers
    official: list[Group] = field(default_factory=list)  # equal to the official solution
    seeds: list[Group] = field(default_factory=list)  # of a run, in answers of several students
    pairs: list[Pair] = field(default_factory=list)
    common: dict[str, float] = field(default_factory=dict)  # task -> usual, where all are alike
    short: int = 0  # answers that are too short to compare
    answers: int = 0


@dataclass(frozen=True)
class _Answer:
    """One attempted answer."""

    task: str
    student: str
    lines: int
    source: str  # formatted
    official: bool
    seed: str  # the number after "seed" in a dict, "" if there is none
    cut: frozenset[int]


def find(submissions: Sequence[Submission], exercises: Mapping[str, Pristine]) -> Similarity:
    """What resembles what. exercises: by lesson."""
    every = [one for submission in submissions for one in _answers(submission, exercises)]
    there = {(one.student, one.task.partition(".")[0]) for one in every}
    files = [
        (one.lesson, one.sha256, one.student, 0)
        for one in submissions
        if (one.student, one.lesson) in there
    ]
    own = [one for one in every if not one.official]
    found = Similarity(
        files=_groups(files, 2),
        sources=_groups([(a.task, a.source, a.student, a.lines) for a in own], 2),
        official=_groups([(a.task, "", a.student, a.lines) for a in every if a.official], 1),
        seeds=_groups(
            [(f"{a.task}, seed {a.seed}", "", a.student, a.lines) for a in own if a.seed], 2
        ),
        short=sum(len(one.cut) < LEAST for one in every),
        answers=len(every),
    )
    by_task: dict[str, dict[str, frozenset[int]]] = {}
    for one in own:
        if len(one.cut) >= LEAST:
            by_task.setdefault(one.task, {})[one.student] = one.cut
    same = {(g.about, name) for g in found.sources for name in g.students}
    for task, by_student in by_task.items():
        found.pairs += _pairs(task, by_student, found.common, same)
    found.pairs.sort(key=lambda pair: (-pair.alike, pair.task, pair.first))
    del found.pairs[LISTED:]
    return found


def _answers(submission: Submission, exercises: Mapping[str, Pristine]) -> Iterator[_Answer]:
    """The answers that are more than their stub and parse."""
    exercise = exercises[submission.lesson]
    for name, source in submission.answers:
        if exercise.attempted(name, source) and (same := formatted(source)):
            official = same == formatted(exercise.solutions.get(name, ""))
            about = exercise.answers[name], submission.student, len(source.strip().splitlines())
            yield _Answer(*about, same, official, seed_of(same), pieces(source))


def _groups(rows: Sequence[tuple[str, str, str, int]], least: int) -> list[Group]:
    """Rows (about, content, student, lines) with equal content, if `least` students have it."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for about, content, student, lines in rows:
        found.setdefault((about, content), []).append((student, lines))
    groups = [
        Group(about, tuple(sorted(student for student, _ in group)), max(n for _, n in group))
        for (about, _), group in found.items()
        if len(group) >= least
    ]
    return sorted(groups, key=lambda group: (group.about, group.students))


def _pairs(
    task: str,
    by_student: Mapping[str, frozenset[int]],
    common: dict[str, float],
    same: set[tuple[str, str]],
) -> Iterator[Pair]:
    """The pairs of a task from ALIKE on; a task whose answers usually are alike goes to `common`.

    same: (task, student) of answers that are listed as equal.
    """
    students = sorted(by_student)
    first, second = torch.triu_indices(len(students), len(students), 1)
    scores = alike([by_student[student] for student in students])[first, second]
    usual = scores.median().item() if len(scores) else 0.0
    if usual >= ALIKE and len(scores) > 1:
        common[task] = usual
        return
    for n in (scores >= ALIKE).nonzero().flatten():
        two = students[first[n]], students[second[n]]
        if scores[n] < 1 or not all((task, name) in same for name in two):
            yield Pair(task, *two, scores[n].item(), usual)


def formatted(source: str) -> str:
    """The source as Python would format it, without comments; "" for what does not parse."""
    try:
        return ast.unparse(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def seed_of(source: str) -> str:
    """The first number that a dict in this source gives for "seed"; "" if there is none."""
    for node in ast.walk(ast.parse(source)):
        entries = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        for key, value in entries:
            named = isinstance(key, ast.Constant) and key.value == "seed"
            if named and isinstance(value, ast.Constant):
                return str(value.value)
    return ""


def alike(cuts: Sequence[frozenset[int]]) -> torch.Tensor:
    """Shared pieces of all pieces, for each two of n answers: (n, n), fp64.

    A row of zeros and ones for each answer: what two share is a product of matrices, which 1,000
    students wait less for than for half a million intersections.
    """
    sizes = torch.tensor([len(cut) for cut in cuts], dtype=torch.float64)
    every = sorted(frozenset().union(*cuts))
    shared = torch.zeros(len(cuts), len(cuts), dtype=torch.float64)
    for start in range(0, len(every), BLOCK):
        column = {piece: i for i, piece in enumerate(every[start : start + BLOCK])}
        held = torch.zeros(len(cuts), len(column), dtype=torch.float64)
        for row, cut in zip(held, cuts, strict=True):
            row[[column[piece] for piece in cut & column.keys()]] = 1.0
        shared += held @ held.T
    return shared / (sizes[:, None] + sizes - shared)


def pieces(source: str) -> frozenset[int]:
    """The runs of WIDTH nodes of an answer's tree, as hashes; none for what does not parse."""
    try:
        nodes = list(_nodes(ast.parse(source), {}))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(hash(tuple(nodes[i : i + WIDTH])) for i in range(len(nodes) - WIDTH + 1))


def _nodes(tree: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """The tree in its order: kinds of nodes, attributes, constants, numbered names."""
    body = getattr(tree, "body", None)
    if isinstance(body, list) and isinstance(tree, (ast.FunctionDef, ast.ClassDef, ast.Module)):
        first = body[0] if body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            tree.body = body[1:]  # the docstring
    yield type(tree).__name__
    if isinstance(tree, ast.Name):
        yield names.setdefault(tree.id, f"name {len(names)}")
    elif isinstance(tree, ast.arg):
        yield names.setdefault(tree.arg, f"name {len(names)}")
    elif isinstance(tree, ast.Attribute):
        yield tree.attr
    elif isinstance(tree, ast.Constant):
        yield repr(tree.value)[:80]
    for child in ast.iter_child_nodes(tree):
        yield from _nodes(child, names)


def report(found: Similarity, terms: Terms) -> str:
    """The lists in Markdown."""
    lines = [
        "# Answers that resemble each other",
        "",
        "An aid for reading, not a verdict: there are few ways to write a short answer well.",
        "",
    ]
    lines += _listed("Identical notebooks", "exercise", found.files, lines=False)
    lines += _listed("Answers that are equal after formatting", "task", found.sources)
    lines += _listed("Copies of the official solution", "task", found.official)
    lines += _listed("Runs with the same seed", "task", found.seeds)
    lines += ["## Similar answers", "", *_table_of_pairs(found.pairs), ""]
    for task, usual in found.common.items():
        text = f"{task}: most answers are alike (usually {usual:.0%}), so no pair is listed."
        lines += [in_markdown(text), ""]
    short = f"{found.short} of {found.answers} answers were too short to compare in this way."
    return "\n".join([*lines, short, "", in_markdown(f"checker {terms.version}"), ""])


def _listed(title: str, about: str, groups: Sequence[Group], lines: bool = True) -> Iterator[str]:
    yield from (f"## {title}", "")
    if not groups:
        yield from ("None.", "")
        return
    head = f"| {about} | students |" + (" lines |" if lines else "")
    yield from (head, "|---|---|" + ("---:|" if lines else ""))
    for group in groups:
        names = ", ".join(group.students[:NAMED])
        more = f" and {len(group.students) - NAMED} more" if len(group.students) > NAMED else ""
        row = f"| {in_markdown(group.about)} | {in_markdown(names + more)} |"
        yield row + (f" {group.lines} |" if lines else "")
    yield ""


def _table_of_pairs(pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return [f"No pair stands out: none is {ALIKE:.0%} alike or more."]
    head = ["The column `usual` is the median over all pairs of the task.", ""]
    head += ["| task | student | student | alike | usual |", "|---|---|---|---:|---:|"]
    return head + [
        f"| {in_markdown(pair.task)} | {in_markdown(pair.first)} | {in_markdown(pair.second)} "
        f"| {pair.alike:.0%} | {pair.usual:.0%} |"
        for pair in pairs
    ]
