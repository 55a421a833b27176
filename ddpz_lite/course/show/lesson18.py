"""Which tokens of a window each rank has, and what it computes of a causal mask."""

from __future__ import annotations

from itertools import product
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import CARD, SERIES, TEXT_COLOR
from ddpz_lite.strategies.context.order import Order

LABEL = {"ha": "center", "va": "center", "fontsize": 8, "color": TEXT_COLOR}
LABEL |= {"bbox": {"fc": CARD, "ec": "none", "pad": 1.5}}
ORDERS = {"contiguous": False, "zigzag": True}  # by name: whether it is a zigzag


def causal_explorer() -> None:
    """The widget: a causal mask and the work of each rank, by number of ranks and order."""
    explore(
        causal_picture,
        ranks=options("Ranks", [2, 4, 8], default=4),
        order=options("Order", list(ORDERS), default="contiguous"),
    )


def causal_picture(ranks: int, order: str) -> tuple[Any, str, Table]:
    """(figure, alt, table): the causal mask in 2N chunks, each row in the colour of its rank."""
    parts, work = 2 * ranks, works(ranks, order)
    idle = 1 - sum(work) / (ranks * max(work))
    fig, (left, right) = figure(1, 2, height=3.1, width_ratios=(1.15, 1))
    with house_style():
        for rank in range(ranks):
            for query in rows_of(rank, ranks, order):
                for key in range(query + 1):
                    left.add_patch(_seen(query, key, SERIES[rank % len(SERIES)].patch_kwargs))
        left.set(
            xlim=(0, parts), ylim=(parts, 0), xlabel="chunk of keys", ylabel="chunk of queries"
        )
        left.set_aspect("equal")
        left.locator_params(integer=True)
        left.set_title("who computes what", fontsize=9.5)
        for rank, amount in enumerate(work):
            right.barh(rank, amount, **SERIES[rank % len(SERIES)].patch_kwargs)
            right.annotate(f"{amount:.1%}", (amount, rank), xytext=(4, 0), va="center",
                           textcoords="offset points", fontsize=8.5)  # fmt: skip
        right.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8.5)
        right.set_ylim(ranks - 0.5, -0.5)
        right.set_xlim(0, max(work) * 1.3)
        right.tick_params(axis="y", length=0)
        right.set_xticks([])
        right.set_xlabel("share of all pairs (modelled)")
        right.set_title(f"idle: {idle:.1%} of the ranks' time", fontsize=9.5)
        fig.suptitle(f"A causal mask over {ranks} ranks, {order}", fontsize=11)
    alt = (
        f"The lower triangle of a causal mask in {parts} by {parts} chunks, each row in the colour "
        f"of its rank, in {order} order. Shares of the work by rank: "
        + ", ".join(f"{amount:.1%}" for amount in work)
        + f". All wait for the largest, so {idle:.1%} of the ranks' time is idle."
    )
    return fig, alt, [["rank", "share of the work"], *([r, w] for r, w in enumerate(work))]


def windows_explorer() -> None:
    """The widget: which tokens of which windows each rank of a mesh data x context has."""
    explore(
        windows_picture,
        data=options("Ranks along data", [1, 2, 4], default=2),
        context=options("Ranks along context", [1, 2, 4], default=2),
        order=options("Order", list(ORDERS), default="zigzag"),
    )


def windows_picture(data: int, context: int, order: str) -> tuple[Any, str, Table]:
    """(figure, alt, table): a row for each window, its chunks in the colours of their ranks."""
    fig, axes = figure(height=1.2 + 0.45 * data)
    rows: list[list[Any]] = [["rank", "window", "chunks of the window"]]
    with house_style():
        for window, place in product(range(data), range(context)):
            rank, chunks = window * context + place, rows_of(place, context, order)
            look = SERIES[rank % len(SERIES)]
            for chunk in chunks:
                axes.barh(window, 0.96, left=chunk, height=0.8, **look.patch_kwargs)
                axes.text(chunk + 0.48, window, f"rank {rank}", **LABEL)
            rows.append([rank, window, ", ".join(map(str, chunks))])
        axes.set_yticks(range(data), [f"window {window}" for window in range(data)])
        axes.set(xlim=(0, 2 * context), ylim=(data - 0.5, -0.5))
        axes.set_xlabel(f"chunk of the window, 1/{2 * context} of its tokens each")
        axes.tick_params(length=0)
        axes.locator_params(axis="x", integer=True)
        axes.set_title(f"data = {data}, context = {context}, {order} (a diagram)")
    alt = f"{data} windows on {data * context} ranks, each in {2 * context} chunks, {order}. "
    alt += "; ".join(f"rank {r} has chunks {c} of window {w}" for r, w, c in rows[1:]) + "."
    return fig, alt, rows


def rows_of(rank: int, ranks: int, order: str) -> list[int]:
    """The chunks of a rank, of the 2N of a window."""
    if ORDERS[order]:
        return list(Order(ranks, rank, zigzag=True).chunks())
    return [2 * rank, 2 * rank + 1]


def works(ranks: int, order: str) -> list[float]:
    """Each rank's share of the pairs (query, key) that a causal mask leaves, of many tokens."""
    seen = [
        sum(row + 0.5 for row in rows_of(rank, ranks, order))  # of its own chunk it sees half
        for rank in range(ranks)
    ]
    return [amount / sum(seen) for amount in seen]


def _seen(query: int, key: int, look: dict[str, str]) -> Any:
    """The box of a pair of chunks; of the chunk itself the half below the diagonal."""
    from matplotlib.patches import Polygon

    corners = [(key, query), (key, query + 1), (key + 1, query + 1)]
    return Polygon([*corners, *([(key + 1, query)] if key < query else [])], linewidth=0.4, **look)
