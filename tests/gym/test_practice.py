"""Cards over days, with a clock that the test holds: intervals, what is kept, the interview."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from random import Random

import pytest

from ddpz_lite.course.gym.bank import cards
from ddpz_lite.course.gym.deck import Deck, Rating
from ddpz_lite.course.gym.interview import CARDS, LONG, PER_TOPIC, draw, report
from ddpz_lite.course.gym.plan import MOST_NEW, PastDay, keep, kept, plan, today
from ddpz_lite.course.gym.session import MOST_TIMES, Asked, Session, TooEarly, in_words

START = datetime(2026, 1, 1, 9, 0, tzinfo=UTC)
ALL = cards()
CARD, OTHER = ALL["Q13"], ALL["M075"]


class Clock:
    """A clock that stands still except for `go`."""

    def __init__(self):
        self.time = START

    def __call__(self):
        return self.time

    def go(self, **by):
        self.time += timedelta(**by)


# ---- the deck ----


def test_a_card_that_is_known_when_due_comes_after_growing_intervals():
    deck, now, waits = Deck(), START, []
    for _ in range(4):
        waits.append(deck.review(CARD, Rating.GOOD, now))
        now += waits[-1]
    assert waits == [timedelta(minutes=10), *(timedelta(days=d) for d in (2, 11, 46))]
    assert deck.known(CARD, now) == pytest.approx(0.9, abs=0.01)
    assert deck.review(CARD, Rating.AGAIN, now) < timedelta(hours=1)


def test_asking_for_the_next_intervals_changes_nothing():
    deck = Deck()
    before = deck.next_in(CARD, START)
    assert CARD.id not in deck.memories and sorted(before.values()) == list(before.values())
    for rating in Rating:
        assert Deck().review(CARD, rating, START) == before[rating]


def test_what_is_due_comes_first_the_longest_waiting_before_and_new_ones_after():
    deck = Deck()
    deck.review(OTHER, Rating.AGAIN, START)
    deck.review(CARD, Rating.AGAIN, START + timedelta(seconds=5))
    some = [ALL["Q01"], CARD, OTHER, ALL["Q02"]]
    later = START + timedelta(hours=1)
    assert deck.due(some, later, new=1) == [OTHER, CARD, ALL["Q01"]]
    assert deck.due(some, START, new=0) == []


def test_new_cards_come_from_the_topics_in_turn_day_after_day():
    deck, topics = Deck(), list(dict.fromkeys(card.topic for card in ALL.values()))
    days = []
    for _ in range(3):
        days.append(deck.due(ALL.values(), START - timedelta(days=1), new=5))
        for card in days[-1]:
            deck.review(card, Rating.EASY, START)
    order = [card.topic for day in days for card in day]
    assert order == (topics * 2)[:15] and len(topics) > 5
    zero = [card for card in ALL.values() if card.topic.en == "ZeRO"]
    assert Deck().due(zero, START, new=99) == zero, "in the bank's order"


def test_what_was_never_seen_is_not_known_and_knowing_fades():
    deck = Deck()
    assert deck.known(CARD, START) == 0
    deck.review(CARD, Rating.GOOD, START)
    after = [deck.known(CARD, START + timedelta(days=d)) for d in (0, 5, 50)]
    assert after == sorted(after, reverse=True) and after[0] > after[2] > 0


def test_a_deck_is_kept_from_day_to_day(tmp_path):
    deck = Deck.load(tmp_path / "new/gym.json")
    deck.review(CARD, Rating.AGAIN, START, "it divides")
    deck.review(CARD, Rating.GOOD, START + timedelta(minutes=2))
    deck.save()
    again = Deck.load(deck.path)
    assert again == deck
    memory = again.memories[CARD.id]
    assert (memory.seen, memory.failed, memory.answer) == (2, 1, "it divides")
    due = memory.due
    assert again.review(CARD, Rating.GOOD, due) == deck.review(CARD, Rating.GOOD, due)


def test_two_sessions_at_once_keep_what_the_other_has_rated(tmp_path):
    first = Deck.load(tmp_path / "gym.json")
    first.review(CARD, Rating.GOOD, START, "mine")
    first.save()
    second = Deck.load(first.path)
    first.review(OTHER, Rating.GOOD, START)
    first.save()
    second.review(CARD, Rating.AGAIN, START, "again")
    second.save()
    first.review(ALL["Q01"], Rating.GOOD, START)
    first.save()
    kept = Deck.load(first.path)
    assert [*kept.memories] == sorted([CARD.id, OTHER.id, "Q01"])
    assert (kept.memories[CARD.id].failed, kept.memories[CARD.id].answer) == (1, "again")
    assert first == kept


def reviewed(path, ids):
    """Each of these cards, known, with a save after each."""
    deck = Deck.load(path)
    for id_ in ids:
        deck.review(ALL[id_], Rating.GOOD, START)
        deck.save()


def test_saves_of_two_processes_wait_for_each_other(tmp_path):
    halves = [*ALL][:30], [*ALL][30:60]
    forked = get_context("fork")
    both = [forked.Process(target=reviewed, args=(tmp_path / "g.json", ids)) for ids in halves]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert Deck.load(tmp_path / "g.json").memories.keys() == {*halves[0], *halves[1]}


@pytest.mark.parametrize(
    "content", ["[]", "no json", '{"Q01": {}}', '{"Q01": {"schedule": {"due": "x"}}}']
)
def test_a_file_that_is_not_a_deck_is_refused_and_left(tmp_path, content):
    path = tmp_path / "gym.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="Fix: move it away"):
        Deck.load(path)
    assert path.read_text() == content


# ---- a session ----


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def session(clock, tmp_path):
    return Session([CARD, OTHER], Deck(tmp_path / "gym.json"), clock)


def test_the_answer_comes_after_ones_own_and_the_rating_after_that(session, clock):
    with pytest.raises(TooEarly, match="Fix: write yours first"):
        session.rate(Rating.GOOD)
    clock.go(seconds=40)
    assert session.write(" it divides ") is CARD
    with pytest.raises(TooEarly, match="Fix: rate the last one first"):
        session.write("again")
    clock.go(seconds=300)  # to read the answer takes no time from the learner's
    session.rate(Rating.GOOD)
    assert session.asked == [Asked(CARD, "it divides", 40.0, Rating.GOOD)]
    assert session.card is OTHER and session.place == (2, 2)
    assert Deck.load(session.deck.path).memories[CARD.id].answer == "it divides"


def test_who_wrote_nothing_has_not_known_it(session):
    session.write("  ")
    session.rate(Rating.EASY)
    assert session.asked[0].rating is Rating.AGAIN


def ratings(cards_, *unknown, again=5):
    """The ids asked in a session in which the named cards are not known, and all others are."""
    session, asked = Session([ALL[id_] for id_ in cards_], Deck(), Clock(), again), []
    while session.card:
        asked.append(session.card.id)
        session.write("" if session.card.id in unknown else "x")
        session.rate(Rating.GOOD)
    return asked


def test_what_was_not_known_comes_again_after_a_few_others_three_times_at_most():
    ids = ["Q01", "Q02", "Q03", "Q04"]
    assert ratings(ids, again=2) == ids
    assert ratings(ids, "Q01", again=2) == ["Q01", "Q02", "Q03", "Q01", "Q04", "Q01"]
    assert ratings(["Q01"], "Q01") == ["Q01"] * MOST_TIMES
    assert ratings(ids, "Q01", again=0) == ids


def test_the_place_counts_what_comes_again(session):
    assert session.place == (1, 2)
    session.write("")
    session.rate(Rating.AGAIN)
    assert session.place == (2, 3) and session.card is OTHER
    for _ in range(2):
        session.write("x")
        session.rate(Rating.GOOD)
    assert [one.rating for one in session.asked] == [Rating.AGAIN, Rating.GOOD, Rating.GOOD]
    assert [one.rating for one in session.last] == [Rating.GOOD, Rating.GOOD]


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        (timedelta(seconds=5), "1 minute"),
        (timedelta(minutes=10), "10 minutes"),
        (timedelta(hours=5), "5 hours"),
        (timedelta(days=1), "1 day"),
        (timedelta(days=46), "46 days"),
        (timedelta(days=150), "5 months"),
    ],
)
def test_a_wait_in_words(wait, words):
    assert in_words(wait) == words


# ---- the plan up to a day ----


def day(count: int):
    return (START + timedelta(days=count)).date()


def known(topic: str) -> Deck:
    """A deck in which all cards of a topic are known."""
    deck = Deck()
    for card in ALL.values():
        if card.topic.en == topic:
            deck.review(card, Rating.EASY, START)
    return deck


def test_a_plan_divides_the_unseen_cards_among_the_days_and_leaves_the_last_free():
    made = plan(ALL.values(), Deck(), day(32), START)
    assert (made.days, made.left, made.missed) == (32, len(ALL), 0)
    assert made.a_day == len(made.new) == math.ceil(len(ALL) / 30)
    for days in (0, 1, 2):
        last = plan(ALL.values(), Deck(), day(days), START)
        assert last.a_day == 0 and last.new == ()


def test_a_plan_begins_with_the_weakest_topics():
    made = plan(ALL.values(), known("ZeRO"), day(60), START)
    assert made.weakest[-1].en == "ZeRO" and made.new[0].topic == made.weakest[0]


def test_where_the_days_do_not_suffice_questions_come_before_statements():
    made = plan(ALL.values(), Deck(), day(5), START)
    assert made.a_day == MOST_NEW and made.missed == len(ALL) - 3 * MOST_NEW
    assert not any(card.statement for card in made.new)


def test_a_day_that_is_over_is_refused():
    with pytest.raises(PastDay, match=r"on 2025-12-31\. Fix: ddpz gym --by"):
        plan(ALL.values(), Deck(), day(-1), START)


def test_all_cards_are_seen_and_still_known_on_the_day_if_each_is_answered_when_due():
    deck, some = Deck(), [card for card in ALL.values() if card.topic.en in ("ZeRO", "DDP")]
    for passed in range(20):
        now = START + timedelta(days=passed)
        made = plan(some, deck, day(20), now)
        for card in today(deck, some, made, now):
            deck.review(card, Rating.GOOD, now)
            deck.review(card, Rating.GOOD, now + timedelta(minutes=11))
    then = START + timedelta(days=20)
    assert len(deck.memories) == len(some)
    assert min(deck.known(card, then) for card in some) >= 0.85


def test_on_the_last_day_what_would_be_forgotten_by_then_is_asked_too():
    deck, now = Deck(), START
    deck.review(CARD, Rating.EASY, now)
    due = deck.memories[CARD.id].due
    before = due - timedelta(hours=12)
    made = plan([CARD], deck, (before + timedelta(days=1)).date(), before)
    assert made.days == 1 and deck.due([CARD], before) == []
    assert today(deck, [CARD], made, before) == [CARD]


def test_the_day_is_kept_and_forgotten(tmp_path):
    path = tmp_path / "a" / "interview.json"
    assert kept(path) is None
    keep(day(3), path)
    assert kept(path) == day(3)
    keep(None, path)
    assert kept(path) is None
    path.write_text("[]")
    with pytest.raises(ValueError, match="Fix: delete it"):
        kept(path)


# ---- the interview ----


def test_an_interview_has_twelve_cards_of_many_topics_and_the_seed_draws_the_same():
    drawn = draw(ALL.values(), Deck(), START, Random(3))
    assert drawn == draw(ALL.values(), Deck(), START, Random(3))
    assert len({card.id for card in drawn}) == CARDS
    assert max(Counter(card.topic for card in drawn).values()) <= PER_TOPIC


def test_one_topic_alone_still_fills_it():
    zero = [card for card in ALL.values() if card.topic.en == "ZeRO"]
    assert len(draw(zero, Deck(), START, Random(0))) == CARDS


def test_what_is_known_is_drawn_seldom():
    """Of two cards of one topic one is known: over 400 draws of one, it comes far less often."""
    deck, pair = Deck(), [ALL["Q13"], ALL["Q14"]]
    deck.review(pair[0], Rating.EASY, START)
    chance = Random(0)
    times = Counter(draw(pair, deck, START, chance, count=1)[0].id for _ in range(400))
    assert times["Q14"] > 5 * times["Q13"] > 0


def test_the_report_has_the_weakest_topic_first_and_the_sum_last():
    asked = [
        Asked(ALL["Q13"], "x", 30.0, Rating.GOOD),
        Asked(ALL["Q14"], "x", 50.0, Rating.HARD),
        Asked(ALL["Q07"], "", LONG + 20, Rating.AGAIN),
    ]
    assert report(asked) == [
        ["topic", "known", "seconds a card", "see again"],
        ["DDP", "0 of 1", "200 (long)", "Q07"],
        ["ZeRO", "1.5 of 2", "40", "Q14"],
        ["all", "1.5 of 3", "93", ""],
    ]
    assert report([]) == []


def test_the_file_holds_data_that_any_program_reads(session):
    session.write("x")
    session.rate(Rating.GOOD)
    kept = json.loads(session.deck.path.read_text())
    assert [*kept] == [CARD.id] and kept[CARD.id]["schedule"]["due"].startswith("2026-01-01")
