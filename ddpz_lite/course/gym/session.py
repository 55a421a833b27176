"""Cards one after the other, for the terminal and for the widget alike.

The order is the point: the learner writes, and only then sees the answer, and only then says how it
went. What one has recalled with effort stays longer than what one has read again (Roediger and
Karpicke 2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ddpz_lite.course.gym.bank import Card, Words
from ddpz_lite.course.gym.deck import Deck, Rating, now


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
    took: float = 0.0  # seconds until it was written

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The time of the open card begins now."""
        self._begun = self.clock()

    @property
    def card(self) -> Card | None:
        """The card that is open; None once all are done."""
        return self.cards[len(self.asked)] if len(self.asked) < len(self.cards) else None

    @property
    def place(self) -> tuple[int, int]:
        """(which card is open, from 1; how many there are)."""
        return min(len(self.asked) + 1, len(self.cards)), len(self.cards)

    def write(self, answer: str) -> Card:
        """Hand in an answer, and get the card to turn over. "" says: I do not know.

        Raises TooEarly if there is no card, or it was turned over before.
        """
        if self.card is None or self.written is not None:
            raise TooEarly("gym: there is no open question. Fix: rate the last one first.")
        self.took = (self.clock() - self._begun).total_seconds()
        self.written = answer.strip()
        return self.card

    def rate(self, rating: Rating) -> timedelta:
        """Say how it went; the next card opens. Returns the time until this one is due again.

        Who wrote nothing has not known it, whatever they say. Raises TooEarly before `write`.
        """
        if self.written is None:
            raise TooEarly("gym: the answer is not seen yet. Fix: write yours first.")
        card, rating = self.card, Rating(rating) if self.written else Rating.AGAIN
        wait = self.deck.review(card, rating, self.clock(), self.written)
        self.deck.save()
        self.asked.append(Asked(card, self.written, self.took, rating))
        self.written = None
        self.begin()
        return wait


SAYS = {  # what is said around the cards, in both languages
    "write": Words("Your answer, before you see ours", "先写下你的答案，再看我们的"),
    "show": Words("Show the answer", "看答案"),
    "unknown": Words("I do not know", "不知道"),
    "begin": Words("Begin", "开始"),
    "ready": Words("{} cards. The time of each is taken.", "共 {} 张卡片，每张计时。"),
    "place": Words("{} of {}", "第 {} / {} 张"),
    "took": Words("You took {:.0f} s.", "用时 {:.0f} 秒。"),
    "proved": Words("Proved by a run: {}.", "由运行证明：{}。"),
    "proof": Words("proof: {}, section “{}”", "证明：{}，“{}”一节"),
    "source": Words("source: {}", "出处：{}"),
    "answer": Words("Answer", "答案"),
    "done": Words("All cards are done.", "全部答完。"),
    "again": Words("To run again:", "再跑一遍："),
    "how": Words("How was it?", "答得怎样？"),
    "1": Words("Not known", "不会"),
    "2": Words("In part", "部分会"),
    "3": Words("Known", "会"),
    "4": Words("At once", "脱口而出"),
    "later": Words("It comes again in {}.", "{}后再问。"),
    "known": Words("{} of {} known.", "共 {1} 张，会 {0} 张。"),
    "next": Words(
        "The next card is due in {}; {} were never seen.",
        "下一张卡片 {}后到期；还有 {} 张没见过。",
    ),
    "now": Words(
        "The next card is due now; {} were never seen.", "下一张卡片现在到期；还有 {} 张没见过。"
    ),
    "unseen": Words(
        "{} cards were never seen: ddpz gym --new 5.", "{} 张卡片还没见过：ddpz gym --new 5。"
    ),
    "rules": Words(
        "Write your answer; an empty line ends it. An empty answer says: I do not know. "
        "Ctrl-D quits.",
        "写下答案，空行结束；什么也不写表示不知道。按 Ctrl-D 退出。",
    ),
}
DAY = 24 * 60
UNITS = (  # up to so many minutes, in units of so many
    (60, 1, Words("minute", "分钟")),
    (DAY, 60, Words("hour", "小时")),
    (60 * DAY, DAY, Words("day", "天")),
    (math.inf, 30 * DAY, Words("month", "个月")),
)


def says(key: str, language: str, *values: object) -> str:
    """One of the sentences around the cards, with its values filled in."""
    return SAYS[key].of(language).format(*values)


def in_words(wait: timedelta, language: str = "en") -> str:
    """A time until: "10 minutes", "3 days", "2 months"."""
    minutes = wait.total_seconds() / 60
    size, name = next((size, name) for most, size, name in UNITS if minutes < most)
    count = max(round(minutes / size), 1)
    return f"{count} {name.of(language)}{'s' * (count != 1 and language == 'en')}"
