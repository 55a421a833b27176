"""A figure with sliders: move one, and the figure is drawn again.

    def ring(world):
        fig, axes = figure()
        ...
        return fig, "what it shows", [["world", "bytes"], [world, ...]]

    explore(ring, world=slider("World size", 2, 16, default=4))

The function is pure: values in, figure out. `Explorer` holds the values and draws; the controls
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
class Slider:
    """One control: a label, the values in order, the one it starts with, and their unit.

    step: their distance if they are numbers that a slider can reach, else None. until: takes the
    other sliders' values by name and returns the highest value that there is with them.
    """

    label: str
    values: tuple[Any, ...]
    default: Any
    unit: str = ""
    step: float | None = None
    until: Callable[..., float] | None = None

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ValueError("explore: a slider needs a label; screen readers read it out.")
        if len(self.values) < 2:
            raise ValueError(
                f"explore: {self.label!r} has {len(self.values)} values. Fix: give two or more."
            )
        if self.default not in self.values:
            raise ValueError(
                f"explore: {self.label!r}: the default {self.default!r} is not among {self.values}."
            )

    def written(self, value: Any) -> str:
        """A value with its unit."""
        return f"{written(value)} {self.unit}".strip()

    def nearest(self, value: Any) -> Any:
        """The slider's own value for what a control reports, which rounds fractions as it likes."""
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
) -> Slider:
    """A slider from low to high, both included, in equal steps.

    until: where the other sliders leave fewer, a function of their values, by name: the highest.
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
    return Slider(label, values, default, unit, step, until)


def options(label: str, values: Sequence[Any], *, default: Any, unit: str = "") -> Slider:
    """A slider with values of your own, for example powers of two or names."""
    return Slider(label, tuple(values), default, unit)


class Explorer:
    """The model behind the widget: the sliders' values, and the figure for them as HTML."""

    def __init__(self, draw: Draw, **sliders: Slider) -> None:
        if not sliders:
            raise ValueError("explore: give at least one slider: explore(draw, world=slider(...)).")
        self.draw, self.sliders = draw, sliders
        self.values = {name: slider.default for name, slider in sliders.items()}

    def move(self, name: str, value: Any) -> str:
        """Set a slider and draw again. Raises ValueError for a value that it does not have."""
        if name not in self.sliders or value not in self.sliders[name].values:
            raise ValueError(f"explore: {value!r} is not a value of the slider {name!r}.")
        self.values[name] = value
        for other, slider in self.sliders.items():
            if slider.until:
                self.values[other] = min(self.values[other], self.highest(other))
        return self.picture()

    def highest(self, name: str) -> Any:
        """The highest value of a slider, as the others stand now."""
        slider = self.sliders[name]
        others = {other: value for other, value in self.values.items() if other != name}
        return slider.until(**others) if slider.until else slider.values[-1]

    def picture(self) -> str:
        """The figure for the present values, with alt text and table."""
        fig, alt, table = self.draw(**self.values)
        return figure_html(fig, alt=alt, table=table)

    @property
    def setting(self) -> str:
        """The present values in words."""
        return ", ".join(
            f"{slider.label}: {slider.written(self.values[name])}"
            for name, slider in self.sliders.items()
        )


def explore(draw: Draw, **sliders: Slider) -> None:
    """Show a figure with sliders. Without a kernel: the figure at the default values.

    draw: takes the sliders' values by name, returns (figure, alt text, table), the arguments of
    `show_figure`. It is called once now and again at each move, so it should take a split second.
    """
    explorer = Explorer(draw, **sliders)
    first = explorer.picture()
    note = f"Drawn for {prose(explorer.setting)}. Run the cell to move the sliders."
    controls = _view(explorer, first) if in_notebook() else []
    show_live(
        controls,
        still=f"{first}<p><small>{note}</small></p>",
        text=f"Figure for {explorer.setting}.",
    )


def _view(explorer: Explorer, first: str) -> list[Any]:
    ipywidgets = need("ipywidgets")
    picture = ipywidgets.HTML(first)
    status = ipywidgets.HTML()
    controls: dict[str, Any] = {}
    updating: list[str] = []  # while a slider's end is moved, the learner is not moving it

    def say() -> None:
        status.value = f'<p role="status"><small>Drawn for {prose(explorer.setting)}.</small></p>'

    def control(name: str, slider: Slider) -> Any:
        def moved(change: dict[str, Any]) -> None:
            if updating:
                return
            try:
                picture.value = explorer.move(name, slider.nearest(change["new"]))
            except Exception as error:
                picture.value = f'<p role="alert">The figure failed: {html.escape(repr(error))}</p>'
                raise
            set_ends()
            say()

        made = _control(slider)
        made.observe(moved, names="value")
        return made

    def set_ends() -> None:
        """Set each slider's highest value, which may depend on the other sliders."""
        updating.append("now")
        for name, slider in explorer.sliders.items():
            if slider.until:
                controls[name].max = explorer.highest(name)
                controls[name].value = explorer.values[name]
        updating.clear()

    controls |= {name: control(name, slider) for name, slider in explorer.sliders.items()}
    set_ends()
    say()
    return [*controls.values(), picture, status]


def _control(slider: Slider) -> Any:
    """A slider for steps, a drop-down list for the rest; arrow keys work on both."""
    ipywidgets = need("ipywidgets")
    looks = {"style": {"description_width": "initial"}, "layout": {"width": "100%"}}
    if slider.step is None:
        choices = [(slider.written(value), value) for value in slider.values]
        return ipywidgets.Dropdown(
            options=choices, value=slider.default, description=slider.label, style=looks["style"]
        )
    integers = all(isinstance(value, int) for value in slider.values)
    kind = ipywidgets.IntSlider if integers else ipywidgets.FloatSlider
    return kind(
        value=slider.default,
        min=slider.values[0],
        max=slider.values[-1],
        step=slider.step,
        description=f"{slider.label}, {slider.unit}" if slider.unit else slider.label,
        continuous_update=False,
        **({} if integers else {"readout_format": ".4g"}),
        **looks,
    )
