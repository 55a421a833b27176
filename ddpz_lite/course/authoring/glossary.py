"""The glossary of the course: its entries, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpz_lite.course.authoring import rules
from ddpz_lite.course.authoring.catalogue import NUMBER

ENTRY = re.compile(
    rf"^## (.+)\n\n(.+) · \[({NUMBER}) [^\]]+\]\(([^)]+)\)\n\n((?:.+\n)+)(?:\n((?!#).+)\n)?", re.M
)
CHINESE = re.compile(r"[\u4e00-\u9fff]")
LINK = re.compile(r"\]\(GLOSSARY\.md#([^)\s]+)\)")


@dataclass(frozen=True)
class Entry:
    """One term, its Chinese one, the lesson (number and file) that defines it, both meanings."""

    term: str
    chinese: str
    number: str
    file: str
    meaning: str
    meaning_chinese: str

    @property
    def anchor(self) -> str:
        return self.term.lower().replace(" ", "-")


def entries(root: Path) -> list[Entry]:
    """All entries that have the form of one, in order."""
    text = (root / "lessons/GLOSSARY.md").read_text(encoding="utf-8")
    return [Entry(*found) for found in ENTRY.findall(text)]


def faults(root: Path, entry: Entry) -> Iterator[str]:
    """Chinese next to English, one or two English sentences, and a lesson that uses the word."""
    path = root / "lessons" / entry.file
    if not CHINESE.search(entry.chinese):
        yield "no Chinese term"
    if not CHINESE.search(entry.meaning_chinese):
        yield "no Chinese meaning: a paragraph below the English one"
    if not path.is_file() or not path.name.startswith(f"{entry.number}_"):
        yield f"lesson {entry.number} is not the file {entry.file}"
        return
    sentences = len(re.findall(r"[.!?](?:\s|$)", entry.meaning))
    if not 1 <= sentences <= 2:
        yield f"{sentences} sentences, and one or two were expected"
    cells = rules.read(path).cells
    words = " ".join("\n".join(cell.source for cell in cells).replace("**", "").casefold().split())
    if " ".join(entry.term.casefold().split()) not in words:
        yield f"lesson {entry.number} does not use the word"
