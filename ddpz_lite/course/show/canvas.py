"""Figures in the house style, and the parts that several of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.show.style import (
    CARD,
    DPI,
    MUTED_COLOR,
    SERIES,
    TEXT_COLOR,
    WIDTH,
    SeriesStyle,
    need,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib in the house style while the context is open; your own settings come back."""
    matplotlib = need("matplotlib")
    text = {
        "text.color": TEXT_COLOR,
        "axes.labelcolor": TEXT_COLOR,
        "xtick.color": TEXT_COLOR,
        "ytick.color": TEXT_COLOR,
        "axes.edgecolor": MUTED_COLOR,
    }
    sizes = {
        "font.size": 10,
        "axes.titlesize": 11,
        "legend.fontsize": 9,
        "figure.titlesize": 12,
        "hatch.linewidth": 0.6,
    }
    card = {
        "figure.facecolor": CARD,
        "axes.facecolor": CARD,
        "savefig.facecolor": CARD,
        "legend.framealpha": 0.9,
    }
    shape = {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same text on every machine
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.axisbelow": True,
        "grid.color": "#DCDCD4",
        "lines.linewidth": 2.0,
        "lines.markersize": 5.0,
        "legend.frameon": False,
        "axes.prop_cycle": matplotlib.cycler(
            color=[series.color for series in SERIES], marker=[series.marker for series in SERIES]
        ),
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
        "svg.hashsalt": "ddpz",
    }
    with matplotlib.rc_context({**text, **sizes, **card, **shape}):
        yield


def figure(
    rows: int = 1, columns: int = 1, *, height: float = 3.0, **options: Any
) -> tuple[Figure, Any]:
    """A figure in the house style and its axes, like `plt.subplots(rows, columns)`.

    height: in inches. The figure is not known to pyplot, so nothing shows it twice and nothing
    needs closing: draw, then `show_figure`.
    """
    need("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with house_style():
        fig = Figure(figsize=(WIDTH, height), layout="constrained")
        fig.get_layout_engine().set(w_pad=0.09, h_pad=0.09)
        FigureCanvasAgg(fig)
        return fig, fig.subplots(rows, columns, **options)


def swatch(look: SeriesStyle) -> Any:
    """A small box in a look, for a legend of what is not drawn by one handle."""
    from matplotlib.patches import Patch

    return Patch(linewidth=0, **look.patch_kwargs)


def stacked_areas(
    axes: Axes,
    places: Sequence[float],
    held: Sequence[Mapping[str, float]],
    kinds: Sequence[str],
    unit: float,
) -> tuple[list[float], list[Any]]:
    """Areas by kind, one on the other, each as high as `held` says until the next place.

    Returns the height of them all at each place, in `unit`, and a handle for each kind.
    """
    below, handles = [0.0] * len(places), []
    for kind in kinds:
        above = [low + one[kind] / unit for low, one in zip(below, held, strict=True)]
        fill = style_of(kind, kinds).patch_kwargs
        handles.append(axes.fill_between(places, below, above, step="post", linewidth=0, **fill))
        below = above
    return below, handles


def legend_above(
    axes: Axes, handles: Sequence[Any], labels: Sequence[str], columns: int = 5
) -> None:
    """A legend in rows above the axes, where it covers no data; the title stays above it."""
    columns = min(len(labels), columns)
    lines = -(-len(labels) // columns)
    # matplotlib fills column by column, and a reader reads row by row
    order = [i for column in range(columns) for i in range(column, len(labels), columns)]
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.6,
    )
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=8 + 16 * lines)


def stacked_bars(
    axes: Axes,
    labels: Sequence[str],
    values: Sequence[dict[str, float]],
    parts: Sequence[str],
    unit: tuple[float, str],
    ends: Sequence[str] | None = None,
) -> None:
    """Horizontal bars, one per label from the top, stacked by part, each with its total.

    unit: divisor and name, as `bytes_unit` gives them. ends: what stands at the ends of the bars
    instead of the totals.
    """
    divisor, unit_name = unit
    left = [0.0] * len(labels)
    handles = []
    for part in parts:
        fill = style_of(part, parts).patch_kwargs
        width = [value.get(part, 0) / divisor for value in values]
        bars = axes.barh(range(len(labels)), width, left=left, height=0.66, linewidth=0.5, **fill)
        handles.append(bars)
        left = [a + b for a, b in zip(left, width, strict=True)]
    behind = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    for place, total in enumerate(left):
        text = ends[place] if ends else f"{total:.4g} {unit_name}"
        axes.annotate(text, (total, place), **behind)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, (max(left) or 1.0) * 1.17)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    legend_above(axes, handles, list(parts))
