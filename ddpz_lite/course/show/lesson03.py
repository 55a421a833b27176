"""The figures of lessons 03 and 03b: one batch on four ranks, and the gradient of a sum."""

from __future__ import annotations

from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import CARD, MUTED_COLOR, SERIES, TEXT_COLOR

RANKS = 4
TO_RANK = 8  # windows of the batch for each of them


def one_batch() -> None:
    """Draw how four ranks share a batch of 32 windows and average their four gradients."""
    fig, axes = figure(height=3.1)
    with house_style():
        for rank in range(RANKS):
            y = RANKS - 1 - rank
            first = rank * TO_RANK + 1
            part = f"windows {first} to {first + TO_RANK - 1}"
            _box(axes, (0.0, y), part, 1.5, SERIES[6])
            _box(axes, (2.3, y), f"rank {rank}: mean loss of 8", 1.9, None)
            _box(axes, (4.5, y), f"gradient {rank}", 1.1, None)
            _arrow(axes, (1.5, y), (2.3, y))
            _arrow(axes, (4.2, y), (4.5, y))
            _box(axes, (6.75, y), "same mean gradient", 1.85, SERIES[4])
            _arrow(axes, (5.6, y), (5.95, y))
            _arrow(axes, (6.3, y), (6.75, y))
        bar, height = (5.95, (RANKS - 1) / 2), RANKS - 0.38
        _box(axes, bar, "all-reduce", 0.35, None, height, rotation=90)
        for x, words in ((0.75, "one batch"), (3.25, "forward"), (5.05, "backward")):
            axes.text(x, 3.7, words, ha="center", fontsize=10, color=MUTED_COLOR)
        axes.text(7.67, 3.7, "gradient of all 32", ha="center", fontsize=10, color=MUTED_COLOR)
        axes.set(xlim=(-0.1, 8.7), ylim=(-0.5, 4.0))
        axes.set_axis_off()
    alt = (
        "A batch of 32 windows is cut into four parts of 8. Each rank computes the mean loss of "
        "its part and its gradient. An all-reduce gives all ranks the mean of the four gradients, "
        "which is the gradient of the batch."
    )
    table = [["rank", "windows", "what it computes", "what it has after the averaging"]]
    table += [
        [
            rank,
            f"{rank * TO_RANK + 1} to {(rank + 1) * TO_RANK}",
            "the gradient of its mean loss",
            "the mean of the four gradients",
        ]
        for rank in range(RANKS)
    ]
    show_figure(fig, alt=alt, table=table)


def sum_and_its_gradient() -> None:
    """Draw two ranks whose losses use one sum: forward, and the way back to rank 0's x."""
    fig, panels = figure(1, 2, height=2.3)
    with house_style():
        for axes, back in zip(panels, (False, True), strict=True):
            for rank, y in ((0, 1.0), (1, 0.0)):
                _box(axes, (0.0, y), f"x of rank {rank}", 1.2, SERIES[6], 0.5)
                _box(axes, (3.5, y), f"loss of rank {rank}", 1.5, None, 0.5)
                if not back:
                    _arrow(axes, (1.2, y), (1.85, 0.5))
                    _arrow(axes, (2.85, 0.5), (3.5, y))
                else:
                    _arrow(axes, (3.5, y), (2.85, 0.5))
            _box(axes, (1.85, 0.5), "sum of x", 1.0, SERIES[4], 0.5)
            if back:
                _arrow(axes, (1.85, 0.5), (1.2, 1.0))
            axes.set_title("backward, to the x of rank 0" if back else "forward")
            axes.set(xlim=(-0.1, 5.1), ylim=(-0.4, 1.4))
            axes.set_axis_off()
    alt = (
        "Forward: the x of both ranks goes into one sum, and the loss of both ranks uses it. "
        "Backward: the x of rank 0 receives a gradient from the loss of rank 0 and from the loss "
        "of rank 1, both through the sum."
    )
    table = [["direction", "from", "to"]]
    table += [["forward", f"x of rank {rank}", "sum"] for rank in (0, 1)]
    table += [["forward", "sum", f"loss of rank {rank}"] for rank in (0, 1)]
    table += [["backward", f"loss of rank {rank}", "sum"] for rank in (0, 1)]
    table += [["backward", "sum", "x of rank 0"]]
    show_figure(fig, alt=alt, table=table)


def _box(
    axes: Any,
    left: tuple[float, float],
    words: str,
    width: float,
    style: Any,
    height: float = 0.62,
    rotation: float = 0,
) -> None:
    """A box whose left side has its middle at `left`; without a style it has the card's color."""
    from matplotlib.patches import Rectangle

    (x, y), color = left, style.color if style else CARD
    at = (x, y - height / 2)
    axes.add_patch(Rectangle(at, width, height, facecolor=color, edgecolor=TEXT_COLOR, lw=0.8))
    color = style.text_color if style else TEXT_COLOR
    looks = {"fontsize": 9, "color": color, "rotation": rotation}
    axes.text(x + width / 2, y, words, ha="center", va="center", **looks)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    arrow = {"arrowstyle": "-|>", "color": TEXT_COLOR, "lw": 1.2, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)
