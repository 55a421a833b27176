"""The loss of several ways to train against what they have spent so far: steps, bytes, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import mean

from ddpz_lite.course.show.canvas import figure, house_style, legend_above
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import SERIES

MOST_BANDS = 4  # ways whose bands can still be told apart


def loss_against(
    spent: Mapping[str, float] | None,
    losses: Mapping[str, Sequence[Sequence[float]]],
    *,
    every: int,
    x: str,
    title: str = "",
) -> None:
    """Draw the mean over the seeds for each way in `losses`, from its second loss on, and show it.

    spent: what one step of each way spends, in the unit that x, the label of the axis, names; None
    if that is the step itself.
    losses: of each way a list for each seed, those before step 0, step `every`, step 2 · `every`
    and so on; the first way is the one to compare with. A band spans the seeds, or, for more than
    four ways, a bar at the end of the line. Raises KeyError for a way whose spending is not known.
    """
    fig, axes = figure(height=3.2)
    handles, ends, table = [], {}, [["way", x, "mean loss", "least", "most"]]
    with house_style():
        for look, (way, seeds) in zip(cycle(SERIES), losses.items(), strict=False):
            marks = list(zip(*seeds, strict=True))[1:]
            step = 1 if spent is None else spent[way]
            places = [step * every * mark for mark in range(1, len(marks) + 1)]
            low, middle, high = ([of(mark) for mark in marks] for of in (min, mean, max))
            handles += axes.plot(places, middle, color=look.color, marker=look.marker)
            if len(losses) <= MOST_BANDS:
                axes.fill_between(places, low, high, color=look.color, alpha=0.2, linewidth=0)
            else:
                axes.vlines(places[-1], low[-1], high[-1], color=look.color, linewidth=1.5)
            ends[way] = places[-1], low[-1], middle[-1], high[-1]
            rows: Table = [[way, *row] for row in zip(places, middle, low, high, strict=True)]
            table += rows
        axes.set(xlabel=x, ylabel="loss on held-out text", title=title, xlim=0)
        axes.grid(axis="y")
        legend_above(axes, handles, list(losses), columns=4)
    seeds_drawn = len(next(iter(losses.values())))
    alt = f"{title or 'Loss'}, against {x}. Mean and range of {seeds_drawn} seeds at the end: "
    alt += "; ".join(
        f"{way} {middle:.3f} ({low:.3f} to {high:.3f}) after {place:.3g}"
        for way, (place, low, middle, high) in ends.items()
    )
    show_figure(fig, alt=f"{alt}.", table=table)
