"""Pictures of memory by kind: bars for moments, areas for a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpz_lite.course.show.canvas import (
    figure,
    house_style,
    legend_above,
    stacked_areas,
    stacked_bars,
)
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import CARD, TEXT_COLOR, bytes_unit, in_bytes
from ddpz_lite.meter.timeline import TIMELINE_KINDS, MemoryTimeline

_Bars = Mapping[str, int] | Mapping[str, Mapping[str, int]]


def memory(
    held: _Bars | MemoryTimeline,
    *,
    title: str | None = None,
    percent_of: Mapping[str, str] | None = None,
) -> None:
    """Draw memory by kind.

    held: what `dz.memory` returned, for one bar; {label: such a dict}, for a bar each; or a
    MemoryTimeline, for the step as areas with its peak marked. Kinds that are 0 throughout are left
    out. percent_of: {label: label of the bar that is its 100%}; the bytes then stand at the ends of
    the bars. Raises ValueError when there is nothing to draw.
    """
    if isinstance(held, MemoryTimeline):
        _areas(held, title or "Memory over one step")
    else:
        several = all(isinstance(value, Mapping) for value in held.values())
        _bars(dict(held) if several else {"now": held}, title or "Memory by kind", percent_of)


def _kinds(some: list[Mapping[str, int]]) -> list[str]:
    known = [*TIMELINE_KINDS, *(kind for one in some for kind in one if kind not in TIMELINE_KINDS)]
    kinds = [kind for kind in dict.fromkeys(known) if any(one.get(kind, 0) for one in some)]
    if not kinds:
        raise ValueError("show.memory: nothing to draw, every kind holds 0 bytes.")
    return kinds


def _bars(held: dict[str, Any], title: str, percent_of: Mapping[str, str] | None) -> None:
    kinds = _kinds(list(held.values()))
    totals = {label: sum(one.values()) for label, one in held.items()}
    unit, unit_name = bytes_unit(max(totals.values()))
    drawn, ends = list(held.values()), None
    if percent_of:
        unit, unit_name = 1, "%"
        drawn = [
            {kind: 100 * size / totals[percent_of[label]] for kind, size in one.items()}
            for label, one in held.items()
        ]
        ends = [in_bytes(total) for total in totals.values()]
    fig, axes = figure(height=1.4 + 0.45 * len(held))
    with house_style():
        axes.set_title(title)
        stacked_bars(axes, list(held), drawn, kinds, (unit, unit_name), ends)
        axes.set_xlabel(unit_name)
    table = [["", *(f"{kind}, bytes" for kind in kinds), "all, bytes"]]
    table += [
        [label, *(one.get(kind, 0) for kind in kinds), totals[label]] for label, one in held.items()
    ]
    text = ". ".join(
        f"{label}: {in_bytes(totals[label])}, {_in_words(one)}" for label, one in held.items()
    )
    show_figure(fig, alt=f"{title}. {text}.", table=table)


def _in_words(kinds: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{kind} {in_bytes(value)}" for kind, value in kinds.items() if value)
        or "nothing"
    )


def _areas(timeline: MemoryTimeline, title: str) -> None:
    samples = timeline.samples
    kinds = _kinds([one for _, one in samples])
    unit, unit_name = bytes_unit(timeline.peak)
    end = max(samples[-1][0], *(seconds for seconds, _ in timeline.marks))
    times = [1e3 * seconds for seconds, _ in samples] + [1e3 * end]
    fig, axes = figure(height=3.9)
    with house_style():
        axes.set_title(title)
        moments = [one for _, one in samples]
        tops, handles = stacked_areas(axes, times, [*moments, moments[-1]], kinds, unit)
        peak_at = tops.index(max(tops))
        axes.set_xlim(0, times[-1])
        axes.set_ylim(0, tops[peak_at] * 1.22)
        axes.set_xlabel("ms since the timeline was opened")
        axes.set_ylabel(unit_name)
        legend_above(axes, handles, kinds)
        _notes(axes, timeline, times[peak_at], tops[peak_at], in_bytes(timeline.peak))
    show_figure(fig, alt=_areas_alt(timeline, title), table=_areas_table(timeline, kinds))


def _notes(axes: Any, timeline: MemoryTimeline, at: float, height: float, text: str) -> None:
    axes.plot(
        [at], [height], marker="v", color=TEXT_COLOR, markersize=7, linestyle="none", clip_on=False
    )
    last = axes.get_xlim()[1]
    side = "right" if at > 0.5 * last else "left"
    peak = axes.annotate(
        f"peak {text}",
        (at, height),
        xytext=(-6 if side == "right" else 6, 7),
        textcoords="offset points",
        ha=side,
    )
    _marks(axes, [mark for mark in timeline.marks if mark[1] != "end"], peak)


def _marks(axes: Any, marks: list[tuple[float, str]], peak: Any) -> None:
    """A line at each mark, and its name, so many lines down that it lies on no other label."""
    axes.figure.draw_without_rendering()  # the layout decides how wide a millisecond is
    measure = axes.figure.canvas.get_renderer()
    boxes = [peak.get_window_extent(measure)]
    for seconds, name in marks:
        axes.axvline(1e3 * seconds, color=TEXT_COLOR, linewidth=0.8, linestyle=(0, (4, 3)))
        label = axes.annotate(
            name, (1e3 * seconds, 0.985), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", va="top", fontsize=8.5,
            bbox={"facecolor": CARD, "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )  # fmt: skip
        while any(label.get_window_extent(measure).overlaps(box) for box in boxes):
            across, up = label.get_position()
            label.set_position((across, up - 11))
        boxes.append(label.get_window_extent(measure))


def _areas_alt(timeline: MemoryTimeline, title: str) -> str:
    return (
        f"{title}. The peak is {in_bytes(timeline.peak)}: {_in_words(timeline.at_peak)}. "
        f"At the end {in_bytes(sum(timeline.samples[-1][1].values()))} are held: "
        f"{_in_words(timeline.samples[-1][1])}."
    )


def _areas_table(timeline: MemoryTimeline, kinds: list[str]) -> list[list[Any]]:
    """The state when each mark was set, and at the peak."""
    rows: list[list[Any]] = [["moment", "ms", *(f"{kind}, bytes" for kind in kinds), "all, bytes"]]
    samples = timeline.samples
    peak = max(samples, key=lambda sample: sum(sample[1].values()))
    moments = [(seconds, name, None) for seconds, name in timeline.marks] + [
        (peak[0], "peak", peak[1])
    ]
    for seconds, name, held in sorted(moments, key=lambda moment: moment[0]):
        held = held or [one for when, one in samples if when <= seconds][-1]
        rows.append(
            [name, round(1e3 * seconds, 3), *(held[kind] for kind in kinds), sum(held.values())]
        )
    return rows
