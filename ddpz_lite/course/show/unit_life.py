"""The life of ZeRO-3's units through one step, to walk through moment by moment.

`life` plays the schedule: one `Moment` after another, each with the state of every unit and the
collectives that begin. `held` counts the elements on one rank at a moment, `picture` draws a step
with one moment marked, and `show_step` the units alone. The lesson on ZeRO-3 compares `calls` with
what its ranks really called.

    root       embeddings, last norm and head: gathered once, unsharded until its backward is over
    block i    gathered before use, freed after it, in forward and again in backward
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style, swatch
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import (
    SERIES,
    TEXT_COLOR,
    SeriesStyle,
    bytes_unit,
    in_bytes,
    style_of,
)

ROOT = "root"
ALLOCATED = ("gathering", "unsharded", "forward", "backward")  # states in which `full` has bytes
STATES: dict[str, SeriesStyle] = {
    "sharded": SeriesStyle("#E4E4DC", "", ""),
    "gathering": style_of("all_gather"),
    "unsharded": SeriesStyle("#D6E8F3", "", ""),
    "forward": style_of("forward"),
    "backward": style_of("backward"),
    "reducing": style_of("reduce_scatter"),
}
FAINT = 0.45  # opacity of what is still to come
KINDS: dict[str, SeriesStyle] = {
    "shards of parameters": STATES["sharded"],
    "unsharded units": STATES["unsharded"],
    "unsharded gradients": SERIES[5],
    "shards of gradients": SERIES[2],
}


@dataclass(frozen=True)
class Moment:
    """One moment of a step.

    text: what happens, in words. states: of every unit, one of STATES. calls: the collectives that
    begin, ("all_gather" or "reduce_scatter", unit). reduced: units whose gradient shard is there.
    in_backward: the backward of the head has begun, so the root has a gradient.
    """

    text: str
    states: Mapping[str, str]
    calls: tuple[tuple[str, str], ...] = ()
    reduced: frozenset[str] = frozenset()
    in_backward: bool = False


class _Step:
    """The schedule at play: the state of every unit now, and the moments so far."""

    def __init__(self, blocks: int, overlap: bool, keep: bool) -> None:
        self.names = [ROOT, *(f"block {i}" for i in range(blocks))]
        self.overlap, self.keep = overlap, keep
        self.now = dict.fromkeys(self.names, "sharded")
        self.calls: list[tuple[str, str]] = []
        self.reduced: set[str] = set()
        self.in_backward = False
        self.moments: list[Moment] = []

    def note(self, text: str) -> None:
        also = [f"{n} is gathered" for n, s in self.now.items() if s == "gathering"]
        also += [f"{n}'s gradients are reduced" for n, s in self.now.items() if s == "reducing"]
        text = "; ".join([text, *also] if text else also)
        calls, reduced = tuple(self.calls), frozenset(self.reduced)
        self.moments.append(Moment(text, dict(self.now), calls, reduced, self.in_backward))
        self.calls = []

    def gather(self, name: str) -> None:
        """Start to unshard a unit, unless it is unsharded or does not exist."""
        if self.now.get(name) == "sharded":
            self.now[name] = "gathering"
            self.calls.append(("all_gather", name))

    def use(self, name: str) -> None:
        """Unshard a unit now: a moment of waiting, if its gather was not started before."""
        if self.now[name] == "sharded":
            self.gather(name)
            self.note("")
        self.now[name] = "unsharded"

    def reduce(self, name: str) -> None:
        """Free a unit and reduce its gradients; without overlap all ranks wait for it."""
        self.settle()
        self.now[name] = "reducing"
        self.calls.append(("reduce_scatter", name))
        if not self.overlap or name == ROOT:
            self.note("")
            self.settle()

    def settle(self) -> None:
        for name in self.names:
            if self.now[name] == "reducing":
                self.now[name] = "sharded"
                self.reduced.add(name)

    def compute(self, name: str, state: str, text: str) -> None:
        self.now[name] = state
        self.note(text)
        self.now[name] = "unsharded"


def life(blocks: int = 4, overlap: bool = False, keep: bool = False) -> list[Moment]:
    """All moments of one step of a model with that many equal blocks.

    overlap: gather the next unit, and reduce the last one, while one computes. keep: blocks stay
    unsharded from forward to backward. Raises ValueError for fewer than one block.
    """
    if blocks < 1:
        raise ValueError(f"life: a model needs at least one block, got {blocks}.")
    step = _Step(blocks, overlap, keep)
    step.note("between two steps: every unit is sharded")
    step.use(ROOT)
    _forward(step)
    _backward(step)
    step.note("the optimizer steps on the shards")
    return step.moments


def _forward(step: _Step) -> None:
    step.compute(ROOT, "forward", "the embedding computes")
    for here, name in enumerate(step.names[1:], start=1):
        step.use(name)
        if step.overlap and here + 1 < len(step.names):
            step.gather(step.names[here + 1])
        step.compute(name, "forward", f"{name} computes forward")
        if not step.keep:
            step.now[name] = "sharded"
    step.compute(ROOT, "forward", "the head and the loss compute")


def _backward(step: _Step) -> None:
    step.in_backward = True
    step.compute(ROOT, "backward", "backward of the loss and the head")
    for here in range(len(step.names) - 1, 0, -1):
        name = step.names[here]
        step.use(name)
        if step.overlap and here > 1:
            step.gather(step.names[here - 1])
        step.compute(name, "backward", f"{name} computes backward")
        step.reduce(name)
    step.compute(ROOT, "backward", "backward of the embedding")
    step.reduce(ROOT)


def calls(moments: list[Moment]) -> list[tuple[str, str]]:
    """All collectives of a step, in order."""
    return [call for moment in moments for call in moment.calls]


def held(moment: Moment, sizes: Mapping[str, int], world: int) -> dict[str, float]:
    """What one rank holds at a moment, by kind, in the unit of `sizes` (elements or bytes).

    sizes: {unit: size of the unsharded unit}. Parameters and gradients only, without the buffers of
    messages. A gradient is unsharded from the moment in which its unit computes backward; the
    root's begins with the head and lasts until the embedding is done.
    """
    states = moment.states
    began = {ROOT} if moment.in_backward else set()
    grads = began | {n for n, s in states.items() if s in ("backward", "reducing")}
    return {
        "shards of parameters": sum(sizes.values()) / world,
        "unsharded units": sum(sizes[n] for n, s in states.items() if s in ALLOCATED),
        "unsharded gradients": sum(sizes[n] for n in grads - moment.reduced),
        "shards of gradients": sum(sizes[n] for n in moment.reduced) / world,
    }


def picture(
    at: int,
    sizes: Mapping[str, int],
    world: int,
    overlap: bool = False,
    keep: bool = False,
) -> tuple[Any, str, Table]:
    """Figure, alt text and table of a step with moment `at` marked, for `show.explore`.

    at: counted from 0; past the end it is the last. sizes: {"root": bytes, "block 0": bytes, ...}.
    """
    moments = life(len(sizes) - 1, overlap, keep)
    at = min(max(at, 0), len(moments) - 1)
    amounts = [held(moment, sizes, world) for moment in moments]
    fig, (units, memory) = figure(2, 1, height=4.6, sharex=True)
    with house_style():
        units.set_title(f"{at}: {moments[at].text}", fontsize=9)
        _draw_units(units, moments, at)
        unit = _draw_memory(memory, amounts, at)
        for axes in (units, memory):
            axes.axvspan(
                at - 0.5, at + 0.5, fill=False, edgecolor=TEXT_COLOR, linewidth=1.6, zorder=5
            )
    now = amounts[at]
    total = sum(now.values())
    parts = ", ".join(f"{kind} {in_bytes(size)}" for kind, size in now.items() if size)
    states = ", ".join(f"{name} {state}" for name, state in moments[at].states.items())
    alt = f"Moment {at} of {len(moments) - 1}: {moments[at].text}. {states}. "
    alt += f"One of {world} ranks holds {in_bytes(total)}: {parts}."
    rows: list[list[Any]] = [["unit", "state", f"unsharded, {unit[1]}", f"sharded, {unit[1]}"]]
    rows += [
        [name, moments[at].states[name], sizes[name] / unit[0], sizes[name] / world / unit[0]]
        for name in sizes
    ]
    return fig, alt, rows


def show_step(blocks: int = 4, *, title: str) -> None:
    """Draw the state of every unit through a step without overlap, moment by moment."""
    moments = life(blocks)
    fig, axes = figure(height=2.5)
    with house_style():
        _draw_units(axes, moments, len(moments))
        axes.set_title(title)
        axes.set_xticks([])
        axes.set_xlim(-0.6, len(moments) - 0.4)
    told = "; ".join(moment.text for moment in moments)
    alt = f"One step of ZeRO-3 over {blocks} blocks, unit by unit, as time passes. {told}."
    head = ["moment", *moments[0].states]
    show_figure(
        fig, alt=alt, table=[head, *([i, *m.states.values()] for i, m in enumerate(moments))]
    )


def _draw_units(axes: Any, moments: list[Moment], at: int) -> None:
    names = list(moments[0].states)
    for x, moment in enumerate(moments):
        shade = {"linewidth": 0, "alpha": 1.0 if x <= at else FAINT}
        for y, name in enumerate(names):
            fill = STATES[moment.states[name]].patch_kwargs
            axes.barh(y, 0.96, left=x - 0.48, height=0.8, **fill, **shade)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="both", length=0)
    drawn = {state for moment in moments for state in moment.states.values()}
    order = [state for state in STATES if state in drawn]
    solid = [swatch(STATES[state]) for state in order]
    axes.legend(
        solid, order, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=6, handlelength=1.4
    )


def _draw_memory(axes: Any, amounts: list[dict[str, float]], at: int) -> tuple[float, str]:
    totals = [sum(one.values()) for one in amounts]
    unit = bytes_unit(max(totals))
    below = [0.0] * len(amounts)
    for kind, style in KINDS.items():
        heights = [one[kind] / unit[0] for one in amounts]
        places = range(len(amounts))
        bars = axes.bar(
            places, heights, bottom=below, width=0.96, linewidth=0, **style.patch_kwargs
        )
        for x, bar in enumerate(bars):
            bar.set_alpha(1.0 if x <= at else FAINT)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    right = at > len(amounts) / 2
    axes.annotate(
        in_bytes(totals[at]), (at + (-0.5 if right else 0.5), 0.99), xytext=(-5 if right else 5, 0),
        xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=9,
        ha="right" if right else "left", va="top", zorder=6,
    )  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(-0.6, len(amounts) - 0.4)
    axes.set_ylim(0, max(below) * 1.16)
    axes.set_ylabel(f"{unit[1]} on one rank")
    axes.set_xlabel("moment of the step")
    axes.legend(
        [swatch(style) for style in KINDS.values()],
        list(KINDS),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        ncols=4,
        handlelength=1.4,
    )
    return unit
