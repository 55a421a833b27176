"""Steps of DDP: the versions of lesson 05 on one axis, and the time of a step by bucket size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.one_axis import one_axis
from ddpz_lite.course.show.page import Table
from ddpz_lite.course.show.style import MUTED_COLOR, SERIES, style_of

Transfers = Sequence[tuple[float, float]]  # (begin, end) of each all-reduce, in seconds


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
        top.set_title(f"{len(transfers[limit])} calls, {end / 1e3 / computing:.3g} x computing")
        places = range(len(limits))
        bottom.plot(places, ends, color=SERIES[0].color, marker="o")
        here = {"color": style_of("all_reduce").color, "marker": "D", "markersize": 10}
        bottom.plot([limits.index(limit)], [end], linestyle="", **here)
        bottom.axhline(1e3 * computing, color=MUTED_COLOR, linewidth=1, linestyle="--")
        bottom.set_xticks(places, [f"{m:g}" for m in limits])
        bottom.set_ylim(0, 1.1 * max(ends))
        bottom.set_xlabel("at most in a bucket, MB (diamond: above; dashed: computing alone)")
        bottom.set_ylabel("ms per step")
    best = limits[ends.index(min(ends))]
    alt = f"With buckets of {limit:g} MB {len(transfers[limit])} all-reduces end the step after "
    alt += f"{end:.0f} ms; computing alone takes {1e3 * computing:.0f} ms. "
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
