"""Strategies side by side: what a rank holds, what it sends, its peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import INK, look

KINDS = ("parameters", "gradients", "optimizer")


def side_by_side(
    measured: Mapping[str, Mapping[str, Any]], formulas: Mapping[str, tuple[float, float]]
) -> None:
    """Draw strategies as rows of three bars each, from the top.

    measured: {name: {"held": {kind: bytes}, "sent": bytes, "peak": bytes}}. formulas: {name: (bytes
    held, bytes sent)}, drawn as black lines.
    """
    names = list(measured)
    fig, (left, middle, last) = figure(1, 3, height=2.9, sharey=True)
    with house_style():
        before = [0.0] * len(names)
        for kind in KINDS:
            widths = [one["held"][kind] / 1e6 for one in measured.values()]
            left.barh(names, widths, left=before, label=kind, linewidth=0, **look(kind).fill)
            before = [a + b for a, b in zip(before, widths, strict=True)]
        middle.barh(names, [one["sent"] / 1e6 for one in measured.values()], color="#6E6E6E")
        last.barh(names, [one["peak"] / 1e6 for one in measured.values()], color="#56B4E9")
        for place, name in enumerate(names):
            for axes, size in zip((left, middle), formulas[name], strict=True):
                x = size / 1e6
                axes.plot([x, x], [place - 0.45, place + 0.45], color=INK, marker="")
        left.set_ylim(len(names) - 0.4, -0.6)
        for axes, title in ((left, "held"), (middle, "sent in a step"), (last, "peak")):
            axes.set_title(title)
            axes.set_xlabel("MB")
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        fig.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    alt = "Strategies side by side. " + " ".join(
        f"{name}: holds {sum(one['held'].values()) / 1e6:.2f} MB, sends {one['sent'] / 1e6:.2f} MB "
        f"per step, peak {one['peak'] / 1e6:.2f} MB."
        for name, one in measured.items()
    )
    rows = [["strategy", *(f"{kind}, bytes" for kind in KINDS), "sent, bytes", "peak, bytes"]]
    for name, one in measured.items():
        rows.append([name, *(one["held"][kind] for kind in KINDS), one["sent"], one["peak"]])
    show_figure(fig, alt=alt, table=rows)
