"""Answers that resemble each other: an aid for whoever reads them, never a verdict.

An answer is compared as its syntax tree, with the names that it gives itself replaced by their
order of appearance, and without docstrings, comments and layout: renaming and moving lines about
change little. Short answers to the same question are alike without anybody having copied, so each
number stands beside what is usual for its task.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ddpz_lite.course.grader.batch import Terms
from ddpz_lite.course.grader.exercise import Pristine
from ddpz_lite.course.grader.submission import Submission
from ddpz_lite.course.grader.text import in_markdown

WIDTH = 6  # nodes of the tree in one piece
LEAST = 40  # pieces: a shorter answer says nothing
ALIKE = 0.9  # from here on a pair is listed
LISTED = 200  # pairs
BLOCK = 4096  # pieces that are counted at once: 32 MB for 1,000 answers


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
    answers: dict[str, dict[str, frozenset[int]]] = {}
    for submission in submissions:
        tasks = exercises[submission.lesson].answers
        for name, source in dict(submission.answers).items():
            cut = pieces(source)
            if len(cut) >= LEAST:
                answers.setdefault(tasks[name], {})[submission.student] = cut
    for task, by_student in answers.items():
        students = sorted(by_student)
        first, second = torch.triu_indices(len(students), len(students), 1)
        scores = alike([by_student[student] for student in students])[first, second]
        usual = scores.median().item() if len(scores) else 0.0
        if usual >= ALIKE and len(scores) > 1:
            common[task] = usual
            continue
        for n in (scores >= ALIKE).nonzero().flatten():
            two = students[first[n]], students[second[n]]
            found.append(Pair(task, *two, scores[n].item(), usual))
    found.sort(key=lambda pair: (-pair.alike, pair.task, pair.first))
    return found[:LISTED], common


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
