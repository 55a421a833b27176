"""The figure of lesson 02: who sends to whom in a star, a tree and a ring."""

from __future__ import annotations

from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import CARD, MUTED_COLOR, SERIES, TEXT_COLOR

CORNERS = {0: (0.0, 1.0), 1: (1.0, 0.0), 2: (0.0, -1.0), 3: (-1.0, 0.0)}  # of the ring, clockwise
WAYS = {  # name: (where each rank stands, (sender, receiver, step) of the first half, what is sent)
    "star": (
        {0: (0.0, 0.75), 1: (-1.1, -0.75), 2: (0.0, -0.75), 3: (1.1, -0.75)},
        ((1, 0, 0), (2, 0, 1), (3, 0, 2)),
        "3 steps, whole tensors",
    ),
    "tree": (
        {0: (-0.6, 0.75), 2: (0.6, 0.75), 1: (-0.6, -0.75), 3: (0.6, -0.75)},
        ((1, 0, 0), (3, 2, 0), (2, 0, 1)),
        "2 steps, whole tensors",
    ),
    "ring": (
        CORNERS,
        tuple((rank, (rank + 1) % 4, "0, 1, 2") for rank in range(4)),
        "3 steps, chunks of a quarter",
    ),
}


def star_tree_ring() -> None:
    """Draw how the sum over 4 ranks is formed in a star, a tree and a ring, side by side."""
    fig, panels = figure(1, 3, height=2.7)
    with house_style():
        for axes, (name, (places, moves, says)) in zip(panels, WAYS.items(), strict=True):
            for sender, receiver, step in moves:
                _arrow(axes, places[sender], places[receiver], str(step))
            for rank, place in places.items():
                style = SERIES[1] if rank == 0 and name != "ring" else SERIES[4]
                axes.plot(
                    *place, marker="o", markersize=22, color=style.color, mec=TEXT_COLOR, mew=0.8
                )
                axes.text(
                    *place, str(rank), ha="center", va="center", fontsize=10, color=style.text_color
                )
            axes.set_title(name)
            axes.text(0, -1.62, says, ha="center", fontsize=9, color=MUTED_COLOR)
            axes.set(xlim=(-1.6, 1.6), ylim=(-1.75, 1.4), aspect="equal")
            axes.set_axis_off()
    alt = (
        "Four ranks add up their tensors in three ways. Star: ranks 1, 2 and 3 send to rank 0, one "
        "after another. Tree: 1 sends to 0 while 3 sends to 2, then 2 sends to 0. Ring: every rank "
        "sends a chunk to the next one in each of 3 steps."
    )
    table = [["way", "step", "from rank", "to rank", "part of the tensor"]]
    table += [
        [name, step, sender, receiver, "a quarter" if name == "ring" else "all of it"]
        for name, (_, moves, _) in WAYS.items()
        for sender, receiver, step in moves
    ]
    show_figure(fig, alt=alt, table=table)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], step: str) -> None:
    """An arrow from one rank to another, with the number of its step on it."""
    arrow = {"arrowstyle": "-|>", "color": TEXT_COLOR, "lw": 1.4, "shrinkA": 13, "shrinkB": 13}
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    box = {"fc": CARD, "ec": "none", "pad": 1.0}
    axes.text(*middle, step, ha="center", va="center", fontsize=9, color=TEXT_COLOR, bbox=box)
