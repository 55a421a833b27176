"""The cards, as bank/*.toml have them: a file for each topic, questions first, then statements.

A statement is a myth (M) or true (V), and the learner has to say which. For each question
rubrics.toml has the points that a good answer makes, and what an interviewer asks next.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FIELDS = {  # what is shown first, and what then
    "Q": ("ask", "say"),
    "M": ("claim", "truth"),
    "V": ("claim", "truth"),
}


@dataclass(frozen=True)
class Words:
    """The same in English and Chinese."""

    en: str
    zh: str

    def of(self, language: str) -> str:
        """In "en" or "zh"."""
        return {"en": self.en, "zh": self.zh}[language]


VERDICTS = {"M": Words("False.", "错。"), "V": Words("True.", "对。")}


@dataclass(frozen=True)
class Source:
    """A paper or a page, and the organisations of its authors."""

    key: str
    by: str
    title: str
    where: str
    year: int
    house: str
    url: str

    @property
    def line(self) -> str:
        return f"{self.by}: {self.title}. {self.where}, {self.year}."


@dataclass(frozen=True)
class Card:
    """A question or a statement.

    front      the question, or the sentence that is a myth or true
    back       a good answer; of a statement, why it is true, or what is right instead
    topic      the title of its file
    rubric     points that a good answer makes
    follow     the question that an interviewer asks next; None if there is none
    rests_on   ids of cards whose cells show this one, too
    """

    id: str
    front: Words
    back: Words
    topic: Words
    sources: tuple[Source, ...]
    rubric: tuple[Words, ...] = ()
    follow: Words | None = None
    rests_on: tuple[str, ...] = ()

    @property
    def statement(self) -> bool:
        return not self.id.startswith("Q")

    @property
    def myth(self) -> bool:
        return self.id.startswith("M")

    def asked(self, language: str) -> str:
        """What the card asks: of a statement, whether it is true."""
        front = self.front.of(language)
        if not self.statement:
            return front
        if language == "en":
            return f"“{front}” True or false, and why?"
        return f"“{front}”对还是错？为什么？"

    def answered(self, language: str) -> str:
        """The checked answer: of a statement, first whether it is true."""
        back = self.back.of(language)
        if not self.statement:
            return back
        verdict = VERDICTS[self.id[0]].of(language)
        return f"{verdict} {back}" if language == "en" else verdict + back


class BadCard(ValueError):
    """A card in bank/*.toml that lacks something: where, what, and the fix."""


@cache
def sources() -> dict[str, Source]:
    """What the answers cite, by its short name."""
    found = _read(HERE / "sources.toml")
    return {key: Source(key, **fields) for key, fields in found.items()}


@cache
def cards() -> dict[str, Card]:
    """All cards by id, in the order of the files. Raises BadCard for one that lacks something."""
    files = {path.name: _read(path) for path in sorted(HERE.glob("bank/*.toml"))}
    return collect(files, sources(), _read(HERE / "rubrics.toml"))


@cache
def topics() -> dict[str, Words]:
    """The topics of articles and interview guides, by id; cells say which they teach."""
    return {key: Words(*pair) for key, pair in _read(HERE / "topics.toml").items()}


def collect(
    files: Mapping[str, dict],
    known: Mapping[str, Source],
    rubrics: Mapping[str, dict] | None = None,
) -> dict[str, Card]:
    """Cards from the files' contents, by name of the file.

    known: the sources there are. rubrics: what rubrics.toml has, by id.
    """
    found: dict[str, Card] = {}
    rubrics = dict(rubrics or {})
    for file, content in files.items():
        entries = dict(content)
        topic = Words(_word(entries, "title", file), _word(entries, "title_zh", file))
        for key in ("title", "title_zh"):
            del entries[key]
        for id_, fields in entries.items():
            where = f"bank/{file}: {id_}"
            if id_ in found:
                raise BadCard(f"{where} is there twice. Fix: give the second the next number.")
            found[id_] = _card(id_, fields, topic, known, where, rubrics.pop(id_, {}))
    for card in found.values():
        if unknown := [id_ for id_ in card.rests_on if id_ not in found]:
            raise BadCard(f"{card.id} rests on {unknown[0]!r}. Fix: name a card of bank/*.toml.")
    if rubrics:
        raise BadCard(f"rubrics.toml: there is no card {next(iter(rubrics))!r}. Fix: remove it.")
    return found


def _card(
    id_: str,
    fields: dict,
    topic: Words,
    known: Mapping[str, Source],
    where: str,
    rubric: Mapping[str, list],
) -> Card:
    if id_[:1] not in FIELDS or not id_[1:].isdigit():
        fix = "Q and a number for a question, M for a myth, V for what is true"
        raise BadCard(f"{where} is not an id. Fix: {fix}.")
    front, back = FIELDS[id_[0]]
    wanted = {front, back, f"{front}_zh", f"{back}_zh", "sources"}
    if other := (wanted - {*fields}) | ({*fields} - wanted - {"rests_on"}):
        fix = "a card has exactly " + ", ".join(sorted(wanted)) + ", and perhaps rests_on"
        raise BadCard(f"{where} lacks or does not know {sorted(other)[0]!r}. Fix: {fix}.")
    if unknown := [key for key in fields["sources"] if key not in known]:
        raise BadCard(f"{where} cites {unknown[0]!r}. Fix: add it to gym/sources.toml.")
    words = [
        Words(_word(fields, name, where), _word(fields, f"{name}_zh", where))
        for name in (front, back)
    ]
    return Card(
        id_,
        *words,
        topic,
        tuple(known[key] for key in fields["sources"]),
        tuple(Words(*point) for point in rubric.get("rubric", ())),
        Words(*rubric["follow"]) if "follow" in rubric else None,
        tuple(fields.get("rests_on", ())),
    )


def chosen(names: Iterable[str]) -> list[Card]:
    """The cards of these ids. Raises KeyError for one that there is not."""
    there = cards()
    for name in names:
        if name not in there:
            raise KeyError(f"there is no card {name!r}. Fix: an id as Q13 or M075, see gym/bank/.")
    return [there[name] for name in names]


def _word(fields: Mapping[str, object], name: str, where: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str) or not text.strip():
        raise BadCard(f"{where}: {name!r} is missing or empty. Fix: write it.")
    return " ".join(text.split())


def _read(path: Path) -> dict:
    with path.open("rb") as file:
        return tomllib.load(file)
