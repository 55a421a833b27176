"""The cost of accumulation under ZeRO-1 and ZeRO-2: memory or traffic, as bars side by side."""

from __future__ import annotations

from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR
from ddpz_lite.strategies.costs import elements_moved
from ddpz_lite.strategies.costs import zero_memory as state_bytes

SIZES = {"125 M": 125e6, "1.3 B": 1.3e9, "7.5 B": 7.5e9, "30 B": 30e9}  # parameters


def ways(params: float, world: int, micro_batches: int) -> dict[str, tuple[float, float]]:
    """{way: (bytes held on a rank, bytes it sends in a step)}, in mixed precision, 2 + 2 + 12.

    Source: Rajbhandari et al. 2020, sections 5 and 7; lesson 10 measures both.
    """
    held = {stage: state_bytes(params, world, stage) for stage in (1, 2)}
    once = 2 * elements_moved(params, world, 2)
    each_time = 2 * elements_moved(params, world, 2, micro_batches)
    return {
        "ZeRO-1": (held[1], once),
        "ZeRO-2, no_sync": (held[1] if micro_batches > 1 else held[2], once),
        "ZeRO-2, keep shards": (held[2], each_time),
    }


def accumulation(model: str, world: int, micro_batches: int) -> tuple[Any, str, Table]:
    """Figure, alt text and table of the three ways, for `show.explore`; dashed: what DDP holds.

    model: one of SIZES.
    """
    found = ways(SIZES[model], world, micro_batches)
    fig, panels = figure(1, 2, height=2.3, sharey=True)
    with house_style():
        for column, (axes, title) in enumerate(
            zip(panels, ("held, GB", "sent in a step, GB"), strict=True)
        ):
            for place, (way, amounts) in enumerate(found.items()):
                size = amounts[column] / 1e9
                axes.barh(way, size, **SERIES[place].patch_kwargs)
                axes.annotate(f" {size:.3g}", (size, place), va="center", fontsize=9)
            axes.set_xlabel(title)
            axes.margins(x=0.2)
        panels[0].axvline(16 * SIZES[model] / 1e9, color=TEXT_COLOR, linestyle="--", linewidth=1)
        panels[0].invert_yaxis()
        panels[0].set_title(f"{model}, {world} ranks, {micro_batches} micro-batches")
    rows = [[way, held / 1e9, sent / 1e9] for way, (held, sent) in found.items()]
    alt = f"{model}, {world} ranks, {micro_batches} micro-batches. "
    alt += " ".join(f"{way}: {held:.3g} GB held, {sent:.3g} GB sent." for way, held, sent in rows)
    return fig, alt, [["way", "held, GB", "sent in a step, GB"], *rows]
