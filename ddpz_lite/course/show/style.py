"""The house style: colours, hatches, sizes and units, set here once and used by every figure.

Colours are those of Okabe and Ito (2008), chosen to stay apart under the common colour blindnesses;
each comes with a hatch, so that a figure also reads in grey. A figure brings its own light card as
background: text that is dark on light stays readable on a page of either theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CARD = "#fcfcfa"  # background of a figure
TEXT_COLOR = "#1f2328"  # text and axes on it
MUTED_COLOR = "#57606a"  # secondary text, 6:1 on the card
WIDTH = 7.2  # inches
DPI = 140


@dataclass(frozen=True)
class SeriesStyle:
    """How one series is drawn in every figure: fill colour, hatch, and marker for lines."""

    color: str
    hatch: str
    marker: str

    @property
    def edge(self) -> str:
        """Colour of the hatch: dark on a light fill, light on a dark one."""
        red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
        return "#1f232880" if 0.3 * red + 0.59 * green + 0.11 * blue > 150 else "#ffffffb0"

    @property
    def text_color(self) -> str:
        """Colour of text on it."""
        return TEXT_COLOR if self.edge.startswith(TEXT_COLOR) else "white"

    @property
    def patch_kwargs(self) -> dict[str, str]:
        """Keyword arguments for a filled bar, area or patch."""
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": self.edge}


SERIES = (
    SeriesStyle("#0072B2", "", "o"),  # blue
    SeriesStyle("#E69F00", "///", "s"),  # orange
    SeriesStyle("#009E73", "...", "^"),  # bluish green
    SeriesStyle("#CC79A7", "xxx", "D"),  # reddish purple
    SeriesStyle("#56B4E9", "\\\\\\", "v"),  # sky blue
    SeriesStyle("#D55E00", "--", "P"),  # vermilion
    SeriesStyle("#F0E442", "---", "X"),  # yellow
    SeriesStyle("#9A9A9A", "oo", "*"),  # grey
)
IDLE = SeriesStyle("#D9D9D0", "", "")

_KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "transient",
    "activations",
    "temporary",
)
_KIND_ORDER = (0, 1, 2, 7, 6, 4, 3)
_NAMED = {kind: SERIES[i] for kind, i in zip(_KINDS, _KIND_ORDER, strict=True)}
_NAMED |= {"forward": SERIES[4], "backward": SERIES[0], "step": SERIES[2], "idle": IDLE}
_NAMED |= {
    "all_reduce": SERIES[5],
    "reduce_scatter": SERIES[1],
    "all_gather": SERIES[3],
    "broadcast": SERIES[6],
}
_NAMED |= {"all_to_all": SERIES[7], "barrier": SeriesStyle("#6E6E6E", "", "*")}
_NAMED |= {"send": SERIES[1], "recv": SERIES[3]}


def style_of(name: str, among: Sequence[str] = ()) -> SeriesStyle:
    """The style of a kind, span or collective; for another name one that none of `among` has."""
    if name in _NAMED:
        return _NAMED[name]
    strangers = [other for other in dict.fromkeys(among) if other not in _NAMED]
    taken = {_NAMED[other] for other in among if other in _NAMED}
    free = [series for series in SERIES if series not in taken] or list(SERIES)
    place = strangers.index(name) if name in strangers else 0
    return free[place % len(free)]


def need(module: str) -> Any:
    """Import a module that only notebooks need; its absence is one line with the fix."""
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"ddpz_lite.course.show draws with {module.split('.')[0]}, which is not installed. "
            f'Install what notebooks need: in the folder of the course, pip install ".[lab]"'
        ) from error


def bytes_unit(largest: float) -> tuple[float, str]:
    """Divisor and name of the decimal unit that suits the largest: 1e6 and "MB" for 3,500,000."""
    for divisor, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= divisor:
            return divisor, name
    return 1.0, "bytes"


def seconds_unit(largest: float) -> tuple[float, str]:
    """Divisor and name of the unit that suits the largest duration: 1e-3 and "ms" for 0.2."""
    for divisor, name in ((1.0, "s"), (1e-3, "ms")):
        if largest >= divisor:
            return divisor, name
    return 1e-6, "µs"


def in_bytes(value: float) -> str:
    """A number of bytes to read: "3.5 MB"."""
    divisor, name = bytes_unit(abs(value))
    return f"{value / divisor:.4g} {name}"


def in_seconds(value: float) -> str:
    """A duration to read: "12.3 ms"."""
    divisor, name = seconds_unit(abs(value))
    return f"{value / divisor:.3g} {name}"
