"""Every question, myth and topic is settled by a cell: counted from the cells' own metadata."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpz_lite.course.gym.bank import cards, topics
from ddpz_lite.course.gym.proofs import label, of, proofs

ROOT = Path(__file__).resolve().parents[2]
PROVED = proofs(ROOT / "lessons")


@pytest.mark.parametrize("kind", ["Q", "M", "V", "T"])
def test_each_is_settled_by_a_cell_or_cited(kind):
    """A topic has a cell. So has a card, or it rests on one that has, or it cites its sources."""
    if kind == "T":
        missing = {id_ for id_ in topics() if id_ not in PROVED}
    else:
        own = [card for card in cards().values() if card.id.startswith(kind)]
        missing = {card.id for card in own if not of(card, PROVED) and not card.sources}
    assert not missing, f"no cell says that it settles {sorted(missing)}"


def test_no_cell_of_a_question_or_myth_is_called_a_proof_that_cannot_fail():
    proving = [(id_, p) for id_, cells in PROVED.items() for p in cells if p.label == "proves"]
    weak = [(id_, p.file, p.cell) for id_, p in proving if not (p.ran and p.asserts)]
    assert not weak, f"they prove by cells that did not run or cannot fail: {weak}"


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


def test_cells_prove_show_or_cite_as_their_metadata_say(tmp_path):
    change = [{"of": ["Q01"], "replace": "1", "by": "0"}]
    proving = code("a", "assert 1", answers=["Q01", "Q02"], counterfactuals=change)
    citing = code("b", "print(2)", answers=["Q01", "Q03"])
    citing["metadata"]["ddpz"]["source"] = ["Q01", "Q03"]
    notebook(tmp_path, "04_naps.ipynb", citing, proving)
    found = proofs(tmp_path)
    assert [p.label for p in found["Q01"]] == ["proves", "source"]
    assert {id_: label(cells) for id_, cells in found.items()} == {
        "Q01": "proves",
        "Q02": "illustrates",
        "Q03": "source",
    }
    assert label([]) == "source"


def test_a_card_has_its_own_cells_and_those_of_the_cards_it_rests_on(tmp_path):
    notebook(
        tmp_path, "04_naps.ipynb", code("a", "1", answers=["Q01"]), code("b", "1", answers=["Q02"])
    )
    found, card = proofs(tmp_path), cards()["Q01"]
    assert [p.cell for p in of(card, found)] == ["a"]
    assert [p.cell for p in of(replace(card, rests_on=("Q02",)), found)] == ["a", "b"]


def test_a_cell_that_was_not_run_or_raised_has_not_run(tmp_path):
    cells = [
        code("a", "1", ran=False, answers=["Q01"]),
        code("b", "1", error=True, answers=["Q02"]),
    ]
    notebook(tmp_path, "04_naps.ipynb", *cells)
    found = proofs(tmp_path)
    assert not found["Q01"][0].ran and not found["Q02"][0].ran
