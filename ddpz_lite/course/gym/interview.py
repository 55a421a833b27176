"""A mock interview: twelve cards, drawn by topic and weakness, timed, with a report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from random import Random

from ddpz_lite.course.gym.bank import Card, Words
from ddpz_lite.course.gym.deck import Deck, Rating
from ddpz_lite.course.gym.session import Asked

CARDS = 12
PER_TOPIC = 2  # at most, as long as there are other topics
LONG = 180.0  # seconds: who asks would have gone on
HEAD = (
    Words("topic", "主题"),
    Words("known", "会"),
    Words("seconds a card", "每张秒数"),
    Words("see again", "再看"),
)
ALL, SLOW, OF = Words("all", "合计"), Words(" (long)", "（长）"), Words("{:g} of {}", "{:g} / {}")
LEAST = 0.05  # what is known still has a small chance to be drawn


def draw(
    cards: Iterable[Card], deck: Deck, now: datetime, chance: Random, count: int = CARDS
) -> list[Card]:
    """Cards for an interview. Every topic is as likely as another, and in it what is not known.

    A card's weight is 1 less the probability that it would be recalled now, divided by the number
    of its topic's cards. Drawn without replacement by weight (Efraimidis and Spirakis 2006).
    """
    cards = list(cards)
    sizes = Counter(card.topic for card in cards)
    weights = {c.id: (1 - deck.known(c, now) + LEAST) / sizes[c.topic] for c in cards}
    order = sorted(cards, key=lambda c: chance.random() ** (1 / weights[c.id]), reverse=True)
    taken: Counter = Counter()
    first, rest = [], []
    for card in order:
        taken[card.topic] += 1
        (first if taken[card.topic] <= PER_TOPIC else rest).append(card)
    return (first + rest)[:count]


def report(asked: Sequence[Asked], language: str = "en") -> list[list[str]]:
    """A table: a row for each topic, weakest first, and the sum. Empty if nothing was asked.

    Known are cards that went GOOD or EASY; half known those that went HARD.
    """
    if not asked:
        return []
    by_topic: dict[str, list[Asked]] = defaultdict(list)
    for one in asked:
        by_topic[one.card.topic.of(language)].append(one)
    rows = sorted(by_topic.items(), key=lambda item: (_share(item[1]), item[0]))
    table = [[word.of(language) for word in HEAD]]
    for topic, ones in [*rows, (ALL.of(language), list(asked))]:
        again = [one.card.id for one in ones if one.rating < Rating.GOOD]
        seconds = sum(one.seconds for one in ones) / len(ones)
        slow = SLOW.of(language) if seconds > LONG else ""
        known = OF.of(language).format(_points(ones), len(ones))
        table.append([topic, known, f"{seconds:.0f}{slow}", " ".join(again)])
    table[-1][-1] = ""  # the sum names no card again
    return table


def _points(asked: Sequence[Asked]) -> float:
    return sum({Rating.AGAIN: 0.0, Rating.HARD: 0.5}.get(one.rating, 1.0) for one in asked)


def _share(asked: Sequence[Asked]) -> float:
    return _points(asked) / len(asked)
