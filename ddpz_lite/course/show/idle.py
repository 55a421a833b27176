"""Who works and who waits: one bar a rank, for each way to deal the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import style_of


def idle(deals: Mapping[str, Sequence[tuple[float, float]]], *, title: str = "") -> None:
    """Draw for each deal and rank how long it worked and how long it waited, and show it.

    deals: {name: [(seconds of work, seconds of waiting) by rank]}. The alternative text says for
    each deal the share of all ranks' time that was spent waiting. Raises ValueError without ranks.
    """
    fig, alt, table = idle_figure(deals, title=title)
    show_figure(fig, alt=alt, table=table)


def idle_figure(
    deals: Mapping[str, Sequence[tuple[float, float]]], *, title: str = ""
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table): what a function for `explore` returns."""
    if not deals or not all(deals.values()):
        raise ValueError("show.idle: give {deal: [(work, wait) by rank]}, with at least one rank.")
    rows = sum(len(ranks) + 1 for ranks in deals.values())
    fig, axes = figure(height=0.9 + 0.17 * rows)
    place, ticks = 0, {}
    with house_style():
        work, wait = style_of("forward"), style_of("idle")
        for name, ranks in deals.items():
            ticks[place + (len(ranks) - 1) / 2] = f"{name}\n{share(ranks):.0%} idle"
            for worked, waited in ranks:
                axes.barh(place, worked, **work.patch_kwargs)
                axes.barh(place, waited, left=worked, **wait.patch_kwargs)
                place += 1
            place += 1
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.set_ylim(place - 1.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0)
        axes.set(xlabel="seconds: work, then (grey) waiting; a bar for each rank", title=title)
    alt = "; ".join(f"{name}: {share(ranks):.0%} of the time idle" for name, ranks in deals.items())
    table = [["deal", "rank", "worked, s", "waited, s"]]
    table += [
        [name, rank, round(worked, 3), round(waited, 3)]
        for name, ranks in deals.items()
        for rank, (worked, waited) in enumerate(ranks)
    ]
    return fig, f"Work and waiting by rank. {alt}.", table


def share(ranks: Sequence[tuple[float, float]]) -> float:
    """The part of all ranks' time in which they waited."""
    waited = sum(wait for _, wait in ranks)
    return waited / max(sum(work for work, _ in ranks) + waited, 1e-12)
