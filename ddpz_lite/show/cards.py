"""Cards of the interview gym: a question, a box for your answer, then the checked one.

`gym.session.Session` is what is asked and answered; the view around it is ipywidgets, by keyboard:
Tab to the box, write, Tab and Space to see the answer, then Tab to how it went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpz_lite.show.live import show_live
from ddpz_lite.show.page import in_notebook, prose, table_html
from ddpz_lite.show.style import need

if TYPE_CHECKING:
    from ddpz_lite.gym.bank import Card
    from ddpz_lite.gym.proofs import Proof
    from ddpz_lite.gym.session import Session

MOST_PROOFS = 3
RATINGS = {1: "Not known", 2: "In part", 3: "Known", 4: "At once"}


def show_cards(
    session: Session,
    proofs: Mapping[str, Sequence[Proof]],
    language: str = "en",
    *,
    report: bool = False,
) -> None:
    """Show the cards of a session. Without a kernel: every card, its answer behind a click.

    proofs: the cells that prove a card, by its id. report: show a table when all are done.
    """
    cards = session.cards
    still = "".join(_still(card, proofs.get(card.id, ()), language) for card in cards)
    text = "\n".join(f"{card.id}  {card.asked(language)}" for card in cards)
    controls = _view(session, proofs, language, report) if in_notebook() else []
    show_live(controls, still=f"<ol>{still}</ol>", text=text)


def back(card: Card, proofs: Sequence[Proof], language: str) -> str:
    """The checked answer of a card, who says so, and the cells that prove it, as HTML."""
    parts = [f"<p>{prose(card.back.of(language))}</p>"]
    if proofs:
        cells = ", ".join(f'<a href="{p.link}">{prose(p.name)}</a>' for p in proofs[:MOST_PROOFS])
        parts.append(f"<p>Proved by a run: {cells}.</p>")
    if card.sources:
        lines = "<br>".join(f'<a href="{s.url}">{prose(s.line)}</a>' for s in card.sources)
        parts.append(f"<p><small>{lines}</small></p>")
    return "".join(parts)


def _still(card: Card, proofs: Sequence[Proof], language: str) -> str:
    return (
        f"<li><p><b>{card.id}</b> · {prose(card.topic.of(language))}<br>"
        f"{prose(card.asked(language))}</p>"
        f"<details><summary>Answer</summary>{back(card, proofs, language)}</details></li>"
    )


def _view(
    session: Session, proofs: Mapping[str, Sequence[Proof]], language: str, report: bool
) -> list[Any]:
    from ddpz_lite.gym import deck, interview  # they import nothing of ours here
    from ddpz_lite.gym import session as words

    ipywidgets = need("ipywidgets")
    wide = {"width": "100%"}
    question, answer = ipywidgets.HTML(), ipywidgets.HTML()
    box = ipywidgets.Textarea(placeholder="Your answer, before you see ours", layout=wide, rows=4)
    show = ipywidgets.Button(description="Show the answer", tooltip="Hand in what you wrote")
    unknown = ipywidgets.Button(description="I do not know", tooltip="Show the answer at once")
    ratings = {number: ipywidgets.Button(description=name) for number, name in RATINGS.items()}
    writing = ipywidgets.HBox([show, unknown])
    rating = ipywidgets.HBox([*ratings.values()])

    def ask() -> None:
        card = session.card
        box.value, answer.value = "", ""
        show.disabled, rating.layout.display, writing.layout.display = True, "none", ""
        if card is not None:
            head = f"<small>{session.place} · {card.id} · {prose(card.topic.of(language))}</small>"
            question.value = f"<p>{head}<br><b>{prose(card.asked(language))}</b></p>"
            return
        box.layout.display = writing.layout.display = "none"
        question.value = '<p role="status">All cards are done.</p>'
        if report:
            question.value += table_html(interview.report(session.asked))

    def turn(text: str) -> None:
        card = session.write(text)
        answer.value = f'<div role="alert">{back(card, proofs.get(card.id, ()), language)}</div>'
        waits = session.deck.next_in(card, session.clock())
        for number, button in ratings.items():
            wait = words.in_words(waits[deck.Rating(number)])
            button.description = f"{RATINGS[number]} · {wait}"
            button.tooltip = f"{RATINGS[number]}: it comes again in {wait}"
            button.disabled = not text.strip() and number > 1
        writing.layout.display, rating.layout.display = "none", ""

    def rated(number: int) -> None:
        session.rate(deck.Rating(number))
        ask()

    def typed(change: dict[str, Any]) -> None:
        show.disabled = not change["new"].strip()

    box.observe(typed, names="value")
    show.on_click(lambda _: turn(box.value))
    unknown.on_click(lambda _: turn(""))
    for number, button in ratings.items():
        button.on_click(lambda _, number=number: rated(number))
    ask()
    return [question, box, writing, answer, rating]
