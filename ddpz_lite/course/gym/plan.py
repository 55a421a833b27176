"""A plan up to the day of an interview: how many new cards a day, of which topics first.

The scheduler brings each card back about when 9 of 10 would still know it (see deck.py). So a card
that is always answered when it is due is known with that chance on the day of the interview, too,
and the plan has to divide only the cards that were never seen. The last days bring none of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from math import ceil
from pathlib import Path

from ddpz_lite.course.check.progress import home, write_whole
from ddpz_lite.course.gym.bank import Card, Words
from ddpz_lite.course.gym.deck import Deck, in_turn

FILE = "interview.json"
MOST_NEW = 20  # cards a day: with those that come again, an hour
QUIET_DAYS = 2  # before the interview, without new cards


class PastDay(ValueError):
    """The day of the interview is over."""


@dataclass(frozen=True)
class Plan:
    """What is left to do up to a day.

    days      up to the interview; 0 on the day itself
    new       cards that today brings for the first time, in this order
    a_day     new cards a day; 0 in the last days
    left      how many were never seen
    missed    how many of these the days have no room for
    weakest   topics, that of which least is known first
    """

    day: date
    days: int
    new: tuple[Card, ...]
    a_day: int
    left: int
    missed: int
    weakest: tuple[Words, ...]


def plan(cards: Iterable[Card], deck: Deck, day: date, now: datetime) -> Plan:
    """The plan for the rest of the days. Raises PastDay if the interview was before today.

    Where the days do not suffice for all cards, statements are left out before questions, and
    topics that are known before those that are not.
    """
    cards = list(cards)
    days = (day - now.date()).days
    if days < 0:
        raise PastDay(f"the interview was on {day}. Fix: ddpz gym --by with the day of the next.")
    unseen = [card for card in cards if card.id not in deck.memories]
    learning = max(days - QUIET_DAYS, 0)
    a_day = min(ceil(len(unseen) / learning), MOST_NEW) if learning else 0
    ranked = weakest(cards, deck, now)
    missed = max(len(unseen) - a_day * learning, 0)
    order = in_turn(sorted(unseen, key=lambda card: ranked.index(card.topic)))
    if missed:
        order.sort(key=lambda card: card.statement)
    return Plan(day, days, tuple(order[:a_day]), a_day, len(unseen), missed, tuple(ranked))


def weakest(cards: Sequence[Card], deck: Deck, now: datetime) -> list[Words]:
    """The topics, that first of whose cards the smallest share would be recalled now."""
    topics: dict[Words, list[float]] = {}
    for card in cards:
        topics.setdefault(card.topic, []).append(deck.known(card, now))
    return sorted(topics, key=lambda topic: sum(topics[topic]) / len(topics[topic]))


def today(deck: Deck, cards: Iterable[Card], made: Plan, now: datetime) -> list[Card]:
    """What to ask today: what is due, then the plan's new cards.

    On the last day before the interview, that is all that is due by then.
    """
    until = now + timedelta(days=made.days) if made.days <= 1 else now
    return [*deck.due(cards, until, new=0), *made.new]


# ---- the day that was chosen ----


def keep(day: date | None, path: Path | None = None) -> None:
    """Remember the day of the interview; None forgets it."""
    path = path or home() / FILE
    if day is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"day": day.isoformat()}) + "\n")


def kept(path: Path | None = None) -> date | None:
    """The day that was kept, None without one. Raises ValueError if the file is not one of ours."""
    path = path or home() / FILE
    try:
        return date.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["day"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold the day of an interview ({error}). Fix: delete it."
        ) from None
