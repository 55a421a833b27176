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
from ddpz_lite.course.gym import plan as plans
from ddpz_lite.course.gym.bank import Card, cards
from ddpz_lite.course.gym.deck import Deck, Rating, now
from ddpz_lite.course.gym.interview import draw, report
from ddpz_lite.course.gym.proofs import Proof, proofs
from ddpz_lite.course.gym.proofs import of as proofs_of
from ddpz_lite.course.gym.session import Session, in_words, says

WIDTH = 100  # characters at most
MOST_PROOFS = 3
NEW = 5  # cards without a plan
WEAKEST = 3  # topics that the plan names
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
        asked = _due(there, deck, options)
    if not asked:
        print(_nothing(there, deck, options.language))
        return 0
    try:
        lessons: Path | None = folder("lessons")
    except UserError:  # the library alone is installed, without notebooks
        lessons = None
    session = Session(asked, deck, again=0) if options.mock else Session(asked, deck)
    _ask(session, proofs(lessons) if lessons else {}, options.language)
    if session.asked:
        print()
        table = report(session.asked, options.language)
        last = _table(table) if options.mock else _summary(session, there, deck, options.language)
        print(last)
    return 0


def _due(there: Sequence[Card], deck: Deck, options: Namespace) -> list[Card]:
    """What to ask today: by the plan up to an interview, otherwise a few new ones."""
    try:
        if options.by is not None:
            plans.keep(options.by or None)
        day = plans.kept()
        made = plans.plan(there, deck, day, now()) if day else None
    except plans.PastDay as error:
        plans.keep(None)
        raise UserError(str(error)) from None
    except ValueError as error:
        raise UserError(str(error)) from None
    if made is None or options.new is not None:
        return deck.due(there, now(), NEW if options.new is None else options.new)
    print(_plan(made, options.language))
    return plans.today(deck, there, made, now())


def _plan(made: plans.Plan, language: str) -> str:
    if not made.a_day:
        return says("last days", language, made.days, made.day)
    names = [topic.of(language) for topic in made.weakest[:WEAKEST]]
    weak = (", " if language == "en" else "、").join(names)
    first = says("plan", language, made.days, made.day, made.left, made.a_day, weak)
    return first + (says("missed", language, made.missed) if made.missed else "")


def _chosen(options: Namespace) -> list[Card]:
    found = list(cards().values())
    if options.topic:
        topics = dict.fromkeys(card.topic.en for card in found)
        word = options.topic.casefold()
        found = [c for c in found if word in c.topic.en.casefold() or word in c.topic.zh.casefold()]
        if not found:
            raise UserError(f"no topic has {options.topic!r} in its name: {'; '.join(topics)}.")
    if options.only:
        found = [card for card in found if card.statement == (options.only == "myths")]
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
        _show(card, session.written, proofs_of(card, proved)[:MOST_PROOFS], language)
        rating = _rated(session, language) if answer.strip() else Rating.AGAIN
        if rating is None:
            return
        print(says("later", language, in_words(session.rate(rating), language)))


def _show(card: Card, written: str, cells: Sequence[Proof], language: str) -> None:
    """The checked answer, what a good one says next to one's own, the cells, the source."""
    print(_wrapped(card.answered(language), language))
    if card.rubric:
        print("\n" + says("rubric", language))
        for point in card.rubric:
            print(_wrapped(f"  [ ] {point.of(language)}", language))
        if written:
            print(_wrapped(says("yours", language, written), language))
    for cell in cells:
        kind = says(f"{cell.label} cell", language)
        print(f"  {says('cell', language, kind, cell.file, cell.section)}")
    for source in card.sources:
        print(f"  {says('cited', language, f'{source.line} {source.url}')}")
    if card.follow:
        print(_wrapped(says("follow", language, card.follow.of(language)), language))


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
    known = sum(one.rating >= Rating.GOOD for one in session.last)
    lines = [says("known", language, known, len(session.last)), _nothing(there, deck, language)]
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
