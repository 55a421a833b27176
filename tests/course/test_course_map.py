"""The map of the course and the glossary: they say what the notebooks say, and every link leads
somewhere.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import notebook_rules as rules
import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
PATHS = {path.stem[:2]: path for path in sorted(LESSONS.glob("[0-9][0-9]_*.ipynb"))}
NUMBERS = [f"{number:02}" for number in range(18)]
README = (LESSONS / "README.md").read_text(encoding="utf-8")
GLOSSARY = (LESSONS / "GLOSSARY.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)[^)]*\)")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def facts(number: str) -> dict:
    return rules.read(PATHS[number]).metadata["ddpz"]


def row(number: str) -> str:
    """What the table of the map says about a lesson that exists, up to its own words."""
    said = facts(number)
    needs = ", ".join(said["needs"]) or "none"
    link = f"[{number} {said['title']}]({PATHS[number].name})"
    return f"| {link} | {said['minutes']} min | {said['difficulty']} | {needs} |"


def abilities(number: str) -> str:
    """What the map says one can do after a lesson."""
    lines = [f"### {number} {facts(number)['title']}", ""]
    return "\n".join([*lines, *(f"- {can}" for can in facts(number)["can_do"]), ""])


@pytest.mark.parametrize("number", PATHS)
def test_the_map_says_what_the_notebook_says(number):
    assert row(number) in README, f"lessons/README.md needs the row\n{row(number)}"
    assert abilities(number) in README, f"lessons/README.md needs\n{abilities(number)}"


@pytest.mark.parametrize("number", [n for n in NUMBERS if n not in PATHS])
def test_what_is_not_written_is_marked_as_planned(number):
    assert re.search(rf"^\| {number} [^|\[]+ \| planned \|", README, re.M)
    assert f"({number}_" not in README
    assert f"### {number}" not in README


def test_the_table_has_every_lesson_once_in_order():
    rows = re.findall(r"^\| \[?(\d\d) ", README, re.M)
    assert rows == NUMBERS


def test_the_time_is_the_sum():
    minutes = sum(facts(number)["minutes"] for number in PATHS)
    assert f"{minutes} minutes" in README, f"the {len(PATHS)} lessons take {minutes} minutes"


def test_the_way_to_zero_needs_nothing_that_is_not_on_it():
    way = re.search(r"`((?:\d\d → )+\d\d)`", README).group(1).split(" → ")
    for position, number in enumerate(way):
        assert set(facts(number)["needs"]) <= set(way[:position])


def test_needs_come_earlier_and_exist():
    for number in PATHS:
        needs = facts(number)["needs"]
        assert all(need in PATHS and need < number for need in needs), (number, needs)


def test_the_picture_shows_every_lesson_as_it_is():
    picture = ET.parse(LESSONS / "map.svg").getroot()
    assert picture.get("role") == "img"
    for name in ("title", "desc"):
        element = picture.find(f"{SVG}{name}")
        assert len(element.text) > 20
        assert element.get("id") in picture.get("aria-labelledby").split()
    rungs = {g.get("id"): g for g in picture.iter(f"{SVG}g")}
    assert sorted(rungs) == [f"lesson-{number}" for number in NUMBERS]
    for number in NUMBERS:
        rung = rungs[f"lesson-{number}"]
        words = " ".join(text.text for text in rung.iter(f"{SVG}text")).replace("\xa0", " ")
        assert rung.get("class") == ("written" if number in PATHS else "planned"), number
        assert words.startswith(number)
        if number in PATHS:
            assert facts(number)["title"].split(":")[0] in words
    assert picture.find(f"{SVG}rect").get("fill") == "#fcfcfa"  # its own card: dark pages, too


@pytest.mark.parametrize("page", [README, GLOSSARY], ids=["README", "GLOSSARY"])
def test_every_link_leads_somewhere(page):
    for text, target in LINK.findall(page):
        assert target.startswith("https://") or (LESSONS / target).exists(), (text, target)


@pytest.mark.parametrize("number", PATHS)
def test_a_lesson_links_to_lessons_and_terms_that_exist(number):
    anchors = {term.lower().replace(" ", "-") for term in re.findall(r"^## (.+)$", GLOSSARY, re.M)}
    for cell in rules.read(PATHS[number]).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(((?:\d\d_|GLOSSARY|README)[^)\s]*)\)", cell.source):
                page, _, anchor = target.partition("#")
                assert (LESSONS / page).exists(), target
                assert not anchor or (page == "GLOSSARY.md" and anchor in anchors), target


def test_the_picture_has_a_text():
    assert len(re.search(r"!\[([^\]]+)\]\(map\.svg\)", README).group(1)) > 80


# ---- the glossary ----

ENTRIES = re.findall(
    r"^## (.+)\n\n(.+) · \[(\d\d) [^\]]+\]\(([^)]+)\)\n\n((?:.+\n)+)", GLOSSARY, re.M
)
TERMS = [entry[0] for entry in ENTRIES]


def test_the_terms_are_many_sorted_and_unique():
    assert len(TERMS) == len(re.findall(r"^## ", GLOSSARY, re.M)) >= 60
    assert sorted(TERMS, key=str.casefold) == TERMS
    assert len({term.casefold() for term in TERMS}) == len(TERMS)


@pytest.mark.parametrize("entry", ENTRIES, ids=TERMS)
def test_an_entry(entry):
    """Chinese beside English, one or two sentences, and a lesson that uses the word."""
    term, chinese, number, target, meaning = entry
    assert CHINESE.search(chinese), "no Chinese term"
    assert number in PATHS and target == PATHS[number].name, "not the lesson's file"
    sentences = re.findall(r"[.!?](?:\s|$)", meaning)
    assert 1 <= len(sentences) <= 2, f"{len(sentences)} sentences"
    words = "\n".join(cell.source for cell in rules.read(PATHS[number]).cells).replace("**", "")
    assert " ".join(term.casefold().split()) in " ".join(words.casefold().split())
