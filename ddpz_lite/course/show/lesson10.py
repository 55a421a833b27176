"""Several runs, drawn one above the other: their ranks in time, and their memory in a step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, stacked_areas
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.ranks import bars, draw_bars, gaps
from ddpz_lite.course.show.style import TEXT_COLOR, in_seconds, seconds_unit
from ddpz_lite.meter.timeline import TIMELINE_KINDS, MemoryTimeline

PHASES = ("forward", "backward", "step")


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


def memory_in_phases(timelines: Mapping[str, MemoryTimeline], *, per: int, title: str) -> None:
    """Draw the memory of a step of each name, from the top, by kind, in bytes per parameter.

    per: the number of parameters.

    Each of PHASES is equally wide, and its changes of memory are equally spaced, so the panels can
    be compared by phase, and not in seconds. Raises ValueError for a timeline without a phase.
    """
    moments = {name: _by_phase(timeline) for name, timeline in timelines.items()}
    every = [held for some in moments.values() for _, held in some]
    kinds = [kind for kind in TIMELINE_KINDS if any(held[kind] for held in every)]
    highest = max(timeline.peak for timeline in timelines.values()) / per
    height = 1.4 + 1.6 * len(timelines)
    fig, panels = figure(len(timelines), 1, height=height, sharex=True, sharey=True, squeeze=False)
    table: Table = [["", "phase", "most", *kinds]]
    handles: list[Any] = []
    with house_style():
        for axes, (name, some) in zip(panels[:, 0], moments.items(), strict=True):
            places = [place for place, _ in some]
            tops, handles = stacked_areas(axes, places, [held for _, held in some], kinds, per)
            at, top = max(zip(places, tops, strict=True), key=lambda moment: moment[1])
            axes.plot([at], [top], marker="v", color=TEXT_COLOR, markersize=7, clip_on=False)
            axes.set_title(f"{name}: peak {top:.1f}, in {PHASES[int(at)]}", fontsize=9.5)
            axes.set_ylabel("bytes / parameter")
            for edge in range(1, len(PHASES)):
                axes.axvline(edge, color=TEXT_COLOR, linewidth=0.8, linestyle=(0, (4, 3)))
            for index, phase in enumerate(PHASES):
                held = max(
                    (held for place, held in some if int(place) == index),
                    key=lambda held: sum(held.values()),
                )
                most = [
                    round(size / per, 2) for size in (sum(held.values()), *map(held.get, kinds))
                ]
                table.append([name, phase, *most])
        axes.set_xlim(0, len(PHASES))
        axes.set_ylim(0, 1.1 * highest)
        axes.set_xticks([index + 0.5 for index in range(len(PHASES))], PHASES)
        axes.tick_params(axis="x", length=0)
        fig.suptitle(title, fontsize=11)
        fig.legend(handles, kinds, loc="outside lower center", ncols=5)
    said = ". ".join(
        f"{name}, most in " + ", ".join(f"{row[1]} {row[2]}" for row in table[1:] if row[0] == name)
        for name in moments
    )
    show_figure(fig, alt=f"{title}. Bytes per parameter. {said}.", table=table)


def _by_phase(timeline: MemoryTimeline) -> list[tuple[float, dict[str, int]]]:
    """(place, {kind: bytes}) after each change; phase i takes the places from i to i + 1."""
    begins: dict[str, float] = {}
    for seconds, name in timeline.marks:
        begins.setdefault(name, seconds)
    if missing := [phase for phase in PHASES if phase not in begins]:
        raise ValueError(f"memory_in_phases: the timeline has no {missing[0]}.")
    edges = [begins[phase] for phase in PHASES]
    inside: list[list[dict[str, int]]] = [[] for _ in PHASES]
    before = [held for seconds, held in timeline.samples if seconds <= edges[0]]
    inside[0] += before[-1:]  # what was there already is counted tensor by tensor: not a change
    for seconds, held in timeline.samples[len(before) :]:
        inside[sum(seconds > edge for edge in edges) - 1].append(held)
    return [
        (index + at / len(some), held)
        for index, some in enumerate(inside)
        for at, held in enumerate(some)
    ]
