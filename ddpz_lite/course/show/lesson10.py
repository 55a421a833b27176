"""The ranks of several runs, drawn on one time axis."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.ranks import bars, draw_bars, gaps
from ddpz_lite.course.show.style import in_seconds, seconds_unit


def on_one_axis(runs: Mapping[str, Any], *, title: str) -> None:
    """Draw what `fastest_step` returned for each name, from the top, each from its own first event.

    The bars are those of `show.timeline`. Raises ValueError for a run that recorded nothing.
    """
    found = {name: bars(run) for name, run in runs.items()}
    ends = {name: max(end for row in rows for spans in row.values() for _, end in spans)
            for name, rows in found.items()}  # fmt: skip
    until = max(ends.values())
    unit, unit_name = seconds_unit(until)
    height = 1.3 + sum(0.35 + 0.5 * len(rows) for rows in found.values())
    fig, panels = figure(len(runs), 1, height=height, sharex=True, squeeze=False)
    handles: dict[str, Any] = {}
    with house_style():
        for axes, (name, rows) in zip(panels[:, 0], found.items(), strict=True):
            free = [gaps(chain(*row.values()), ends[name]) for row in rows]
            handles |= draw_bars(axes, rows, free, until, unit)
            axes.set_title(f"{name}: {in_seconds(ends[name])}", fontsize=9.5)
            axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, until / unit * 1.005)
        axes.set_xlabel(f"{unit_name} since the step began")
        fig.suptitle(title, fontsize=11)
        fig.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4)
    table: Table = [["run", "rank", "what", f"{unit_name} in all"]]
    for name, rows in found.items():
        for rank, row in enumerate(rows):
            for (_, what), spans in row.items():
                took = sum(end - start for start, end in spans) / unit
                table.append([name, rank, what, round(took, 3)])
    said = ", ".join(f"{name} {in_seconds(end)}" for name, end in ends.items())
    show_figure(fig, alt=f"{title}, on one time axis. A step takes: {said}.", table=table)
