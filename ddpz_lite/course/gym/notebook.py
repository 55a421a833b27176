"""The gym in a notebook: cards to practise with, and the mock interview."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

from ddpz_lite.course import interactive
from ddpz_lite.course.gym.bank import cards, chosen
from ddpz_lite.course.gym.deck import Deck, now
from ddpz_lite.course.gym.interview import draw
from ddpz_lite.course.gym.proofs import Proof, proofs
from ddpz_lite.course.gym.session import Session
from ddpz_lite.course.show.cards import show_cards


def practice(ids: Iterable[str], language: str = "en") -> None:
    """Show these cards, one after the other. Without a kernel: all, with the answers closed.

    What you answer counts in `ddpz gym`, too. Raises KeyError for an id that there is not.
    """
    show_cards(Session(chosen(ids), _deck()), found(), language)


def mock_interview(seed: int, language: str = "en") -> None:
    """Twelve cards, drawn by topic and by what you do not know, timed, with a report.

    seed: another one draws other cards. Where no person answers, nothing is known, so that a stored
    notebook has the same cards on every machine and every day.
    """
    deck = _deck()
    drawn = draw(cards().values(), deck, now(), Random(seed))
    show_cards(Session(drawn, deck, again=0), found(), language, report=True)


def found() -> dict[str, list[Proof]]:
    """The proofs in the folder of the lessons that is here, beside, or in this checkout."""
    here = Path.cwd()
    checkout = Path(__file__).resolve().parents[3]
    for place in (here, here.parent / "lessons", here / "lessons", checkout / "lessons"):
        if place.name == "lessons" and any(place.glob("*.ipynb")):
            return proofs(place)
    return {}


def _deck() -> Deck:
    return Deck.load() if interactive.notebook() else Deck()
