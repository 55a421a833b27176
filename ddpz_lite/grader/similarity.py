"""Answers that resemble each other: an aid for whoever reads them, never a verdict.

An answer is compared as its syntax tree, with the names that it gives itself replaced by their
order of appearance, and without docstrings, comments and layout: renaming and moving lines about
change little. Short answers to the same question are alike without anybody having copied, so each
number stands beside what is usual for its task.
"""

from __future__ import annotations

import ast
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .batch import Terms
from .exercise import Pristine
from .submission import Submission
from .text import in_markdown

WIDTH = 6  # nodes of the tree in one piece
LEAST = 40  # pieces: a shorter answer says nothing
ALIKE = 0.9  # from here on a pair is listed
LISTED = 200  # pairs


@dataclass(frozen=True)
class Pair:
    """Two answers to a task: how alike they are, and how alike two answers to it usually are."""

    task: str
    first: str
    second: str
    alike: float  # 0 to 1: shared pieces of all pieces
    usual: float


def pairs(
    submissions: Sequence[Submission], exercises: Mapping[str, Pristine]
) -> tuple[list[Pair], dict[str, float]]:
    """(the pairs that are alike from ALIKE on, the most alike first; task -> how alike its answers
    usually are, for tasks where that is ALIKE or more, whose pairs would say nothing).
    """
    found: list[Pair] = []
    common: dict[str, float] = {}
    answers: dict[str, dict[str, frozenset]] = {}
    for submission in submissions:
        tasks = exercises[submission.lesson].answers
        for name, source in dict(submission.answers).items():
            cut = pieces(source)
            if len(cut) >= LEAST:
                answers.setdefault(tasks[name], {})[submission.student] = cut
    for task, by_student in answers.items():
        scores = {
            (a, b): len(by_student[a] & by_student[b]) / len(by_student[a] | by_student[b])
            for a, b in itertools.combinations(sorted(by_student), 2)
        }
        usual = statistics.median(scores.values()) if scores else 0.0
        if usual >= ALIKE and len(scores) > 1:
            common[task] = usual
            continue
        alike = {two: score for two, score in scores.items() if score >= ALIKE}
        found += [Pair(task, *two, score, usual) for two, score in alike.items()]
    found.sort(key=lambda pair: (-pair.alike, pair.task, pair.first))
    return found[:LISTED], common


def pieces(source: str) -> frozenset:
    """The runs of WIDTH nodes of an answer's tree; none for what does not parse."""
    try:
        nodes = list(_nodes(ast.parse(source), {}))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    return frozenset(tuple(nodes[i : i + WIDTH]) for i in range(len(nodes) - WIDTH + 1))


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


def report(found: Sequence[Pair], common: Mapping[str, float], terms: Terms) -> str:
    """The pairs in Markdown."""
    lines = [
        "# Answers that resemble each other",
        "",
        "An aid for reading, not a verdict: there are few ways to write a short answer well. The",
        "column `usual` is the median over all pairs of the task.",
        "",
    ]
    if found:
        lines += ["| task | student | student | alike | usual |", "|---|---|---|---:|---:|"]
        lines += [
            f"| {in_markdown(pair.task)} | {in_markdown(pair.first)} | {in_markdown(pair.second)} "
            f"| {pair.alike:.0%} | {pair.usual:.0%} |"
            for pair in found
        ]
    else:
        lines.append(f"No pair of answers stands out: none is {ALIKE:.0%} alike or more.")
    for task, usual in common.items():
        text = (
            f"{task}: most answers of the class are alike (usually {usual:.0%}), so none is listed."
        )
        lines += ["", in_markdown(text)]
    return "\n".join([*lines, "", in_markdown(f"checker {terms.version}"), ""])
