"""What each rank holds before a collective and after it, drawn from a run's own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import IDLE, MUTED_COLOR, SERIES, TEXT_COLOR

Held = Sequence[float] | Mapping[int, float]  # all places in order, or {place: number}


def collectives(run: Sequence[Mapping[str, tuple[Held, Held]]]) -> None:
    """Draw collectives as tables of numbers, before and after: a row per rank, a column per place.

    run: for each rank {name: (before, after)}. A number 10 r + place belongs to rank r and has its
    colour; a sum over ranks is grey. Raises ValueError for a run that holds nothing.
    """
    if not run or not run[0]:
        raise ValueError("show.collectives: nothing to draw; return {name: (before, after)}.")
    names, world = list(run[0]), len(run)
    rows = -(-len(names) // 2)
    fig, panels = figure(rows, 2, height=1.8 * rows, squeeze=False)
    with house_style():
        for axes in panels.flat[len(names) :]:
            axes.set_axis_off()
        for axes, name in zip(panels.flat, names, strict=False):
            for side, left in enumerate((0, world + 1.5)):
                for rank in range(world):
                    _draw_row(axes, run[rank][name][side], rank, left, world)
            _frame(axes, name, world)
    table = [["collective", "rank", "before", "after"]]
    table += [
        [name, rank, *(in_words(held) for held in run[rank][name])]
        for name in names
        for rank in range(world)
    ]
    alt = f"What each of {world} ranks holds before and after: {', '.join(names)}."
    show_figure(fig, alt=alt, table=table)


def in_words(held: Held) -> str:
    """The numbers of a rank in order: "10 11 12"; "nothing" where it holds none."""
    values = held.values() if isinstance(held, Mapping) else held
    return " ".join(f"{value:02.0f}" for value in values) or "nothing"


def _draw_row(axes: Any, held: Held, rank: int, left: float, world: int) -> None:
    from matplotlib.patches import Rectangle

    numbers = held if isinstance(held, Mapping) else dict(enumerate(held))
    for place in range(world):
        style = {"fc": "none", "ec": MUTED_COLOR, "lw": 0.5}
        value = numbers.get(place)
        if value is not None:
            source = int(value // 10)
            look = SERIES[source % len(SERIES)] if source < world else IDLE
            style["fc"] = look.color
            axes.text(left + place + 0.5, rank + 0.5, f"{value:02.0f}", ha="center", va="center",
                      fontsize=8, color=look.text_color)  # fmt: skip
        axes.add_patch(Rectangle((left + place, rank + 0.08), 1, 0.84, **style))


def _frame(axes: Any, name: str, world: int) -> None:
    arrow = {"arrowstyle": "-|>", "color": TEXT_COLOR}
    axes.annotate("", xy=(world + 1.3, world / 2), xytext=(world + 0.2, world / 2),
                  arrowprops=arrow)  # fmt: skip
    axes.set_title(name)
    axes.set_xlim(-0.1, 2 * world + 1.6)
    axes.set_ylim(world, 0)
    axes.set_yticks([r + 0.5 for r in range(world)], [f"rank {r}" for r in range(world)])
    axes.set_xticks([world / 2, 1.5 * world + 1.5], ["before", "after"])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
