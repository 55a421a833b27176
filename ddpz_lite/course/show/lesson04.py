"""How one step's texts are assigned to ranks, and how long ranks with random texts wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.idle import idle_figure
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR, style_of

Assignments = Mapping[str, Sequence[Sequence[int]]]
STEPS = 1000  # random steps
LEAST = 0.035  # of the axis: a narrower box has no room for its number


def boxes(assignments: Assignments, lengths: Sequence[int], *, title: str = "") -> None:
    """Draw for each assignment what every rank holds, and show it.

    assignments: {name: [the texts of a rank, for each rank]}. lengths: the tokens of each text. A
    dashed line marks the mean of the ranks; the grey part of a row is the time in which its rank
    waits. Raises ValueError without ranks.
    """
    fig, alt, table = boxes_figure(assignments, lengths, title=title)
    show_figure(fig, alt=alt, table=table)


def boxes_figure(
    assignments: Assignments, lengths: Sequence[int], *, title: str = ""
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table)."""
    if not assignments or not all(assignments.values()):
        raise ValueError("boxes: give {assignment: [texts of each rank]}, with at least one rank.")
    assignments = {
        name: [[lengths[i] for i in texts] for texts in ranks]
        for name, ranks in assignments.items()
    }
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
                      linestyle="--", marker="", linewidth=1.2, zorder=2)  # fmt: skip
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
    left, box = 0, SERIES[4].color
    for text in texts:
        axes.barh(place, text, left=left, height=0.8, facecolor=box, edgecolor="white", zorder=1)
        if text > LEAST * widest:  # its own patch of colour, where the dashed line would cross it
            axes.text(left + text / 2, place, str(text), ha="center", va="center", zorder=3,
                      fontsize=8, color=TEXT_COLOR,
                      bbox={"facecolor": box, "edgecolor": "none", "pad": 0.8})  # fmt: skip
        left += text
    grey = style_of("idle").color
    axes.barh(
        place, until - left, left=left, height=0.8, facecolor=grey, edgecolor="white", zorder=1
    )


def random_steps(
    lengths: Sequence[int], seconds: float
) -> Callable[[int, int], tuple[Any, str, Table]]:
    """For `show.explore`: a function of the ranks and of the texts that each draws per step.

    lengths: the tokens of each text. seconds: of work per token. It draws a step whose share of
    waiting is that of all random steps.
    """

    def draw(ranks: int, texts_each: int) -> tuple[Any, str, Table]:
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(len(lengths), (STEPS, ranks, texts_each), generator=generator)
        work = seconds * torch.tensor(lengths)[drawn].sum(2)  # (steps, ranks)
        share = 1 - work.mean() / work.amax(1).mean()
        shares = 1 - work.mean(1) / work.amax(1)  # (steps,)
        typical = work[(shares - share).abs().argmin()].tolist()
        waiting = [(busy, max(typical) - busy) for busy in typical]
        title = f"Modelled: {ranks} ranks wait {share:.0%} of {STEPS:,} random steps"
        return idle_figure({"one of them": waiting}, title=title)

    return draw
