"""Strategies on a mesh of nodes: what crosses the slow link, and which one to choose.

    mesh_groups(groups)           the ranks of two nodes, and who talks to whom in which group
    link_bytes(table)             intra- and inter-node bytes of measured strategies, and seconds
    chosen(setting)               the strategy that is fastest among those that fit, and why
    chooser()                     the same with sliders

A collective is inter-node if its group has ranks on several nodes: it goes at the pace of the link
between them. Arithmetic as in lesson 12b: bytes from `placement`, compute 6Ψ operations per token.

Sources: Zhao et al. 2023, "PyTorch FSDP", section 3.2.2; Rajbhandari et al. 2020, section 7.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.show.canvas import figure, house_style, legend_above, swatch
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR, SeriesStyle, in_bytes, in_seconds
from ddpz_lite.strategies.costs import elements_moved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ddpz_lite.course.show.page import Table


INTRA, INTER, COMPUTE = SERIES[0], SERIES[1], SERIES[2]

LINKS_OF = {"intra-node": INTRA, "inter-node": INTER}

# parameters, blocks: each block is a message, gathered or reduced alone
MODELS = {
    "1.3 B": (1.3e9, 24),
    "7 B": (7e9, 32),
    "30 B": (30e9, 60),
    "70 B": (70e9, 80),
    "175 B": (175e9, 96),
}
# of a whole node: bytes per second of its cards together, seconds of latency of a hop
LINKS = {
    "10 Gbit/s Ethernet": (1.25e9, 30e-6),
    "100 Gbit/s": (12.5e9, 10e-6),
    "400 Gbit/s": (50e9, 5e-6),
    "8 x 400 Gbit/s": (400e9, 5e-6),
}
INSIDE = 200e9  # bytes per second of one rank inside a node: NVLink
PER_NODE = 8
DEVICE = 80e9
FOR_STATE = 0.75  # of a device; the rest is for activations and what a step needs for a moment
# bytes of parameters, gradients, optimizer state; bytes of a number that travels; operations/s
PRECISIONS = {"bf16": ((2, 2, 12), 2, 300e12), "fp32": ((4, 4, 8), 4, 75e12)}
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-3": 3}  # over all ranks
NAMES = ("DDP", "ZeRO-1", "hybrid", "ZeRO-1 across", "ZeRO-3")
IN_NODES = ("hybrid", "ZeRO-1 across")  # the model is shared out inside of each node


@dataclass(frozen=True)
class Setting:
    """A training run: parameters, blocks, nodes of 8 ranks, the link of a node, tokens of a rank.

    link: (bytes per second, seconds of latency), as in LINKS.
    """

    params: float
    blocks: int
    nodes: int
    link: tuple[float, float]
    precision: str = "bf16"
    tokens: int = 8192

    @property
    def names(self) -> list[str]:
        """The strategies to choose from. With one node, sharing inside of it is ZeRO-3."""
        return [name for name in NAMES if self.nodes > 1 or name not in IN_NODES]


def held(setting: Setting, name: str) -> float:
    """Bytes of state on one rank."""
    weight, gradient, state = PRECISIONS[setting.precision][0]
    world = setting.nodes * PER_NODE
    shares = {
        "DDP": (1, 1, 1),
        "ZeRO-1": (1, 1, world),
        "hybrid": (PER_NODE, PER_NODE, PER_NODE),
        "ZeRO-1 across": (PER_NODE, PER_NODE, world),
        "ZeRO-3": (world, world, world),
    }[name]
    sizes = (weight, gradient, state)
    return setting.params * sum(size / n for size, n in zip(sizes, shares, strict=True))


def spent(setting: Setting, name: str) -> dict[str, float]:
    """Seconds of a step: computing, and messages inside nodes and through a node's cable.

    A ring over all ranks enters and leaves a node once, so its cable carries each pass once,
    whatever the ranks of a node; and each of its hops waits for the latency. With one ring for each
    place in a node, as hybrid sharding has, the cable carries them together.
    """
    _, size, speed = PRECISIONS[setting.precision]
    nodes, psi = setting.nodes, setting.params
    bandwidth, latency = setting.link
    world, shared = nodes * PER_NODE, name in IN_NODES
    intra = inter = 0.0
    if shared or nodes == 1:
        intra = elements_moved(psi, PER_NODE, 3 if shared else STAGES[name]) * size / INSIDE
    if nodes > 1:
        ring, stage = (nodes, 0) if shared else (world, STAGES[name])
        passes = elements_moved(1, ring, stage) * ring / (ring - 1)  # 2 or 3
        inter = passes * psi * (nodes - 1) / nodes * size / bandwidth
        inter += passes * setting.blocks * (ring - 1) * latency
    computing = 6 * psi * setting.tokens / speed
    return {"computing": computing, "intra-node": intra, "inter-node": inter}


def step_seconds(setting: Setting, name: str) -> float:
    """A step in which messages hide behind computing as well as they can."""
    parts = spent(setting, name)
    return max(parts["computing"], parts["intra-node"] + parts["inter-node"])


def fits(setting: Setting, name: str) -> bool:
    return held(setting, name) <= FOR_STATE * DEVICE


def chosen(setting: Setting) -> tuple[str | None, str]:
    """The fastest strategy that fits, the simplest of equals; and why, in words.

    None if nothing fits.
    """
    names = setting.names
    fitting = [name for name in names if fits(setting, name)]
    if not fitting:
        least = held(setting, "ZeRO-3")
        return None, (
            f"Nothing fits: even ZeRO-3 holds {in_bytes(least)} on each rank. More nodes, "
            "offloading (lesson 12c), or split the layers (lesson 14)."
        )
    best = min(fitting, key=lambda name: round(step_seconds(setting, name), 6))
    parts = spent(setting, best)
    sending = parts["intra-node"] + parts["inter-node"]
    text = f"{best}: holds {in_bytes(held(setting, best))}, "
    if sending <= parts["computing"]:
        text += "and its messages can hide behind the computing."
    else:
        text += f"and {in_seconds(sending - parts['computing'])} of messages stay exposed."
    lower = [name for name in names[: names.index(best)] if name not in fitting]
    if lower:
        text += f" {lower[-1]} would hold {in_bytes(held(setting, lower[-1]))}: too much."
    slower = [n for n in fitting if step_seconds(setting, n) > 1.01 * step_seconds(setting, best)]
    if slower:
        times = step_seconds(setting, slower[-1]) / step_seconds(setting, best)
        text += f" {slower[-1]} fits, too, and a step takes {times:.1f} x as long."
    return best, text


def draw(setting: Setting) -> tuple[Figure, str, Table]:
    """A pair of bars for each strategy: computing, and messages; and the choice in words."""
    best, words = chosen(setting)
    names = setting.names
    fig, axes = figure(height=2.2 + 0.55 * len(names))
    rows: Table = [[
        "strategy", "held, bytes", "fits", "computing, s", "intra-node, s", "inter-node, s"
    ]]  # fmt: skip
    with house_style():
        longest = 0.0
        for place, name in enumerate(names):
            parts, fit = spent(setting, name), fits(setting, name)
            rows.append([name, held(setting, name), "yes" if fit else "no", *parts.values()])
            left = 0.0
            for kind, look in LINKS_OF.items():
                if parts[kind]:
                    axes.barh(
                        place + 0.2, parts[kind], 0.34, left=left, linewidth=0, **look.patch_kwargs
                    )
                left += parts[kind]
            axes.barh(place - 0.2, parts["computing"], 0.34, linewidth=0, **COMPUTE.patch_kwargs)
            size = in_bytes(held(setting, name))
            says = f"{size}{'' if fit else ', does not fit'}{', chosen' if name == best else ''}"
            end = max(left, parts["computing"])
            axes.annotate(says, (end, place), xytext=(5, 0), textcoords="offset points",
                          va="center", fontsize=9, color=TEXT_COLOR,
                          fontweight="bold" if name == best else "normal")  # fmt: skip
            longest = max(longest, end)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, 1.45 * longest)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("seconds of a step (modelled); upper bar: computing, lower bar: messages")
        _legend(axes, {"computing": COMPUTE} | LINKS_OF)
        lines = textwrap.wrap(words, 92)
        fig.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=10, color=TEXT_COLOR)
    return fig, words, rows


def _legend(axes: Axes, looks: Mapping[str, SeriesStyle]) -> None:
    legend_above(axes, [swatch(look) for look in looks.values()], list(looks))


def chooser() -> None:
    """Which strategy, with sliders: model, nodes, link, precision, tokens of a rank."""

    def turned(model, nodes, link, precision, tokens):
        return draw(Setting(*MODELS[model], nodes, LINKS[link], precision, tokens))

    explore(
        turned,
        model=options("Model", list(MODELS), default="30 B"),
        nodes=options("Nodes of 8", [1, 2, 4, 8, 16, 32, 64], default=8),
        link=options("Link between nodes", list(LINKS), default="100 Gbit/s"),
        precision=options("Precision", list(PRECISIONS), default="bf16"),
        tokens=options("Tokens per rank", [2048, 8192, 32768, 131072], default=8192),
    )


def mesh_groups(groups: Sequence[Sequence[Sequence[int]]]) -> None:
    """Draw four ranks on two nodes, and an arrow for each pair that is in one group.

    groups: for each rank the members of its group that shards, and of the one that replicates.
    """
    from matplotlib.patches import FancyArrowPatch, Rectangle

    fig, axes = figure(height=3.4)
    says = ("all-gather weights,\nreduce-scatter gradients", "all-reduce\ngradient shards")
    rows: Table = [["ranks", "group", "messages"]]
    with house_style():
        for node in range(2):
            corner, size = (-0.45, -1.42 * node - 0.42), (2.9, 0.84)
            axes.add_patch(Rectangle(corner, *size, facecolor="#EEF1F4", edgecolor="#9AA4AE"))
            axes.text(-0.38, corner[1] + 0.06, f"node {node}", fontsize=9, color=TEXT_COLOR)
        for kind, (name, look) in enumerate(zip(("shard", "replicate"), SERIES, strict=False)):
            pairs = sorted({tuple(of_rank[kind]) for of_rank in groups})
            for a, b in pairs:
                ends = _place(a), _place(b)
                axes.add_patch(
                    FancyArrowPatch(
                        *ends, arrowstyle="<|-|>", mutation_scale=14, color=look.color,
                        linewidth=2.4, linestyle="-" if kind == 0 else (0, (4, 2)),
                        shrinkA=30 - 12 * kind, shrinkB=30 - 12 * kind,
                    )
                )  # fmt: skip
                middle = [sum(pair) / 2 for pair in zip(*ends, strict=True)]
                level = ends[0][1] == ends[1][1]
                axes.text(middle[0] if level else middle[0] + 0.08, middle[1] + 0.06 * level,
                          says[kind], ha="center" if level else "left", fontsize=8.5,
                          va="bottom" if level else "center", color=TEXT_COLOR)  # fmt: skip
                rows.append([f"{a}, {b}", name, says[kind].replace("\n", " ")])
        for rank, (local, _) in enumerate(groups):
            x, y = _place(rank)
            label = f"rank {rank}\nshard {list(local).index(rank)} of {len(local)}"
            box = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": TEXT_COLOR}
            axes.text(x, y, label, ha="center", va="center", fontsize=9.5, bbox=box)
        axes.set(xlim=(-0.5, 2.5), ylim=(-1.95, 0.5))
        axes.axis("off")
        axes.set_title("Two groups for each rank (a diagram of the groups above)", loc="left")
    alt = "Four ranks on two nodes. " + " ".join(
        f"Ranks {row[0]} are a group of the axis {row[1]}: {row[2]}." for row in rows[1:]
    )
    show_figure(fig, alt=alt, table=rows)


def _place(rank: int) -> tuple[float, float]:
    return 2.0 * (rank % 2), -1.42 * (rank // 2)


def link_bytes(table: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw strategies as rows: bytes of a step by link, and seconds next to the arithmetic.

    table: {name: {"intra-node": bytes, "inter-node": bytes, "seconds": of a step, "derived": the
    seconds that the lesson derives from the messages, drawn as a black line}}.
    """
    names = list(table)
    fig, (left, right) = figure(1, 2, height=1.5 + 0.42 * len(names), sharey=True)
    rows: Table = [[
        "strategy", "intra-node, bytes", "inter-node, bytes", "seconds", "derived seconds"
    ]]  # fmt: skip
    with house_style():
        for place, (name, one) in enumerate(table.items()):
            before = 0.0
            for kind, look in LINKS_OF.items():
                left.barh(place, one[kind] / 1e6, left=before, linewidth=0, **look.patch_kwargs)
                before += one[kind] / 1e6
            right.barh(place, one["seconds"], color="#6E6E6E")
            wanted = one["derived"]
            right.plot([wanted, wanted], [place - 0.45, place + 0.45], color=TEXT_COLOR, marker="")
            rows.append([name, *(one[kind] for kind in LINKS_OF), one["seconds"], wanted])
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.4, -0.6)
        left.set(xlabel="MB sent by rank 0 (real)", title="bytes of a step")
        right.set(xlabel="seconds (shaped network)", title="one step; black line: derived")
        for axes in (left, right):
            axes.tick_params(axis="y", length=0)
        _legend(left, LINKS_OF)
    alt = "Strategies on two nodes. " + " ".join(
        f"{name}: {one['intra-node'] / 1e6:.2f} MB intra-node, "
        f"{one['inter-node'] / 1e6:.2f} MB inter-node, {one['seconds']:.2f} s, "
        f"derived {one['derived']:.2f} s."
        for name, one in table.items()
    )
    show_figure(fig, alt=alt, table=rows)
