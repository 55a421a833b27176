"""How one step's texts are assigned to ranks: a box for each text, as wide as its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR, style_of

LEAST = 0.035  # of the axis: a narrower box has no room for its number


def boxes(assignments: Mapping[str, Sequence[Sequence[int]]], *, title: str = "") -> None:
    """Draw for each assignment what every rank holds, and show it.

    assignments: {name: [the tokens of each text, by rank]}. A dashed line marks the mean of the
    ranks, and the grey part of a row is the time in which its rank waits. Raises ValueError without
    ranks.
    """
    fig, alt, table = boxes_figure(assignments, title=title)
    show_figure(fig, alt=alt, table=table)


def boxes_figure(
    assignments: Mapping[str, Sequence[Sequence[int]]], *, title: str = ""
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table)."""
    if not assignments or not all(assignments.values()):
        raise ValueError("boxes: give {assignment: [tokens of each text, by rank]}, with ranks.")
    widest = max(sum(texts) for ranks in assignments.values() for texts in ranks)
    rows = sum(len(ranks) + 1 for ranks in assignments.values())
    fig, axes = figure(height=0.9 + 0.26 * rows)
    place, ticks = 0, {}
    with house_style():
        for name, ranks in assignments.items():
            ticks[place + (len(ranks) - 1) / 2] = name
            for rank, texts in enumerate(ranks):
                _row(axes, place + rank, texts, max(map(sum, ranks)), widest)
            mean = sum(map(sum, ranks)) / len(ranks)
            axes.plot([mean] * 2, [place - 0.45, place + len(ranks) - 0.55], color=TEXT_COLOR,
                      linestyle="--", marker="", linewidth=1.2)  # fmt: skip
            place += len(ranks) + 1
        axes.set_yticks(list(ticks), list(ticks.values()))
        axes.set_ylim(place - 1.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.01 * widest)
        axes.set(xlabel="tokens of a step, a row for each rank (grey: waiting; dashed: the mean)")
        axes.set_title(title)
    words = [f"{name}: {', '.join(str(sum(t)) for t in r)}" for name, r in assignments.items()]
    table = [["assignment", "rank", "tokens of its texts", "sum"]]
    table += [
        [name, rank, " ".join(map(str, texts)), sum(texts)]
        for name, ranks in assignments.items()
        for rank, texts in enumerate(ranks)
    ]
    return fig, f"Tokens of each rank. {'; '.join(words)}.", table


def _row(axes: Any, place: int, texts: Sequence[int], until: int, widest: int) -> None:
    """One rank's texts end to end, then its waiting."""
    left = 0
    for text in texts:
        axes.barh(place, text, left=left, height=0.8, facecolor=SERIES[4].color, edgecolor="white")
        if text > LEAST * widest:
            axes.text(left + text / 2, place, str(text), ha="center", va="center",
                      fontsize=8, color=TEXT_COLOR)  # fmt: skip
        left += text
    axes.barh(place, until - left, left=left, height=0.8, **style_of("idle").patch_kwargs)
