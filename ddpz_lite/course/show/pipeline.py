"""Schedules of a pipeline, drawn: who computes what when, who waits, what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import CARD, TEXT_COLOR, style_of
from ddpz_lite.strategies.pipeline.schedules import (
    Bar,
    Schedule,
    gpipe,
    idle,
    interleaved,
    length,
    live,
    one_f_one_b,
    play,
    read,
    words,
    zero_bubble,
)

__all__ = [
    "bars_of",
    "explorer",
    "gpipe",
    "idle",
    "interleaved",
    "length",
    "live",
    "measured",
    "one_f_one_b",
    "picture",
    "play",
    "read",
    "schedule",
    "words",
    "zero_bubble",
]

CHUNK = ("#56B4E9", "#9AD3F2", "#3C8DBC", "#C9E7F8")  # forward, by chunk
CHUNK_BACK = ("#0072B2", "#4A9CCB", "#00507D", "#86BEDD")
WEIGHTS = "#E69F00"  # the weights' half of a backward that is split


def schedule(
    lines: Sequence[str] | Schedule, forward: float | Sequence[float] = 1.0, *, title: str = ""
) -> None:
    """Draw a schedule and show it: a row a stage. lines: of `read`, or actions."""
    actions = [read(line) if isinstance(line, str) else line for line in lines]
    fig, alt, table = picture(actions, forward, title=title)
    show_figure(fig, alt=alt, table=table)


def picture(
    actions: Schedule, forward: float | Sequence[float] = 1.0, *, title: str = ""
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table): what a function for `explore` returns."""
    bars = play(actions, forward)
    until, kept, share = length(bars), live(bars), idle(bars)
    fig, axes = figure(height=min(1.25 + 0.36 * len(actions), 4.6))
    text = f"{until:.4g} units of time, {share:.1%} of it idle"
    with house_style():
        for bar in bars:
            _draw(axes, bar, until)
        axes.set_facecolor(style_of("idle").color)
        names = [f"stage {s}\nkeeps {k:.3g}" for s, k in enumerate(kept)]
        axes.set_yticks(range(len(actions)), names, fontsize=8.5)
        axes.set_ylim(len(actions) - 0.5, -0.5)
        axes.set_xlim(0, until)
        axes.locator_params(axis="x", integer=True)
        axes.tick_params(axis="y", length=0)
        splits = any(bar.kind == "W" for bar in bars)
        weights = ", hatched: weight gradients" if splits else ""
        axes.set_xlabel(f"calculated time; light: forward, dark: backward{weights}, grey: idle")
        axes.set_title(f"{title}: {text}" if title else text)
    alt = f"{title or 'A schedule'} of {len(actions)} stages: {text}. At most "
    alt += ", ".join(f"{k:.3g}" for k in kept) + " micro-batches are kept, by stage."
    rows = [["stage", "most kept", "order"]]
    for stage, line in enumerate(actions):
        rows.append([stage, kept[stage], words(line)])
    return fig, alt, rows


def _draw(axes: Any, bar: Bar, until: float) -> None:
    """One box, with its micro-batch's number where there is room."""
    width = bar.end - bar.start
    colours = {"F": CHUNK, "B": CHUNK_BACK, "W": (WEIGHTS,)}[bar.kind]
    colour = colours[bar.chunk % len(colours)]
    axes.barh(bar.stage, width, left=bar.start, height=0.84, color=colour, edgecolor=CARD,
              linewidth=0.6, hatch="//" if bar.kind == "W" else None)  # fmt: skip
    if width / until > 0.012:
        light = colour in (*CHUNK, CHUNK_BACK[3], WEIGHTS)
        axes.text(bar.start + width / 2, bar.stage, str(bar.micro), ha="center", va="center",
                  fontsize=7.5, color=TEXT_COLOR if light else "white")  # fmt: skip


def bars_of(run: Any, lines: Sequence[str] | Schedule, unit: float) -> list[Bar]:
    """The actions of a run with their measured times, in units of `unit` seconds.

    run: one step, in which each action is a span "forward" or "backward", as simulated compute
    records them. lines: of `read`, or actions. Raises ValueError if a rank has another number of
    spans than actions.
    """
    actions = [read(line) if isinstance(line, str) else line for line in lines]
    spans = [s for s in run.spans if s.name in ("forward", "backward")]
    zero, bars = min(s.started for s in spans), []
    for stage, order in enumerate(actions):
        own = sorted((s for s in spans if s.rank == stage), key=lambda s: s.started)
        for (kind, micro, *chunk), s in zip(order, own, strict=True):
            start, end = (s.started - zero) / unit, (s.finished - zero) / unit
            bars.append(Bar(stage, kind, micro, chunk[0] if chunk else 0, start, end))
    return bars


def measured(steps: Mapping[str, Sequence[Bar]]) -> None:
    """Draw steps that ranks have run, one below another on one axis, and show them.

    steps: the bars of each, from `bars_of`.
    """
    until = max(map(length, steps.values()))
    fig, panels = figure(len(steps), 1, height=0.7 + 1.15 * len(steps), sharex=True, squeeze=False)
    rows, words = [["schedule", "step", "idle"]], []
    with house_style():
        for axes, (name, bars) in zip(panels[:, 0], steps.items(), strict=True):
            for bar in bars:
                _draw(axes, bar, until)
            own, share, stages = length(bars), idle(bars), 1 + max(bar.stage for bar in bars)
            axes.barh(range(stages), own, height=1, color=style_of("idle").color, zorder=0)
            axes.set_yticks(range(stages), [f"rank {s}" for s in range(stages)], fontsize=8)
            axes.set_ylim(stages - 0.5, -0.5)
            axes.set_xlim(0, until)
            axes.locator_params(axis="x", integer=True)
            axes.tick_params(axis="y", length=0)
            axes.set_title(f"{name}: {own:.1f} units, {share:.0%} idle", fontsize=9.5)
            rows.append([name, round(own, 1), round(share, 3)])
            words.append(f"{name}: {own:.1f} units of time, {share:.0%} idle")
        panels[-1, 0].set_xlabel(
            "measured time, simulated compute; light: forward, dark: backward, grey: idle"
        )
    show_figure(fig, alt="Steps on one axis. " + "; ".join(words) + ".", table=rows)


def explorer() -> None:
    """The widget: a schedule, with sliders for stages, micro-batches and interleaving."""
    from ddpz_lite.course.show.sliders import explore, options, slider

    explore(
        _turned,
        order=options("Schedule", ["GPipe", "1F1B"], default="1F1B"),
        stages=options("Stages", [2, 4, 8], default=4),
        micros=options("Micro-batches", [1, 2, 4, 8, 16, 32], default=8),
        chunks=slider("Chunks per stage", 1, 4, default=1, until=_most_chunks),
        slow=options("Last stage takes", ["1", "1.5", "2"], default="1", unit="x"),
    )


def _most_chunks(order: str, stages: int, micros: int, **_: Any) -> int:
    return 4 if order == "1F1B" and micros % stages == 0 else 1


def _turned(order: str, stages: int, micros: int, chunks: int, slow: str) -> tuple[Any, str, Table]:
    if chunks > 1:
        actions = interleaved(stages, micros, chunks)
    else:
        actions = (gpipe if order == "GPipe" else one_f_one_b)(stages, micros)
    seconds = [1.0] * (stages - 1) + [float(slow)]
    return picture(actions, seconds, title=order + (f", {chunks} chunks" if chunks > 1 else ""))
