"""A picture of what each rank did when, drawn from the run's own records on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddpz_lite.show.canvas import figure, house_style, legend_above
from ddpz_lite.show.page import show_figure
from ddpz_lite.show.style import in_seconds, look, seconds_unit
from ddpz_lite.stretches import gaps, length


@dataclass(frozen=True)
class Bar:
    """One stretch of one rank, in seconds since the first event of the run.

    lane: "compute" or "traffic".
    """

    rank: int
    lane: str
    name: str
    start: float
    end: float


def bars(run: Any) -> list[Bar]:
    """The spans and collectives of a run, on one clock that starts with the first of them."""
    found = [(s.rank, "compute", s.name, s.started, s.finished) for s in run.spans]
    found += [
        (r.rank, "traffic", r.op, r.started, r.finished)
        for r in run.ledger
        if r.finished is not None
    ]
    if not found:
        raise ValueError(
            "show.timeline: this run recorded nothing. Launch with record=True, and let the ranks "
            "call a collective "
            'or open a span: with dz.span("forward"): ...'
        )
    zero = min(started for *_, started, _ in found)
    return sorted(
        (
            Bar(rank, lane, name, started - zero, finished - zero)
            for rank, lane, name, started, finished in found
        ),
        key=lambda bar: (bar.rank, bar.start),
    )


def timeline(run: Any, *, title: str = "What each rank did, and when") -> None:
    """Draw a run on one clock: a row per rank, spans above, collectives below, idle time shaded.

    run: what `dz.launch` returned. A collective's bar lasts from the call to its completion. A rank
    is idle when it is neither in a span nor in a collective; where a run has no spans nobody knows,
    so the shade reads "outside collectives". Raises ValueError for a run that recorded nothing.
    """
    all_bars = bars(run)
    table, alt = _timeline_table(run.world_size, all_bars), _timeline_alt(run.world_size, all_bars)
    until = max(bar.end for bar in all_bars)
    unit, unit_name = seconds_unit(until)
    fig, axes = figure(height=min(1.5 + 0.62 * run.world_size, 14))
    with house_style():
        axes.set_title(title)
        handles = _draw_bars(axes, run.world_size, all_bars, until, unit)
        axes.set_yticks(range(run.world_size), [f"rank {rank}" for rank in range(run.world_size)])
        axes.set_ylim(run.world_size - 0.5, -0.5)
        axes.set_xlim(0, until / unit * 1.005)
        axes.set_xlabel(f"{unit_name} since the first event")
        axes.tick_params(axis="y", length=0)
        legend_above(axes, list(handles.values()), list(handles))
    show_figure(fig, alt=alt, table=table)


def _draw_bars(
    axes: Any, world: int, all_bars: Sequence[Bar], until: float, unit: float
) -> dict[str, Any]:
    """Draw all bars and the idle time; returns {label: handle} for the legend."""
    ordered = sorted(all_bars, key=lambda bar: (bar.lane, bar.start))
    names = list(dict.fromkeys(bar.name for bar in ordered))
    lanes = {"compute": (-0.38, 0.36), "traffic": (0.02, 0.36)}  # offset from the row, height
    if not any(bar.lane == "compute" for bar in all_bars):
        lanes["traffic"] = (-0.38, 0.76)
    both_ways = _send_while_receiving(all_bars)
    least = until / 400  # the narrowest bar that can be seen
    handles: dict[str, Any] = {}
    for rank in range(world):
        mine = [bar for bar in all_bars if bar.rank == rank]
        free = [(start / unit, (end - start) / unit) for start, end in gaps(_times(mine), until)]
        idle = axes.broken_barh(free, (rank - 0.38, 0.76), facecolor=look("idle").color)
        groups = [[bar for bar in mine if (bar.lane, bar.name) == key] for key in _keys(mine)]
        # A span inside another is drawn on top of it: the long ones first.
        for group in sorted(groups, key=lambda group: -max(bar.end - bar.start for bar in group)):
            lane, name, style = group[0].lane, group[0].name, look(group[0].name, names)
            offset, height = lanes[lane]
            if both_ways and name in ("send", "recv"):  # side by side: neither hides the other
                height /= 2
                offset += height * (name == "recv")
            extents = [(bar.start / unit, max(bar.end - bar.start, least) / unit) for bar in group]
            handles[name] = axes.broken_barh(extents, (rank + offset, height))
            handles[name].set(facecolor=style.color, hatch=style.hatch, edgecolor=style.edge)
            handles[name].set(linewidth=0.3)
    return {name: handles[name] for name in names} | {_free_name(all_bars): idle}


def _send_while_receiving(all_bars: Sequence[Bar]) -> bool:
    """Whether a rank sends and receives at the same time anywhere in the run."""
    for rank in {bar.rank for bar in all_bars}:
        sends, recvs = (
            [
                (b.start, b.end)
                for b in all_bars
                if (b.rank, b.name, b.lane) == (rank, op, "traffic")
            ]
            for op in ("send", "recv")
        )
        if length(sends) + length(recvs) > length([*sends, *recvs]) * (1 + 1e-9):
            return True
    return False


def _keys(some: Iterable[Bar]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((bar.lane, bar.name) for bar in some))


def _free_name(all_bars: Sequence[Bar]) -> str:
    """What a stretch without a bar is called: without spans nobody knows that a rank was idle."""
    known = any(bar.lane == "compute" for bar in all_bars)
    return "idle" if known else "outside collectives"


def _times(some: Iterable[Bar]) -> list[tuple[float, float]]:
    return [(bar.start, bar.end) for bar in some]


def _timeline_table(world: int, all_bars: Sequence[Bar]) -> list[list[Any]]:
    spans = list(dict.fromkeys(bar.name for bar in all_bars if bar.lane == "compute"))
    ops = list(dict.fromkeys(bar.name for bar in all_bars if bar.lane == "traffic"))
    until = max(bar.end for bar in all_bars)
    free = f"{_free_name(all_bars)}, ms"
    head = ["rank", *(f"{name}, ms" for name in spans)]
    head += [text for op in ops for text in (f"{op}, calls", f"{op}, ms")] + [free]
    rows: list[list[Any]] = [head]
    for rank in range(world):
        mine = [bar for bar in all_bars if bar.rank == rank]
        row: list[Any] = [rank]
        row += [
            _ms(bar for bar in mine if bar.lane == "compute" and bar.name == name) for name in spans
        ]
        for op in ops:
            calls = [bar for bar in mine if bar.lane == "traffic" and bar.name == op]
            row += [len(calls), _ms(calls)]
        rows.append(
            [*row, round(1e3 * sum(end - start for start, end in gaps(_times(mine), until)), 3)]
        )
    return rows


def _ms(some: Iterable[Bar]) -> float:
    return round(1e3 * length(_times(some)), 3)


def _timeline_alt(world: int, all_bars: Sequence[Bar]) -> str:
    until = max(bar.end for bar in all_bars)
    names = list(dict.fromkeys(bar.name for bar in all_bars))
    means = [(name, length_of(all_bars, name, world) / world) for name in names]
    each = ", ".join(f"{name} {in_seconds(mean)}" for name, mean in means)
    free = [
        (
            sum(
                end - start
                for start, end in gaps(_times(b for b in all_bars if b.rank == rank), until)
            ),
            rank,
        )
        for rank in range(world)
    ]
    most, rank = max(free, key=lambda pair: (pair[0], -pair[1]))
    word = _free_name(all_bars).capitalize()
    return (
        f"Timeline of {world} ranks over {in_seconds(until)}. Mean per rank: {each}. "
        f"{word} the longest: rank {rank}, {100 * most / until if until else 0:.0f}% of the time."
    )


def length_of(all_bars: Sequence[Bar], name: str, world: int) -> float:
    """Seconds in bars of one name, added over the ranks; overlaps within a rank count once."""
    return sum(
        length(_times(b for b in all_bars if b.name == name and b.rank == rank))
        for rank in range(world)
    )
