"""Cards one after the other, for the terminal and for the widget alike.

The order is the point: the learner writes, and only then sees the answer, and only then says how it
went. What one has recalled with effort stays longer than what one has read again (Roediger and
Karpicke 2006).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from .bank import Card
from .deck import Deck, Rating, now


class TooEarly(ValueError):
    """An answer was asked for, or a rating given, before its time."""


@dataclass(frozen=True)
class Asked:
    """A card that was answered: in how many seconds, and how it went."""

    card: Card
    answer: str
    seconds: float
    rating: Rating


@dataclass
class Session:
    """Cards that are asked in order. clock: what time it is."""

    cards: Sequence[Card]
    deck: Deck
    clock: Callable[[], datetime] = now
    asked: list[Asked] = field(default_factory=list)
    written: str | None = None  # the learner's answer to the card that is open

    def __post_init__(self) -> None:
        self._begun = self.clock()
        self._took = 0.0

    @property
    def card(self) -> Card | None:
        """The card that is open; None once all are done."""
        return self.cards[len(self.asked)] if len(self.asked) < len(self.cards) else None

    @property
    def place(self) -> str:
        return f"{min(len(self.asked) + 1, len(self.cards))} of {len(self.cards)}"

    def write(self, answer: str) -> Card:
        """Hand in an answer, and get the card to turn over. "" says: I do not know.

        Raises TooEarly if there is no card, or it was turned over before.
        """
        if self.card is None or self.written is not None:
            raise TooEarly("gym: there is no open question. Cure: rate the last one first.")
        self._took = (self.clock() - self._begun).total_seconds()
        self.written = answer.strip()
        return self.card

    def rate(self, rating: Rating) -> timedelta:
        """Say how it went; the next card opens. Returns the time until this one is due again.

        Who wrote nothing has not known it, whatever they say. Raises TooEarly before `write`.
        """
        if self.written is None:
            raise TooEarly("gym: the answer is not seen yet. Cure: write yours first.")
        card, rating = self.card, Rating(rating) if self.written else Rating.AGAIN
        wait = self.deck.review(card, rating, self.clock(), self.written)
        self.deck.save()
        self.asked.append(Asked(card, self.written, self._took, rating))
        self.written, self._begun = None, self.clock()
        return wait


def in_words(wait: timedelta) -> str:
    """A time until: "10 minutes", "3 days", "2 months"."""
    minutes = wait.total_seconds() / 60
    for most, size, name in ((60, 1, "minute"), (24 * 60, 60, "hour"), (60 * 24 * 60, 1440, "day")):
        if minutes < most:
            count = max(round(minutes / size), 1)
            return f"{count} {name}{'s' * (count != 1)}"
    return f"{round(minutes / (30 * 1440))} months"
