"""Memory through a step of ZeRO-3, the strategies side by side, and FSDP2 while it runs.

The functions for FSDP2 look into `torch.distributed.fsdp._fully_shard`, which is private: read with
torch 2.13. If a later torch has renamed something, they raise AttributeError or ImportError with
its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, legend_above, stacked_areas
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import TEXT_COLOR, bytes_unit, in_bytes, style_of
from ddpz_lite.meter.timeline import TIMELINE_KINDS

Samples = Sequence[tuple[float, Mapping[str, int]]]  # (seconds, {kind: bytes}), a MemoryTimeline's

NAMES = {  # of the kinds under ZeRO-3, for the legend
    "parameters": "parameter shards",
    "gradients": "gradient shards",
    "optimizer": "optimizer shards",
    "transient": "unsharded units",
    "temporary": "full gradients, buffers",
}


def memory_changes(
    samples: Samples,
    marks: Sequence[tuple[float, str]],
    *,
    root: int,
    title: str,
) -> None:
    """Draw a timeline's samples side by side from the mark "forward" on, its marks as lines.

    root: bytes of the root unit. Where more is unsharded, the number of the block is written: those
    of forward in order, and then those of backward in reverse. Raises ValueError for a timeline
    without a mark "forward".
    """
    begins = [seconds for seconds, name in marks if name == "forward"]
    if not begins:
        raise ValueError('memory_changes: the timeline has no mark "forward", where it begins.')
    samples = [(seconds, one) for seconds, one in samples if seconds >= begins[0]]
    drawn = [kind for kind in TIMELINE_KINDS if any(one[kind] for _, one in samples)]
    most = max((one for _, one in samples), key=lambda one: sum(one.values()))
    unit, unit_name = bytes_unit(sum(most.values()))
    fig, axes = figure(height=3.4)
    with house_style():
        moments = [one for _, one in samples]
        tops, handles = stacked_areas(axes, range(len(samples)), moments, drawn, unit)
        top = max(tops)
        for seconds, name in marks:
            if name != "end" and seconds >= begins[0]:
                at = sum(when < seconds for when, _ in samples)
                axes.axvline(at, color=TEXT_COLOR, linewidth=0.8, linestyle="--")
                axes.text(at + 2, 1.16 * top, name, fontsize=8.5)
        at = moments.index(most)
        axes.annotate(f"peak {in_bytes(sum(most.values()))}", (at, top), (at + 4, 1.06 * top),
                      fontsize=8.5, va="center", arrowprops={"arrowstyle": "-"})  # fmt: skip
        axes.plot([at], [top], "o", color=TEXT_COLOR, markersize=4)
        _number_blocks(axes, moments, drawn, root, unit)
        axes.set_title(title, loc="left")
        axes.set_ylim(0, 1.25 * top)
        axes.set_xlim(0, len(samples))
        axes.set_ylabel(unit_name)
        axes.set_xlabel("change of memory, in order")
        labels = [NAMES.get(kind, kind) for kind in drawn]
        legend_above(axes, handles, labels, columns=3)
    rows = [[name, most[kind]] for name, kind in zip(labels, drawn, strict=True)]
    head = ["at the peak", f"bytes, {in_bytes(sum(most.values()))} in all"]
    alt = f"{title}: memory over one step. On the shards, unsharded units rise and fall once per "
    alt += "block in forward and once in backward. Activations grow in forward and shrink in "
    alt += f"backward. The peak is {in_bytes(sum(most.values()))}."
    show_figure(fig, alt=alt, table=[head, *rows])


def _number_blocks(
    axes: Any, moments: Sequence[Mapping[str, int]], drawn: Sequence[str], root: int, unit: float
) -> None:
    """Write the number of the block where more than the root is unsharded, white lines around."""
    more = [False, *(one["transient"] > root for one in moments), False]
    edges = [at for at, (before, now) in enumerate(pairwise(more)) if before != now]
    intervals = list(zip(edges[::2], edges[1::2], strict=True))
    box = {"fc": style_of("transient", drawn).color, "ec": "none", "pad": 1.2}
    for number, (start, end) in enumerate(intervals):
        held = moments[start]
        bottom = sum(held[kind] for kind in drawn[: drawn.index("transient")]) / unit
        top = bottom + held["transient"] / unit
        block = min(number, len(intervals) - 1 - number)
        axes.text((start + end) / 2, (bottom + top) / 2, block, ha="center", va="center",
                  fontsize=9, color=TEXT_COLOR, bbox=box)  # fmt: skip
        axes.vlines([start, end], bottom + root / unit, top, color="white", linewidth=1.4)


KINDS = ("parameters", "gradients", "optimizer")


def side_by_side(
    measured: Mapping[str, Mapping[str, Any]], formulas: Mapping[str, tuple[float, float]]
) -> None:
    """Draw strategies as rows of three bars each, from the top.

    measured: {name: {"held": {kind: bytes}, "sent": bytes, "peak": {kind: bytes}}}. formulas:
    {name: (bytes held, bytes sent)}, drawn as black lines.
    """
    names = list(measured)
    peak_kinds = [k for k in TIMELINE_KINDS if any(one["peak"][k] for one in measured.values())]
    peaks = {name: sum(one["peak"].values()) for name, one in measured.items()}
    fig, (left, middle, last) = figure(1, 3, height=3.1, sharey=True)
    with house_style():
        before = [0.0] * len(names)
        for kind in KINDS:
            widths = [one["held"][kind] / 1e6 for one in measured.values()]
            left.barh(
                names, widths, left=before, label=kind, linewidth=0, **style_of(kind).patch_kwargs
            )
            before = [a + b for a, b in zip(before, widths, strict=True)]
        middle.barh(
            names,
            [one["sent"] / 1e6 for one in measured.values()],
            **style_of("all_reduce").patch_kwargs,
        )
        before = [0.0] * len(names)
        for kind in peak_kinds:
            widths = [one["peak"][kind] / 1e6 for one in measured.values()]
            last.barh(
                names, widths, left=before, label=kind, linewidth=0, **style_of(kind).patch_kwargs
            )
            before = [a + b for a, b in zip(before, widths, strict=True)]
        for place, name in enumerate(names):
            for axes, size in zip((left, middle), formulas[name], strict=True):
                x = size / 1e6
                axes.plot([x, x], [place - 0.45, place + 0.45], color=TEXT_COLOR, marker="")
        left.set_ylim(len(names) - 0.4, -0.6)
        for axes, title in ((left, "held"), (middle, "sent in a step"), (last, "peak")):
            axes.set_title(title)
            axes.set_xlabel("MB")
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        fig.legend(*last.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    alt = "Strategies side by side. " + " ".join(
        f"{name}: holds {sum(one['held'].values()) / 1e6:.2f} MB, sends {one['sent'] / 1e6:.2f} MB "
        f"per step, peak {peaks[name] / 1e6:.2f} MB."
        for name, one in measured.items()
    )
    rows = [["strategy", *(f"{kind}, bytes" for kind in KINDS), "sent, bytes", "peak, bytes"]]
    for name, one in measured.items():
        rows.append([name, *(one["held"][kind] for kind in KINDS), one["sent"], peaks[name]])
    show_figure(fig, alt=alt, table=rows)


METHODS = (
    "pre_forward",
    "unshard",
    "wait_for_unshard",
    "post_forward",
    "reshard",
    "pre_backward",
    "post_backward",
    "finalize_backward",
)
FUNCTIONS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


@contextmanager
def watched_fsdp2() -> Iterator[list[tuple[str, str]]]:
    """Note what FSDP2 calls inside the `with`, in order: (unit, name of the method).

    A name is indented by four blanks for each call around it. A function that knows no unit counts
    to the one that called it. Clear the list to start again.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as source

    log: list[tuple[str, str]] = []
    around = [""]
    group = source.FSDPParamGroup
    methods = [(group, name) for name in METHODS] + [(source, name) for name in FUNCTIONS]
    originals = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, original in originals:
        setattr(owner, name, _noting(original, name, around, log))
    try:
        yield log
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def calls_of(unit: str, log: Sequence[tuple[str, str]]) -> list[str]:
    """One unit's lines of a log, and for a call that another unit's method made, also that line."""
    lines: list[str] = []
    around: list[tuple[str, str]] = []  # the calls that enclose the current one, and itself
    for whose, line in log:
        depth = (len(line) - len(line.lstrip())) // 4
        around[depth:] = [(whose, line)]
        if whose != unit:
            continue
        caller = around[depth - 1] if depth else around[depth]
        if caller[0] != unit:
            lines.append(f"{caller[1]} of {caller[0]}")
        lines.append(line)
    return lines


def _noting(original: Any, name: str, around: list[str], log: list[tuple[str, str]]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        unit = getattr(args[0], "_module_fqn", "") if args else ""
        around.append(unit or around[-1])
        log.append((around[-1], "    " * (len(around) - 2) + name))
        try:
            return original(*args, **kwargs)
        finally:
            around.pop()

    return noting
