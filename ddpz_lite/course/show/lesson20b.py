"""The figures of lesson 20b: a roofline, meshes by seconds and bytes, predictions and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ddpz_lite.course.fleet.hardware import Cluster
from ddpz_lite.course.fleet.models import Model
from ddpz_lite.course.fleet.plan import Assumed, Operation, Plan, Step, memory, step_time, why_not
from ddpz_lite.course.show.canvas import figure, house_style, swatch
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import CARD, IDLE, MUTED_COLOR, SERIES, TEXT_COLOR, style_of

CAUSES = {
    "compute": SERIES[0],
    "recompute": SERIES[4],
    "tensor": SERIES[5],
    "context": SERIES[3],
    "expert": SERIES[7],
    "stages": SERIES[6],
    "bubble": IDLE,
    "data": SERIES[1],
}
KINDS = {
    "weights": style_of("parameters"),
    "gradients": style_of("gradients"),
    "optimizer": style_of("optimizer"),
    "activations": style_of("activations"),
}
Mesh = tuple[Step, Mapping[str, float]]  # what a step takes, and what a GPU holds


def roofline(
    layers: Mapping[str, Mapping[str, Operation]], peak: float, bandwidth: float, *, title: str
) -> None:
    """Draw operations on the roof of a GPU: FLOP/s that are possible, over FLOPs per byte.

    layers: for each series {operation: (FLOPs, bytes)}. Operations without FLOPs have no place
    here and are left out. peak: FLOP/s that a product reaches.
    """
    fig, axes = figure(height=3.3)
    ridge = peak / bandwidth
    table: Table = [["layer", "operation", "FLOPs per byte", "possible TFLOP/s"]]
    with house_style():
        reach = (ridge / 30, ridge, ridge * 60)
        axes.plot(reach, [min(peak, bandwidth * x) / 1e12 for x in reach], color=MUTED_COLOR,
                  marker="", zorder=1)  # fmt: skip
        axes.axvline(ridge, color=MUTED_COLOR, linestyle="--", linewidth=0.8, zorder=0)
        axes.text(ridge * 0.9, 1.4 * bandwidth * reach[0] / 1e12,
                  f"{ridge:.0f} FLOPs per byte", ha="right", fontsize=8.5)  # fmt: skip
        for place, (series, operations) in enumerate(layers.items()):
            shown = {name: op for name, op in operations.items() if op[0]}
            xs = [flops / moved for flops, moved in shown.values()]
            ys = [min(peak, bandwidth * x) / 1e12 for x in xs]
            look = SERIES[(0, 5, 2)[place % 3]]
            axes.plot(xs, ys, look.marker, color=look.color, markersize=8, label=series)
            ordered = sorted(zip(xs, ys, shown, strict=True), reverse=place == 0)
            for line, (x, y, name) in enumerate(ordered):
                right = place > 0  # of a point on the slope, where the line leaves room
                axes.annotate(name, (x, y), xytext=(8 * right, -8 - 11 * line), va="top",
                              ha="left" if right else "center", textcoords="offset points",
                              fontsize=7.5, color=look.color)  # fmt: skip
            table += [[series, name, x, y] for name, x, y in zip(shown, xs, ys, strict=True)]
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte of memory traffic",
                 ylabel="TFLOP/s that are possible", title=title)  # fmt: skip
        axes.legend(loc="lower right")
    alt = f"Roofline of a GPU: slanted up to {ridge:.0f} FLOPs per byte, then flat at "
    alt += f"{peak / 1e12:.0f} TFLOP/s. " + " ".join(
        f"{series}, {name}: {x:.0f} FLOPs per byte." for series, name, x, _ in table[1:]
    )
    show_figure(fig, alt=alt, table=table)


def meshes(found: Mapping[str, Mesh], capacity: float, *, title: str) -> None:
    """Draw meshes from the top: seconds of a step by cause, and gigabytes of a GPU by kind.

    capacity: bytes that a GPU has for them.
    """
    fig, alt, table = meshes_picture(found, capacity, title)
    show_figure(fig, alt=alt, table=table)


def meshes_picture(
    found: Mapping[str, Mesh], capacity: float, title: str
) -> tuple[Any, str, Table]:
    """(figure, alt, table) of `meshes`."""
    names = list(found)
    shown = [cause for cause in CAUSES if any(asdict(step)[cause] for step, _ in found.values())]
    fig, (left, right) = figure(
        1, 2, height=2.1 + 0.28 * len(names), sharey=True, width_ratios=[1.25, 1]
    )
    table: Table = [["mesh", *shown, "seconds", *KINDS, "GB"]]
    with house_style():
        for place, (name, (step, held)) in enumerate(found.items()):
            took = {cause: asdict(step)[cause] for cause in shown}
            size = {kind: held[kind] / 1e9 for kind in KINDS}
            _bar(left, place, took, CAUSES, f"{step.total:.1f} s")
            fits = sum(held.values()) <= capacity
            total = sum(size.values())
            _bar(right, place, size, KINDS, f"{total:.0f} GB" + ("" if fits else ", too much"),
                 capacity / 1e9)  # fmt: skip
            table.append([name, *took.values(), step.total, *size.values(), total])
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - 0.4, -0.6)
        left.set_xlim(0, 1.22 * max(step.total for step, _ in found.values()))
        most = max(sum(held.values()) for _, held in found.values()) / 1e9
        right.set_xlim(0, 1.5 * max(most, capacity / 1e9))
        right.axvline(capacity / 1e9, color=TEXT_COLOR, linewidth=1, linestyle="--")
        for axes, x in ((left, "seconds of a step"), (right, "GB of a GPU; the line: usable")):
            axes.set_xlabel(x)
            axes.tick_params(axis="y", length=0)
        fig.suptitle(title, fontsize=11)
        small = {"fontsize": 8, "columnspacing": 1.2}
        fig.legend([swatch(CAUSES[cause]) for cause in shown], shown, ncols=4,
                   title="seconds", loc="outside lower left", **small)  # fmt: skip
        fig.legend([swatch(look) for look in KINDS.values()], list(KINDS), ncols=2,
                   title="GB", loc="outside lower right", **small)  # fmt: skip
    alt = f"{title}. " + " ".join(
        f"{name}: {step.total:.1f} s, {sum(held.values()) / 1e9:.0f} GB."
        for name, (step, held) in found.items()
    )
    return fig, alt, table


def _bar(
    axes: Any, place: int, parts: Mapping[str, float], looks: Any, text: str, beyond: float = 0.0
) -> None:
    """A bar of parts, and a text to the right of it and of `beyond`."""
    before = 0.0
    for name, width in parts.items():
        axes.barh(place, width, left=before, linewidth=0, **looks[name].patch_kwargs)
        before += width
    axes.annotate(text, (max(before, beyond), place), xytext=(4, 0), va="center",
                  textcoords="offset points", fontsize=8.5)  # fmt: skip


def explorer(model: Model, cluster: Cluster, batch: int) -> None:
    """The widget: sizes of the inner axes; the data axis has the rest of the GPUs."""

    def picture(tp: int, pp: int, cp: int, stage: int, recompute: str) -> tuple[Any, str, Table]:
        dp = max(1, cluster.gpus // (tp * pp * cp))
        plan = Plan(dp, tp, pp, cp, stage=stage, recompute=recompute)
        reason = why_not(model, cluster, plan, batch)
        axes = f"tp {tp}, cp {cp}, pp {pp}, dp {dp}"
        if plan.gpus > cluster.gpus or batch % dp:  # no such run: draw nothing of it
            fig, empty = figure(height=1.6)
            empty.set_axis_off()
            empty.text(0, 0.5, f"{axes}: {reason}", fontsize=10)
            return fig, f"{axes}: {reason}.", [["mesh", "why not"], [axes, reason]]
        found = step_time(model, cluster, plan, batch), memory(model, plan, batch)
        title = f"{axes}: {'fits' if reason is None else reason} (modelled)"
        capacity = Assumed().usable * cluster.gpu.memory
        return meshes_picture({"a step": found}, capacity, title)

    explore(
        picture,
        tp=options("Tensor", [1, 2, 4, 8, 16, 32, 64], default=8),
        pp=options("Pipeline", [1, 2, 4, 8, 16], default=1),
        cp=options("Context", [1, 2, 4, 8], default=1),
        stage=options("ZeRO stage", [1, 2, 3], default=1),
        recompute=options("Recompute", ["none", "full"], default="none"),
    )


def published(errors: Mapping[str, tuple[float, float, bool]], *, title: str) -> None:
    """Draw predictions as multiples of the published step, from the top.

    errors: {run: (predicted / published, the same if all messages hide, whether it was fitted)}.
    """
    fig, axes = figure(height=1.2 + 0.27 * len(errors))
    with house_style():
        axes.axvline(1, color=TEXT_COLOR, linewidth=1)
        for place, (shown, hidden, fitted) in enumerate(errors.values()):
            look = SERIES[2] if fitted else SERIES[0]
            axes.plot([hidden, shown], [place, place], color=MUTED_COLOR, marker="", linewidth=1.5)
            axes.plot([shown], [place], look.marker, color=look.color, markersize=7)
            axes.plot([hidden], [place], "|", color=MUTED_COLOR, markersize=8)
            text = f"{round(100 * shown) - 100:+d}%"
            axes.annotate(text, (max(shown, hidden), place), xytext=(7, 0), va="center",
                          textcoords="offset points", fontsize=8.5,
                          bbox={"color": CARD, "pad": 0.5})  # fmt: skip
        axes.set_yticks(range(len(errors)), list(errors))
        axes.set_ylim(len(errors) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set(xlabel="predicted / published step time", title=title)
        dots = [
            axes.plot([], [], look.marker, color=look.color)[0] for look in (SERIES[2], SERIES[0])
        ]
        bar = axes.plot([], [], color=MUTED_COLOR, marker="|")[0]
        fig.legend([*dots, bar], ["fitted", "predicted", "if all messages within layers hide"],
                   loc="outside lower center", ncols=3)  # fmt: skip
    rows = [[run, shown, hidden] for run, (shown, hidden, _) in errors.items()]
    table: Table = [["run", "predicted / published", "if all messages hide"], *rows]
    alt = "Predicted over published step times. " + " ".join(
        f"{run}: {shown:.2f}, or {hidden:.2f} if all messages hide." for run, shown, hidden in rows
    )
    show_figure(fig, alt=alt, table=table)
