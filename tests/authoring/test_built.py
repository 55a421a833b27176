"""What stands in ddpz_lite/course/built is what the learner wrote, word for word."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddpz_lite.course.authoring import rules

ROOT = Path(__file__).resolve().parents[2]
BUILT = sorted((ROOT / "ddpz_lite/course/built").glob("lesson*.py"))


def definitions(source: str) -> dict[str, str]:
    """The source of each function and class at the top level, with its decorators, by name."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_word_for_word_as_in_the_lesson(path):
    (lesson,) = ROOT.glob(f"lessons/{path.stem.removeprefix('lesson')}_*.ipynb")
    cells = [c.source for c in rules.read(lesson).cells if c.cell_type == "code"]
    written = {name: text for cell in cells for name, text in definitions(cell).items()}
    built = definitions(path.read_text(encoding="utf-8"))
    assert built
    for name, text in built.items():
        assert text == written.get(name), f"{path.name}: {name} differs from {lesson.name}"


def test_there_is_something():
    assert BUILT
