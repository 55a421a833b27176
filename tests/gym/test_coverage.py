"""Every question, myth and topic is settled by a cell: counted from the cells' own metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpz_lite.course.gym.bank import cards, topics
from ddpz_lite.course.gym.proofs import proofs

ROOT = Path(__file__).resolve().parents[2]
PROVED = proofs(ROOT / "lessons")


@pytest.mark.parametrize(("kind", "least"), [("Q", 78), ("M", 180), ("T", 129)])
def test_each_is_settled_by_a_cell(kind, least):
    there = {id_ for id_ in [*cards(), *topics()] if id_.startswith(kind)}
    missing = there - PROVED.keys()
    assert not missing, f"no cell says that it settles {sorted(missing)}"
    assert len(there) >= least


def test_every_question_and_myth_has_a_cell_that_ran_and_asserts():
    weak = [
        id_
        for id_ in cards()
        if id_ in PROVED and not any(proof.ran and proof.asserts for proof in PROVED[id_])
    ]
    assert not weak, f"settled only by cells that cannot fail: {weak}"


def test_every_cell_that_settles_a_question_or_myth_was_run():
    idle = [(p.file, p.cell) for id_ in cards() for p in PROVED.get(id_, ()) if not p.ran]
    assert not idle


# ---- how cells are found ----


def notebook(folder: Path, name: str, *cells: dict) -> None:
    content = {"cells": list(cells), "metadata": {"ddpz": {"title": "Nap"}}}
    (folder / name).write_text(json.dumps(content))


def code(id_: str, source: str, *, ran: bool = True, error: bool = False, **settles) -> dict:
    outputs = [{"output_type": "error"}] if error else []
    return {
        "cell_type": "code",
        "id": id_,
        "source": source.splitlines(keepends=True),
        "metadata": {"ddpz": settles},
        "execution_count": 1 if ran else None,
        "outputs": outputs,
    }


def test_cells_are_found_by_what_they_say_and_those_that_assert_come_first(tmp_path):
    source = "# Nap\n\n## Sleep\n\n```\n## no heading\n```\n"
    text = {"cell_type": "markdown", "id": "t", "source": source, "metadata": {}}
    notebook(
        tmp_path,
        "04b_naps.ipynb",
        text,
        code("a", "print(1)", answers=["Q01"], teaches=["T001"]),
        code("b", "assert 1", answers=["Q01"], busts=["M001"]),
    )
    found = proofs(tmp_path)
    assert [p.cell for p in found["Q01"]] == ["b", "a"] and [*found] == ["Q01", "T001", "M001"]
    (proof,) = found["M001"]
    assert (proof.name, proof.section, proof.link) == (
        "04b Nap",
        "Sleep",
        "04b_naps.ipynb#cell-id=b",
    )


@pytest.mark.parametrize(
    ("source", "asserts"),
    [
        ("assert x == 1", True),
        ("torch.testing.assert_close(a, b)", True),
        ("try:\n    f()\nexcept E:\n    pass\nelse:\n    raise AssertionError('no')", True),
        ("%time f()\nassert x", True),
        ("print('assert x')", False),
        ("# assert x\nf()", False),
        ("%time f()", False),
        ("raise ValueError", False),
    ],
)
def test_a_cell_asserts_if_it_can_fail_on_purpose(tmp_path, source, asserts):
    notebook(tmp_path, "04_naps.ipynb", code("a", source, answers=["Q01"]))
    assert proofs(tmp_path)["Q01"][0].asserts is asserts


def test_a_cell_that_was_not_run_or_raised_has_not_run(tmp_path):
    cells = [
        code("a", "1", ran=False, answers=["Q01"]),
        code("b", "1", error=True, answers=["Q02"]),
    ]
    notebook(tmp_path, "04_naps.ipynb", *cells)
    found = proofs(tmp_path)
    assert not found["Q01"][0].ran and not found["Q02"][0].ran
