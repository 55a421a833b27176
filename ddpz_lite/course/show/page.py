"""The only way out for figures: a picture with alt text, and the table of its numbers.

The table is one click away. The picture is PNG inside HTML, since JupyterLab and nbconvert drop the
alt text of a bare image. The same figure gives the same bytes: no dates, no version
strings.
"""

from __future__ import annotations

import base64
import html
import io
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpz_lite.course.show.canvas import house_style
from ddpz_lite.course.show.style import CARD, DPI, need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Sequence[Sequence[Any]]  # rows of cells; the first row is the header


def show_figure(fig: Figure, *, alt: str, table: Table) -> None:
    """Show a figure, and close it.

    alt: what the picture says, in a sentence or two, for those who cannot see it. It is also the
    text where no picture can be. table: the numbers behind the picture, a header row and then rows
    of the same length.
    Raises ValueError for an alt text or a table without content.
    """
    emit(figure_html(fig, alt=alt, table=table), alt)


def figure_html(fig: Figure, *, alt: str, table: Table) -> str:
    """The HTML that `show_figure` shows."""
    if not alt.strip():
        raise ValueError("show_figure: alt is empty. Say in a sentence what the picture shows.")
    numbers = table_html(table)
    picture = base64.b64encode(png(fig)).decode()
    style = "width:100%;max-width:720px;height:auto;border:1px solid #d0d0c8;border-radius:6px"
    return (
        f'<figure style="margin:0.5em 0;max-width:720px">'
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{picture}" style="{style}">'
        f"<details><summary>The numbers behind this figure</summary>{numbers}</details></figure>"
    )


def png(fig: Figure) -> bytes:
    """The figure as PNG of at most 256 colours, which is a third of the size; closes the figure."""
    image = need("PIL.Image")
    raw = io.BytesIO()
    with house_style():
        fig.savefig(raw, format="png", dpi=DPI, facecolor=CARD, metadata={"Software": None})
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)
    raw.seek(0)
    out = io.BytesIO()
    colours = image.open(raw).convert("RGB").quantize(256, dither=image.Dither.NONE)
    colours.save(out, format="png", optimize=True)
    return out.getvalue()


def table_html(table: Table) -> str:
    """A table as HTML: numbers to the right, with separators; text escaped."""
    rows = [list(row) for row in table]
    if len(rows) < 2 or not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(
            "show_figure: table needs a header row and at least one row of the same length, "
            f"got rows of lengths {[len(row) for row in rows]}."
        )
    head = "".join(
        f'<th scope="col" style="text-align:left">{prose(str(cell))}</th>' for cell in rows[0]
    )
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f'<td style="text-align:{"right" if number else "left"}">{prose(written(value))}</td>'


def written(value: Any) -> str:
    """A table cell or a result as text: 1234567 as "1,234,567", floats to four digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return (
        f"{value:,.4g}"
        if 1e-4 <= abs(value) < 1e4
        else f"{value:,.0f}"
        if 1e4 <= abs(value) < 1e15
        else f"{value:.3e}"
    )


def prose(text: str) -> str:
    """Plain text as HTML: escaped, with `code` between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def emit(page: str, text: str, **more: Any) -> None:
    """Show HTML in a notebook; print the text where there is none. more: further mime types."""
    if not in_notebook():
        print(text)
        return
    from IPython.display import display

    display({"text/html": page, "text/plain": text, **more}, raw=True)


def in_notebook() -> bool:
    """Whether an IPython shell runs this code and can show HTML."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def hint(text: str, title: str = "Hint") -> None:
    """A hint that stays closed until it is asked for."""
    emit(
        f"<details><summary>{prose(title)}</summary><p>{prose(text)}</p></details>",
        f"{title}: {text}",
    )
