"""A picture of what each rank did when, drawn from the run's own records on one clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, legend_above
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import CARD, in_seconds, seconds_unit, style_of
from ddpz_lite.meter.intervals import Interval, gaps, length

Rows = list[dict[tuple[str, str], list[Interval]]]


def bars(run: Any) -> Rows:
    """For each rank {(lane, name): its intervals}, on one clock that starts with the first of them.

    lane: "compute" or "traffic". Stretches are in order of their start, names of their first.
    """
    rows: Rows = [defaultdict(list) for _ in range(run.world_size)]
    ended = [r for r in run.ledger if r.finished is not None]
    if not run.spans and not ended:
        raise ValueError(
            "show.timeline: this run recorded nothing. Launch with record=True, and let the ranks "
            "call a collective "
            'or open a span: with dz.span("forward"): ...'
        )
    zero = min(one.started for one in chain(run.spans, ended))
    for s in run.spans:
        rows[s.rank]["compute", s.name].append((s.started - zero, s.finished - zero))
    for r in ended:
        rows[r.rank]["traffic", r.op].append((r.started - zero, r.finished - zero))
    for row in rows:
        for intervals in row.values():
            intervals.sort()
    return [dict(sorted(row.items(), key=lambda item: item[1][0])) for row in rows]


def timeline(run: Any, *, title: str = "What each rank did, and when") -> None:
    """Draw a run on one clock: a row per rank, spans above, collectives below, idle time shaded.

    run: what `dz.launch` returned. A collective's bar lasts from the call to its completion. A rank
    is idle when it is neither in a span nor in a collective; without spans that is unknown,
    so the shade reads "in no call". Raises ValueError for a run that recorded nothing.
    """
    rows = bars(run)
    until = max(end for row in rows for intervals in row.values() for _, end in intervals)
    free = [gaps(chain(*row.values()), until) for row in rows]
    table, alt = _timeline_table(rows, free), _timeline_alt(rows, free, until)
    unit, unit_name = seconds_unit(until)
    fig, axes = figure(height=min(1.5 + 0.62 * run.world_size, 14))
    with house_style():
        axes.set_title(title)
        handles = draw_bars(axes, rows, free, until, unit)
        axes.set_yticks(range(run.world_size), [f"rank {rank}" for rank in range(run.world_size)])
        axes.set_ylim(run.world_size - 0.5, -0.5)
        axes.set_xlim(0, until / unit * 1.005)
        axes.set_xlabel(f"{unit_name} since the first event")
        axes.tick_params(axis="y", length=0)
        legend_above(axes, list(handles.values()), list(handles))
    show_figure(fig, alt=alt, table=table)


def draw_bars(
    axes: Any, rows: Rows, free: Sequence[list[Interval]], until: float, unit: float
) -> dict[str, Any]:
    """Draw all bars and the idle time; returns {label: handle} of what can be seen."""
    names = _by_time(rows)
    lanes = {"compute": (-0.38, 0.36), "traffic": (0.02, 0.36)}  # offset from the row, height
    if not _names(rows, "compute"):
        lanes["traffic"] = (-0.38, 0.76)
    both_ways = any(_sends_while_receiving(row) for row in rows)
    least = until / 400  # the narrowest bar that can be seen
    handles: dict[str, Any] = {}
    for rank, row in enumerate(rows):
        # A single gap that is too narrow to be seen would be drawn as a thin line without meaning.
        shade = [
            (start / unit, (end - start) / unit)
            for start, end in _visible(free[rank], least)
            if end - start >= least
        ]
        idle = axes.broken_barh(shade, (rank - 0.38, 0.76), facecolor=style_of("idle").color)
        # A span inside another is drawn on top of it: the long ones first.
        longest = {key: max(end - start for start, end in row[key]) for key in row}
        for lane, name in sorted(row, key=longest.__getitem__, reverse=True):
            style = style_of(name, names)
            offset, height = lanes[lane]
            if both_ways and name in ("send", "recv"):  # side by side: neither hides the other
                height /= 2
                offset += height * (name == "recv")
            seen = _visible(row[lane, name], least)
            extents = [(start / unit, max(end - start, least) / unit) for start, end in seen]
            bar = axes.broken_barh(
                extents, (rank + offset, height), linewidth=0.3, **style.patch_kwargs
            )
            if lane == "traffic":  # a light edge: messages that follow one another can be counted
                starts = [left for left, width in extents if width * unit > 4 * least]
                x = [value for left in starts for value in (left, left, math.nan)]
                y = [rank + offset, rank + offset + height, math.nan] * len(starts)
                axes.plot(x, y, color=CARD, linewidth=1.2, marker="", solid_capstyle="butt")
            handles[name] = bar
    is_idle = any(end - start >= least for intervals in free for start, end in intervals)
    return {name: handles[name] for name in names} | ({_free_name(rows): idle} if is_idle else {})


def _visible(intervals: Iterable[Interval], least: float) -> list[Interval]:
    """Intervals in order, with narrow ones joined where they would be drawn on top of each other.

    What is drawn is no more than fits, however many calls there were.
    """
    seen: list[Interval] = []
    reach = -math.inf  # where what is drawn of the last ones ends, if they were narrow
    for start, end in intervals:
        narrow = end - start < least
        if narrow and start <= reach:
            seen[-1] = (seen[-1][0], max(seen[-1][1], end))
        else:
            seen.append((start, end))
        reach = start + least if narrow else -math.inf
    return seen


def _sends_while_receiving(row: dict[tuple[str, str], list[Interval]]) -> bool:
    """Whether a rank sends and receives at the same time anywhere in the run."""
    sends, recvs = (row.get(("traffic", op), []) for op in ("send", "recv"))
    return length(sends) + length(recvs) > length([*sends, *recvs]) * (1 + 1e-9)


def _names(rows: Rows, *lanes: str) -> list[str]:
    """The names in these lanes, in the order of the ranks and on each by time."""
    return list(dict.fromkeys(name for row in rows for lane, name in row if lane in lanes))


def _by_time(rows: Rows) -> list[str]:
    """All names in the order in which they first happened, those of spans first."""
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        for key, intervals in row.items():
            first[key] = min(intervals[0][0], first.get(key, math.inf))
    ordered = sorted(first, key=lambda key: (key[0], first[key]))
    return list(dict.fromkeys(name for _, name in ordered))


def _free_name(rows: Rows) -> str:
    """The name of an interval without a bar: idle, which only spans can tell."""
    return "idle" if _names(rows, "compute") else "in no call"


def _timeline_table(rows: Rows, free: Sequence[list[Interval]]) -> list[list[Any]]:
    spans, ops = _names(rows, "compute"), _names(rows, "traffic")
    head = ["rank", *(f"{name}, ms" for name in spans)]
    head += [text for op in ops for text in (f"{op}, calls", f"{op}, ms")]
    table: list[list[Any]] = [[*head, f"{_free_name(rows)}, ms"]]
    for rank, row in enumerate(rows):
        line: list[Any] = [rank, *(_ms(row.get(("compute", name), [])) for name in spans)]
        for op in ops:
            calls = row.get(("traffic", op), [])
            line += [len(calls), _ms(calls)]
        table.append([*line, _ms(free[rank])])
    return table


def _ms(some: Iterable[Interval]) -> float:
    return round(1e3 * length(some), 3)


def _timeline_alt(rows: Rows, free: Sequence[list[Interval]], until: float) -> str:
    world = len(rows)
    each = ", ".join(
        f"{name} {in_seconds(_length_of(rows, name) / world)}"
        for name in _names(rows, "compute", "traffic")
    )
    idle = [length(some) for some in free]
    most = max(idle)
    return (
        f"Timeline of {world} ranks over {in_seconds(until)}. Mean per rank: {each}. "
        f"{_free_name(rows).capitalize()} the longest: rank {idle.index(most)}, "
        f"{100 * most / until if until else 0:.0f}% of the time."
    )


def _length_of(rows: Rows, name: str) -> float:
    """Seconds in bars of one name, added over the ranks; overlaps within a rank count once."""
    lanes = ("compute", "traffic")
    return sum(length(chain(*(row.get((lane, name), []) for lane in lanes))) for row in rows)
