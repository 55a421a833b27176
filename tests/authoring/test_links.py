"""Every relative link of the course leads somewhere, its anchor too. No network is asked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("lessons", "exercises", "solutions")
SOURCES = [ROOT / "README.md"]
SOURCES += sorted(
    p for f in FOLDERS for kind in ("md", "ipynb") for p in ROOT.glob(f"{f}/*.{kind}")
)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"\]\(<?([^)\s>]+)|\b(?:href|src)=[\"']([^\"']+)")


def text_of(path: Path) -> str:
    """The Markdown of a page, or of a notebook's text cells, without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return CODE.sub("", text)


def anchors(path: Path) -> set[str]:
    """What `#...` may name in a Markdown page: its headings, lower case, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.+?)\s*$", text_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> list[str]:
    """The relative links of a page that lead nowhere, each with the reason."""
    found = []
    for link in (a or b for a, b in LINK.findall(text_of(path))):
        if urlsplit(link).scheme:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / unquote(name) if name else path
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix != ".md":
            found.append(f"{link}: only Markdown has the same anchors everywhere")
        elif anchor and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(path):
    assert broken(path) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# A title, twice\n\n## Part 2\n\n[self](#part-2)\n")
    (tmp_path / "n.ipynb").write_text('{"cells": []}')
    good = "[a](a.md) [b](a.md#a-title-twice) `[c](no.md)` [d](https://no.invalid/x)\n"
    fenced = "```\n[e](no.md)\n```\n"
    bad = '[f](no.md) [g](a.md#part-3) <img src="no.png"> [h](n.ipynb#Part)\n'
    (tmp_path / "page.md").write_text(good + fenced + bad)
    reasons = ["no such file", "no such heading", "no such file", "only Markdown"]
    found = broken(tmp_path / "page.md")
    assert [
        sentence.partition(": ")[2][: len(why)]
        for sentence, why in zip(found, reasons, strict=True)
    ] == reasons
    assert broken(tmp_path / "a.md") == []
