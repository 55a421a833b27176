"""Plain charts of a lesson's own numbers: lines and bars, each in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure, written
from ddpz_lite.course.show.style import MUTED_COLOR, SERIES, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = tuple[Sequence[float], Sequence[float]]  # x, y


def lines(series: Mapping[str, Points], *, x: str, y: str, alt: str, **looks: Any) -> None:
    """Draw a line for each of `series`, {label: (x values, y values)}, and show it.

    x, y: what the axes say. alt: the picture in words. For `looks` see `line_figure`.
    """
    fig, alt, table = line_figure(series, x=x, y=y, alt=alt, **looks)
    show_figure(fig, alt=alt, table=table)


def line_figure(
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    alt: str,
    title: str = "",
    log: str = "",
    dots: Mapping[str, Points] | None = None,
    at: Mapping[str, float] | None = None,
    upright: Mapping[str, float] | None = None,
    ticks: Sequence[float] | None = None,
    marks: bool = True,
    steps: bool = False,
    low: float = 0,
) -> tuple[Figure, str, Table]:
    """The same as (figure, alt, table): what a function for `explore` returns.

    log: the axes that are logarithmic, "", "x", "y" or "xy". dots: points without a line, drawn in
    the colour of the line of the same name, or black. at: dashed lines at a height, by what they
    mean. upright: the same, dotted, at a place of the x axis. ticks: the places of the x axis that
    are labelled. marks: whether each point has its marker. steps: whether a line keeps its height
    until its next point. low: where the y axis begins, if it is not logarithmic and no line is
    negative. Raises ValueError for lines without points.
    """
    if not series or any(len(a) != len(b) or not len(a) for a, b in series.values()):
        raise ValueError("show.lines: give {label: (x, y)} with as many x as y, and at least one.")
    fig, axes = figure(height=2.9)
    with house_style():
        if dots:
            axes.margins(y=0.1)  # no marker on the frame
        looks = dict(zip(series, cycle(SERIES), strict=False))
        for label, (a, b) in series.items():
            look, every = looks[label], max(1, len(a) // 8)
            style = {
                "color": look.color,
                "marker": look.marker if marks else "",
                "markevery": every,
                "drawstyle": "steps-post" if steps else "default",
            }
            axes.plot(a, b, label=label, **style)
        for label, (a, b) in (dots or {}).items():
            own = {"label": label} if label not in looks else {}
            look = looks.get(label)
            style = {
                "color": look.color if look else TEXT_COLOR,
                "marker": look.marker if look else "+",
            }
            axes.plot(a, b, linestyle="", markersize=9, **style, **own)
        for label, height in (at or {}).items():
            axes.axhline(height, color=TEXT_COLOR, linewidth=1, linestyle="--")
            axes.annotate(label, (0.99, height), xycoords=("axes fraction", "data"), ha="right",
                          va="bottom", fontsize=8.5)  # fmt: skip
        for label, place in (upright or {}).items():
            axes.axvline(place, color=MUTED_COLOR, linewidth=1, linestyle=":")
            axes.annotate(label, (place, 0.97), xycoords=("data", "axes fraction"), ha="right",
                          va="top", rotation=90, fontsize=8.5)  # fmt: skip
        axes.set(xlabel=x, ylabel=y, title=title)
        if "x" in log:
            axes.set_xscale("log")
            places = [value for a, _ in series.values() for value in a]
            if max(places) < 5000 and all(math.frexp(place)[0] == 0.5 for place in places):
                axes.set_xscale("log", base=2)  # 1, 2, 4: numbers of ranks
                axes.xaxis.set_major_formatter("{x:,.4g}")
                if len(set(places)) <= 12:
                    axes.set_xticks(sorted(set(places)))
            elif max(places) < 100 * min(places):  # 5, 10, 20, 50, 100
                axes.set_xscale("log", subs=[2, 5])
                for set_format in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
                    set_format("{x:,.4g}")
        elif all(isinstance(value, int) for a, _ in series.values() for value in a):
            axes.locator_params(axis="x", integer=True)  # no step 2.5
        if ticks:
            axes.set_xticks(ticks, [f"{place:g}" for place in ticks])
            axes.set_xticks([], minor=True)
        if "y" in log:
            axes.set_yscale("log")
            heights = [value for _, b in series.values() for value in b]
            if max(heights) < 10 * min(heights):  # no power of ten between them: 3.2, not 3.2 x 10⁰
                if max(heights) > 8 * min(heights):  # there is room for 2 and 5 alone
                    axes.set_yscale("log", subs=[2, 5])
                for set_format in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                    set_format("{x:.3g}")
            elif min(heights) >= 1e-3 and max(heights) < 1e5:
                axes.yaxis.set_major_formatter("{x:,.4g}")  # 0.1, not 10⁻¹
        elif min(min(b) for _, b in series.values()) >= 0:
            axes.set_ylim(low)
        if len(series) + len(dots or {}) > 1:
            axes.legend()
    rows = [[label, *pair] for label, points in series.items() for pair in _some(points)]
    for label, points in (dots or {}).items():
        name = f"{label}, measured" if label in series else label
        rows += [[name, *pair] for pair in zip(*points, strict=True)]
    return fig, alt, [["line", x, y], *rows]


def bars(
    heights: Mapping[str, float],
    *,
    x: str,
    alt: str,
    title: str = "",
    log: bool = False,
    first_is_right: bool = False,
    text: Mapping[str, str] | None = None,
) -> None:
    """Draw a horizontal bar for each of {label: value}, from the top, and show it.

    text: what stands at the end of a bar in place of its value. first_is_right: the first bar is
    the one to compare with, and has a colour of its own.
    """
    fig, axes = figure(height=0.9 + 0.36 * len(heights))
    with house_style():
        for place, (label, value) in enumerate(heights.items()):
            look = SERIES[2] if first_is_right and place == 0 else SERIES[5 * first_is_right]
            axes.barh(place, value, **look.patch_kwargs)
            axes.annotate((text or {}).get(label, written(value)), (value, place), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=9)  # fmt: skip
        axes.set_yticks(range(len(heights)), list(heights))
        axes.set_ylim(len(heights) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        top = max(heights.values())
        if log:
            axes.set_xscale("log")
            least = min(value for value in heights.values() if value > 0)
            axes.set_xlim(least / 3, top * 12)
        else:
            axes.set_xlim(0, 1.17 * (top or 1.0))
        axes.set(xlabel=x, title=title)
    show_figure(fig, alt=alt, table=[["", x], *([label, v] for label, v in heights.items())])


def _some(points: Points, most: int = 12) -> list[tuple[float, float]]:
    """At most about a dozen of the points, the last one among them."""
    pairs = list(zip(*points, strict=True))
    step = -(-len(pairs) // most)
    return [pair for i, pair in enumerate(pairs) if i % step == 0 or i == len(pairs) - 1]
