"""The loss of several ways to train against what they have spent so far: bytes, or seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpz_lite.course.show.charts import line_figure
from ddpz_lite.course.show.page import show_figure


def loss_against(
    spent: Mapping[str, float],
    losses: Mapping[str, Sequence[float]],
    *,
    every: int,
    x: str,
    log: str = "y",
) -> None:
    """Draw a line for each way in `losses`, from its second loss on, and show it.

    spent: what one step of each way spends, in the unit that x, the label of the axis, names.
    losses: of each way, those before step 0, step `every`, step 2 · `every` and so on; the first
    way is the one to compare with. log: as of `line_figure`. Raises KeyError for a way whose
    spending is not known.
    """
    series = {
        way: ([spent[way] * every * mark for mark in range(1, len(found))], found[1:])
        for way, found in losses.items()
    }
    ends = {way: (sums[-1], found[-1]) for way, (sums, found) in series.items()}
    first, least = next(iter(ends)), min(ends, key=lambda way: ends[way][0])
    alt = f"Loss against {x}, {every * (len(losses[first]) - 1)} steps each. "
    alt += f"{first} ends at {ends[first][1]:.2f} after {ends[first][0]:.3g}; least is spent by "
    alt += f"{least}, {ends[least][0]:.3g}, and it ends at {ends[least][1]:.2f}."
    fig, alt, table = line_figure(series, x=x, y="loss on held-out text", log=log, alt=alt)
    if "x" in log:  # room for the legend
        fig.axes[0].set_xlim(right=12 * max(end for end, _ in ends.values()))
    show_figure(fig, alt=alt, table=table)
