"""One progress bar for all ranks: each reports its progress, the launcher draws the slowest."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ddpz_lite.launcher import rank as _rank

Item = TypeVar("Item")
EVERY = 0.1  # seconds between two reports of a rank


def progress(
    items: Iterable[Item], total: int | None = None, label: str = "step"
) -> Iterator[Item]:
    """Iterate over `items` and show how far the ranks are: `for i in dz.progress(range(100)): ...`

    Under `dz.launch` the notebook draws one bar, for the slowest rank; any other process draws its
    own. `total` is needed where `items` has no length; without it only the count is shown.
    """
    if total is None:
        total = len(items) if hasattr(items, "__len__") else None
    here = _rank.current
    bar = None if here else Bar(1)
    last = 0.0

    def report(done: int) -> None:
        if here:
            here.control.send("bar", json.dumps([label, done, total]).encode())
        else:
            bar.update(0, label, done, total)

    done = 0
    report(done)
    try:
        for done, item in enumerate(items, 1):
            yield item
            if time.monotonic() - last > EVERY:
                report(done)
                last = time.monotonic()
    finally:
        report(done)
        if bar:
            bar.close()


class Bar:
    """The bar of a job: in a notebook one HTML element, in a terminal tqdm's.

    The HTML ends as a line of text without times, so the stored output is the same in every run.
    """

    def __init__(self, world_size: int):
        self._state: list[tuple[str, int, int | None] | None] = [None] * world_size
        self._display: Any = None
        self._tqdm: Any = None
        self._notebook = "ipykernel" in sys.modules

    def update(self, rank: int, label: str, done: int, total: int | None) -> None:
        self._state[rank] = (label, done, total)
        known = [state for state in self._state if state]
        label, done, total = min(known, key=lambda state: state[1])
        if self._notebook:
            self._draw_html(label, done, total)
        else:
            self._draw_tqdm(label, done, total)

    def forget(self, rank: int) -> None:
        """Ignore a rank that has died."""
        self._state[rank] = None

    def text_of(self, rank: int) -> str:
        """ "step 12 of 200", or "" before the first report of the rank."""
        return _text(*self._state[rank]) if self._state[rank] else ""

    def close(self) -> None:
        if self._tqdm:
            self._tqdm.close()

    def _draw_html(self, label: str, done: int, total: int | None) -> None:
        from html import escape

        from IPython.display import display

        text = _text(label, done, total)
        slowest = "" if len(self._state) == 1 else f" on {len(self._state)} ranks"
        meter = (
            f'<progress value="{done}" max="{total}"></progress> ' if total and done < total else ""
        )
        data = {"text/html": f"{meter}{escape(text + slowest)}", "text/plain": text + slowest}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)

    def _draw_tqdm(self, label: str, done: int, total: int | None) -> None:
        if self._tqdm is None:
            from tqdm import tqdm

            self._tqdm = tqdm(total=total, desc=label, disable=not sys.stderr.isatty())
        self._tqdm.update(done - self._tqdm.n)


def _text(label: str, done: int, total: int | None) -> str:
    return f"{label} {done}" + (f" of {total}" if total is not None else "")
