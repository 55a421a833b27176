"""The time of an all-reduce over several nodes, by algorithm, from the formulas."""

from __future__ import annotations

from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.style import SERIES, in_seconds

Parts = tuple[float, float, float]  # seconds: inside, inter-node bytes, inter-node latencies
KINDS = ("inside the node", "inter-node bytes", "inter-node latencies")


def all_reduce_times(times: dict[str, Parts]) -> tuple[Any, str, Table]:
    """Figure, alt text and table, for `show.explore`: a bar for each algorithm, in three parts."""
    fig, axes = figure(height=2.6)
    names = list(times)
    with house_style():
        left = [0.0] * len(names)
        for kind, (label, look) in enumerate(zip(KINDS, SERIES, strict=False)):
            widths = [1e3 * times[name][kind] for name in names]
            axes.barh(names, widths, left=left, height=0.55, color=look.color, hatch=look.hatch,
                      edgecolor="white", label=label)  # fmt: skip
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    text = [f"{name} {in_seconds(sum(parts))}" for name, parts in times.items()]
    rows = [[name, *(f"{1e3 * part:.2f}" for part in parts)] for name, parts in times.items()]
    alt = f"Time of an all-reduce: {', '.join(text)}."
    return fig, alt, [["algorithm", *(f"{kind}, ms" for kind in KINDS)], *rows]
