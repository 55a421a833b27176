"""DDP drawn: how buckets are filled, versions on one axis, and the step time by bucket size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.one_axis import one_axis
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import CARD, MUTED_COLOR, SERIES, TEXT_COLOR, style_of

Transfers = Sequence[tuple[float, float]]  # (begin, end) of each all-reduce, in seconds
GAP = 6  # bytes between two boxes of `bucket_layout`, so that they are seen as two


def bucket_layout(sizes: Mapping[str, int], groups: Sequence[Sequence[int]], most: int) -> None:
    """Draw parameters, the reversed row cut into buckets, and their flat tensors with views.

    sizes: bytes of each parameter, in the order of the model. groups: the buckets, each a list of
    positions in the reversed row. most: the limit of a bucket, in bytes.
    """
    names = list(sizes)
    backwards = names[::-1]
    fig, axes = figure(height=2.9)
    rows, left = [], 0.0
    with house_style():
        for name in names:
            _box(axes, 3, left, sizes[name], f"{name}\n{sizes[name]}", "#BEBEB0")
            left += sizes[name] + GAP
        left = 0.0
        for number, group in enumerate(groups):
            begin, inside = left, [backwards[i] for i in group]
            color = SERIES[number % len(SERIES)].color
            for name in inside:
                middle = left + sizes[name] / 2
                _box(axes, 2, left, sizes[name], f"{name}\n{sizes[name]}", color)
                axes.annotate(
                    f"{name}.grad",
                    (middle, 1.02),
                    (middle, 0.35),
                    ha="center",
                    fontsize=9,
                    arrowprops={"arrowstyle": "->", "color": TEXT_COLOR},
                )
                left += sizes[name]
            held = int(left - begin)
            _box(axes, 1, begin, held, f"bucket {number}\n{held} of {most}", color)
            rows.append([number, ", ".join(inside), held])
            left += GAP
        axes.set_yticks(
            [3.25, 2.25, 1.25, 0.45], ["parameters", "reversed, cut", "flat tensors", "views"]
        )
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlim(-2, sum(sizes.values()) + GAP * len(sizes))
        axes.set_ylim(0.2, 3.6)
        axes.set_title(f"How gradients are laid into buckets of at most {most} bytes")
    alt = f"Parameters in the order {', '.join(names)}, read in reverse. " + " ".join(
        f"Bucket {number}: {inside}, {held} of {most} bytes in one flat tensor."
        for number, inside, held in rows
    )
    show_figure(fig, alt=alt, table=[["bucket", "views in it", "bytes"], *rows])


def _box(axes: Any, row: float, left: float, width: float, text: str, color: str) -> None:
    axes.broken_barh([(left, width)], (row, 0.5), facecolor=color, edgecolor=CARD, alpha=0.45)
    axes.text(left + width / 2, row + 0.25, text, ha="center", va="center", fontsize=9)


def bucket_sizes(
    transfers: Mapping[float, Transfers], limit: float, forward: float, computing: float
) -> tuple[Any, str, Table]:
    """Figure, alt text and table, for `show.explore`.

    transfers: for each limit in MB when its all-reduces travel, in seconds since the step began.
    limit: the one whose step is drawn. forward, computing: when forward and backward end. Raises
    ValueError for a limit that is not among them.
    """
    if limit not in transfers:
        raise ValueError(f"bucket_sizes: no limit of {limit} MB; there are {list(transfers)}.")
    limits = list(transfers)
    ends = [1e3 * max(computing, *(end for _, end in transfers[m])) for m in limits]
    end = ends[limits.index(limit)]
    fig, (top, bottom) = figure(2, height=4.0)
    with house_style():
        _step(top, transfers[limit], forward, computing)
        top.set_xlim(0, 1.02 * end)
        top.set_title(f"{len(transfers[limit])} calls, {end / 1e3 / computing:.3g} x compute")
        places = range(len(limits))
        bottom.plot(places, ends, color=SERIES[0].color, marker="o")
        here = {"color": style_of("all_reduce").color, "marker": "D", "markersize": 10}
        bottom.plot([limits.index(limit)], [end], linestyle="", label="drawn above", **here)
        level = {"color": MUTED_COLOR, "linewidth": 1, "linestyle": "--"}
        bottom.axhline(1e3 * computing, label="compute alone", **level)
        bottom.set_xticks(places, [f"{m:g}" for m in limits])
        bottom.set_ylim(0.95e3 * computing, max(ends) + 0.15 * (max(ends) - 0.95e3 * computing))
        bottom.set_xlabel("at most in a bucket, MB")
        bottom.set_ylabel("ms per step")
        bottom.legend(loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=2, frameon=False)
    best = limits[ends.index(min(ends))]
    alt = f"With buckets of {limit:g} MB {len(transfers[limit])} all-reduces end the step after "
    alt += f"{end:.0f} ms; compute alone takes {1e3 * computing:.0f} ms. "
    alt += f"The best of the limits is {best:g} MB, {min(ends):.0f} ms."
    rows = [[m, len(transfers[m]), ms] for m, ms in zip(limits, ends, strict=True)]
    return fig, alt, [["MB", "calls", "ms per step"], *rows]


def _step(axes: Any, transfers: Transfers, forward: float, computing: float) -> None:
    """Computing above, all-reduces below, in ms."""
    for name, begin, end in (("forward", 0.0, forward), ("backward", forward, computing)):
        bar = (1e3 * begin, 1e3 * (end - begin))
        axes.broken_barh([bar], (0.55, 0.4), label=name, **style_of(name).patch_kwargs)
    bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in transfers]
    fill = {"facecolor": style_of("all_reduce").color, "edgecolor": "white"}
    axes.broken_barh(bars, (0.05, 0.4), label="all_reduce", **fill)
    axes.set_yticks([0.75, 0.25], ["compute", "network"])
    axes.set_xlabel("ms")
    axes.legend(loc="upper left", bbox_to_anchor=(0.47, 1.25), ncols=3, frameon=False)


def exposed(step: Any) -> float:
    """Seconds on rank 0 from the end of computing to the end of the last all-reduce of a step."""
    begin, end = _exposed(step)
    return end - begin


def versions(steps: Mapping[str, Any], unit: float) -> None:
    """Draw a step of each version of DDP on one time axis, its exposed time in a bracket.

    steps: {name: a run cut down to one step}. unit: seconds of a backward, 1 on the axis.
    """
    one_axis(
        steps,
        unit=unit,
        x="time since the step began, in backwards",
        title="Simulated compute above, real messages on a slowed network below",
        exposed={name: _exposed(step) for name, step in steps.items()},
    )


def _exposed(step: Any) -> tuple[float, float]:
    """When rank 0 has computed, in a span "wait" or at the end of all spans; when it has sent."""
    spans = [s for s in step.spans if s.rank == 0]
    waits = [s.started for s in spans if s.name == "wait"]
    computed = min(waits) if waits else max(s.finished for s in spans)
    sent = [r.finished for r in step.ledger if (r.rank, r.op) == (0, "all_reduce")]
    return computed, max(computed, *sent)
