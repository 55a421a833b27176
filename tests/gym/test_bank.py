"""The bank: every card has its form, both languages and its sources, and says what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpz_lite.course.authoring.glossary import entries
from ddpz_lite.course.gym import bank, listings
from ddpz_lite.course.gym.bank import BadCard, cards, collect, sources, topics

ROOT = Path(__file__).resolve().parents[2]
CHINESE = re.compile(r"[\u4e00-\u9fff]")
GOOD = {"ask": "a?", "say": "b.", "ask_zh": "甲?", "say_zh": "乙。", "sources": []}
HEAD = {"title": "T", "title_zh": "题"}


def test_the_questions_and_myths_of_the_field_are_all_there():
    questions = [card for card in cards().values() if not card.myth]
    myths = [card for card in cards().values() if card.myth]
    assert {*(card.id for card in questions)} >= {f"Q{n:02d}" for n in range(1, 95)}
    assert {*(card.id for card in myths)} >= {f"M{n:03d}" for n in range(1, 169)}
    assert {*topics()} >= {f"T{n:03d}" for n in range(1, 120)}


def test_a_learner_cannot_answer_every_statement_with_false():
    statements = [card for card in cards().values() if card.statement]
    true = [card for card in statements if not card.myth]
    assert len(true) >= len(statements) / 6
    assert {card.topic for card in true} >= {card.topic for card in statements if card.myth}


def test_every_question_has_a_rubric_and_a_follow_up_in_both_languages():
    for card in cards().values():
        assert card.statement == (not card.rubric) == (card.follow is None), card.id
        for words in (*card.rubric, *([card.follow] if card.follow else [])):
            assert CHINESE.search(words.zh) or words.zh == words.en, (card.id, words.zh)
            assert words.en and not CHINESE.search(words.en), card.id


def test_every_card_and_topic_is_in_both_languages():
    for card in cards().values():
        for words in (card.front, card.back, card.topic):
            assert CHINESE.search(words.zh) or words.zh == words.en, card.id
            assert not CHINESE.search(words.en), card.id
        assert CHINESE.search(card.back.zh), card.id
    for key, words in topics().items():
        assert not CHINESE.search(words.en) and words.zh, key


OTHER_WORDS = {  # of the Chinese texts: a word beside the glossary's own for the same thing
    "规约": "归约",
    "归约散播": "归约散射",
    "集合点": "汇合（rendezvous）",
    "重新集合": "汇合（rendezvous）",
    "聚齐": "全收集",
    "剖析": "性能分析",
    "脑浮点": "bfloat16 格式（BF16）",
    "平均无故障": "平均故障间隔",
    "梯度截断": "梯度裁剪",
    "掉队节点": "掉队者",
    "人人": "每个 rank",
    "无声的": "静默",
    "两条轴": "两回事",
}


def test_the_chinese_texts_use_the_terms_of_the_glossary():
    """One word for one thing: halves of a pair are looked for in cards, topics and glossary."""
    texts = {id_: str(card) for id_, card in cards().items()}
    texts |= {key: str(words) for key, words in topics().items()}
    texts |= {entry.term: entry.chinese + entry.meaning_chinese for entry in entries(ROOT)}
    found = [(where, word) for where, text in texts.items() for word in OTHER_WORDS if word in text]
    assert not found, f"the glossary's words: {[OTHER_WORDS[word] for _, word in found]}"
    terms = " ".join(entry.chinese for entry in entries(ROOT))
    for word in (
        "归约散射",
        "汇合（rendezvous）",
        "全收集",
        "bfloat16 格式（BF16）",
        "平均故障间隔",
    ):
        assert word in terms, word


def test_chinese_words_stand_in_full_width_brackets():
    half = re.compile(r"[\u4e00-\u9fff]\([^()]*[\u4e00-\u9fff]|[\u4e00-\u9fff]\)[\u4e00-\u9fff]")
    for card in cards().values():
        for words in (card.front, card.back, *card.rubric):
            assert not half.search(words.zh), (card.id, half.search(words.zh).group())
    for entry in entries(ROOT):
        assert not half.search(entry.chinese), entry.term


def test_an_answer_to_a_question_has_a_number():
    for card in cards().values():
        assert card.statement or re.search(r"\d", card.back.en), card.id


def test_every_source_can_be_opened_and_is_cited_or_read_in_the_lesson():
    cited = {source.key for card in cards().values() for source in card.sources}
    lesson = "".join(path.read_text() for path in ROOT.glob("lessons/17_*.ipynb"))
    for key, source in sources().items():
        assert source.url.startswith("https://") and 1970 < source.year < 2100, key
        assert key in cited or source.url in lesson, key


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"Q1": GOOD | {"rests_on": ["Q2"]}}, "Q1 rests on 'Q2'. Fix: name a card"),
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


def test_a_statement_is_answered_with_whether_it_is_true():
    fields = {"claim": "c", "truth": "t.", "claim_zh": "甲", "truth_zh": "乙。", "sources": []}
    found = collect({"a.toml": HEAD | {"M1": fields, "V1": fields, "Q1": GOOD}}, {})
    assert [found[id_].answered("en") for id_ in ("M1", "V1", "Q1")] == [
        "False. t.",
        "True. t.",
        "b.",
    ]
    assert found["V1"].answered("zh") == "对。乙。" and not found["V1"].myth
    assert found["M1"].asked("en") == found["V1"].asked("en") == "“c” True or false, and why?"


def test_a_rubric_of_no_card_is_named():
    with pytest.raises(BadCard, match=r"there is no card 'Q2'\. Fix: remove it"):
        collect({"a.toml": HEAD | {"Q1": GOOD}}, {}, {"Q2": {"rubric": []}})


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
