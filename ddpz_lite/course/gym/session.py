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


MOST_TIMES = 3  # that one card is asked in a session


@dataclass
class Session:
    """Cards that are asked in order. clock: what time it is.

    again: a card that was not known is asked once more after so many others, or when these are
    fewer at the end; 0 asks each card once. After MOST_TIMES it waits for another day.
    """

    cards: Sequence[Card]
    deck: Deck
    clock: Callable[[], datetime] = now
    again: int = 5
    asked: list[Asked] = field(default_factory=list)
    written: str | None = None  # the learner's answer to the card that is open
    took: float = 0.0  # seconds until it was written

    def __post_init__(self) -> None:
        self._waiting = list(self.cards)
        self.begin()

    def begin(self) -> None:
        """The time of the open card begins now."""
        self._begun = self.clock()

    @property
    def card(self) -> Card | None:
        """The card that is open; None once all are done."""
        return self._waiting[0] if self._waiting else None

    @property
    def last(self) -> list[Asked]:
        """Each card once, as it went when it was last asked."""
        return list({one.card.id: one for one in self.asked}.values())

    @property
    def place(self) -> tuple[int, int]:
        """(how many have been asked, the open one included; how many it will be, as it looks)."""
        total = len(self.asked) + len(self._waiting)
        return min(len(self.asked) + 1, total), total

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
        del self._waiting[0]
        times = sum(one.card == card for one in self.asked)
        if rating is Rating.AGAIN and self.again and times < MOST_TIMES:
            self._waiting.insert(self.again, card)
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
    "proves": Words("Proved by a run: {}.", "已由实际运行验证：{}。"),
    "illustrates": Words("Shown in a run: {}.", "运行演示：{}。"),
    "source": Words("Cited, not run: {}.", "引用，未运行：{}。"),
    "cell": Words("{}: lessons/{}, section “{}”", "{}：lessons/{}，“{}”一节"),
    "proves cell": Words("proof", "验证"),
    "illustrates cell": Words("shown", "演示"),
    "source cell": Words("cited", "引用"),
    "cited": Words("source: {}", "出处：{}"),
    "yours": Words("You wrote: {}", "你写的：{}"),
    "rubric": Words("A good answer says:", "好的回答会提到："),
    "follow": Words("They may ask next: {}", "可能的追问：{}"),
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
    "plan": Words(
        "{} days until your interview on {}. {} cards were never seen: {} new ones a day, weak "
        "topics first ({}). ",
        "距离 {1} 的面试还有 {0} 天。还有 {2} 张没见过：每天 {3} 张新卡，先练薄弱的主题（{4}）。",
    ),
    "last days": Words(
        "{} days until your interview on {}: no new cards now, only what is due. An interview "
        "to practise: ddpz gym --mock.",
        "距离 {1} 的面试还有 {0} 天：不再加新卡，只复习到期的。模拟面试：ddpz gym --mock。",
    ),
    "missed": Words(
        "There is no time for {} of them; questions come before statements.",
        "其中 {} 张排不下；先问答题，后判断题。",
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
