"""The cards, as bank/*.toml have them: a file for each topic, questions first and then myths."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
FIELDS = {"Q": ("ask", "say"), "M": ("claim", "truth")}  # what is shown first, and what then


@dataclass(frozen=True)
class Words:
    """The same in English and Chinese."""

    en: str
    zh: str

    def of(self, language: str) -> str:
        """In "en" or "zh"."""
        return {"en": self.en, "zh": self.zh}[language]


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
    """A question or a myth.

    front   the question; of a myth, the sentence that is wrong
    back    a good answer; of a myth, what is right
    topic   the title of its file
    """

    id: str
    front: Words
    back: Words
    topic: Words
    sources: tuple[Source, ...]

    @property
    def myth(self) -> bool:
        return self.id.startswith("M")

    def asked(self, language: str) -> str:
        """What the card asks: of a myth, what is wrong with it."""
        front = self.front.of(language)
        if not self.myth:
            return front
        return f"“{front}” What is wrong?" if language == "en" else f"“{front}”错在哪里？"


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
    return collect({path.name: _read(path) for path in sorted(HERE.glob("bank/*.toml"))}, sources())


@cache
def topics() -> dict[str, Words]:
    """The topics of articles and interview guides; cells say which they teach."""
    return {key: Words(*pair) for key, pair in _read(HERE / "topics.toml").items()}


def collect(files: Mapping[str, dict], known: Mapping[str, Source]) -> dict[str, Card]:
    """Cards from the files' contents, by name of the file. known: the sources there are."""
    found: dict[str, Card] = {}
    for file, content in files.items():
        entries = dict(content)
        topic = Words(_word(entries, "title", file), _word(entries, "title_zh", file))
        for key in ("title", "title_zh"):
            del entries[key]
        for id_, fields in entries.items():
            where = f"bank/{file}: {id_}"
            if id_ in found:
                raise BadCard(f"{where} is there twice. Fix: give the second the next number.")
            found[id_] = _card(id_, fields, topic, known, where)
    return found


def _card(id_: str, fields: dict, topic: Words, known: Mapping[str, Source], where: str) -> Card:
    if id_[:1] not in FIELDS or not id_[1:].isdigit():
        raise BadCard(f"{where} is not an id. Fix: Q and a number for a question, M for a myth.")
    front, back = FIELDS[id_[0]]
    wanted = {front, back, f"{front}_zh", f"{back}_zh", "sources"}
    if other := {*fields} ^ wanted:
        fix = "a card has exactly " + ", ".join(sorted(wanted))
        raise BadCard(f"{where} lacks or does not know {sorted(other)[0]!r}. Fix: {fix}.")
    if unknown := [key for key in fields["sources"] if key not in known]:
        raise BadCard(f"{where} cites {unknown[0]!r}. Fix: add it to gym/sources.toml.")
    words = [
        Words(_word(fields, name, where), _word(fields, f"{name}_zh", where))
        for name in (front, back)
    ]
    return Card(id_, *words, topic, tuple(known[key] for key in fields["sources"]))


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
