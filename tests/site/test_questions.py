"""The site's pages of questions: every card in both languages, every link to a marked cell."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ddpz_lite.course.gym.bank import cards, topics
from ddpz_lite.course.gym.proofs import Proof, proofs

ROOT = Path(__file__).resolve().parents[2]


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"book_{name}", ROOT / f"book/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


questions = load("questions")
PROVED = proofs(ROOT / "lessons")
PAGES = questions.pages(PROVED)


def test_every_card_is_on_one_page_with_both_answers():
    text = "".join(PAGES.values())
    for card in cards().values():
        assert text.count(f"### {card.id} · ") == 1
        for answer in (card.back.en, card.back.zh):
            assert questions._plain(answer) in text, card.id
    assert all(words.zh in PAGES["index"] for words in topics().values())


def test_a_search_leads_to_the_mark_of_each_card():
    places = [card["at"] for card in questions.searched()]
    assert len(places) == len(set(places)) == len(cards())
    for place in places:
        name, _, mark = place.removeprefix("questions/").partition(".html#")
        assert f"\n({mark.upper()})=\n### {mark.upper()} · " in PAGES[name]


def test_no_two_links_of_a_card_have_the_same_words():
    for page in PAGES.values():
        for line in page.splitlines():
            if line.startswith("- Proved by a run"):
                words = re.findall(r"\[([^\]]+)\]\(#cell-[^)]+\)", line)
                assert words and len(words) <= questions.MOST_CELLS
                assert len({*words}) == len(words), line


def test_the_first_page_leads_to_all_others():
    first, *others = PAGES
    assert first == "index"
    for name in others:
        assert f"]({name}.md)" in PAGES["index"] and f"\n{name}\n" in PAGES["index"]


def test_every_link_to_a_cell_has_its_mark():
    linked = {name for page in PAGES.values() for name in re.findall(r"\]\(#(cell-[^)]+)\)", page)}
    assert linked and linked <= {*questions.targets(PROVED).values()}


def test_a_mark_stands_before_its_cell_and_nothing_else_changes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "book")
    build = load("build")
    proof = Proof("08", "Wall", "08_wall.ipynb", "b", "Myths", True, True, True, "proves")
    notebook = {"cells": [{"id": "a"}, {"id": "b"}, {"id": "c"}]}
    build.mark(notebook, "08_wall.ipynb", questions.targets({"Q01": [proof]}))
    assert [cell["id"] for cell in notebook["cells"]] == ["a", "cell-08-b", "b", "c"]
    assert notebook["cells"][1]["source"].startswith("(cell-08-b)=\n")
    sys.modules.pop("questions", None)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("1. Pad. 2. Cut.", r"1\. Pad. 2. Cut."),
        ("a * b < c", r"a \* b \< c"),
        ("`x * y` is [1]", r"`x * y` is \[1\]"),
        ("all_reduce, 2Ψ(N−1)/N", "all_reduce, 2Ψ(N−1)/N"),
    ],
)
def test_signs_stand_for_themselves_and_code_stays_code(text, plain):
    assert questions._plain(text) == plain
