"""Cards of the interview gym: a question, a box for your answer, then the checked one.

`gym.session.Session` is what is asked and answered; the view around it is ipywidgets, by keyboard:
Tab to the box, write, Tab and Space to see the answer, then Tab to how it went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.gym import deck, interview
from ddpz_lite.course.gym.proofs import LABELS, of
from ddpz_lite.course.gym.session import in_words, says
from ddpz_lite.course.show.live import show_live
from ddpz_lite.course.show.page import in_notebook, prose, table_html
from ddpz_lite.course.show.style import need

if TYPE_CHECKING:
    from ddpz_lite.course.gym.bank import Card
    from ddpz_lite.course.gym.proofs import Proof
    from ddpz_lite.course.gym.session import Session

MOST_PROOFS = 3


def show_cards(
    session: Session,
    proofs: Mapping[str, Sequence[Proof]],
    language: str = "en",
    *,
    report: bool = False,
) -> None:
    """Show the cards of a session. Without a kernel: every card, its answer behind a click.

    proofs: the cells that settle a card, by its id. report: show a table when all are done.
    """
    cards = session.cards
    still = "".join(_still(card, of(card, proofs), language) for card in cards)
    text = "\n".join(f"{card.id}  {card.asked(language)}" for card in cards)
    controls = _view(session, proofs, language, report) if in_notebook() else []
    show_live(controls, still=f"<ol>{still}</ol>", text=text)


def back(card: Card, proofs: Sequence[Proof], language: str) -> str:
    """The checked answer of a card, its source, and the cells that settle it, as HTML."""
    parts = [f"<p>{prose(card.answered(language))}</p>"]
    if card.rubric:
        points = "".join(f"<li>{prose(point.of(language))}</li>" for point in card.rubric)
        parts.append(f"<p>{says('rubric', language)}</p><ul>{points}</ul>")
    for kind in LABELS:
        cells = [proof for proof in proofs[:MOST_PROOFS] if proof.label == kind]
        if cells:
            parts.append(f"<p>{says(kind, language, ', '.join(_links(cells)))}</p>")
    if card.sources:
        lines = "<br>".join(f'<a href="{s.url}">{prose(s.line)}</a>' for s in card.sources)
        parts.append(f"<p><small>{lines}</small></p>")
    if card.follow:
        parts.append(f"<p>{says('follow', language, prose(card.follow.of(language)))}</p>")
    return "".join(parts)


def _links(proofs: Sequence[Proof]) -> list[str]:
    """A link to each cell: the lesson's name, and for its further cells their number."""
    seen: Counter[str] = Counter()
    links = []
    for proof in proofs:
        seen[proof.file] += 1
        name = prose(proof.name) if seen[proof.file] == 1 else f"{seen[proof.file]}"
        links.append(f'<a href="{proof.link}">{name}</a>')
    return links


def _still(card: Card, proofs: Sequence[Proof], language: str) -> str:
    return (
        f"<li><p><b>{card.id}</b> · {prose(card.topic.of(language))}<br>"
        f"{prose(card.asked(language))}</p>"
        f"<details><summary>{says('answer', language)}</summary>"
        f"{back(card, proofs, language)}</details></li>"
    )


def _again(session: Session, proofs: Mapping[str, Sequence[Proof]], language: str) -> str:
    """The cards that were not known, each with the first cell that settles it, as HTML."""
    lines = [
        f"<li>{prose(one.card.asked(language))}"
        + "".join(f" → {link}" for link in _links(of(one.card, proofs)[:1]))
        + "</li>"
        for one in session.last
        if one.rating < 3
    ]
    return f"<p>{says('again', language)}</p><ul>{''.join(lines)}</ul>" if lines else ""


def _view(
    session: Session, proofs: Mapping[str, Sequence[Proof]], language: str, report: bool
) -> list[Any]:
    ipywidgets = need("ipywidgets")
    wide = {"width": "calc(100% - 8px)"}

    def button(key: str) -> Any:
        return ipywidgets.Button(
            description=says(key, language), layout={"width": "auto", "align_self": "flex-start"}
        )

    question, answer, box = (
        ipywidgets.HTML(),
        ipywidgets.HTML(),
        ipywidgets.Textarea(placeholder=says("write", language), layout=wide, rows=4),
    )
    begin, show, unknown = button("begin"), button("show"), button("unknown")
    ratings = {number: button(str(number)) for number in (1, 2, 3, 4)}
    writing = ipywidgets.HBox([show, unknown])
    rating = ipywidgets.HBox([*ratings.values()], layout={"flex_flow": "row wrap"})

    def see(*visible: Any) -> None:
        for part in (begin, box, writing, rating):
            part.layout.display = "" if part in visible else "none"

    def ask() -> None:
        card = session.card
        box.value, answer.value, show.disabled = "", "", True
        if card is None:
            return end()
        place = says("place", language, *session.place)
        head = f"<small>{place} · {card.id} · {prose(card.topic.of(language))}</small>"
        question.value = f"<p>{head}<br><b>{prose(card.asked(language))}</b></p>"
        see(box, writing)

    def end() -> None:
        see()
        table = table_html(interview.report(session.asked, language)) if report else ""
        again = _again(session, proofs, language)
        question.value = f'<p role="status">{says("done", language)}</p>{table}{again}'

    def turn(text: str) -> None:
        card = session.write(text)
        html = back(card, of(card, proofs), language)
        if report:
            html += f"<p><small>{says('took', language, session.took)}</small></p>"
        answer.value = f'<div role="alert">{html}</div>'
        waits = session.deck.next_in(card, session.clock())
        for number, choice in ratings.items():
            wait = in_words(waits[deck.Rating(number)], language)
            choice.description = f"{says(str(number), language)} · {wait}"
            choice.tooltip = says("later", language, wait)
            choice.disabled = not text.strip() and number > 1
        see(box, rating)
        ratings[1].focus()

    def rated(number: int) -> None:
        session.rate(deck.Rating(number))
        ask()
        box.focus()

    def begun() -> None:
        session.begin()
        ask()
        box.focus()

    def typed(change: dict[str, Any]) -> None:
        show.disabled = not change["new"].strip()

    box.observe(typed, names="value")
    begin.on_click(lambda _: begun())
    show.on_click(lambda _: turn(box.value))
    unknown.on_click(lambda _: turn(""))
    for number, choice in ratings.items():
        choice.on_click(lambda _, number=number: rated(number))
    ask()
    if report:  # the clock must not run while the cells above are read
        question.value = f"<p>{says('ready', language, len(session.cards))}</p>"
        see(begin)
    return [question, begin, box, writing, answer, rating]
