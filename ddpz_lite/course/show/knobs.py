"""A figure with knobs: turn one, and the figure is drawn again.

    def ring(world):
        fig, axes = figure()
        ...
        return fig, "what it shows", [["world", "bytes"], [world, ...]]

    explore(ring, world=slider("World size", 2, 16, default=4))

The function is pure: knobs in, figure out. `Explorer` holds the values and draws; the controls
around it are ipywidgets.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.show.live import show_live
from ddpz_lite.course.show.page import Table, figure_html, in_notebook, prose, written
from ddpz_lite.course.show.style import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[..., "tuple[Figure, str, Table]"]


@dataclass(frozen=True)
class Knob:
    """What can be turned: a label, the values in order, the one it starts with, and their unit.

    step: their distance if they are numbers that a slider can reach, else None. until: takes the
    other knobs' values by name and returns the highest value that there is with them.
    """

    label: str
    values: tuple[Any, ...]
    default: Any
    unit: str = ""
    step: float | None = None
    until: Callable[..., float] | None = None

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ValueError("explore: a knob needs a label; screen readers read it out.")
        if len(self.values) < 2:
            raise ValueError(
                f"explore: {self.label!r} has {len(self.values)} values; a knob needs two or more."
            )
        if self.default not in self.values:
            raise ValueError(
                f"explore: {self.label!r}: the default {self.default!r} is not among {self.values}."
            )

    def written(self, value: Any) -> str:
        """A value with its unit."""
        return f"{written(value)} {self.unit}".strip()

    def nearest(self, value: Any) -> Any:
        """The knob's own value for what a control reports, which rounds fractions as it likes."""
        return min(self.values, key=lambda own: abs(own - value)) if self.step else value


def slider(
    label: str,
    low: float,
    high: float,
    *,
    default: float,
    step: float = 1,
    unit: str = "",
    until: Callable[..., float] | None = None,
) -> Knob:
    """A knob from low to high, both included, in equal steps.

    until: where the other knobs leave fewer, a function of their values, by name: the highest.
    """
    if step <= 0 or high <= low:
        raise ValueError(
            f"explore: {label!r} needs step > 0 and high > low, got step {step}, {low} to {high}."
        )
    count = int((high - low) / step + 1e-9)
    digits = 12  # enough to hide 0.1 + 0.2
    values = tuple(
        low + i * step if isinstance(step, int) else round(low + i * step, digits)
        for i in range(count + 1)
    )
    return Knob(label, values, default, unit, step, until)


def options(label: str, values: Sequence[Any], *, default: Any, unit: str = "") -> Knob:
    """A knob with values of your own, for example powers of two or names."""
    return Knob(label, tuple(values), default, unit)


class Explorer:
    """The model behind the widget: the knobs' values, and the figure for them as HTML."""

    def __init__(self, draw: Draw, **knobs: Knob) -> None:
        if not knobs:
            raise ValueError("explore: give at least one knob: explore(draw, world=slider(...)).")
        self.draw, self.knobs = draw, knobs
        self.values = {name: knob.default for name, knob in knobs.items()}

    def turn(self, name: str, value: Any) -> str:
        """Set a knob and draw again. Raises ValueError for a value that the knob does not have."""
        if name not in self.knobs or value not in self.knobs[name].values:
            raise ValueError(f"explore: {value!r} is not a value of the knob {name!r}.")
        self.values[name] = value
        for other, knob in self.knobs.items():
            if knob.until:
                self.values[other] = min(self.values[other], self.highest(other))
        return self.picture()

    def highest(self, name: str) -> Any:
        """The highest value of a knob, as the others stand now."""
        knob = self.knobs[name]
        others = {other: value for other, value in self.values.items() if other != name}
        return knob.until(**others) if knob.until else knob.values[-1]

    def picture(self) -> str:
        """The figure for the present values, with alt text and table."""
        fig, alt, table = self.draw(**self.values)
        return figure_html(fig, alt=alt, table=table)

    @property
    def setting(self) -> str:
        """The present values in words."""
        return ", ".join(
            f"{knob.label}: {knob.written(self.values[name])}" for name, knob in self.knobs.items()
        )


def explore(draw: Draw, **knobs: Knob) -> None:
    """Show a figure with knobs. Without a kernel: the figure at the default values.

    draw: takes the knobs' values by name, returns (figure, alt text, table), the arguments of
    `show_figure`. It is called once now and again at each turn, so it should take a split second.
    """
    explorer = Explorer(draw, **knobs)
    first = explorer.picture()
    note = f"Drawn for {prose(explorer.setting)}. Run the cell to turn the knobs."
    controls = _view(explorer, first) if in_notebook() else []
    show_live(
        controls,
        still=f"{first}<p><small>{note}</small></p>",
        text=f"Figure for {explorer.setting}.",
    )


def _view(explorer: Explorer, first: str) -> list[Any]:
    ipywidgets = need("ipywidgets")
    picture = ipywidgets.HTML(first)
    said = ipywidgets.HTML()
    controls: dict[str, Any] = {}
    settling: list[str] = []  # while a slider's end is moved, it is not being turned

    def say() -> None:
        said.value = f'<p role="status"><small>Drawn for {prose(explorer.setting)}.</small></p>'

    def control(name: str, knob: Knob) -> Any:
        def turned(change: dict[str, Any]) -> None:
            if settling:
                return
            try:
                picture.value = explorer.turn(name, knob.nearest(change["new"]))
            except Exception as error:
                picture.value = f'<p role="alert">The figure failed: {html.escape(repr(error))}</p>'
                raise
            settle()
            say()

        made = _control(knob)
        made.observe(turned, names="value")
        return made

    def settle() -> None:
        """Let each slider end where the other knobs say."""
        settling.append("now")
        for name, knob in explorer.knobs.items():
            if knob.until:
                controls[name].max = explorer.highest(name)
                controls[name].value = explorer.values[name]
        settling.clear()

    controls |= {name: control(name, knob) for name, knob in explorer.knobs.items()}
    settle()
    say()
    return [*controls.values(), picture, said]


def _control(knob: Knob) -> Any:
    """A slider for steps, a drop-down list for the rest; arrow keys work on both."""
    ipywidgets = need("ipywidgets")
    looks = {"style": {"description_width": "initial"}, "layout": {"width": "100%"}}
    if knob.step is None:
        choices = [(knob.written(value), value) for value in knob.values]
        return ipywidgets.Dropdown(
            options=choices, value=knob.default, description=knob.label, style=looks["style"]
        )
    whole = all(isinstance(value, int) for value in knob.values)
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    return kind(
        value=knob.default,
        min=knob.values[0],
        max=knob.values[-1],
        step=knob.step,
        description=f"{knob.label}, {knob.unit}" if knob.unit else knob.label,
        continuous_update=False,
        **({} if whole else {"readout_format": ".4g"}),
        **looks,
    )
