"""What a learner knows of each card, and when it is due: in one small file, from day to day.

When a card comes again is reckoned by FSRS (Ye et al., KDD 2022), as the package `fsrs` has it: of
each card it keeps a stability, the days after which 9 of 10 such cards would still be known, and a
difficulty. Nothing here reads a clock: who calls says what time it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

import fsrs

from ddpz_lite.course.check.progress import home, write_whole
from ddpz_lite.course.gym.bank import Card, Words

if sys.platform != "win32":
    import fcntl

FILE = "gym.json"
SCHEDULER = fsrs.Scheduler(enable_fuzzing=False)  # the same answers, the same days


class Rating(IntEnum):
    """How it went, by the learner's own judgment, once the answer is seen."""

    AGAIN = 1  # not known
    HARD = 2  # known in part
    GOOD = 3  # known
    EASY = 4  # known at once, with its number


@dataclass
class Memory:
    """What is kept of one card: the scheduler's numbers, how often it was seen and failed, and the
    learner's last answer."""

    schedule: dict[str, Any]
    seen: int = 0
    failed: int = 0
    answer: str = ""

    @property
    def due(self) -> datetime:
        return datetime.fromisoformat(self.schedule["due"])


@dataclass
class Deck:
    """The memories of all cards that were ever seen, by id.

    path: the file that keeps them; None keeps nothing.
    """

    path: Path | None = None
    memories: dict[str, Memory] = field(default_factory=dict)
    _unsaved: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: Path | None = None) -> Deck:
        """The deck kept at `path`, by default the learner's own; a new one if there is none.

        Raises ValueError, and changes nothing, where the file is not one of ours.
        """
        path = path or home() / FILE
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            memories = {id_: Memory(**memory) for id_, memory in kept.items()}
            for memory in memories.values():
                fsrs.Card.from_dict(memory.schedule)
        except FileNotFoundError:
            return cls(path)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{path} does not hold the cards of the gym ({error}). "
                "Fix: move it away, and a new one begins."
            ) from None
        return cls(path, memories)

    def save(self) -> None:
        """Write the file whole or not at all; nothing where there is no path.

        Cards that were reviewed here since the last save replace the file's; of all others the
        file's are kept, since another session may have reviewed them. One card in two sessions at
        once is as the last to save has it. Raises ValueError as `load` does.
        """
        if self.path is None:
            return
        with _alone(self.path):
            there = Deck.load(self.path).memories
            self.memories = there | {id_: self.memories[id_] for id_ in self._unsaved}
            kept = {id_: asdict(memory) for id_, memory in sorted(self.memories.items())}
            write_whole(self.path, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        self._unsaved.clear()

    def review(self, card: Card, rating: Rating, now: datetime, answer: str = "") -> timedelta:
        """Take note of how a card went at `now`; returns the time until it is due again."""
        memory = self.memories.setdefault(card.id, Memory(_new(now).to_dict()))
        after = _after(memory, rating, now)
        memory.schedule = after.to_dict()
        memory.seen += 1
        memory.failed += rating is Rating.AGAIN
        memory.answer = answer or memory.answer
        self._unsaved.add(card.id)
        return after.due - now

    def next_in(self, card: Card, now: datetime) -> dict[Rating, timedelta]:
        """For each rating, the time until the card would be due again. Nothing is changed."""
        memory = self.memories.get(card.id) or Memory(_new(now).to_dict())
        return {rating: _after(memory, rating, now).due - now for rating in Rating}

    def known(self, card: Card, now: datetime) -> float:
        """The probability that the card would be recalled now; 0 for one that was never seen."""
        memory = self.memories.get(card.id)
        if memory is None:
            return 0.0
        return SCHEDULER.get_card_retrievability(fsrs.Card.from_dict(memory.schedule), now)

    def due(self, cards: Iterable[Card], now: datetime, new: int = 5) -> list[Card]:
        """Of these cards those that are due, longest first, and then up to `new` unseen ones.

        Unseen ones come from the topics in turn.
        """
        cards = list(cards)
        waiting = [c for c in cards if c.id in self.memories and self.memories[c.id].due <= now]
        waiting.sort(key=lambda card: self.memories[card.id].due)
        return waiting + [card for card in in_turn(cards) if card.id not in self.memories][:new]


def in_turn(cards: Iterable[Card]) -> list[Card]:
    """The first card of each topic, then the second of each, and so on."""
    by_topic: dict[Words, list[Card]] = {}
    for card in cards:
        by_topic.setdefault(card.topic, []).append(card)
    return [card for row in zip_longest(*by_topic.values()) for card in row if card is not None]


def now() -> datetime:
    """The time, as the scheduler wants it."""
    return datetime.now(UTC)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process is in here for this path; without locks (Windows, some NFS) one may be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        if sys.platform != "win32":
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield


def _new(now: datetime) -> fsrs.Card:
    return fsrs.Card(card_id=0, due=now)  # we name cards ourselves


def _after(memory: Memory, rating: Rating, now: datetime) -> fsrs.Card:
    """The scheduler's card after a review; the memory stays as it is."""
    card = fsrs.Card.from_dict(memory.schedule)
    reviewed, _ = SCHEDULER.review_card(card, fsrs.Rating(rating), now)
    return reviewed
