"""What three widgets show in each of their states, for the site, where no kernel runs.

A widget is its sliders and a list of states for each value of the first slider, of lists for each
value of the second, and so on. The last list may be shorter for some values, and its slider with
it. A state is HTML, and `widgets.js` shows the chosen one. Numbers and sentences come from
`ddpz_lite.course.show`; only the drawing is the site's own: text and frames have the page's colour.
"""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

import torch

from ddpz_lite.course.show import calculator, ring, unit_life
from ddpz_lite.course.show.style import SERIES, SeriesStyle, in_bytes, style_of

WIDTH = 640  # units of a drawing; it is as wide as its page
TELLS = {  # a lesson's cell that calls this has the widget of that name
    "show.ring_steps(": "ring",
    "\ncalculator()": "calculator",
    "unit_life.picture(": "life",
}
WORLDS = (2, 3, 4)
CALCULATED = {  # the sliders that the site has, of those of the lesson
    "Model": list(calculator.MODELS),
    "World size": [1, 8, 64, 512],
    "Stage": [0, 1, 2, 3],
    "Checkpointing": ["off", "on"],
    "Device": [24, 80, 192],
}
WINDOWS = 4
UNIT = re.compile(r">(root|block \d+)</td><td[^>]*>[^<]*</td><td[^>]*>([\d.,]+)<")
SCALE = re.compile(r"unsharded, (bytes|[kMG]B)<")
BYTES = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def widget(name: str, stored: str) -> dict[str, Any]:
    """A widget by name. stored: the HTML of its still form in the lesson."""
    return {"ring": ring_steps, "calculator": calculate, "life": lives}[name](stored)


# ---- the ring ----


def ring_steps(stored: str = "") -> dict[str, Any]:
    """The ring all-reduce of 2 to 4 ranks, step by step."""
    model = ring.RingSteps({world: _ring(world) for world in WORLDS})
    states = []
    for world in WORLDS:
        model.choose(world)
        states.append([])
        for _ in range(model.last + 1):
            states[-1].append(_drawn(_ring_svg(model), model.sentence))
            model.go(1)
    sliders = [_slider("World size", WORLDS, 4), {"label": "Moment", "kind": "slider", "start": 1}]
    return {"sliders": sliders, "states": states}


def _ring(world: int) -> list[list[torch.Tensor]]:
    """What the ranks of a right ring hold before its first step and after each: [rank][step]."""
    held = [[10.0**rank] * world for rank in range(world)]
    trace = [[torch.tensor(one)] for one in held]
    for step in range(2 * (world - 1)):
        before = [list(one) for one in held]
        for rank in range(world):
            left = (rank - 1) % world
            adding = step < world - 1
            chunk = (left - step) % world if adding else (left + 1 - (step - world + 1)) % world
            held[rank][chunk] = before[left][chunk] + adding * before[rank][chunk]
        for rank, one in enumerate(held):
            trace[rank].append(torch.tensor(one))
    return trace


def _ring_svg(model: ring.RingSteps) -> tuple[list[str], int]:
    world, high = model.world, 46
    left, wide = 62, (WIDTH - 62) / model.world
    parts = [_text(left + (c + 0.5) * wide, 14, f"chunk {c}", "middle") for c in range(world)]
    for rank, chunks in enumerate(model.counts()):
        top = 22 + rank * (high + 8)
        parts.append(_text(0, top + high / 2 + 5, f"rank {rank}"))
        for chunk, counts in enumerate(chunks):
            slot = (wide - 12) / world
            for source, count in enumerate(counts):
                x = left + chunk * wide + 6 + source * slot
                own = SERIES[source]
                parts.append(_box(x, top + 4, slot, high - 8, own.color if count else "none"))
                if count:
                    ink = "#1f2328" if own.edge.startswith("#1f") else "#fff"
                    said = str(source) if count == 1 else f"{count}x{source}"
                    parts.append(_text(x + slot / 2, top + high / 2 + 5, said, "middle", ink))
    for move in model.moves():
        x, top = left + move.chunk * wide + 2, 22 + move.receiver * (high + 8)
        parts.append(_frame(x, top, wide - 4, high))
    return parts, 22 + world * (high + 8)


# ---- the memory calculator ----


def calculate(stored: str = "") -> dict[str, Any]:
    """The memory calculator in mixed precision with AdamW, micro-batches of 4 x 2,048 tokens."""

    def below(chosen: tuple) -> Any:
        if len(chosen) == len(CALCULATED):
            return _calculated(*chosen)
        values = list(CALCULATED.values())[len(chosen)]
        return [below((*chosen, value)) for value in values]

    starts = {"Model": "6.7 B", "World size": 8, "Stage": 0, "Checkpointing": "off", "Device": 80}
    units = {"Device": "GB"}
    sliders = [_slider(k, v, starts[k], units.get(k, "")) for k, v in CALCULATED.items()]
    note = f"AdamW, mixed precision, micro-batches of {WINDOWS} x 2,048 tokens. "
    note += f"The dashed line leaves {calculator.FREE:.0%} of the device free."
    return {"sliders": sliders, "states": below(()), "note": note}


def _calculated(model: str, world: int, stage: int, checkpointing: str, device: int) -> str:
    shape = calculator.MODELS[model]
    job = calculator.Job(shape, world, stage, windows=WINDOWS, checkpointing=checkpointing == "on")
    needs, capacity = job.needs(), calculator.usable(device * 1e9)
    most = 1.08 * max(sum(needs.values()), device * 1e9)
    looks = {kind: style_of(kind, list(needs)) for kind in needs}
    parts = _stack(needs, looks, most, 8, 34)
    x = WIDTH * capacity / most
    parts.append(
        f'<path d="M{x:.1f} 2V48" stroke="currentColor" stroke-dasharray="4 3" fill="none"/>'
    )
    return _drawn((parts, 50), calculator.advice(job, device * 1e9), _legend(needs, looks))


# ---- the life of a unit ----


def lives(stored: str) -> dict[str, Any]:
    """ZeRO-3's units through a step, on 4 ranks, in the sizes of the lesson's model."""
    scale = BYTES[SCALE.search(stored)[1]]
    sizes = {name: scale * float(said.replace(",", "")) for name, said in UNIT.findall(stored)}
    states = [[_life(sizes, overlap, keep) for keep in (False, True)] for overlap in (False, True)]
    sliders = [
        _slider("Overlap", ("off", "on"), "on"),
        _slider("After forward", ("reshard", "keep"), "reshard"),
        {"label": "Moment", "kind": "slider", "start": 13},
    ]
    return {"sliders": sliders, "states": states, "note": "4 ranks."}


def _life(sizes: dict[str, float], overlap: bool, keep: bool) -> list[str]:
    moments = unit_life.life(len(sizes) - 1, overlap, keep)
    held = [unit_life.held(moment, sizes, 4) for moment in moments]
    most = 1.02 * max(sum(one.values()) for one in held)
    found = []
    for at, (moment, now) in enumerate(zip(moments, held, strict=True)):
        parts = []
        for row, (name, state) in enumerate(moment.states.items()):
            top = 4 + 30 * row
            full = state in unit_life.ALLOCATED
            wide = (WIDTH - 190) * sizes[name] / max(sizes.values()) / (1 if full else 4)
            parts += [_text(0, top + 17, name), _text(70, top + 17, state)]
            parts.append(_box(160, top, wide, 24, unit_life.STATES[state].color))
        top = 4 + 30 * len(sizes) + 10
        parts += _stack(now, unit_life.KINDS, most, top, 28)
        said = f"Moment {at} of {len(moments) - 1}: {moment.text}."
        total = f"One rank holds {in_bytes(sum(now.values()))}: "
        found.append(_drawn((parts, top + 32), said, total + _legend(now, unit_life.KINDS)))
    return found


# ---- drawing ----


def _slider(label: str, values: Any, start: Any, unit: str = "") -> dict[str, Any]:
    shown = [f"{value} {unit}".strip() for value in values]
    return {"label": label, "values": shown, "start": list(values).index(start)}


def _drawn(drawing: tuple[list[str], int], words: str, legend: str = "") -> str:
    """A picture, what it says, and what its colours mean."""
    parts, height = drawing
    said = html.escape(words)
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">'
    below = f"<p><small>{legend}</small></p>" if legend else ""
    return f"{svg}{''.join(parts)}</svg>{below}<p role='status'>{said}</p>"


def _stack(
    sizes: dict[str, float], looks: dict[str, SeriesStyle], most: float, top: float, height: float
) -> list[str]:
    """A bar of parts, side by side. most: what is as wide as the drawing."""
    lefts = itertools.accumulate(sizes.values(), initial=0.0)
    scale = WIDTH / most
    return [
        _box(scale * left, top, scale * size, height, looks[kind].color)
        for left, (kind, size) in zip(lefts, sizes.items(), strict=False)
        if size
    ]


def _legend(sizes: dict[str, float], looks: dict[str, SeriesStyle]) -> str:
    swatch = '<i class="dz-swatch" style="background:{}"></i>'
    parts = (
        f"{swatch.format(looks[kind].color)}{kind} {in_bytes(size)}"
        for kind, size in sizes.items()
        if size
    )
    return " · ".join(parts)


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    at = f'x="{x:.1f}" y="{y:.0f}" width="{max(width, 0):.1f}" height="{height:.0f}"'
    return f'<rect {at} fill="{fill}" stroke="#8c8c84" stroke-width=".7"/>'


def _frame(x: float, y: float, width: float, height: float) -> str:
    at = f'x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}"'
    return f'<rect {at} fill="none" stroke="currentColor" stroke-width="2.5"/>'


def _text(x: float, y: float, said: str, anchor: str = "start", fill: str = "currentColor") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}">{said}</text>'
