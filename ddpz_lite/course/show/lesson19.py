"""How a router spreads tokens over experts, and what a capacity drops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import SERIES

FACTORS = [1.0, 1.25, 1.5, 2.0, 4.0]


def routing_over_steps(
    shares: Mapping[str, Sequence[Sequence[float]]], *, every: int, title: str
) -> None:
    """Show, for each way to train, the shares (steps, experts) of the tokens as stacked areas.

    Each point is the mean over `every` steps.
    """
    means = {
        way: [_mean(steps[at : at + every]) for at in range(0, len(steps), every)]
        for way, steps in shares.items()
    }
    fig, panels = figure(1, len(shares), height=2.9, sharey=True, squeeze=False)
    table: Table = [["way", "step", "largest share"]]
    with house_style():
        for axes, (way, steps) in zip(panels[0], means.items(), strict=True):
            by_expert = list(zip(*steps, strict=True))
            colors = [SERIES[e % len(SERIES)].color for e in range(len(by_expert))]
            places = [every * (k + 0.5) for k in range(len(steps))]
            axes.stackplot(places, by_expert, colors=colors, edgecolor="white", linewidth=0.5)
            axes.set(xlim=(places[0], places[-1]), ylim=(0, 1), xlabel="step")
            axes.set_title(way, fontsize=9.5)
            table += [[way, places[k], max(steps[k])] for k in (0, -1)]
        panels[0, 0].set_ylabel("share of the tokens")
        fig.suptitle(title, fontsize=11)
    alt = "Shares of the tokens by expert over the steps. " + " ".join(
        f"{way}: the largest is {max(steps[0]):.0%} at first and {max(steps[-1]):.0%} at the end."
        for way, steps in means.items()
    )
    show_figure(fig, alt=alt, table=table)


def capacity_explorer(counts: Mapping[str, Sequence[int]]) -> None:
    """The widget: choices of each expert, by way to train, and what a capacity drops of them."""

    def picture(way: str, factor: float) -> tuple[Any, str, Table]:
        return capacity_picture(counts[way], float(factor), way)

    explore(
        picture,
        way=options("Router", list(counts), default=next(iter(counts))),
        factor=options("Capacity factor", FACTORS, default=1.25),
    )


def capacity_picture(counts: Sequence[int], factor: float, way: str) -> tuple[Any, str, Table]:
    """(figure, alt, table): a bar for each expert, cut at its capacity."""
    capacity = ceil(sum(counts) / len(counts) * factor)
    kept = [min(count, capacity) for count in counts]
    dropped = 1 - sum(kept) / sum(counts)
    places = range(len(counts))
    over = [count - keep for count, keep in zip(counts, kept, strict=True)]
    fig, axes = figure(height=2.7)
    with house_style():
        axes.bar(places, kept, label="computed", **SERIES[0].patch_kwargs)
        axes.bar(places, over, bottom=kept, label="dropped", **SERIES[1].patch_kwargs)
        axes.axhline(capacity, linewidth=1, linestyle="--", color=SERIES[2].color)
        axes.set(xlabel="expert", ylabel="tokens")
        axes.locator_params(axis="x", integer=True)
        axes.set_title(f"{way}, factor {factor:g}: capacity {capacity}, {dropped:.1%} dropped")
        axes.legend(loc="upper right")
    alt = f"Tokens of {len(counts)} experts, {way}. A capacity of {capacity} drops {dropped:.1%}."
    rows: Table = [["expert", "computed", "dropped"]]
    rows += [[e, k, o] for e, k, o in zip(places, kept, over, strict=True)]
    return fig, alt, rows


def _mean(steps: Sequence[Sequence[float]]) -> list[float]:
    return [sum(of_expert) / len(steps) for of_expert in zip(*steps, strict=True)]
