"""A widget where a kernel runs, a still form of it everywhere else.

A stored notebook is read in places without a kernel: on a code host, as exported HTML, in
JupyterLab before the first run. A widget's output is blank or an error text there. So each widget
leaves two outputs: first the still form, plain HTML, then the widget. One style rule shows the
right one:

    the widget is alive   it carries a style that hides its own still form, found by id;
    it is not             the still form carries a style that hides JupyterLab's error text.

[Note: id] It is a hash of the still form's text, so that running a notebook twice stores the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ddpz_lite.course.show.page import emit, in_notebook
from ddpz_lite.course.show.style import need

if TYPE_CHECKING:
    from ipywidgets import Widget

VIEW = "application/vnd.jupyter.widget-view+json"
_HIDE_THE_DEAD = (
    "<style>.jp-OutputArea-child:has(.dz-still)"
    " + .jp-OutputArea-child:has(.jupyter-widgets):not(:has(.dz-live)){display:none}</style>"
)
_LOOKS = (
    ".dz-live>.jupyter-widgets{max-width:calc(100% - 4px)}"  # the 4 are margins: no scroll bar
    ".dz-live .widget-html-content{line-height:1.5}"
    ".dz-live p{margin:0.4em 0}"
    ".dz-live a{color:var(--jp-content-link-color,#0067c0);text-decoration:underline}"
    ".dz-live .dz-choice{width:auto;height:auto;white-space:normal;text-align:left;"
    "line-height:1.4;padding:6px 10px}"
    ".dz-live :focus-visible{outline:2px solid #0072B2;outline-offset:2px}"
)
# ipywidgets draws a slider without a name that a screen reader could say (the label next to it is
# not tied to it). A <style> element runs this when it arrives: it names each handle, and the number
# beside it that one can type, by its label.
# It also keeps JupyterLab from taking the arrow keys of a drop-down list to move between cells.
_NAME_THE_SLIDERS = (
    "const box=this.closest('.dz-live');const name=()=>{box.querySelectorAll('.widget-slider')"
    ".forEach(s=>{const label=s.querySelector('label').textContent;"
    "s.querySelector('.noUi-handle')?.setAttribute('aria-label',label);"
    "const typed=s.querySelector('.widget-readout');typed?.setAttribute('role','textbox');"
    "typed?.setAttribute('aria-label',label+' (number)')});"
    "box.querySelectorAll('select').forEach(s=>s.dataset.lmSuppressShortcuts='true')};name();"
    "new MutationObserver(name).observe(box,{childList:true,subtree:true})"
)


def show_live(controls: list[Widget], *, still: str, text: str) -> None:
    """Show widgets, one below the other.

    still: HTML that stands in for them where no kernel runs. text: the same where no HTML is shown.
    """
    if not in_notebook():
        emit(still, text)
        return
    ipywidgets = need("ipywidgets")
    name = "dz-" + hashlib.sha256(still.encode()).hexdigest()[:12]
    hide = f"#{name},.jp-OutputArea-child:has(#{name}){{display:none}}"
    style = ipywidgets.HTML(f'<style onload="{_NAME_THE_SLIDERS}">{hide}{_LOOKS}</style>')
    style.layout.display = "none"
    box = ipywidgets.VBox([*controls, style], layout={"max_width": "720px"})
    box.add_class("dz-live")
    emit(f'<div class="dz-still" id="{name}">{_HIDE_THE_DEAD}{still}</div>', text)
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    emit(
        "<!-- The still form of this widget is the output above. -->",
        "(interactive when run)",
        **{VIEW: view},
    )
