"""What follows from the notebooks and is written by no hand: map, tables, sums and links.

In a Markdown page a block stands between two comments, `<!-- ddpz course: NAME -->` and
`<!-- end -->`. In a notebook it is the last cell, with `{"generated": "links"}` in its metadata,
and the first words of code (see `start`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import nbformat

from ddpz_lite.course.authoring import built
from ddpz_lite.course.authoring.catalogue import Course, Incomplete, Lesson
from ddpz_lite.course.authoring.start import begin_exercise, begin_lesson
from ddpz_lite.course.check.notebooks import write_text

TASKS = Path(__file__).resolve().parents[1] / "tasks"
BLOCK = "<!-- ddpz course: {} -->"
END = "<!-- end -->"
LINKS = "links"  # the id of the generated cell, and what its metadata says
GITHUB = "https://github.com/"


def stale(root: Path, course: Course) -> dict[Path, str]:
    """The files that differ from what the notebooks' metadata make of them: their right text.

    Raises Incomplete for a page that has lost its comments.
    """
    wanted = {
        root / "README.md": _filled(root / "README.md", _front(course)),
        root / "README.zh.md": _filled(root / "README.zh.md", _front_chinese(course)),
        root / "lessons/README.md": _filled(root / "lessons/README.md", _map(course)),
        root / "exercises/README.md": _filled(root / "exercises/README.md", {"inside": _inside()}),
    }
    for lesson in course.written:
        path = root / "lessons" / str(lesson.file)
        wanted[path] = _linked(path, lesson_links(course, lesson), begin_lesson, course)
    wanted |= built.modules(root)
    by_number = {lesson.number: lesson for lesson in course.written}
    for number, exercise in course.exercises.items():
        if number in by_number:
            path = root / "solutions" / exercise.file
            links = exercise_links(course, by_number[number])
            wanted[path] = _linked(path, links, begin_exercise, course)
    return {
        path: text
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


# ---- links ----


def lesson_links(course: Course, lesson: Lesson) -> str:
    """The last cell of a lesson: its exercise, what comes next and came before, the map."""
    parts = []
    if exercise := course.exercise(lesson):
        worth = f"{exercise.minutes} minutes, {exercise.points} points"
        parts.append(f"**Exercise:** [{exercise.name}](../exercises/{exercise.file}), {worth}")
    parts += _onward(course, lesson, "")
    if before := _before(course, lesson):
        parts.append(f"**Before:** {_link(before)}")
    return " ·\n".join([*parts, "[All lessons](README.md)"])


def exercise_links(course: Course, lesson: Lesson) -> str:
    """The last cell of an exercise: back to its lesson, and on to the next one."""
    parts = [f"**Lesson:** {_link(lesson, '../lessons/')}", *_onward(course, lesson, "../lessons/")]
    return " ·\n".join([*parts, "[All lessons](../lessons/README.md)"])


def _onward(course: Course, lesson: Lesson, folder: str) -> Iterator[str]:
    """The next lesson that one needs, and before it what lies on the way and can wait."""
    for later in course.lessons[course.lessons.index(lesson) + 1 :]:
        if later.can_wait:
            if later.number[:2] == lesson.number[:2]:
                yield f"**Can wait:** {_link(later, folder)}"
        elif later.file:
            yield f"**Next:** {_link(later, folder)}"
            return
    if course.planned and course.planned[-1].number > lesson.number:
        planned = next(later for later in course.planned if later.number > lesson.number)
        yield f"**Next:** {planned.name}, which is planned"


def _before(course: Course, lesson: Lesson) -> Lesson | None:
    earlier = [one for one in course.written if one.number < lesson.number and not one.can_wait]
    return earlier[-1] if earlier else None


def _link(lesson: Lesson, folder: str = "") -> str:
    return f"[{lesson.name}]({folder}{lesson.file})"


def _linked(path: Path, text: str, begin: Callable, course: Course) -> str:
    """The notebook's file with its first words of code, and `text` as its last cell."""
    notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
    if any(cell.cell_type == "code" for cell in notebook.cells):
        begin(notebook, course.repository)
    notebook.cells = [cell for cell in notebook.cells if not _is_links(cell)]
    about = {"ddpz": {"generated": LINKS}}
    notebook.cells.append(nbformat.v4.new_markdown_cell(text, id=LINKS, metadata=about))
    return write_text(notebook)


def _is_links(cell: nbformat.NotebookNode) -> bool:
    return cell.metadata.get("ddpz", {}).get("generated") == LINKS


# ---- the pages ----


def _front(course: Course) -> dict[str, str]:
    """The blocks of the README."""
    rows = ["| lesson | you learn | exercise |", "|---|---|---|"]
    for lesson in course.written:
        own = course.exercises.get(lesson.number)
        exercise = f"[{lesson.number}](exercises/{own.file}) " if own else ""
        title = f"[{lesson.name}](lessons/{lesson.file}){_second(lesson)}"
        rows.append(f"| {title} | {lesson.learn} | {exercise}|")
    return {
        "hours": _hours(course),
        "get": _get(course),
        "count": _count(course),
        "table": "\n".join(rows),
        "planned": _planned(course),
    }


def _front_chinese(course: Course) -> dict[str, str]:
    """The blocks of README.zh.md. Raises Incomplete for a lesson without its Chinese words."""
    way, rows = _on_the_way(course), ["| 课 | 内容 | 练习 |", "|---|---|---|"]
    for lesson in course.written:
        if lesson.number not in course.chinese:
            raise Incomplete(
                f"lessons/plan.json: `chinese` has no words for lesson {lesson.number}."
            )
        title, learn = course.chinese[lesson.number]
        own = course.exercises.get(lesson.number)
        exercise = f"[{lesson.number}](exercises/{own.file}) " if own else ""
        star = " ★" if lesson in way else ""
        rows.append(
            f"| [{lesson.number} {title}](lessons/{lesson.file}){star} | {learn} | {exercise}|"
        )
    a, b, c, d = _all_hours(course)
    hours = f"全部课文约 {a} 小时，练习另需 {b} 小时。"
    hours += f"只走到 ZeRO-3 的最短路线是其中的一部分，约 {c} 小时，练习另需 {d} 小时。"
    get = _clone(
        course,
        "创建 .venv，安装课程，在 JupyterLab 中打开第 00 课",
        "可选：安装测试所需并运行，约 8 分钟",
    )
    return {"hours": hours, "get": get, "table": "\n".join(rows)}


def _clone(course: Course, lab: str, test: str) -> str:
    """The commands, with these comments."""
    clone = f"git clone {course.repository or '<this repository>'} ddpz-lite && cd ddpz-lite"
    return "\n".join(["```sh", clone, f"make lab     # {lab}", f"make test    # {test}", "```"])


def _get(course: Course) -> str:
    """How to get the course, with its address if it has one."""
    text = _clone(
        course,
        "creates .venv, installs the course, opens JupyterLab at lesson 00",
        "optional: installs what the tests need too, and runs them, 8 minutes on two cores",
    )
    if course.site:
        text += f"\n\nTo read first, without installing: <{course.site}>"
    if course.repository.startswith(GITHUB):
        where = course.repository.removeprefix(GITHUB)
        colab = f"https://colab.research.google.com/github/{where}/blob/HEAD/lessons/{course.written[0].file}"
        binder = f"https://mybinder.org/v2/gh/{where}/HEAD?labpath=lessons"
        text += f"\n\nTo run it in a browser: [Colab]({colab}), [Binder]({binder})"
    return text


def _count(course: Course) -> str:
    """How lessons relate to notebooks, and which of them are the short way."""
    lessons = len({lesson.number[:2] for lesson in course.written})
    *way, last = (lesson.number for lesson in _on_the_way(course))
    return _wrapped(
        f"{lessons} lessons come in {len(course.written)} notebooks, because most lessons have a "
        "second or third part, which can often wait. A notebook takes about an hour, and an "
        f"exercise a little longer. The short way to ZeRO-3 is {', '.join(way)} and {last}."
    )


def _planned(course: Course) -> str:
    if not course.planned:
        return "All lessons are written."
    names = [lesson.name for lesson in course.planned]
    return _wrapped(f"Planned: {'; '.join(names)}.")


def _map(course: Course) -> dict[str, str]:
    """The blocks of lessons/README.md."""
    return {
        "sums": _sums(course),
        "picture": mermaid(course),
        "way": _way(course),
        "table": _table(course),
        "abilities": _abilities(course),
    }


def mermaid(course: Course) -> str:
    """The map as a Mermaid flowchart: an arrow leads from a lesson to those that need it.

    An arrow is left out where a path of others says the same.
    """
    lines = ["```mermaid", "flowchart TB", "  accTitle: The map of the course"]
    lines += ["  accDescr: An arrow leads from a lesson to each lesson that needs it."]
    for name, lessons in groupby(course.lessons, course.group):
        lines.append(f'  subgraph {name.replace(" ", "_")}["{name}"]')
        for lesson in lessons:
            planned = "" if lesson.file else ":::planned"
            lines.append(f'    {lesson.number}["{lesson.name}<br>{lesson.makes}"]{planned}')
        lines.append("  end")
    lines += [f"  {need} --> {lesson.number}" for lesson, need in _arrows(course)]
    base = f"{course.repository}/blob/HEAD/lessons/" if course.repository else ""
    lines += [f'  click {one.number} href "{base}{one.file}"' for one in course.written]
    if course.planned:
        lines.append("  classDef planned stroke-dasharray: 5 4")
    return "\n".join([*lines, "```"])


def _arrows(course: Course) -> Iterator[tuple[Lesson, str]]:
    """(lesson, a number that it needs) without those that another of its needs already needs."""
    all_needs: dict[str, set[str]] = {}
    for lesson in course.lessons:
        indirect = set().union(*(all_needs.get(need, set()) for need in lesson.needs))
        all_needs[lesson.number] = {*lesson.needs, *indirect}
        yield from ((lesson, need) for need in lesson.needs if need not in indirect)


def outline(course: Course, folder: str) -> str:
    """The map as Markdown lists of links, a list per group; `folder` is where the lessons are."""
    sections = []
    for name, lessons in groupby(course.lessons, course.group):
        items = [
            f"- {_link(one, folder) if one.file else one.name}: {one.makes}" for one in lessons
        ]
        sections.append("\n".join([f"**{name}**", "", *items]))
    return "\n\n".join(sections)


def _sums(course: Course) -> str:
    minutes = sum(lesson.minutes for lesson in course.written)
    exercises = course.exercises.values()
    text = (
        f"{len({lesson.number[:2] for lesson in course.written})} lessons are written, in "
        f"{len(course.written)} notebooks that take {minutes} minutes. Their exercises take "
        f"{sum(e.minutes for e in exercises)} more, for {sum(e.points for e in exercises)} points."
    )
    if course.planned:
        text += f" {len(course.planned)} lessons are planned, and their numbers are fixed."
    return _wrapped(text)


def _way(course: Course) -> str:
    way = " → ".join(lesson.number for lesson in _on_the_way(course))
    return _wrapped(f"The short way to ZeRO leaves nothing out that it needs: `{way}`.")


def _all_hours(course: Course) -> tuple[int, ...]:
    """Hours: all lessons, all exercises, the short way to ZeRO, and its exercises."""
    way = _on_the_way(course)
    lessons, short = (sum(one.minutes for one in some) for some in (course.written, way))
    exercises = sum(one.minutes for one in course.exercises.values())
    own = [course.exercises[one.number].minutes for one in way if one.number in course.exercises]
    return tuple(round(minutes / 60) for minutes in (lessons, exercises, short, sum(own)))


def _hours(course: Course) -> str:
    """How long the course takes, and the short way to ZeRO."""
    a, b, c, d = _all_hours(course)
    return _wrapped(
        f"The lessons take about {a} hours and their exercises {b} more. The short way to ZeRO-3, "
        f"a part of them, takes {c} hours of lessons and {d} of exercises."
    )


def _on_the_way(course: Course) -> list[Lesson]:
    """The short way to ZeRO: what its last lesson needs, and what these need, in order."""
    by_number = {lesson.number: lesson for lesson in course.written}
    found, open_ = set(), [course.way]
    while open_:
        number = open_.pop()
        if number not in by_number:
            raise Incomplete(f"lesson {number} is needed and there is no such notebook.")
        if number not in found:
            found.add(number)
            open_ += by_number[number].needs
    return [by_number[number] for number in sorted(found)]


def _table(course: Course) -> str:
    rows = ["| lesson | time | difficulty | needs | you learn | exercise |", "|---" * 6 + "|"]
    for lesson in course.lessons:
        if not lesson.file:
            rows.append(f"| {lesson.name} | planned | | | {lesson.learn} | |")
            continue
        own = course.exercises.get(lesson.number)
        worth = f"[{own.minutes} min, {own.points} points](../exercises/{own.file}) " if own else ""
        needs = ", ".join(lesson.needs) or "none"
        rows.append(
            f"| [{lesson.number} {lesson.title}]({lesson.file}){_second(lesson)} | "
            f"{lesson.minutes} min | {lesson.difficulty} | {needs} | {lesson.learn} | {worth}|"
        )
    return "\n".join(rows)


def _abilities(course: Course) -> str:
    sections = []
    for lesson in course.written:
        abilities = "\n".join(f"- {can}" for can in lesson.can_do)
        sections.append(f"### {lesson.number} {lesson.title}\n\n{abilities}")
    return "\n\n".join(sections)


def _inside() -> str:
    """The lessons whose judges need what only an answer's own process can tell."""
    jobs = sorted(TASKS.glob("lesson*/job.py"))
    numbers = [job.parent.name[6:] for job in jobs if "check.watch import" in job.read_text()]
    lessons = ", ".join(numbers[:-1]) + f" and {numbers[-1]}"
    return _wrapped(
        "What lies in memory, what was changed there, and how far backward has come, only the "
        f"answer's own process can tell (lessons {lessons}). An answer that tampers with that "
        "there can deceive those criteria. Bytes and calls are counted by the grader's broker; to "
        "which call of the answer they belong, the answer's process says. Full points mean: right "
        "on these cases."
    )


def _second(lesson: Lesson) -> str:
    return f" ({lesson.second})" if lesson.second else ""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _filled(path: Path, blocks: dict[str, str]) -> str:
    """The page with each block between its comments. Raises Incomplete where they are missing."""
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        begin = BLOCK.format(name)
        pattern = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(END)}", re.S)
        if len(pattern.findall(text)) != 1:
            raise Incomplete(f"{path.name} needs the lines {begin!r} and {END!r}, once.")
        text = pattern.sub(lambda _: f"{begin}\n\n{block}\n\n{END}", text)  # noqa: B023
    return text
