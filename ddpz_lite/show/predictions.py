"""Commit to a number, then measure: the prediction stands beside the measurement.

kept = predict("How many bytes per parameter does AdamW keep?", default=12, unit="bytes")
...
kept.reveal(measured)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ddpz_lite.show.live import show_live
from ddpz_lite.show.page import in_notebook, prose, written
from ddpz_lite.show.style import need


@dataclass
class Prediction:
    """A number that somebody committed to: `value`. It can change until it is revealed."""

    question: str
    value: float
    unit: str = ""
    measured: float | None = None
    _control: Any = field(default=None, repr=False)

    def commit(self, value: float) -> None:
        """Change the prediction. Raises RuntimeError once the measurement is known."""
        if self.measured is not None:
            raise RuntimeError(
                f"The answer is known ({self.written(self.measured)}): run the question again to "
                "change."
            )
        self.value = _number("a prediction", value)

    def reveal(self, measured: float) -> None:
        """Print prediction, measurement and their ratio. The prediction is fixed from now on."""
        self.measured = _number("a measurement", measured)
        if self._control is not None:
            self._control.disabled = True
        print(f"predicted  {self.written(self.value)}")
        print(f"measured   {self.written(self.measured)}")
        print(self.verdict)

    @property
    def verdict(self) -> str:
        """How far off, in words."""
        if self.measured is None:
            return "Not measured yet."
        if self.value == self.measured:
            return "Exactly right."
        if self.value == 0 or self.measured / self.value <= 0:
            return f"Off by {self.written(self.measured - self.value)}."
        ratio = self.measured / self.value
        close = "Close: " if 0.9 <= ratio <= 1 / 0.9 else ""
        return f"{close}measured / predicted = {ratio:.3g}"

    def written(self, value: float) -> str:
        """A value with its unit."""
        return f"{written(value)} {self.unit}".strip()


def predict(
    question: str,
    default: float,
    unit: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
) -> Prediction:
    """Ask for a number: in a box, or on a slider when `low` and `high` are given.

    Without a kernel or a reader the default is the prediction. Raises ValueError for a default
    outside the slider.
    """
    _number("the default", default)
    if (low is None) != (high is None):
        raise ValueError("predict: a slider needs both low and high; a box needs neither.")
    if low is not None and not low <= default <= high:
        raise ValueError(
            f"predict: the default {default} lies outside the slider, {low} to {high}."
        )
    prediction = Prediction(question, default, unit)
    controls = _view(prediction, low, high, step) if in_notebook() else []
    said = prediction.written(default)
    still = (
        f"<p><b>Predict.</b> {prose(question)}</p><p>Prediction in this stored run: {prose(said)}. "
        f"Run the cell to enter yours.</p>"
    )
    show_live(controls, still=still, text=f"Predict. {question}\nPrediction: {said}")
    return prediction


def _view(
    prediction: Prediction, low: float | None, high: float | None, step: float | None
) -> list[Any]:
    ipywidgets = need("ipywidgets")
    whole = all(isinstance(x, int) for x in (prediction.value, low, high, step) if x is not None)
    options = {
        "value": prediction.value,
        "description": f"Your prediction{', ' * bool(prediction.unit)}{prediction.unit}",
        "style": {"description_width": "initial"},
        "layout": {"width": "100%" if low is not None else "320px"},
    }
    if low is None:
        control = ipywidgets.FloatText(**options)
    elif whole:
        control = ipywidgets.IntSlider(min=low, max=high, step=step or 1, **options)
    else:
        control = ipywidgets.FloatSlider(
            min=low, max=high, step=step or (high - low) / 100, **options
        )
    control.observe(lambda change: prediction.commit(change["new"]), names="value")
    prediction._control = control
    text = f"{prose(prediction.question)} <i>Commit before you run the next cell.</i>"
    return [ipywidgets.HTML(f"<p><b>Predict.</b> {text}</p>"), control]


def _number(what: str, value: float) -> float:
    try:
        finite = math.isfinite(value)
    except TypeError:
        finite = False
    if not finite:
        raise ValueError(f"predict: {what} must be a finite number, got {value!r}.")
    return value
