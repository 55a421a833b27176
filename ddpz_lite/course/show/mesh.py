"""A mesh on nodes: who talks to whom, over which links, and what that costs a step.

The job is a model of 70 billion parameters on 8 nodes of 8 devices. The seconds are arithmetic, as
the lesson on meshes has it: computing and its bubble, and for each axis its bytes over its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.style import SERIES, TEXT_COLOR, SeriesStyle

PARAMS, LAYERS, WIDTH = 70e9, 80, 8192
TOKENS, BATCH = 2048, 256  # of a sample; samples of a step, each a micro-batch of its own
NODES, PER_NODE = 8, 8
FLOPS, NEAR, FAR, MEMORY = 400e12, 300e9, 25e9, 80e9  # of a device; of a link, per second; bytes
STYLES: dict[str, SeriesStyle] = {
    "compute": SERIES[4],
    "bubble": SERIES[7],
    "tensor": SERIES[1],
    "pipeline": SERIES[2],
    "data": SERIES[0],
}
Plan = Sequence[tuple[str, int]]  # axis and size, innermost first


def partners(plan: Plan, rank: int = 0) -> dict[str, list[int]]:
    """For each axis the ranks of the group in which `rank` is, itself included."""
    found, stride = {}, 1
    for axis, size in plan:
        first = rank - rank // stride % size * stride
        found[axis] = [first + i * stride for i in range(size)]
        stride *= size
    return found


def is_near(ranks: Sequence[int]) -> bool:
    """Whether all of these ranks lie in one node."""
    return len({rank // PER_NODE for rank in ranks}) == 1


def where_of(ranks: Sequence[int]) -> str:
    return "inside a node" if is_near(ranks) else "between nodes"


def seconds(plan: Plan) -> dict[str, float]:
    """Seconds of a step, by what they are for: the keys of STYLES."""
    size = dict(plan)
    d, p, t = size["data"], size["pipeline"], size["tensor"]
    link = {axis: NEAR if is_near(ranks) else FAR for axis, ranks in partners(plan).items()}
    micros, message = BATCH // d, 2 * TOKENS * WIDTH  # 16 bits
    compute = 6 * PARAMS * TOKENS / (p * t * FLOPS)
    tensor = 4 * LAYERS / p * 2 * (t - 1) / t * message / link["tensor"]
    hop = 2 * message / link["pipeline"] if p > 1 else 0.0
    return {
        "compute": micros * compute,
        "tensor": micros * tensor,
        "pipeline": micros * hop,
        "bubble": (p - 1) * (compute + tensor + hop),
        "data": 2 * (d - 1) / d * 2 * PARAMS / (p * t) / link["data"],
    }


def held(plan: Plan) -> float:
    """Bytes on a device: 16 for each of its parameters, and the activations that are live."""
    size = dict(plan)
    p, t = size["pipeline"], size["tensor"]
    live = min(p, BATCH // size["data"])
    activations = 34 * TOKENS * WIDTH * LAYERS / p / t
    return 16 * PARAMS / (p * t) + live * activations


def picture(plan: Plan) -> tuple[Any, str, Table]:
    """The devices with rank 0's partners, and a step's seconds: what `explore` shows."""
    spent, bytes_, groups = seconds(plan), held(plan), partners(plan)
    total = sum(spent.values())
    fits = "fits" if bytes_ <= MEMORY else "does not fit"
    text = f"{total:.1f} s a step, {bytes_ / 1e9:.0f} of {MEMORY / 1e9:.0f} GB: {fits}"
    fig, (left, right) = figure(1, 2, height=3.1, width_ratios=[1, 1.25])
    with house_style():
        _devices(left, groups)
        for place, (name, value) in enumerate(spent.items()):
            right.barh(place, value, **STYLES[name].patch_kwargs)
            where = "" if name not in groups or len(groups[name]) == 1 else (
                f", {where_of(groups[name])}"
            )  # fmt: skip
            right.annotate(f"{value:.2f} s{where}", (value, place), xytext=(4, 0),
                           textcoords="offset points", va="center", fontsize=8.5)  # fmt: skip
        right.set_yticks(range(len(spent)), list(spent))
        right.set_ylim(len(spent) - 0.4, -0.6)
        right.set_xlim(0, 1.75 * max(spent.values()))
        right.set_xlabel("modelled seconds of a step")
        right.set_title(text, fontsize=9.5)
    order = " x ".join(f"{axis} {size}" for axis, size in plan)
    alt = f"Innermost first, {order}, on 8 nodes of 8: {text}. "
    alt += ", ".join(f"{name} {value:.2f} s" for name, value in spent.items()) + "."
    rows = [["part", "seconds", "links"]]
    for name, value in spent.items():
        known = groups.get(name, [0])
        rows.append([name, value, "-" if len(known) == 1 else where_of(known)])
    return fig, alt, rows


def _devices(axes: Any, groups: dict[str, list[int]]) -> None:
    """64 squares, a row a node, with rank 0 and its partners along each axis."""
    for rank in range(NODES * PER_NODE):
        axis = next((a for a, ranks in groups.items() if rank in ranks and rank), None)
        look = STYLES[axis] if axis else SeriesStyle("#E4E4DC", "", "")
        y, x = divmod(rank, PER_NODE)
        colour = TEXT_COLOR if rank == 0 else look.color
        axes.bar(x, 0.86, bottom=y - 0.43, width=0.86, color=colour, linewidth=0)
        if axis:
            ink = "white" if axis == "data" else TEXT_COLOR
            axes.text(x, y, axis[0].upper(), ha="center", va="center", fontsize=8, color=ink)
    axes.text(0, 0, "0", ha="center", va="center", fontsize=8, color="white")
    axes.set_xlim(-0.6, PER_NODE - 0.4)
    axes.set_ylim(NODES - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks(range(NODES), [f"node {n}" for n in range(NODES)], fontsize=8)
    axes.tick_params(length=0)
    axes.set_title("rank 0 and its partners", fontsize=9.5)
    axes.spines[:].set_visible(False)


def explorer() -> None:
    """The widget: sizes of two axes, the third is what is left, and their order."""
    from ddpz_lite.course.show.sliders import explore, options

    orders = [", ".join(axes) for axes in permutations(("tensor", "data", "pipeline"))]
    explore(
        _turned,
        tensor=options("Tensor", [1, 2, 4, 8], default=8),
        pipeline=options("Pipeline", [1, 2, 4, 8], default=4),
        order=options("From the inside", orders, default=orders[0]),
    )


def _turned(tensor: int, pipeline: int, order: str) -> tuple[Any, str, Table]:
    sizes = {"tensor": tensor, "pipeline": pipeline}
    sizes["data"] = NODES * PER_NODE // (tensor * pipeline)
    return picture([(axis, sizes[axis]) for axis in order.split(", ")])
