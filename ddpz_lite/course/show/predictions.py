"""Commit to a number, then measure: the prediction stands next to the measurement.

    sent = predict("How many bytes does each rank send?", default=4000, unit="bytes")
    ...
    sent.reveal(measured)

The box starts empty. If no number was entered when `reveal` is called, the measuring cell asks for
one. In a stored run or a test there is no one to ask: the default is the prediction, and the output
says so.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ddpz_lite.course import interactive
from ddpz_lite.course.show.live import show_live
from ddpz_lite.course.show.page import in_notebook, prose, written
from ddpz_lite.course.show.style import need

NUMBER = re.compile(r"[+-]?(\d[\d,_ ]*)?\.?\d+(e[+-]?\d+)?|[+-]?\d[\d,_ ]*\.?(e[+-]?\d+)?", re.I)


@dataclass
class Prediction:
    """A number that the learner commits to. It can change until it is revealed.

    within: how far off, as a share of the measurement, the derivation leaves open: 0.1 is 10%.
    None for a count, which is right or wrong.
    index: the number names something, such as a rank, so how far off it is means nothing.
    """

    question: str
    default: float
    unit: str = ""
    within: float | None = None
    low: float = -math.inf
    high: float = math.inf
    committed: float | None = None
    measured: float | None = None
    word: str = "measured"  # or "calculated", for a formula's value
    index: bool = False
    _control: Any = field(default=None, repr=False)

    @property
    def value(self) -> float:
        """The committed number; the default as long as there is none."""
        return self.default if self.committed is None else self.committed

    def commit(self, value: float | str) -> None:
        """Fix the prediction: a number, or text that is one ("1,200" or "1.2e3").

        Raises ValueError for a value that is not a number or is out of range, RuntimeError once the
        measurement is known.
        """
        if self.measured is not None:
            raise RuntimeError(
                f"The answer is known ({self.written(self.measured)}): run the question again to "
                "change."
            )
        number = _read(value) if isinstance(value, str) else _number("a prediction", value)
        if not self.low <= number <= self.high:
            raise ValueError(
                f"{written(number)} is out of range: it lies between {written(self.low)} and "
                f"{written(self.high)}."
            )
        self.committed = number

    def reveal(self, measured: float) -> None:
        """Print prediction, measurement and verdict; ask for the prediction first if there is none.

        The prediction is fixed from now on.
        """
        measured = _number("a measurement", measured)
        if self.committed is None and interactive.notebook():
            self._ask()
        self.measured = measured
        if self._control is not None:
            self._control.disabled = True
        by_default = "" if self.committed is not None else "  (the default: no prediction entered)"
        print(f"predicted  {self.written(self.value)}{by_default}")
        print(f"{self.word:10} {self.written(self.measured)}")
        print(self.verdict)

    @property
    def verdict(self) -> str:
        """Right, close or outside the tolerance, and how far off."""
        if self.measured is None:
            return "Not measured yet."
        guess, measured = self.value, self.measured
        if guess == measured:
            return "Exactly right."
        if self.index:
            return "Not right."
        if guess == 0 or measured / guess <= 0:
            off = f"off by {self.written(measured - guess)}"
        else:
            off = f"{self.word} / predicted = {measured / guess:.3g}"
        if self.within is None:
            return f"{'Not right: ' if float(measured).is_integer() else ''}{off}"
        close = abs(guess - measured) <= self.within * abs(measured)
        word = "Close: within" if close else "Outside tolerance: more than"
        return f"{word} {100 * self.within:.3g}%{'' if close else ' away'}, {off}"

    def written(self, value: float) -> str:
        """A value with its unit."""
        return f"{written(value)} {self.unit}".strip()

    def _ask(self) -> None:
        """Ask until there is a number. An empty line takes the default, so Run All continues."""
        print(f"Commit to a number first. {self.question.replace('`', '')}")
        unit = f", {self.unit}" if self.unit else ""
        while self.committed is None:
            text = input(f"Your prediction{unit} (Enter takes {self.written(self.default)}): ")
            if not text.strip():
                return
            try:
                self.commit(text)
            except ValueError as error:
                print(error)


def predict(
    question: str,
    default: float,
    unit: str = "",
    *,
    within: float | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    word: str = "measured",
    index: bool = False,
) -> Prediction:
    """Ask for a number in a box that starts empty; returns the Prediction.

    default: the prediction without an interactive kernel. within: the share of the measurement that
    still counts as close, where the derivation leaves something open; a count is right or wrong.
    low, high: what is possible at all. word: how the answer was found. index: the number names
    something, such as a rank or a call. Raises ValueError for a default out of range.
    """
    if not low <= _number("the default", default) <= high:
        raise ValueError(f"predict: the default {default} lies outside {low} to {high}.")
    if within is not None and not 0 < within < 1:
        raise ValueError(f"predict: within is a share between 0 and 1, such as 0.1, not {within}.")
    prediction = Prediction(question, default, unit, within, low, high, word=word, index=index)
    controls = _view(prediction) if in_notebook() else []
    shown = prediction.written(default)
    still = (
        f"<p><b>Predict.</b> {prose(_asked(prediction))}</p><p>Run the cell to enter your number. "
        f"(This stored run uses the default, {prose(shown)}.)</p>"
    )
    show_live(controls, still=still, text=f"Predict. {question}\nDefault: {shown}")
    return prediction


def _view(prediction: Prediction) -> list[Any]:
    ipywidgets = need("ipywidgets")
    shown = ipywidgets.HTML()
    box = ipywidgets.Text(
        placeholder="a number",
        description=f"Your prediction{', ' * bool(prediction.unit)}{prediction.unit}",
        continuous_update=False,  # committed by Enter, or by leaving the box
        style={"description_width": "initial"},
        layout={"width": "360px"},
    )

    def committed(change: dict[str, Any]) -> None:
        try:
            prediction.commit(change["new"])
        except ValueError as error:
            prediction.committed = None
            shown.value = f'<p role="alert">{prose(str(error))}</p>'
        else:
            text = prose(prediction.written(prediction.value))
            shown.value = f'<p role="status">Committed: {text}. Now run the next cell.</p>'

    box.observe(committed, names="value")
    prediction._control = box
    text = f"{prose(_asked(prediction))} <i>Type a number and press Enter.</i>"
    return [ipywidgets.HTML(f"<p><b>Predict.</b> {text}</p>"), box, shown]


def _asked(prediction: Prediction) -> str:
    """The question, and how close is close."""
    if prediction.within is None:
        return prediction.question
    return f"{prediction.question} ({100 * prediction.within:.3g}% off is close.)"


def _read(text: str) -> float:
    text = text.strip()
    if not NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number. Write it in digits, such as 1,200 or 1.2e3.")
    bare = re.sub(r"[,_ ]", "", text)
    value = int(bare) if re.fullmatch(r"[+-]?\d+", bare) else float(bare)
    return _number("a prediction", value)


def _number(what: str, value: float) -> float:
    try:
        finite = math.isfinite(value)
    except TypeError:
        finite = False
    if not finite:
        raise ValueError(f"predict: {what} must be a finite number, got {value!r}.")
    return value
