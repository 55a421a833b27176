"""`ddpz gym`: the questions and myths of interviews, until you know them."""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from random import Random

from ddpz_lite.course.cli.shared import UserError, folder
from ddpz_lite.course.gym.bank import Card, cards
from ddpz_lite.course.gym.deck import Deck, Rating, now
from ddpz_lite.course.gym.interview import draw, report
from ddpz_lite.course.gym.proofs import Proof, proofs
from ddpz_lite.course.gym.session import Session, in_words, says

WIDTH = 100  # characters at most
MOST_PROOFS = 3
KEYS = {"1": Rating.AGAIN, "2": Rating.HARD, "3": Rating.GOOD, "4": Rating.EASY}


def run(options: Namespace) -> int:
    """Ask the cards that are due, and some new ones; with --mock an interview."""
    try:
        deck = Deck.load()
    except ValueError as error:
        raise UserError(str(error)) from None
    there = _chosen(options)
    if options.mock:
        asked = draw(there, deck, now(), Random(options.seed))
    else:
        asked = deck.due(there, now(), options.new)
    if not asked:
        print(_nothing(there, deck, options.language))
        return 0
    try:
        lessons: Path | None = folder("lessons")
    except UserError:  # the library alone is installed, without notebooks
        lessons = None
    session = Session(asked, deck)
    _ask(session, proofs(lessons) if lessons else {}, options.language)
    if session.asked:
        print()
        table = report(session.asked, options.language)
        last = _table(table) if options.mock else _summary(session, there, deck, options.language)
        print(last)
    return 0


def _chosen(options: Namespace) -> list[Card]:
    found = list(cards().values())
    if options.topic:
        topics = dict.fromkeys(card.topic.en for card in found)
        word = options.topic.casefold()
        found = [c for c in found if word in c.topic.en.casefold() or word in c.topic.zh.casefold()]
        if not found:
            raise UserError(f"no topic has {options.topic!r} in its name: {'; '.join(topics)}.")
    if options.only:
        found = [card for card in found if card.myth == (options.only == "myths")]
    if not found:
        raise UserError(f"this topic has no {options.only}.")
    return found


def _ask(session: Session, proved: dict[str, list[Proof]], language: str) -> None:
    """Until all cards are done or the input ends; what was rated by then is kept."""
    print(says("rules", language))
    while card := session.card:
        place = says("place", language, *session.place)
        print(f"\n{place} · {card.id} · {card.topic.of(language)}")
        print(_wrapped(card.asked(language), language))
        answer = _written()
        if answer is None:
            return
        session.write(answer)
        print()
        print(_wrapped(card.back.of(language), language))
        for proof in proved.get(card.id, [])[:MOST_PROOFS]:
            print(f"  {says('proof', language, f'lessons/{proof.file}', proof.section)}")
        for source in card.sources:
            print(f"  {says('source', language, f'{source.line} {source.url}')}")
        rating = _rated(session, language) if answer.strip() else Rating.AGAIN
        if rating is None:
            return
        print(says("later", language, in_words(session.rate(rating), language)))


def _written() -> str | None:
    """What the learner writes, up to an empty line; None where the input ends."""
    lines: list[str] = []
    try:
        while line := input("> "):
            lines.append(line)
    except EOFError:
        return None
    return "\n".join(lines)


def _rated(session: Session, language: str) -> Rating | None:
    waits = session.deck.next_in(session.card, session.clock())
    choices = [
        f"{key} {says(key, language).lower()} ({in_words(waits[rating], language)})"
        for key, rating in KEYS.items()
    ]
    print(says("how", language), " ", "   ".join(choices))
    try:
        while (key := input("1-4: ").strip()) not in KEYS:
            pass
    except EOFError:
        return None
    return KEYS[key]


def _summary(session: Session, there: Sequence[Card], deck: Deck, language: str) -> str:
    known = sum(one.rating >= Rating.GOOD for one in session.asked)
    lines = [says("known", language, known, len(session.asked)), _nothing(there, deck, language)]
    return (" " if language == "en" else "").join(lines)


def _nothing(there: Sequence[Card], deck: Deck, language: str) -> str:
    """When the next card is due."""
    at = now()
    seen = [deck.memories[card.id].due for card in there if card.id in deck.memories]
    left = len(there) - len(seen)
    if not seen:
        return says("unseen", language, left)
    wait = min(seen) - at
    if wait.total_seconds() <= 0:
        return says("now", language, left)
    return says("next", language, in_words(wait, language), left)


def _wrapped(text: str, language: str) -> str:
    """Within the terminal; Chinese as the terminal breaks it."""
    width = min(shutil.get_terminal_size().columns, WIDTH)
    return textwrap.fill(text, width) if language == "en" else text


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(_columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c + " " * (w - _columns(c)) for c, w in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _columns(text: str) -> int:
    """The columns of a terminal that a text takes: two for a Chinese character."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)
