"""The figures of lessons 01 and 01b: what is inside a GPT, and does its training fit?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, stacked_bars
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import CARD, MUTED_COLOR, SERIES, TEXT_COLOR

LINE = {"color": TEXT_COLOR, "linewidth": 1.2, "marker": ""}
DEVICES = (24, 80)  # GB
BLOCK = (  # left edge, width, name, what it reads
    (2.55, 0.75, "norm", SERIES[7]),
    (3.5, 1.6, "attention\n(looks back)", SERIES[0]),
    (6.1, 0.75, "norm", SERIES[7]),
    (7.05, 1.6, "2 linear layers\n(this position)", SERIES[1]),
)


def gpt_block(model: Any) -> None:
    """Draw how a GPT turns tokens into scores, with one of its blocks opened.

    model: a `ddpz_lite.model.GPT`, whose parameters the table under the figure counts.
    """
    fig, axes = figure(height=2.5)
    with house_style():
        axes.plot([1.5, 10.4], [1.0, 1.0], color=TEXT_COLOR, linewidth=2.5, marker="", zorder=1)
        _box(axes, 0.05, 0.55, 1.45, "embeddings:\ntoken and\nposition", SERIES[4])
        _box(axes, 10.4, 0.55, 1.5, "norm\noutput head\n256 scores", SERIES[2])
        for left, width, name, style in BLOCK:
            _box(axes, left, 2.0, width, name, style)
        for leaves, joins, inner in ((2.25, 5.45, (3.3, 3.5)), (5.8, 9.0, (6.85, 7.05))):
            _branch(axes, leaves, joins, inner)
        _frame_of_block(axes, model.config.layers)
        axes.text(9.9, 1.1, "stream", ha="center", fontsize=8, color=MUTED_COLOR)
        axes.set(xlim=(-0.05, 12.05), ylim=(0.2, 3.75))
        axes.set_axis_off()
    width, vocabulary = model.config.width, model.config.vocab_size
    alt = (
        f"A GPT from left to right: embeddings make a stream of vectors, {model.config.layers} "
        "blocks add to it, and a norm and the output head turn it into scores. Inside a block, "
        "two branches leave the stream and are added back to it: a norm and attention, which "
        "reads earlier positions, then a norm and two linear layers, which read this position."
    )
    block = model.blocks[0]
    layers = (block.norm1, block.norm2, block.up, block.down)
    table = [["part", "numbers at each position after it", "parameters"]]
    table += [
        ["embeddings, token + position", width, _count(model.tokens, model.positions)],
        ["attention of one block", width, _count(block.attention)],
        ["norms and two linear layers of one block", width, _count(*layers)],
        ["last norm and output head", vocabulary, _count(model.norm, model.head)],
    ]
    show_figure(fig, alt=alt, table=table)


def explore_needs(
    needs: Callable[..., dict[str, float]], models: Sequence[str], optimizers: Sequence[str]
) -> None:
    """Sliders over a memory calculator, drawn as one bar next to devices of 24 and of 80 GB.

    needs: returns bytes by kind for model, optimizer, precision, windows and checkpointing.
    """

    def draw(**settings: Any) -> Any:
        parts = needs(**settings)
        total = sum(parts.values()) / 1e9
        fig, axes = figure(height=2.0)
        with house_style():
            stacked_bars(axes, [""], [parts], list(parts), (1e9, "GB"))
            for limit in DEVICES:
                axes.axvline(limit, color=TEXT_COLOR, linestyle="--", linewidth=1)
                axes.text(limit + 0.6, -0.66, f"{limit} GB", va="top", fontsize=8, color=TEXT_COLOR)
            axes.set_xlim(0, max(100, 1.17 * total))
            axes.set_ylim(0.5, -0.68)  # space for the names of the lines
            axes.set_xlabel("GB, modelled (dashed: the memory of two devices)")
        fits = next((f"fits {limit} GB" for limit in DEVICES if total <= limit), "fits neither")
        alt = f"{total:.1f} GB in all: {fits}. "
        alt += ", ".join(f"{kind} {size / 1e9:.1f} GB" for kind, size in parts.items()) + "."
        rows = [[kind, size / 1e9] for kind, size in parts.items()]
        return fig, alt, [["kind", "GB"], *rows, ["all", total]]

    explore(
        draw,
        model=options("Model", models, default="1.3 B"),
        optimizer=options("Optimizer", optimizers, default="AdamW"),
        precision=options("Precision", ["fp32", "mixed"], default="mixed"),
        windows=options("Batch", [1, 2, 4, 8, 16, 32], default=8, unit="windows of 2,048"),
        checkpointing=options("Checkpointing", ["off", "on"], default="off"),
    )


def _box(axes: Any, left: float, bottom: float, width: float, name: str, style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom), width, 0.9, boxstyle=shape, fc=style.color, ec=TEXT_COLOR, lw=0.8
        )
    )
    middle = (left + width / 2, bottom + 0.45)
    axes.text(*middle, name, ha="center", va="center", fontsize=7.5, color=style.text_color)


def _branch(axes: Any, leaves: float, joins: float, inner: tuple[float, float]) -> None:
    """A path that leaves the stream, goes through two boxes and is added to the stream again."""
    first, last = leaves + 0.3, joins - 0.35
    axes.plot([leaves, leaves, first], [1.0, 2.45, 2.45], **LINE)
    axes.plot(inner, [2.45, 2.45], **LINE)
    axes.plot([last, joins, joins], [2.45, 2.45, 1.0], **LINE)
    axes.plot(
        [joins], [1.0], marker="o", markersize=15, color=CARD, markeredgecolor=TEXT_COLOR, zorder=2
    )
    axes.text(joins, 0.98, "+", ha="center", va="center", fontsize=12, color=TEXT_COLOR, zorder=3)


def _frame_of_block(axes: Any, layers: int) -> None:
    from matplotlib.patches import Rectangle

    style = {"fill": False, "ec": MUTED_COLOR, "lw": 1.0, "ls": "--"}
    axes.add_patch(Rectangle((2.0, 0.3), 7.4, 2.85, **style))
    axes.text(2.0, 3.27, f"one block; this GPT has {layers}", fontsize=9, color=MUTED_COLOR)


def _count(*modules: Any) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
