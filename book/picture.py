"""The picture on the README: three runs of the library, drawn from what they really did.

    python book/picture.py          writes book/at-work-light.svg and book/at-work-dark.svg

A step whose all-reduces hide behind backward, a rank that takes another branch, and a wrong answer
to a task. Bars, bytes and sentences are those of the runs; the drawing moves by CSS alone, so it
plays wherever a page shows an image, and stands still for a reader who asks for less motion.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import textwrap
import time
from collections.abc import Callable
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.course.check.cell import CheckFailed

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT, LOOP = 900, 416, 24.0  # pixels, pixels, seconds
BEGIN = 7.2  # second of the loop at which it begins, so that the first frame is a full one
SCENES = ((0.0, 9.0), (9.0, 16.5), (16.5, 24.0))  # seconds of the loop
LANE, LEFT, RIGHT, TOP = 40, 562, 876, 96  # where the timeline stands
THEMES = {
    "light": {
        "card": "#fcfcfa", "ink": "#1f2328", "quiet": "#57606a", "cell": "#f1f1ec",
        "backward": "#0072B2", "all_reduce": "#E69F00", "bad": "#b3400a", "good": "#00724f",
    },
    "dark": {
        "card": "#16191d", "ink": "#e6e6e0", "quiet": "#a4acb5", "cell": "#22262c",
        "backward": "#56B4E9", "all_reduce": "#E69F00", "bad": "#ff9a62", "good": "#4fd3a5",
    },
}  # fmt: skip


def step():
    gradients = torch.ones(4, 250_000)  # 4 layers of 1 MB
    sums = []
    for layer in gradients.flip(0):
        with dz.span("backward"):
            time.sleep(0.05)
        sums.append(dist.all_reduce(layer, async_op=True))
    for work in sums:
        work.wait()


def loss_of_this_rank():
    loss = torch.rand(1)
    if dist.get_rank() != 2:
        dist.all_reduce(loss)
    return loss.item()


def weighted_mean(gradients, samples):
    for g in gradients:
        dist.all_reduce(g)
        g /= dist.get_world_size()


# -- the three runs --------------------------------------------------------------------------------


def hang() -> str:
    """What the report of a job says in which one rank does not call what the others call."""
    try:
        dz.launch(loss_of_this_rank, world_size=4, timeout=10)
    except dz.RankFailed as error:
        return str(error)
    raise AssertionError("the job should have failed")


def verdict() -> str:
    """What the check says of an answer that weighs all ranks alike."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(CheckFailed):
        dz.check("03.weighted_mean", weighted_mean)
    return said.getvalue()


def timeline() -> tuple[list[tuple[str, int, float, float]], int]:
    """(kind, rank, start, end in seconds) of each bar, and the bytes that a rank sent."""
    run = dz.launch(step, world_size=4, network=dz.Network(latency=1e-3, bandwidth=40e6))
    bars = [("backward", s.rank, s.started, s.finished) for s in run.spans]
    bars += [(r.op, r.rank, r.started, r.finished) for r in run.ledger]
    begun = min(start for _, _, start, _ in bars)
    bars = [(kind, rank, start - begun, end - begun) for kind, rank, start, end in bars]
    return bars, run.bytes_sent()[0]["all_reduce"]


# -- the drawing -----------------------------------------------------------------------------------


class Drawing:
    """Elements and the CSS that lets each appear at its second of the loop."""

    def __init__(self, colors: dict[str, str]) -> None:
        self.colors, self.body, self.css, self.count = colors, [], [], 0

    def appear(self, scene: int, after: float, during: float = 0.0) -> str:
        """A class for what appears so many seconds into a scene; during: it grows so long."""
        self.count += 1
        name, start, end = f"a{self.count}", SCENES[scene][0] + after, SCENES[scene][1] - 0.3
        at = [100 * t / LOOP for t in (start, start + max(during, 0.15), end, end + 0.3)]
        hidden = "transform:scaleX(0)" if during else "opacity:0"
        shown = "transform:scaleX(1);opacity:1" if during else "opacity:1"
        gone = f"{shown.replace('opacity:1', 'opacity:0')}"
        first = f"0%,{at[0]:.2f}%{{{hidden}}}"
        frames = f"{first}{at[1]:.2f}%,{at[2]:.2f}%{{{shown}}}{at[3]:.2f}%,100%{{{gone}}}"
        self.css.append(f"@keyframes {name}{{{frames}}}.{name}{{animation-name:{name}}}")
        return f"m {name} s{scene}" + (" bar" if during else "")

    def text(self, x: float, y: float, words: str, css: str, color: str = "ink") -> None:
        fill = self.colors[color]
        self.body.append(
            f'<text x="{x}" y="{y}" class="{css}" fill="{fill}">{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, w: float, h: float, css: str, color: str) -> None:
        shape = f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{h}" rx="3" class="{css}"'
        edge = f'stroke="{self.colors["card"]}"'
        self.body.append(f'{shape} fill="{self.colors[color]}" {edge}/>')

    def cell(self, scene: int, source: str, call: str, width: int) -> int:
        """The cell of a notebook; the y below it."""
        lines = [*textwrap.dedent(source).rstrip().splitlines(), "", call]
        height = 20 * len(lines) + 20
        self.rect(24, 58, width, height, self.appear(scene, 0.2), "cell")
        for number, line in enumerate(lines):
            if line:
                self.text(38, 84 + 20 * number, line, self.appear(scene, 0.2))
        return 58 + height

    def words(self, scene: int, top: float, text: str, after: float, pace: float) -> None:
        """The lines of a report, one after another."""
        for number, line in enumerate(text.splitlines()):
            color = next((c for mark, c in MARKS.items() if mark in line), "ink")
            seen = self.appear(scene, after + pace * number)
            self.text(30, top + 20 * number, line, seen, color)

    def svg(self, alt: str) -> str:
        still = ".m{animation:none}.s1,.s2{opacity:0}"
        css = (
            "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}"
            ".t{font:600 17px system-ui,sans-serif}.q{font:13px system-ui,sans-serif}"
            f".m{{animation:{LOOP}s linear -{BEGIN}s infinite both}}"
            ".bar{transform-box:fill-box;transform-origin:left}"
            f"{''.join(self.css)}@media (prefers-reduced-motion:reduce){{{still}}}"
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        card = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{self.colors["card"]}"/>'
        parts = (f'{head} aria-label="{escape(alt)}">', f"<style>{css}</style>", card, *self.body)
        return "\n".join((*parts, "</svg>")) + "\n"


MARKS = {"FAIL": "bad", "  rank 2": "bad", "  rank": "quiet", "pass": "good"}
ALT = (
    "Three runs. Four ranks compute backward while their all-reduces run behind it, on a timeline. "
    "A rank that takes another branch is named with its line. A wrong answer to a task is told "
    "which property it misses."
)


def draw(colors: dict[str, str], bars: list, sent: int, report: str, said: str) -> str:
    drawing = Drawing(colors)
    title(drawing, 0, "four real processes, from one cell")
    call = "run = dz.launch(step, world_size=4, network=slow)"
    drawing.cell(0, source(step), call, 516)
    timeline_of(drawing, bars, sent)
    title(drawing, 1, "a hang becomes a sentence, with the line")
    call = "dz.launch(loss_of_this_rank, world_size=4)"
    below = drawing.cell(1, source(loss_of_this_rank), call, 516)
    drawing.words(1, below + 30, as_in_a_cell(report), after=1.6, pace=0.35)
    title(drawing, 2, "exercises are judged by bytes, calls and memory, not by numbers alone")
    call = 'check("03.weighted_mean", weighted_mean)'
    below = drawing.cell(2, source(weighted_mean), call, 516)
    drawing.words(2, below + 30, said, after=1.6, pace=0.35)
    return drawing.svg(ALT)


def title(drawing: Drawing, scene: int, words: str) -> None:
    drawing.text(24, 36, words, drawing.appear(scene, 0) + " t")


def timeline_of(drawing: Drawing, bars: list, sent: int) -> None:
    """A lane for each rank: compute above, communication below, as the run recorded them."""
    slowness = 5.5 / max(end for *_, end in bars)  # the run takes 5.5 seconds of the loop
    scale = (RIGHT - LEFT - 60) * slowness / 5.5  # pixels per second of the run
    for rank in range(4):
        y = TOP + rank * (LANE + 12)
        drawing.text(LEFT, y + 22, f"rank {rank}", drawing.appear(0, 0.4) + " q", "quiet")
    for kind, rank, start, end in bars:
        y = TOP + rank * (LANE + 12) + (0 if kind == "backward" else 18)
        css = drawing.appear(0, 1.0 + start * slowness, (end - start) * slowness)
        drawing.rect(LEFT + 60 + start * scale, y, (end - start) * scale, 15, css, kind)
    keys = (("backward", "backward"), ("all_reduce", "all-reduce, behind it"))
    for number, (kind, words) in enumerate(keys):
        x, y, seen = LEFT + 60 + 110 * number, TOP - 26, drawing.appear(0, 0.4)
        drawing.rect(x, y, 12, 12, seen, kind)
        drawing.text(x + 18, y + 11, words, seen + " q", "quiet")
    text = f"run.bytes_sent()[0]  →  {{'all_reduce': {sent:,}}}".replace(",", "_")
    drawing.text(30, HEIGHT - 24, text, drawing.appear(0, 6.8))


def source(function: Callable) -> str:
    return inspect.getsource(function)


def as_in_a_cell(report: str) -> str:
    """The report, with lines counted in the cell as a notebook does."""
    first = inspect.getsourcelines(loss_of_this_rank)[1]
    here = re.escape(Path(__file__).name)
    return re.sub(rf"{here}:(\d+)", lambda m: f"cell 12:{int(m[1]) - first + 1}", report)


if __name__ == "__main__":
    bars, sent = timeline()
    report, said = hang(), verdict()
    for theme, colors in THEMES.items():
        path = HERE / f"at-work-{theme}.svg"
        path.write_text(draw(colors, bars, sent, report, said), encoding="utf-8")
        print(f"wrote {path.relative_to(HERE.parent)}")
