"""Memory through a step, one change after the other, where time would hide what happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpz_lite.course.show.canvas import figure, house_style, stacked_areas
from ddpz_lite.course.show.page import show_figure
from ddpz_lite.course.show.style import INK, bytes_unit, in_bytes
from ddpz_lite.meter.timeline import TIMELINE_KINDS

Samples = Sequence[tuple[float, Mapping[str, int]]]  # (seconds, {kind: bytes}), a MemoryTimeline's


def memory_changes(
    samples: Samples,
    marks: Sequence[tuple[float, str]],
    *,
    alt: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Draw a timeline's samples side by side from the mark "forward" on, its marks as lines.

    alt: what the picture shows, in words. names: what the legend calls a kind. Raises ValueError
    for a timeline without a mark "forward".
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
                axes.axvline(at, color=INK, linewidth=0.8, linestyle="--")
                axes.text(at + 2, 1.16 * top, name, fontsize=8.5)
        axes.set_ylim(0, 1.25 * top)
        axes.set_xlim(0, len(samples))
        axes.set_ylabel(unit_name)
        axes.set_xlabel("change of memory, in order")
        said = [(names or {}).get(kind, kind) for kind in drawn]
        axes.legend(handles, said, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    rows = [[name, most[kind]] for name, kind in zip(said, drawn, strict=True)]
    head = ["at the peak", f"bytes, {in_bytes(sum(most.values()))} in all"]
    show_figure(fig, alt=alt, table=[head, *rows])
