"""Cards as a widget and as a still page: the answer is closed until one has written."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from ddpz_lite.course.gym import notebook
from ddpz_lite.course.gym.bank import chosen
from ddpz_lite.course.gym.deck import Deck, Rating
from ddpz_lite.course.gym.proofs import Proof
from ddpz_lite.course.gym.session import Session
from ddpz_lite.course.show import cards

PROOF = Proof("08", "The wall", "08_wall.ipynb", "abc", "Myths", True, True, True, "proves")
PROVED = {"Q13": [PROOF] * 5}


@pytest.fixture
def session():
    clock = lambda: datetime(2026, 1, 1, tzinfo=UTC)  # noqa: E731
    return Session(chosen(["Q13", "M075"]), Deck(), clock, again=0)


@pytest.fixture
def shown(monkeypatch):
    """What is handed to `show_live`: [(controls, still, text)]."""
    found = []

    def keep(controls, *, still, text):
        found.append((controls, still, text))

    monkeypatch.setattr(cards, "show_live", keep)
    return found


def test_the_static_version_has_every_card_and_its_answer_behind_a_click(session, shown):
    cards.show_cards(session, PROVED)
    ((controls, still, text),) = shown
    assert controls == [] and still.count("<details>") == 2 and "Q13  What is ZeRO?" in text
    before, _, after = still.partition("<details>")
    assert "What is ZeRO?" in before and "divided among the ranks" not in before
    assert "divided among the ranks" in after
    assert after.count('href="08_wall.ipynb#cell-id=abc"') == cards.MOST_PROOFS


def test_the_widget_shows_nothing_until_one_has_written(session, shown, monkeypatch):
    monkeypatch.setattr(cards, "in_notebook", lambda: True)
    cards.show_cards(session, PROVED, report=True)
    ((controls, _, _),) = shown
    question, begin, box, writing, answer, rating = controls
    show, unknown = writing.children
    assert "2 cards" in question.value and "ZeRO" not in question.value
    begin.click()
    assert show.disabled and answer.value == "" and rating.layout.display == "none"
    box.value = "it divides the state"
    assert not show.disabled
    show.click()
    assert "divided among the ranks" in answer.value and writing.layout.display == "none"
    known = rating.children[2]
    assert known.description == "Known · 10 minutes" and not known.disabled
    known.click()
    assert session.asked[0].rating is Rating.GOOD and answer.value == "" and box.value == ""
    assert "M075" in question.value and "True or false" in question.value
    unknown.click()
    assert [button.disabled for button in rating.children] == [False, True, True, True]
    rating.children[0].click()
    assert "All cards are done" in question.value and re.search(r"1 of 2", question.value)
    _, _, again = question.value.partition("To run again")
    assert "M075" not in again and "reduces communication" in again and "What is ZeRO" not in again


def test_the_clock_of_an_interview_begins_with_the_learner(shown, monkeypatch):
    monkeypatch.setattr(cards, "in_notebook", lambda: True)
    seconds = iter((0, 1000, 1040, 1100, 1100))  # made, begun, written, rated, the next begins
    clock = lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(seconds))  # noqa: E731
    session = Session(chosen(["Q13"]), Deck(), clock)
    cards.show_cards(session, {}, report=True)
    ((controls, _, _),) = shown
    _, begin, _, writing, answer, _ = controls
    begin.click()
    writing.children[1].click()
    assert session.took == 40 and "You took 40 s" in answer.value


def test_the_widget_speaks_chinese(session, shown, monkeypatch):
    monkeypatch.setattr(cards, "in_notebook", lambda: True)
    cards.show_cards(session, PROVED, "zh")
    ((controls, still, _),) = shown
    question, _, box, writing, answer, rating = controls
    box.value = "分摊状态"
    writing.children[0].click()
    words = " ".join([still, question.value, box.placeholder, answer.value])
    words += " ".join(b.description for b in (*writing.children, *rating.children))
    assert "会 · 10 分钟" in words and ("已由实际运行验证" in words or "运行演示" in words)
    for english in ("Answer", "Known", "minutes", "Proved"):
        assert english not in words


def test_without_a_person_nothing_is_rated_and_the_seed_draws_the_same(
    shown, tmp_path, monkeypatch
):
    monkeypatch.setenv("DDPZ_HOME", str(tmp_path))
    monkeypatch.setattr(notebook, "show_cards", cards.show_cards)
    for _ in range(2):
        notebook.mock_interview(seed=17)
    assert shown[0][1:] == shown[1][1:]
    notebook.practice(["Q13"])
    assert not any(tmp_path.iterdir())
