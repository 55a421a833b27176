"""Steps to bring into an order: the model, and buttons that move a step up or down.

Without a kernel the steps are shown with their letters, to be typed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpz_lite.course.show.live import show_live
from ddpz_lite.course.show.page import in_notebook, prose
from ddpz_lite.course.show.style import need


class Ordering:
    """Lettered steps and the order that they have now. Raises ValueError for fewer than two."""

    def __init__(self, steps: Mapping[str, str]) -> None:
        if len(steps) < 2:
            raise ValueError(f"ordering: {len(steps)} steps; give two or more, letter to text.")
        self.steps = dict(steps)
        self.order = list(steps)

    def move(self, letter: str, by: int) -> None:
        """Move a step up (negative) or down; at the ends it stays. Raises ValueError if unknown."""
        if letter not in self.steps:
            raise ValueError(f"ordering: there is no step {letter!r}; there are {self.order}.")
        place = self.order.index(letter)
        self.order.remove(letter)
        self.order.insert(min(max(place + by, 0), len(self.order)), letter)

    @property
    def code(self) -> str:
        """The order as a list in Python, to be written into an answer."""
        return "[" + ", ".join(f'"{letter}"' for letter in self.order) + "]"


def ordering(steps: Mapping[str, str]) -> None:
    """Show steps to order. steps: letter to text, in the order in which they are shown at first."""
    state = Ordering(steps)
    lines = [f"{letter}  {text}" for letter, text in state.steps.items()]
    items = "".join(f"<li><b>{prose(k)}</b> {prose(v)}</li>" for k, v in state.steps.items())
    controls = _view(state) if in_notebook() else []
    show_live(controls, still=f"<ul>{items}</ul>", text="\n".join(lines))


def _view(state: Ordering) -> list[Any]:
    """One row per place: two buttons and the step that stands there. Moving redraws all rows."""
    ipywidgets = need("ipywidgets")
    status = ipywidgets.HTML()
    rows: list[tuple[Any, Any, Any]] = []

    def draw() -> None:
        for (up, down, text), letter in zip(rows, state.order, strict=True):
            up.tooltip = f"Move {letter} up: {state.steps[letter]}"
            down.tooltip = f"Move {letter} down: {state.steps[letter]}"
            text.value = f"<b>{prose(letter)}</b> {prose(state.steps[letter])}"
        status.value = f'<p role="status">Your order: <code>{state.code}</code></p>'

    def mover(place: int, by: int) -> Any:
        def moved(_: Any) -> None:
            state.move(state.order[place], by)
            draw()

        return moved

    for place in range(len(state.order)):
        size = ipywidgets.Layout(width="3em")
        up = ipywidgets.Button(description="↑", layout=size)
        down = ipywidgets.Button(description="↓", layout=size)
        up.on_click(mover(place, -1))
        down.on_click(mover(place, 1))
        rows.append((up, down, ipywidgets.HTML()))
    draw()
    return [*(ipywidgets.HBox(row) for row in rows), status]
