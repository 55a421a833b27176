"""The map of the course as a drawing: a ladder, lesson 00 at its foot."""

from __future__ import annotations

from html import escape
from itertools import groupby, pairwise

from ddpz_lite.course.authoring.catalogue import Course, Lesson

# Colour-blind safe, each dark enough for text on the drawing's own card; used in turn.
COLOURS = ("#0072B2", "#B06F00", "#007A5A", "#A0527F")
RUNG, GAP = 36, 8  # pixels from rung to rung, and more between two groups
LEFT, WIDTH, HEIGHT = 222, 306, 29  # of a rung
INSET = 14  # of a second notebook's rung, on either side
STYLE = """\
    .name { font-size: 15px; font-weight: 600 } .makes { font-size: 14px; fill: #57606a }
    .group { font-size: 15px; font-weight: 600 }
    .planned .rung { fill: none; stroke-dasharray: 5 4 }
    .planned .name { fill: #57606a; font-weight: 400 } .rung { stroke-width: 1.6 }"""
FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"


def described(course: Course) -> str:
    """The map in words: its groups from the bottom, and what the outlines mean."""
    groups = []
    for name, lessons in _groups(course):
        first, last = lessons[0].number[:2], lessons[-1].number[:2]
        groups.append(f"{name}, {first} to {last}" if first != last else f"{name}, {first}")
    rungs = len({lesson.number[:2] for lesson in course.lessons})
    planned = ", planned ones a dashed one" if course.planned else ""
    return (
        f"The map of the course, a ladder of {rungs} lessons. From the bottom: "
        f"{'; '.join(groups)}. Written lessons have a full outline{planned}."
    )


def drawn(course: Course) -> str:
    """The map as the text of an SVG file."""
    places = _places(course)
    height = places[course.lessons[0].number] + 66
    colours = {name: COLOURS[i % len(COLOURS)] for i, (_, name) in enumerate(course.groups)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 790 {height}" width="790" '
        f'height="{height}" role="img" aria-labelledby="t d" font-family="{FONTS}">',
        '  <title id="t">The map of the course: a ladder of lessons</title>',
        f'  <desc id="d">{escape(described(course))}</desc>',
        f"  <style>\n{STYLE}\n  </style>",
        f'  <rect width="790" height="{height}" rx="10" fill="#fcfcfa" stroke="#d0d0c8"/>',
        f'  <path d="M212 10 V{height - 16} M538 10 V{height - 16}" stroke="#57606a" '
        'stroke-width="5" stroke-linecap="round"/>',
    ]
    for lesson in course.lessons:
        lines += _rung(lesson, places[lesson.number], colours[course.group(lesson)])
    for name, lessons in _groups(course):
        top, bottom = places[lessons[-1].number], places[lessons[0].number]
        lines += _bracket(name, top, bottom, colours[name])
    lines += [
        f'  <text class="makes" x="174" y="{height - 12}" text-anchor="end">begin here</text>',
        f'  <path d="M182 {height - 17} h20 m-6 -5 l6 5 l-6 5" fill="none" stroke="#57606a" '
        'stroke-width="1.6"/>',
    ]
    if course.planned:
        lines.append(f'  <text class="makes" x="566" y="{height - 12}">dashed: planned</text>')
    return "\n".join([*lines, "</svg>", ""])


def _groups(course: Course) -> list[tuple[str, list[Lesson]]]:
    return [(name, list(lessons)) for name, lessons in groupby(course.lessons, course.group)]


def _places(course: Course) -> dict[str, int]:
    """The top of each rung, by number: the last lesson is the highest."""
    upward = list(reversed(course.lessons))
    places = {upward[0].number: 18}
    for upper, lower in pairwise(upward):
        gap = GAP * (course.group(upper) != course.group(lower))
        places[lower.number] = places[upper.number] + RUNG + gap
    return places


def _rung(lesson: Lesson, y: int, colour: str) -> list[str]:
    inset = INSET * lesson.number.endswith("b")
    name = escape(f"{lesson.number}\u00a0\u00a0{lesson.title.partition(':')[0]}")
    return [
        f'  <g id="lesson-{lesson.number}" class="{"written" if lesson.file else "planned"}">',
        f'    <rect class="rung" x="{LEFT + inset}" y="{y}" width="{WIDTH - 2 * inset}" '
        f'height="{HEIGHT}" rx="5" fill="{colour}" fill-opacity="0.13" stroke="{colour}"/>',
        f'    <text class="name" x="{LEFT + inset + 14}" y="{y + 20}" fill="#1f2328">{name}</text>',
        f'    <text class="makes" x="566" y="{y + 20}">{escape(lesson.makes)}</text>',
        "  </g>",
    ]


def _bracket(name: str, top: int, bottom: int, colour: str) -> list[str]:
    height, middle = bottom - top + HEIGHT - 4, (top + bottom) // 2
    return [
        f'  <path d="M196 {top + 2} h-10 v{height} h10" fill="none" stroke="{colour}" '
        'stroke-width="2.4"/>',
        f'  <text class="group" x="174" y="{middle + 20}" text-anchor="end" fill="{colour}">'
        f"{escape(name)}</text>",
    ]
