"""Steps of several runs on one time axis: what rank 0 computed above what it sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, legend_above, swatch
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import TEXT_COLOR, style_of

COMPUTING = ("forward", "backward")
Bars = list[tuple[float, float]]  # (left, width)


def one_axis(
    steps: Mapping[str, Any],
    *,
    unit: float,
    x: str,
    title: str,
    exposed: Mapping[str, tuple[float, float]] | None = None,
    number: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Draw a step of rank 0 for each of `steps`, one below another, and show it.

    steps: {name: a run cut down to one step}. unit: seconds that count as 1 on the axis, whose
    label is x. exposed: for each name when its exposed communication begins and ends, on the clock
    of the run; it is drawn as a bracket, and backward ends where it begins.
    number: for a name, which of its calls, counted from 0, are numbered 1, 2, ... in the figure.
    """
    fig, axes = figure(height=1.4 + 0.75 * len(steps))
    words, rows, kinds = [], [], {}
    with house_style():
        for row, (name, step) in enumerate(steps.items()):
            zero = min(r.started for r in (*_spans(step), *_calls(step)))
            bracket = None
            if exposed is not None:
                bracket = [(at - zero) / unit for at in exposed[name]]
            lanes = _lanes(step, zero, unit, bracket[0] if bracket else None)
            for kind, bars in lanes.items():
                above = kind in COMPUTING
                look = style_of(kind).patch_kwargs
                if not above:  # one call after another: no hatch, a white line between
                    look = {"facecolor": look["facecolor"], "edgecolor": "white"}
                axes.broken_barh(
                    bars, (row - 0.28 if above else row + 0.02, 0.26), linewidth=0.5, **look
                )
            ordered = sorted(_calls(step), key=lambda call: call.started)
            for place, index in enumerate((number or {}).get(name, ()), start=1):
                middle = (ordered[index].started + ordered[index].finished) / 2
                at = (middle - zero) / unit, row + 0.3
                axes.annotate(str(place), at, ha="center", va="top", fontsize=8.5)
            kinds |= dict.fromkeys(lanes)
            end = max(left + width for bars in lanes.values() for left, width in bars)
            calls = sum(len(bars) for kind, bars in lanes.items() if kind not in COMPUTING)
            line = {"collectives": calls, "step": round(end, 2)}
            if bracket:
                line["exposed"] = round(bracket[1] - bracket[0], 2)
                _bracket(axes, row, *bracket)
            rows.append([name, *line.values()])
            words.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in line.items()))
        axes.set_yticks(range(len(steps)), list(steps))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(steps) - 0.4, -0.45)
        axes.set_xlim(0, 1.2 * max(row[2] for row in rows))
        axes.set_xlabel(x)
        axes.set_title(title)
        legend_above(axes, [swatch(style_of(kind)) for kind in kinds], list(kinds))
    alt = f"Steps on one axis, rank 0, {x}. " + "; ".join(words) + "."
    show_figure(fig, alt=alt, table=[["version", *line], *rows])


def _bracket(axes: Any, row: int, begin: float, end: float) -> None:
    low, high = row + 0.32, row + 0.42
    corners = [begin, begin, end, end], [low, high, high, low]
    axes.plot(*corners, color=TEXT_COLOR, marker="", linewidth=1.2)
    axes.annotate(f" exposed {end - begin:.2f}", (end, high), va="center", fontsize=9)


def _spans(step: Any) -> list[Any]:
    return [s for s in step.spans if s.rank == 0 and s.name in COMPUTING]


def _calls(step: Any) -> list[Any]:
    return [r for r in step.ledger if r.rank == 0 and r.finished is not None]


def _lanes(step: Any, zero: float, unit: float, computed: float | None) -> dict[str, Bars]:
    """The bars of rank 0 by name; backward ends at `computed` if that is given."""
    lanes: dict[str, Bars] = {}
    for one, name in [(s, s.name) for s in _spans(step)] + [(r, r.op) for r in _calls(step)]:
        left, right = (one.started - zero) / unit, (one.finished - zero) / unit
        if name == "backward" and computed is not None:
            right = min(right, computed)
        lanes.setdefault(name, []).append((left, right - left))
    return lanes
