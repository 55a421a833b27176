"""What is generated is what the notebooks say, whichever lessons there are; and the glossary."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest

from ddpz_lite.course.authoring import catalogue, glossary, pages, rules
from ddpz_lite.course.authoring.catalogue import Course, Exercise, Lesson
from ddpz_lite.course.cli import main
from ddpz_lite.course.cli.shared import lesson_number

ROOT = Path(__file__).resolve().parents[2]
COURSE = catalogue.read(ROOT)
GLOSSARY = (ROOT / "lessons/GLOSSARY.md").read_text(encoding="utf-8")


def test_what_is_generated_is_up_to_date():
    stale = [path.relative_to(ROOT).as_posix() for path in pages.stale(ROOT, COURSE)]
    assert stale == [], "run: make course"


def test_needs_come_earlier_and_exist():
    numbers = [lesson.number for lesson in COURSE.written]
    for lesson in COURSE.written:
        assert all(need in numbers and need < lesson.number for need in lesson.needs), lesson


# ---- a small course, with second notebooks ----

LEARN = {"learn": "x", "makes": "y", "minutes": 30, "difficulty": "easy", "can_do": ("a", "b", "c")}
SMALL = Course(
    lessons=(
        Lesson("00", "Start", file="00_start.ipynb", **LEARN),
        Lesson("01", "One: alone", file="01_one.ipynb", needs=("00",), **LEARN),
        Lesson("01b", "Memory", file="01b_memory.ipynb", second="can wait", **LEARN),
        Lesson("02", "Two", "planned", "planned"),
        Lesson("03", "Three", file="03_three.ipynb", needs=("01",), **LEARN),
        Lesson("03b", "Metrics", file="03b_metrics.ipynb", second="needed for 05", **LEARN),
        Lesson("05", "Five & six", file="05_five.ipynb", needs=("01", "03b"), **LEARN),
        Lesson("06", "Six", "planned", "planned"),
    ),
    exercises={
        "01": Exercise("01_one.ipynb", "01 One", 10, 3),
        "03b": Exercise("03b_metrics.ipynb", "03b Metrics", 20, 4),
    },
    groups=(("00", "Ground"), ("03", "Up")),
    way="05",
    chinese={},
)
BY_NUMBER = {lesson.number: lesson for lesson in SMALL.lessons}


@pytest.mark.parametrize(
    ("number", "sentences"),
    [
        ("00", ["**Next:** [01 One](01_one.ipynb)"]),
        (
            "01",
            [
                "**Exercise:** [01 One](../exercises/01_one.ipynb), 10 minutes, 3 points",
                "**Can wait:** [01b Memory](01b_memory.ipynb)",
                "**Next:** [03 Three](03_three.ipynb)",
                "**Before:** [00 Start](00_start.ipynb)",
            ],
        ),
        (
            "01b",
            [
                "**Exercise:** [01 One](../exercises/01_one.ipynb), 10 minutes, 3 points",
                "**Next:** [03 Three](03_three.ipynb)",
                "**Before:** [01 One](01_one.ipynb)",
            ],
        ),
        (
            "03",
            ["**Next:** [03b Metrics](03b_metrics.ipynb)", "**Before:** [01 One](01_one.ipynb)"],
        ),
        (
            "05",
            [
                "**Next:** 06 Six, which is planned",
                "**Before:** [03b Metrics](03b_metrics.ipynb)",
            ],
        ),
    ],
)
def test_links_pass_over_what_can_wait(number, sentences):
    links = pages.lesson_links(SMALL, BY_NUMBER[number])
    assert links == " ·\n".join([*sentences, "[All lessons](README.md)"])


def test_an_exercise_leads_back_and_on():
    assert pages.exercise_links(SMALL, BY_NUMBER["03b"]) == (
        "**Lesson:** [03b Metrics](../lessons/03b_metrics.ipynb) ·\n"
        "**Next:** [05 Five & six](../lessons/05_five.ipynb) ·\n"
        "[All lessons](../lessons/README.md)"
    )


def test_tables_and_sums_have_second_notebooks_too():
    blocks = pages._map(SMALL)
    assert "4 lessons are written, in 6 notebooks that take 180 minutes" in blocks["sums"]
    assert "take 30 more, for 7 points. 2 lessons are planned" in " ".join(blocks["sums"].split())
    assert "`00 → 01 → 03b → 05`" in blocks["way"]
    assert ("planned" in pages._map(COURSE)["sums"]) == bool(COURSE.planned)
    rows = re.findall(r"^\| \[?(\d\d[bc]?) ", blocks["table"], re.M)
    assert rows == list(BY_NUMBER)
    assert "| [01b Memory](01b_memory.ipynb) (can wait) | 30 min |" in blocks["table"]
    assert "| 02 Two | planned |" in blocks["table"]
    assert "### 03b Metrics\n\n- a\n- b\n- c" in blocks["abilities"]
    assert (
        "| [03b Metrics](lessons/03b_metrics.ipynb) (needed for 05) | x |"
        in (pages._front(SMALL)["table"])
    )


def test_the_map_has_a_node_a_link_and_the_needs_of_each_lesson():
    lines = pages.mermaid(SMALL).splitlines()
    assert (
        '    01b["01b Memory<br>y"]' in lines and '    02["02 Two<br>planned"]:::planned' in lines
    )
    assert '  click 03b href "03b_metrics.ipynb"' in lines
    arrows = [line.split() for line in lines if "-->" in line]
    assert arrows == [["00", "-->", "01"], ["01", "-->", "03"], ["01", "-->", "05"],
                      ["03b", "-->", "05"]]  # fmt: skip
    by_link = dataclasses.replace(SMALL, repository="https://host/us")
    assert 'click 00 href "https://host/us/blob/HEAD/lessons/00_start.ipynb"' in (
        pages.mermaid(by_link)
    )


def test_the_map_leaves_out_arrows_that_a_path_of_others_says():
    needs = {"00": (), "01": ("00",), "02": ("00", "01")}
    lessons = tuple(Lesson(n, n, "x", "y", file=f"{n}.ipynb", needs=n_) for n, n_ in needs.items())
    arrows = re.findall(
        r"(\d\d) --> (\d\d)", pages.mermaid(Course(lessons, {}, (("00", "A"),), "02", {}))
    )
    assert arrows == [("00", "01"), ("01", "02")]


def test_the_outline_lists_every_lesson_under_its_group():
    text = pages.outline(SMALL, "lessons/")
    assert text.startswith("**Ground**\n\n- [00 Start](lessons/00_start.ipynb): y\n")
    assert "\n- 02 Two: planned\n" in text and "\n\n**Up**\n\n- [03 Three]" in text


# ---- pages that list lessons ----


def test_the_lessons_that_judge_memory_are_those_whose_jobs_look_at_it():
    sentences = pages._inside()
    numbers = set(re.findall(r"\d\d", sentences.partition("(lessons ")[2].partition(")")[0]))
    for path in ROOT.glob("ddpz_lite/course/tasks/lesson*/job.py"):
        measures = re.search(r"\b(Holding|Kept|tell_when_reached)\(", path.read_text())
        assert (path.parent.name[6:] in numbers) == bool(measures), path


def test_every_schedule_has_lessons_that_exist_after_those_that_they_need():
    text = (ROOT / "exercises/CLASS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]*(?:weeks|days)[^|]* \| ([\d bc·]+) \|$", text, re.M)
    needs = {lesson.number: lesson.needs for lesson in COURSE.written}
    assert len(rows) == 3
    for row in rows:
        numbers = re.findall(r"\d\d[bc]?", row)
        assert numbers == sorted(set(numbers)) and set(numbers) <= set(needs)
        for place, number in enumerate(numbers):
            assert set(needs[number]) <= set(numbers[:place]), (row, number)


# ---- the command ----


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Our course's pages and three of its notebooks, with the command at work there."""
    (tmp_path / "lessons").mkdir()
    (tmp_path / "solutions").mkdir()
    (tmp_path / "exercises").mkdir()
    for name in ("README.md", "README.zh.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "exercises/README.md", tmp_path / "exercises")
    for name in ("README.md", "plan.json"):
        shutil.copy(ROOT / "lessons" / name, tmp_path / "lessons")
    for number in ("00", "01", "02"):
        for folder in ("lessons", "solutions"):
            for path in (ROOT / folder).glob(f"{number}_*.ipynb"):
                shutil.copy(path, tmp_path / folder)
    plan = json.loads((tmp_path / "lessons/plan.json").read_text())
    four = {"title": "Feeding the ranks", "learn": "no rank waits", "makes": "nobody waits"}
    planned = {"04": four, **plan["planned"]}  # whatever is planned today
    (tmp_path / "lessons/plan.json").write_text(
        json.dumps({**plan, "way": "02", "planned": planned})
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_once_and_then_has_nothing_to_do(small, capsys):
    assert main(["course", "--check"]) == 1
    assert "README.md differs from what the notebooks say" in capsys.readouterr().out
    assert main(["course"]) == 0
    assert "wrote lessons/README.md" in capsys.readouterr().out
    assert main(["course", "--check"]) == 0
    assert capsys.readouterr().out == "all are up to date\n"
    readme = (small / "README.md").read_text()
    assert "[02 Ranks and collectives]" in readme and "[05 DDP]" not in readme
    chinese = (small / "README.zh.md").read_text()
    assert "[02 rank 与集合通信](lessons/02_ranks_and_collectives.ipynb) ★" in chinese
    assert "小时" in chinese and "05 DDP" not in chinese
    last = nbformat.read(next((small / "lessons").glob("02_*.ipynb")), as_version=4).cells[-1]
    assert "**Next:** 04 Feeding the ranks, which is planned" in last.source


def test_a_changed_title_changes_every_page_that_names_it(small):
    main(["course"])
    (path,) = (small / "lessons").glob("01_*.ipynb")
    path.write_text(path.read_text().replace('"title": "One device"', '"title": "A device"'))
    stale = pages.stale(small, catalogue.read(small))
    names = {p.relative_to(small).as_posix() for p in stale}
    assert {"README.md", "lessons/README.md"} <= names
    assert {"lessons/00_start_here.ipynb", "solutions/01_one_device.ipynb"} <= names


def test_the_addresses_of_the_course_come_from_one_place(small):
    main(["course"])
    path = small / "lessons/plan.json"
    assert "git clone <this repository> ddpz-lite" in (small / "README.md").read_text()
    plan = json.loads(path.read_text())
    assert plan["addresses"].keys() == {"repository", "site"}
    assert "colab" not in (small / "README.md").read_text()
    plan["addresses"] = {"repository": "https://github.com/a/b", "site": "https://c.example"}
    path.write_text(json.dumps(plan))
    main(["course"])
    readme = (small / "README.md").read_text()
    assert "git clone https://github.com/a/b ddpz-lite" in readme
    assert "<https://c.example>" in readme
    assert "colab.research.google.com/github/a/b/blob/HEAD/lessons/00_start_here.ipynb" in readme
    assert "mybinder.org/v2/gh/a/b/HEAD" in readme
    first = rules.read(small / "lessons/00_start_here.ipynb").cells[2].source
    assert "git+https://github.com/a/b`" in first


def spoil(path, old, new):
    return lambda root: (root / path).write_text((root / path).read_text().replace(old, new))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (spoil("README.md", "<!-- ddpz course: table -->", ""), "README.md needs the lines"),
        (spoil("lessons/plan.json", '"01"', '"1"'), "has no words for lesson 01"),
        (spoil("lessons/00_start_here.ipynb", '"makes"', '"m"'), "`ddpz` has no 'makes'"),
        (spoil("lessons/plan.json", '"04"', '"02"'), "still plans 02, which is written"),
        (spoil("lessons/plan.json", '"way": "02"', '"way": "16"'), "lesson 16 is needed"),
        (
            lambda root: (root / "lessons/01d_more.ipynb").write_text("{}"),
            "the name of a lesson is NN_name.ipynb",
        ),
    ],
)
def test_a_course_without_a_map_is_one_line(small, change, complaint, capsys):
    change(small)
    assert main(["course"]) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


def test_a_lesson_may_have_a_second_and_a_third_notebook():
    names = [f"12{letter}_more.ipynb" for letter in ("", "b", "c", "d", "bc")]
    assert [bool(catalogue.NAME.fullmatch(name)) for name in names] == [True] * 3 + [False] * 2
    assert [lesson_number(text) for text in ("3", "3b", "3c", "3d")] == ["03", "03b", "03c", "3d"]
    assert [catalogue.is_further(number) for number in ("03", "03b", "03c")] == [False, True, True]


@pytest.mark.parametrize("lesson", COURSE.written, ids=lambda lesson: lesson.number)
def test_below_each_summary_stands_the_same_in_chinese_folded(lesson):
    cells = rules.read(ROOT / "lessons" / lesson.file).cells
    at = [i for i, c in enumerate(cells) if c.metadata.get("ddpz", {}).get("part") == "summary"]
    below = cells[at[-1] + 1].source
    assert below.startswith('<details lang="zh"><summary>') and glossary.CHINESE.search(below)


# ---- the glossary ----


@pytest.mark.parametrize("lesson", COURSE.written, ids=lambda lesson: lesson.number)
def test_a_lesson_links_to_terms_that_exist(lesson):
    anchors = {entry.anchor for entry in glossary.entries(ROOT)}
    for cell in rules.read(ROOT / "lessons" / lesson.file).cells:
        assert set(glossary.LINK.findall(cell.source)) <= anchors


def test_the_terms_are_many_sorted_and_unique():
    terms = [entry.term for entry in glossary.entries(ROOT)]
    assert len(terms) == len(re.findall(r"^## ", GLOSSARY, re.M)) >= 60
    assert sorted(terms, key=str.casefold) == terms
    assert len({term.casefold() for term in terms}) == len(terms)


def test_every_entry_has_its_form_and_a_lesson_that_uses_the_word():
    found = [
        (e.term, sentences)
        for e in glossary.entries(ROOT)
        for sentences in glossary.faults(ROOT, e)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"chinese": "none"}, "no Chinese term"),
        ({"meaning_chinese": ""}, "no Chinese meaning"),
        ({"file": "02_gone.ipynb"}, "is not the file"),
        ({"number": "02"}, "is not the file"),
        ({"meaning": "One. Two. Three."}, "3 sentences"),
        ({"term": "unheard-of"}, "does not use the word"),
    ],
)
def test_a_spoilt_entry_is_found(changed, fault):
    entry = glossary.entries(ROOT)[0]
    spoilt = glossary.Entry(**{**vars(entry), **changed})
    assert any(fault in sentences for sentences in glossary.faults(ROOT, spoilt))
