"""The parts of a step: a bar per row, cut into compute, exposed, data and rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, legend_above
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import SERIES, style_of

PARTS = {
    "compute": style_of("forward"),
    "exposed": style_of("all_reduce"),
    "data": SERIES[1],
    "rest": SERIES[3],
}


def step_parts(rows: Mapping[str, Mapping[str, float]], *, title: str = "") -> None:
    """Draw a bar for each of {row: {part: seconds}}, and show it.

    Parts are "compute", "exposed", "data" and "rest"; one that is missing is zero. The alternative
    text gives each row's step and its exposed share. Raises ValueError without rows, or for a part
    of another name.
    """
    fig, alt, table = step_parts_figure(rows, title=title)
    show_figure(fig, alt=alt, table=table)


def step_parts_figure(
    rows: Mapping[str, Mapping[str, float]], *, title: str = ""
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table): what a function for `explore` returns."""
    if not rows or any(set(parts) - set(PARTS) for parts in rows.values()):
        raise ValueError(f"step_parts: give {{row: {{part: seconds}}}}, parts: {', '.join(PARTS)}.")
    fig, axes = figure(height=1.1 + 0.34 * len(rows))
    handles = {}
    with house_style():
        for place, parts in enumerate(rows.values()):
            left = 0.0
            for name, kind in PARTS.items():
                width = 1000 * parts.get(name, 0.0)
                handles[name] = axes.barh(place, width, left=left, **kind.patch_kwargs)
                left += width
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0)
        axes.set(xlabel="milliseconds of a step", title=title)
        legend_above(axes, list(handles.values()), list(handles))
    table = [["row", *PARTS, "step, ms"]]
    texts = []
    for row, parts in rows.items():
        total = sum(parts.values())
        share = parts.get("exposed", 0.0) / total if total else 0.0
        table.append([row, *(round(1000 * parts.get(p, 0.0), 2) for p in PARTS), 1000 * total])
        texts.append(f"{row}: {1000 * total:.0f} ms, {share:.0%} of it exposed")
    return fig, f"Parts of a step. {'; '.join(texts)}.", table
