"""Which rank reads what when a checkpoint of one world size is loaded by another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR

Reads = Sequence[Sequence[tuple[int, int, int]]]  # by new rank: (old rank, first, last + 1)


def resharding(numel: int, old: int, reads: Reads) -> tuple[Any, str, Table]:
    """Figure, alt text and table, for `show.explore`.

    Above, the shards of `old` ranks; below, those of the new ones, each stretch in the colour and
    with the number of the old rank that it is read from. numel: elements; padding is left white.
    """
    new, shard = len(reads), -(-numel // old)
    fig, axes = figure(height=2.4)
    with house_style():
        for rank in range(old):
            width = min(shard, max(numel - rank * shard, 0))
            _bar(axes, rank, 1, rank * shard, width, f"{rank}")
            _frame(axes, 1, rank * shard, shard)
        size = -(-numel // new)
        for rank, parts in enumerate(reads):
            at = rank * size
            for owner, first, last in parts:
                _bar(axes, owner, 0, at, last - first, f"{owner}")
                at += last - first
            _frame(axes, 0, rank * size, size)
        axes.set_yticks([0, 1], [f"{new} ranks read", f"{old} ranks wrote"])
        axes.set_xlabel("elements of the flat range (white: padding)")
        axes.set_title(f"from {old} ranks to {new}: {sum(map(len, reads))} stretches are read")
    text = [
        f"rank {rank} reads "
        + (", ".join(f"{a} to {b} of old rank {owner}" for owner, a, b in parts) or "nothing")
        for rank, parts in enumerate(reads)
    ]
    alt = f"{numel} elements that {old} ranks wrote and {new} read: {'; '.join(text)}."
    head = ["new rank", "old rank", "first", "last"]
    rows = [[r, owner, a, b - 1] for r, parts in enumerate(reads) for owner, a, b in parts]
    return fig, alt, [head, *rows]


def _bar(axes: Any, owner: int, row: int, left: int, width: int, words: str) -> None:
    if width:
        color = SERIES[owner % len(SERIES)].color
        axes.barh(row, width, left=left, height=0.55, color=color, edgecolor="white")
        axes.text(left + width / 2, row, words, ha="center", va="center", color="white")


def _frame(axes: Any, row: int, left: int, width: int) -> None:
    axes.barh(row, width, left=left, height=0.55, fill=False, edgecolor=TEXT_COLOR, linewidth=1.2)
