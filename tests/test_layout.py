"""Which module may import which: the library does not know the course, and there are no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ddpz_lite

ROOT = Path(ddpz_lite.__file__).parent
COURSE = "ddpz_lite.course"
# The two that hand out the course's names: lazily, and as the command `ddpz`.
DOORS = {"ddpz_lite", "ddpz_lite.__main__"}
SPINE = (
    *("placement", "comm", "flat", "units", "ddp", "zero1", "zero2", "zero3", "optim"),
    *("precision", "clip", "parallelize"),
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of ours that a module imports, at its top or anywhere inside."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else base for name in names]
        yield from (name for name in names if name in MODULES)


def test_nothing_outside_of_the_course_imports_from_it():
    wrong = [
        f"{name} imports {other}"
        for name, tree in TREES.items()
        if name not in DOORS and not f"{name}.".startswith(f"{COURSE}.")
        for other in imported(tree)
        if f"{other}.".startswith(f"{COURSE}.")
    ]
    assert wrong == []


def test_all_imports_are_absolute():
    relative = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_modules_of_the_library_do_not_import_each_other_in_circles():
    """Inside of functions neither. A package and its modules may: together they are one thing."""
    library = {n for n in MODULES if n not in DOORS and not f"{n}.".startswith(f"{COURSE}.")}
    graph = {
        name: (set(imported(TREES[name])) & library) - {name, name.rpartition(".")[0]}
        for name in library
    }
    assert cycles(graph) == []


def test_the_spine_reads_in_an_evening():
    files = [ROOT / "strategies" / f"{name}.py" for name in SPINE]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 2000
