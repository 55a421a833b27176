"""Which rank reads what in resharding, a new group of survivors, and the cost of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import MUTED_COLOR, SERIES, TEXT_COLOR

Reads = Sequence[Sequence[tuple[int, int, int]]]  # by new rank: (old rank, first, last + 1)


def explore_resharding(ranges_to_read: Callable[[int, int, int], Iterable[Any]]) -> None:
    """The widget: sliders for the elements, the ranks that saved and the ranks that load.

    ranges_to_read: (elements, ranks that saved, ranks that load) -> what each new rank reads.
    """
    from ddpz_lite.course.show.sliders import explore, options, slider

    explore(
        lambda numel, old, new: resharding(numel, old, list(ranges_to_read(numel, old, new))),
        numel=options("Elements", [10, 24, 61], default=61),
        old=slider("Ranks that saved", 1, 8, default=4),
        new=slider("Ranks that load", 1, 8, default=3),
    )


def resharding(numel: int, old: int, reads: Reads) -> tuple[Any, str, Table]:
    """Figure, alt text and table, for `show.explore`.

    Above, the shards of `old` ranks; below, those of the new ones, each interval in the colour and
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
        axes.set_title(f"from {old} ranks to {new}: {sum(map(len, reads))} intervals are read")
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


Event = tuple[float, str, bool]  # (seconds, what happened, whether it went through the store)


def regroup_sequence(events: Mapping[int, Sequence[Event]], *, dead: int, died: float) -> None:
    """Draw what each survivor did after a death, one row per event, in the order in which it came.

    events: {rank: its events}, on one clock. dead: the rank that died, at `died` on that clock.
    The store has a column between the ranks; an arrow leads to it where an event went through it.
    """
    ranks = sorted([*events, dead])
    columns = dict(zip(ranks, (0, *range(2, len(ranks) + 1)), strict=True))  # the store is in 1
    rows = [(died, dead, "is killed", False)]
    rows += sorted((at, rank, *rest) for rank, some in events.items() for at, *rest in some)
    fig, axes = figure(height=0.7 + 0.27 * len(rows))
    with house_style():
        looks = {rank: SERIES[i] for i, rank in enumerate(ranks)}
        heads = {f"rank {rank}": column for rank, column in columns.items()} | {"store": 1}
        for head, column in heads.items():
            axes.text(column, -1, head, ha="center", va="center", fontweight="bold")
            until = 0 if column == columns[dead] else len(rows) - 0.5
            axes.plot([column, column], [-0.6, until], color=MUTED_COLOR, linewidth=1, marker="")
        for row, (at, rank, what, to_store) in enumerate(rows):
            column, look = columns[rank], looks[rank]
            moment = f"{1000 * (at - died):.0f} ms"
            axes.text(-0.75, row, moment, ha="right", va="center", fontsize=8.5)
            if to_store:
                ends = {"xy": (1, row), "xytext": (column, row)}
                axes.annotate("", **ends, arrowprops={"arrowstyle": "->", "color": TEXT_COLOR})
            box = {"boxstyle": "round,pad=0.25", "facecolor": look.color, "edgecolor": "white"}
            if rank == dead:
                box["facecolor"] = TEXT_COLOR
            axes.text(column, row, what, ha="center", va="center", fontsize=8.5, bbox=box,
                      color="white" if rank == dead else look.text_color)  # fmt: skip
        axes.set(xlim=(-1.15, len(ranks) + 0.5), ylim=(len(rows) - 0.4, -1.5))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_title(f"After the death of rank {dead} (real, times since the death)")
    table: Table = [["ms after the death", "rank", "event", "through the store"]]
    table += [[round(1000 * (at - died)), rank, what, "yes" if to_store else ""]
              for at, rank, what, to_store in rows]  # fmt: skip
    alt = f"Rank {dead} is killed. Then, in order: "
    alt += "; ".join(f"rank {rank} {what}" for _, rank, what, _ in rows[1:]) + "."
    show_figure(fig, alt=alt, table=table)


def shares_figure(shares: Mapping[str, float], *, title: str) -> tuple[Any, str, Table]:
    """Figure, alt text and table, for `show.explore`: the share of the machines' time of each."""
    fig, axes = figure(height=0.9 + 0.36 * len(shares))
    with house_style():
        for place, share in enumerate(shares.values()):
            axes.barh(place, 100 * min(share, 1), **SERIES[0].patch_kwargs)
            axes.annotate(f"{share:.1%}", (100 * min(share, 1), place), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=9)  # fmt: skip
        axes.set_yticks(range(len(shares)), list(shares))
        axes.set_ylim(len(shares) - 0.5, -0.5)
        axes.set_xlim(0, 115)
        axes.tick_params(axis="y", length=0)
        axes.set(xlabel="share of the machines' time that is lost, %", title=title)
    said = "; ".join(f"{name} {share:.1%}" for name, share in shares.items())
    table: Table = [["way", "lost"], *([name, f"{share:.1%}"] for name, share in shares.items())]
    return fig, f"{title}. Lost: {said}.", table
