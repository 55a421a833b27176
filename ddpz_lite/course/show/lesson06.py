"""The figures of lesson 06: two hops, a residual, steps on a slow network, where it pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddpz_lite.course.show.canvas import figure, house_style, legend_above
from ddpz_lite.course.show.charts import line_figure
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import MUTED_COLOR, SERIES, TEXT_COLOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def two_hops(world: int) -> None:
    """Draw what each rank holds before, between and after the two hops of a mean in int8.

    A row is a rank, a colour is a part of the gradient. Pale: float32, full colour: int8.
    """
    from matplotlib.patches import Rectangle

    panels = {  # (part, text, pale) of a box
        "gradient": lambda rank, i: (i, f"part {i}", True),
        "hop 1: all-to-all": lambda rank, i: (rank, f"from {i}", False),
        "mean": lambda rank, i: (rank, "mean", True) if rank == i else None,
        "hop 2: all-gather": lambda rank, i: (i, "mean", False),
    }
    fig, axes_of = figure(1, len(panels), height=2.4)
    table: Table = [["moment", "rank", "holds"]]
    with house_style():
        for axes, (title, box_of) in zip(axes_of, panels.items(), strict=True):
            for rank in range(world):
                boxes = [box_of(rank, i) for i in range(world)]
                for column, box in enumerate(boxes):
                    if box is None:
                        continue
                    part, text, pale = box
                    look = SERIES[part % len(SERIES)]
                    alpha, color = (0.25, TEXT_COLOR) if pale else (1.0, look.text_color)
                    axes.add_patch(Rectangle((column, rank), 0.94, 0.9, fc=look.color,
                                             ec=MUTED_COLOR, alpha=alpha))  # fmt: skip
                    axes.text(column + 0.47, rank + 0.45, text, ha="center", va="center",
                              fontsize=6.5, color=color)  # fmt: skip
                held = ", ".join(
                    f"part {part} {text}" if text != f"part {part}" else text
                    for part, text, _ in filter(None, boxes)
                )
                table.append([title, str(rank), held])
            axes.set(xlim=(-0.05, world), ylim=(world, -0.05), xticks=[])
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("int8" if "hop" in title else "float32", fontsize=8)
            axes.set_yticks([rank + 0.45 for rank in range(world)], range(world), fontsize=8)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        axes_of[0].set_ylabel("rank", fontsize=8)
        fig.suptitle("A mean in int8: what each rank holds (a diagram)", fontsize=10)
    alt = f"{world} ranks. Each has {world} parts of its gradient in float32. After the all-to-all "
    alt += "rank r has part r of every rank in int8, whose mean it takes in float32. After the "
    alt += "all-gather every rank has the mean of every part in int8."
    show_figure(fig, alt=alt, table=table)


class Watched:
    """A top-k method with a `residual` and a `k`; it records what every 50th entry goes through.

    record: for each step the entries' gradients, gradients + residual, and the smallest size sent.
    """

    def __init__(self, method: Any, stride: int = 50) -> None:
        self.method, self.stride = method, stride
        self.record: list[tuple[Tensor, Tensor, float]] = []

    def __call__(self, gradient: Tensor) -> Tensor:
        held = gradient + self.method.residual
        least = held.abs().topk(self.method.k).values[-1].item()
        every = slice(None, None, self.stride)
        self.record.append((gradient[every].cpu().clone(), held[every].cpu().clone(), least))
        return self.method(gradient)


def residual(record: Sequence[tuple[Tensor, Tensor, float]], sent_times: int = 4) -> int:
    """Draw one entry's way through top-k with error feedback; returns how often it was sent.

    record: of `Watched`. Of the entries whose gradient alone was never large enough to be sent, the
    one is drawn that was sent about `sent_times` times and held the most.
    """
    gradients = torch.stack([gradient for gradient, _, _ in record])  # (steps, entries)
    held = torch.stack([total for _, total, _ in record])
    least = torch.tensor([size for _, _, size in record])  # (steps,)
    was_sent = held.abs() >= least[:, None]
    alone = (gradients.abs() >= least[:, None]).any(0)
    distance = (was_sent.sum(0) - sent_times).abs() + 1000 * alone
    entry = int((held.abs().amax(0) - 1e6 * (distance > distance.min())).argmax())
    own, size = (values[:, entry].abs().tolist() for values in (gradients, held))
    moments = was_sent[:, entry].nonzero().flatten().tolist()
    fig, axes = figure(height=2.9)
    with house_style():
        drawn = [
            *axes.plot(own, color=SERIES[1].color, marker=""),
            *axes.plot(size, color=SERIES[0].color, marker=""),
            *axes.plot(moments, [size[m] for m in moments], color=SERIES[5].color, marker="o",
                       linestyle="", markersize=8),
            *axes.plot(least.tolist(), color=TEXT_COLOR, marker="", linestyle="--", linewidth=1.2),
        ]  # fmt: skip
        axes.set(xlabel="step", ylabel="size", ylim=0, xlim=(0, len(size)),
                 title="One entry on rank 0 (real)")  # fmt: skip
        labels = ["its gradient", "gradient + residual", "sent", "least that is sent"]
        legend_above(axes, drawn, labels)
    alt = f"Size of one entry over {len(size)} steps. Its gradient alone stays below the least "
    alt += f"that is sent. Gradient + residual grows until it is sent, in steps {moments}."
    rows = [[m, own[m], size[m], least[m].item()] for m in moments]
    show_figure(fig, alt=alt, table=[["sent in step", *labels[:2], labels[3]], *rows])
    return len(moments)


def step_times(measured: Mapping[str, float], modelled: Mapping[str, float], *, title: str) -> None:
    """Draw the time of each way's step, measured and modelled, as a multiple of the first's."""
    first = next(iter(measured))
    fig, axes = figure(height=1.0 + 0.42 * len(measured))
    table: Table = [["way", "measured", "modelled"]]
    with house_style():
        for row, name in enumerate(measured):
            pair = measured[name] / measured[first], modelled[name] / modelled[first]
            table.append([name, *(round(share, 3) for share in pair)])
            for place, share, look in zip((-0.2, 0.2), pair, SERIES, strict=False):
                handle = axes.barh(row + place, share, height=0.36, linewidth=0.5,
                                   label="_" if row else None, **look.patch_kwargs)  # fmt: skip
                axes.annotate(f"{share:.2f}", (share, row + place), xytext=(4, 0), va="center",
                              textcoords="offset points", fontsize=8)  # fmt: skip
                if row == 0:
                    handle.set_label("measured" if place < 0 else "modelled")
        axes.set_yticks(range(len(measured)), list(measured))
        axes.tick_params(axis="y", length=0)
        axes.set(ylim=(len(measured) - 0.5, -0.5), xlim=(0, 1.12), title=title,
                 xlabel=f"time of a step, in steps of {first}")  # fmt: skip
        legend_above(axes, *axes.get_legend_handles_labels())
    alt = f"{title}, in steps of {first}, measured and modelled: "
    alt += ", ".join(f"{name} {took} and {model}" for name, took, model in table[1:])
    show_figure(fig, alt=f"{alt}.", table=table)


def pays(sent: Mapping[str, float], extra: Mapping[str, float]) -> tuple[Figure, str, Table]:
    """Draw each way's exchange over the bandwidth, as a multiple of the first way's exchange.

    sent, extra: bytes, and seconds that a way computes beyond the first, whose `extra` is 0.
    Latencies are left out. A dot marks where a way takes as long as the first.
    """
    first = next(iter(sent))
    bandwidths = [10 ** (e / 8) for e in range(48, 89)]  # bytes per second
    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        name: (bandwidths, [(extra[name] * b + sent[name]) / sent[first] for b in bandwidths])
        for name in sent
    }
    limits = {
        name: (sent[first] - sent[name]) / extra[name]
        for name in sent
        if extra[name] and sent[name] < sent[first]
    }
    dots = {name: ([limit], [1.0]) for name, limit in limits.items() if limit < bandwidths[-1]}
    words = [f"{name} below {limit:.2g} bytes per second" for name, limit in limits.items()]
    fig, alt, table = line_figure(
        series,
        x="bandwidth, bytes per second",
        y=f"time over {first}'s",
        log="x",
        dots=dots,
        marks=False,
        title="Compressing and sending, without latencies (modelled)",
        alt=f"Modelled time of an exchange over that of {first}. It is shorter for "
        + (", ".join(words) or "none of them")
        + ".",
    )
    axes: Any = fig.axes[0]
    axes.set_ylim(0, 2)
    axes.set_xlim(bandwidths[0], bandwidths[-1])
    with house_style():
        legend_above(axes, *axes.get_legend_handles_labels())
    return fig, alt, table


def seconds_alone(
    makers: Mapping[str, Callable[[], Callable]], gradient: Tensor
) -> dict[str, float]:
    """Seconds that each method computes for this gradient, the shortest of twelve calls."""
    torch.set_num_threads(1)
    found = {}
    for name, make in makers.items():
        method, times = make(), []
        for _ in range(12):
            given = gradient.clone()
            started = time.perf_counter()
            method(given)
            times.append(time.perf_counter() - started)
        found[name] = min(times)
    return found
