"""Mutants of a solution: small mistakes, made by rule, that its judge has to find.

`make` changes one thing of an answer's source at a time: a statement is dropped or repeated, a
loop cut, a condition negated, a number or an index moved by one, a world, a rank or a dtype
made constant, a clone, a wait or a division left out, a first result kept for all later calls. What
a judge lets pass is either a hole in it or not a mistake. The latter are listed in the lesson's
answers under EQUIVALENT, each with the reason.

    cd tests && python -m answers 09 --mutants
"""

from __future__ import annotations

import ast
import copy
import importlib
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from answers import trying
from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.run import draw, judge_all
from ddpz_lite.course.check.task import Task, tasks

SECONDS = 5.0  # until a mutant's turn is ended
WIDTH = 60  # characters of a fragment in a name
DROPPED = {"clone", "contiguous", "detach", "wait", "float", "double", "flatten", "to", "abs"}
SWAPPED = {
    **{"sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "amin": "amax"},
    **{"any": "all", "all": "any", "SUM": "MAX", "MAX": "SUM", "zeros": "ones", "ones": "zeros"},
    **{"zeros_like": "ones_like", "new_zeros": "new_ones", "div_": "mul_", "mul_": "div_"},
    **{"add_": "sub_", "sub_": "add_", "append": "count"},
}
LIKE = {"empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones"}
SIZES = {"numel", "size", "len"}
CONSTANT = {"get_world_size": 2, "get_rank": 0}
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv,
}  # fmt: skip
KEEPING = """
_kept = {}


def _once(function):
    def first(*args, **options):
        if function not in _kept:
            _kept[function] = function(*args, **options)
        return _kept[function]
    return first
"""


@dataclass(frozen=True)
class Mutant:
    """name: what became what; line: where, in the answer cell."""

    name: str
    line: int
    source: str


@dataclass(frozen=True)
class MutationResult:
    """The mutants of one task: how many were made and killed, and which survive."""

    task: str
    made: int
    killed: int
    surviving: list[Mutant] = field(default_factory=list)
    equivalent: list[str] = field(default_factory=list)  # survive, and are listed with a reason
    stale: list[str] = field(default_factory=list)  # are listed, and are killed or not made

    @property
    def share(self) -> float:
        """The part of the mutants that are mistakes which the judge found."""
        return self.killed / max(1, self.made - len(self.equivalent))

    def __str__(self) -> str:
        lines = [
            f"{self.task}: {self.made} made, {self.killed} killed, {len(self.equivalent)} "
            f"equivalent, {len(self.surviving)} surviving ({self.share:.1%} killed)"
        ]
        lines += [f"    line {m.line}: {m.name}" for m in self.surviving]
        lines += [f"    listed as equivalent, and is not: {name}" for name in self.stale]
        return "\n".join(lines)


# ---- making them ----


def make(source: str) -> list[Mutant]:
    """The mutants of an answer cell, in the order of its lines."""
    tree = ast.parse(source)
    found: dict[str, Mutant] = {}
    known = {ast.unparse(tree)}
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    spared = {id(keyword.value) for keyword in keywords if keyword.arg == "async_op"}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in spared:  # whether to wait at once is the answer's own choice
            continue
        for words, new in _changes(node):
            text = _changed(tree, number, new)
            if text is None or text in known:
                continue
            known.add(text)
            name = f"{_short(node)} -> {words}"
            same = sum(mutant.name.partition(" (#")[0] == name for mutant in found.values())
            name += f" (#{same + 1})" if same else ""
            place = node.target if isinstance(node, ast.comprehension) else node
            found[name] = Mutant(name, getattr(place, "lineno", 0), text)
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return f"`{text}`" if len(text) <= WIDTH else f"`{text[: WIDTH - 3]}...`"


def _changed(tree: ast.Module, number: int, new: ast.AST | list[ast.stmt]) -> str | None:
    """The source with node `number` replaced; None where that is no program."""
    tree = copy.deepcopy(tree)
    old = list(ast.walk(tree))[number]
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(part is old for part in value):
                at = next(i for i, part in enumerate(value) if part is old)
                value[at : at + 1] = new if isinstance(new, list) else [new]
    try:
        text = ast.unparse(ast.fix_missing_locations(tree))
        compile(text, "<mutant>", "exec")
    except (SyntaxError, ValueError, TypeError, AttributeError):
        return None
    return (KEEPING + text) if "_kept." in text or "@_once" in text else text


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """(what it becomes in words, the new node or statements) for all that can be changed here."""
    if isinstance(node, ast.stmt):
        yield from _statement(node)
    elif isinstance(node, ast.expr):
        for new in _expression(node):
            yield _short(new), new
    elif isinstance(node, ast.comprehension):
        for part in ("[:1]", "[-1:]", "[:-1]"):
            new = copy.deepcopy(node)
            new.iter = _parsed(f"list({ast.unparse(node.iter)}){part}")
            yield part, new


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _statement(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.FunctionDef):
        if node.name != "__init__" and not node.decorator_list:
            new = copy.deepcopy(node)
            new.decorator_list = [_parsed("_once")]
            yield "its first result, kept", new
        return
    if isinstance(node, ast.ClassDef | ast.Import | ast.ImportFrom | ast.Pass | ast.Global):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    yield "dropped", ast.Pass()
    if isinstance(node, ast.Expr | ast.Assign) and any(_is_message(n) for n in ast.walk(node)):
        yield "twice", [node, copy.deepcopy(node)]
    if isinstance(node, ast.For):
        for part in ("[:1]", "[-1:]", "[:-1]", "[1:]"):
            new = copy.deepcopy(node)
            new.iter = _parsed(f"list({ast.unparse(node.iter)}){part}")
            yield part, new
    if isinstance(node, ast.If | ast.While):
        for test in _conditions(node.test, constant=isinstance(node, ast.If)):
            new = copy.deepcopy(node)
            new.test = test
            yield f"if {ast.unparse(test)}", new
    if isinstance(node, ast.AugAssign) and type(node.op) in TURNED:
        new = copy.deepcopy(node)
        new.op = TURNED[type(node.op)]()
        yield _short(new), new
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        kept = f"_kept.setdefault({node.lineno}, {ast.unparse(node.value)})"
        new = copy.deepcopy(node)
        new.value = _parsed(kept)
        yield "the first one, kept", new


def _is_message(node: ast.AST) -> bool:
    """Whether this calls a collective, by its name, or sends."""
    words = ("reduce", "gather", "scatter", "broadcast", "all_to_all", "send", "barrier")
    return isinstance(node, ast.Call) and any(word in _called(node) for word in words)


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _conditions(test: ast.expr, constant: bool) -> Iterator[ast.expr]:
    yield ast.UnaryOp(ast.Not(), test)
    if constant:
        yield ast.Constant(True)
        yield ast.Constant(False)


def _expression(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Constant):
        yield from _constant(node.value)
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.BinOp):
        yield node.left
        if not isinstance(node.op, ast.Div):
            yield node.right
        if type(node.op) in TURNED:
            yield ast.BinOp(node.left, TURNED[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        yield ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(TURNED[type(node.op)](), node.values)
        yield from node.values
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        if node.attr in SWAPPED:
            yield ast.Attribute(node.value, SWAPPED[node.attr], node.ctx)
        if node.attr == "dtype":
            yield _parsed("torch.float32")
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in SWAPPED:
        yield ast.Name(SWAPPED[node.id], node.ctx)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from _subscript(node)


def _constant(value: Any) -> Iterator[ast.expr]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        yield _parsed(str(value - 1))
    elif isinstance(value, float):
        yield ast.Constant(value * 2 + 1)


def _call(node: ast.Call) -> Iterator[ast.expr]:
    name = _called(node)
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        yield node.func.value
    if name == "sorted":
        yield ast.Call(ast.Name("list", ast.Load()), node.args, [])
    if name in CONSTANT:
        yield ast.Constant(CONSTANT[name])
    if name in SIZES:
        yield _parsed(f"{ast.unparse(node)} + 1")
        yield _parsed(f"_kept.setdefault({node.lineno}, {ast.unparse(node)})")
    if name in LIKE and not any(keyword.arg == "dtype" for keyword in node.keywords):
        yield _parsed(f"{ast.unparse(node)[:-1]}, dtype=torch.float32)")
    if name == "range":
        for place, end in enumerate(node.args):
            if not isinstance(end, ast.Constant):
                for step in ("+ 1", "- 1"):
                    args = list(node.args)
                    args[place] = _parsed(f"{ast.unparse(end)} {step}")
                    yield ast.Call(node.func, args, node.keywords)
    for keyword in node.keywords:
        if keyword.arg not in (None, "async_op"):
            others = [other for other in node.keywords if other is not keyword]
            yield ast.Call(node.func, node.args, others)


def _subscript(node: ast.Subscript) -> Iterator[ast.expr]:
    if isinstance(node.slice, ast.Slice):
        for name in ("lower", "upper"):
            end = getattr(node.slice, name)
            if end is not None and not isinstance(end, ast.Constant):
                for step in ("+ 1", "- 1"):
                    new = copy.deepcopy(node)
                    setattr(new.slice, name, _parsed(f"({ast.unparse(end)}) {step}"))
                    yield new
            if end is not None:
                new = copy.deepcopy(node)
                setattr(new.slice, name, None)
                yield new
    elif not isinstance(node.slice, ast.Constant | ast.Tuple):
        for index in (f"{ast.unparse(node.slice)} - 1", "0", "-1"):
            new = copy.deepcopy(node)
            new.slice = _parsed(index)
            yield new


# ---- judging them ----


def survivors(
    task: Task, program: list[tuple[str, str]], equivalent: dict[str, str] | None = None
) -> MutationResult:
    """Make the mutants of a solution and judge all of them.

    program: (cell id, source), the task's own answer last. equivalent: names of mutants that are
    no mistakes -> why. Raises ValueError if the solution itself does not pass.
    """
    equivalent = equivalent or {}
    *given, (_, source) = program
    mutants, answers = [], [_answer(task, program)]
    for mutant in make(source):
        try:
            answers.append(_answer(task, [*given, ("mutant", mutant.source)]))
        except Exception:  # its own cell raises: no answer, and no mutant
            continue
        mutants.append(mutant)
    cases = draw(task)
    (solution,) = judge_all(task, answers[:1], cases)  # the first launch imports: it takes longer
    if not solution.solved:
        raise ValueError(f"{task.id}: its solution does not pass: {solution.findings}")
    verdicts = judge_all(
        task,
        answers[1:],
        cases,
        exact=False,
        seconds=SECONDS,
        enough=lambda _, judging: bool(judging.failed()),
    )
    alive = [m for m, verdict in zip(mutants, verdicts, strict=True) if verdict.solved]
    names = {mutant.name for mutant in alive}
    return MutationResult(
        task.id,
        len(mutants),
        len(mutants) - len(alive),
        [mutant for mutant in alive if mutant.name not in equivalent],
        [name for name in equivalent if name in names],
        [name for name in equivalent if name not in names],
    )


def _answer(task: Task, program: list[tuple[str, str]]) -> Any:
    space: dict[str, Any] = {"__name__": "__main__"}
    for name, source in program:
        file = f"<{name} {hash(source) & 0xFFFFFFFF:x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), space)
    return space[task.answer]


def mutation_report(lesson: str, part: str = "") -> list[MutationResult]:
    """Mutate the solutions of a lesson's tasks whose names contain `part`."""
    equivalent = getattr(importlib.import_module(f"answers.lesson{lesson}"), "EQUIVALENT", {})
    notebook = trying.master(lesson)
    return [
        survivors(task, notebooks.program(notebook, task.id), equivalent.get(task.id))
        for task in tasks(lesson)
        if part in task.id
    ]
