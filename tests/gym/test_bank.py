"""The bank: every card has its form, both languages and its sources, and says what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpz_lite.course.gym import bank, listings
from ddpz_lite.course.gym.bank import BadCard, cards, collect, sources, topics

CHINESE = re.compile(r"[\u4e00-\u9fff]")
GOOD = {"ask": "a?", "say": "b.", "ask_zh": "甲?", "say_zh": "乙。", "sources": []}
HEAD = {"title": "T", "title_zh": "题"}


def test_the_questions_and_myths_of_the_field_are_all_there():
    questions = [card for card in cards().values() if not card.myth]
    myths = [card for card in cards().values() if card.myth]
    assert {*(card.id for card in questions)} >= {f"Q{n:02d}" for n in range(1, 79)}
    assert [*sorted(card.id for card in myths)] == [f"M{n:03d}" for n in range(1, len(myths) + 1)]
    assert len(myths) >= 180
    assert [*topics()] == [f"T{n:03d}" for n in range(1, len(topics()) + 1)]
    assert len(topics()) >= 129
    numbers = sorted(int(card.id[1:]) for card in questions)
    # From 101 on, each lesson has its own block of five numbers.
    assert numbers[:94] == [*range(1, 95)], "no number is left out"
    assert {*range(101, 111)} <= {*numbers}


def test_every_card_and_topic_is_in_both_languages():
    for card in cards().values():
        for words in (card.front, card.back, card.topic):
            assert CHINESE.search(words.zh) or words.zh == words.en, card.id
            assert not CHINESE.search(words.en), card.id
        assert CHINESE.search(card.back.zh), card.id
    for key, words in topics().items():
        assert not CHINESE.search(words.en) and words.zh, key


def test_an_answer_to_a_question_has_a_number():
    for card in cards().values():
        assert card.myth or re.search(r"\d", card.back.en), card.id


def test_every_source_can_be_opened_and_is_cited_or_read_in_the_lesson():
    cited = {source.key for card in cards().values() for source in card.sources}
    root = Path(__file__).resolve().parents[2]
    lesson = "".join(path.read_text() for path in root.glob("lessons/17_*.ipynb"))
    for key, source in sources().items():
        assert source.url.startswith("https://") and 1970 < source.year < 2100, key
        assert key in cited or source.url in lesson, key


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"X01": GOOD}, "bank/a.toml: X01 is not an id. Fix: Q and a number"),
        ({"Q1": {k: v for k, v in GOOD.items() if k != "say_zh"}}, "does not know 'say_zh'"),
        ({"Q1": GOOD | {"claim": "c"}}, "lacks or does not know 'claim'"),
        ({"Q1": GOOD | {"say": " "}}, "Q1: 'say' is missing or empty. Fix: write it."),
        ({"Q1": GOOD | {"sources": ["nobody"]}}, "cites 'nobody'. Fix: add it to"),
    ],
)
def test_a_bad_card_is_named_with_its_fix(entries, says):
    with pytest.raises(BadCard, match=re.escape(says)):
        collect({"a.toml": HEAD | entries}, {})


def test_a_number_is_given_once():
    with pytest.raises(BadCard, match="there twice"):
        collect({"a.toml": HEAD | {"Q1": GOOD}, "b.toml": HEAD | {"Q1": GOOD}}, {})


def test_ids_are_chosen_in_order_and_an_unknown_one_is_refused():
    assert [card.id for card in bank.chosen(["M001", "Q13"])] == ["M001", "Q13"]
    with pytest.raises(KeyError, match=r"there is no card 'Q999'\. Fix"):
        bank.chosen(["Q999"])


def test_listings_name_their_files():
    names, file = listings.listing("tf.distribute")
    assert "MirroredStrategy" in names and "pbtxt" in file
    with pytest.raises(KeyError, match=r"no listing of 'tf\.zero'"):
        listings.listing("tf.zero")
