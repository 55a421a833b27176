"""A step in letters: how ranks hold parameters, gradients and optimizer state, moment by moment.

    R  Replicate: every rank holds the whole value
    P  Partial: every rank holds a whole tensor, and the value is their sum
    S  Shard: every rank holds its own part of the value

`step_placements(0, 1)` draws a step of these stages. Every change of a letter is one of the four
transitions of `ddpz_lite.strategies.placement`, and carries the name of what brings it about.

The letters are told apart by how much of a box is filled, and how. Colours are left for the kinds
of state, which have theirs in every other figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import CARD, MUTED_COLOR, TEXT_COLOR
from ddpz_lite.strategies.placement import TRANSITIONS, P, Placement, R, S, strategy

KINDS = ("parameter", "gradient", "optimizer")
PHASES = ("forward", "backward", "step")
FILL = "#BDBDB5"
HATCH = {R: "", P: "////", S: ""}
PART = 0.25  # of the box of S that is filled
MEANINGS = {
    R: "Replicate: full on every rank",
    P: "Partial: to be summed",
    S: "Shard: one part each",
}


@dataclass(frozen=True)
class Moment:
    """One moment of a step: its phase, and the letter of each kind; None where there is none."""

    phase: str
    parameter: Placement
    gradient: Placement | None
    optimizer: Placement


def moments(stage: int) -> list[Moment]:
    """A step of `stage`, moment by moment. Raises ValueError for anything but 0, 1, 2, 3."""
    row = strategy(stage)
    if stage == 0:
        letters = [("forward", R, None), ("backward", R, P), ("backward", R, R), ("step", R, R)]
    elif stage == 1:
        letters = [("forward", R, None), ("backward", R, P), ("step", R, S), ("step", S, S)]
        letters += [("step", R, S)]
    elif stage == 2:
        letters = [("forward", R, None), ("backward", R, P), ("backward", R, S), ("step", S, S)]
        letters += [("step", R, S)]
    else:
        letters = [("forward", S, None), ("forward", R, None), ("forward", S, None)]
        letters += [("backward", R, None), ("backward", R, P), ("backward", S, S), ("step", S, S)]
    return [Moment(*one, row.optimizer) for one in letters]


def changes(stage: int) -> list[tuple[int, str, str]]:
    """(moment before, kind, transition) for each change of a letter, in order."""
    step, found = moments(stage), []
    for i, (before, after) in enumerate(pairwise(step)):
        for kind in KINDS:
            pair = getattr(before, kind), getattr(after, kind)
            if None not in pair and pair[0] != pair[1]:
                found.append((i, kind, TRANSITIONS[pair]))
    return found


def step_placements(*stages: int, title: str | None = None) -> None:
    """Draw one step of each stage: a row for each kind of state, its letter moment by moment.

    Between two letters stands the collective that turns one into the other. A change from R to S
    moves nothing: a rank frees the others' slices, or updates its own alone. Raises
    ValueError for no stage, or one that is none.
    """
    if not stages:
        raise ValueError("step_placements: name at least one stage, 0 to 3: step_placements(0, 1).")
    steps = {stage: moments(stage) for stage in stages}
    widest = max(len(step) for step in steps.values())
    drawn = {getattr(m, kind) for step in steps.values() for m in step for kind in KINDS}
    legend = [letter for letter in MEANINGS if letter in drawn]
    fig, panels = figure(len(stages), 1, height=0.75 + 1.7 * len(stages), squeeze=False)
    with house_style():
        for axes, (stage, step) in zip(panels[:, 0], steps.items(), strict=True):
            _draw(axes, stage, step, widest)
        fig.legend(
            handles=[_Key(letter) for letter in legend],
            handler_map={_Key: _Key},
            labels=[f"{letter.value}  {MEANINGS[letter]}" for letter in legend],
            loc="outside lower center", ncols=3, fontsize=8.5,
        )  # fmt: skip
        if title:
            fig.suptitle(title)
    show_figure(fig, alt=" ".join(map(_alt, stages)), table=_table(stages))


def _draw(axes: Any, stage: int, step: list[Moment], widest: int) -> None:
    axes.set_title(f"stage {stage}, {strategy(stage).name}", fontsize=10)
    for place, moment in enumerate(step):
        for row, kind in enumerate(KINDS):
            letter = getattr(moment, kind)
            if letter is None:
                axes.text(
                    place, row, "none", ha="center", va="center", color=MUTED_COLOR, fontsize=8
                )
                continue
            for patch in _box(place - 0.19, row - 0.33, 0.38, 0.66, letter):
                axes.add_patch(patch)
            axes.text(place, row, letter.value, ha="center", va="center", weight="bold",
                      color=TEXT_COLOR, bbox=_ground(letter))  # fmt: skip
    for before, kind, transition in changes(stage):
        row = KINDS.index(kind)
        named = transition != "slice"
        update = not named and step[before + 1].phase == "step"
        arrow = {
            "arrowstyle": "-|>",
            "color": TEXT_COLOR if named else MUTED_COLOR,
            "lw": 1.4,
            "shrinkA": 0,
        }
        axes.annotate("", (before + 0.8, row), (before + 0.26, row), arrowprops=arrow)
        text = transition.replace("_", "-") if named else "update own" if update else "free others"
        at = {"xytext": (0, 10), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        color = TEXT_COLOR if named else MUTED_COLOR
        axes.annotate(text, (before + 0.53, row), **at, color=color, **_behind(axes))
    if step[-2].parameter is step[-1].parameter:  # the update changes values, and no letter
        at = {"xytext": (0, 10), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        arrow = {"arrowstyle": "-|>", "color": MUTED_COLOR, "lw": 1.4, "shrinkA": 0}
        axes.annotate("", (len(step) - 1.2, 0), (len(step) - 1.74, 0), arrowprops=arrow)
        axes.annotate("update", (len(step) - 1.5, 0), **at, color=MUTED_COLOR, **_behind(axes))
    for before, (moment, after) in enumerate(pairwise(step)):
        if moment.phase == after.phase and moment.gradient is None and after.gradient is P:
            at = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 7}
            arrow = {"arrowstyle": "-|>", "color": MUTED_COLOR, "lw": 1.4, "shrinkA": 0}
            axes.annotate("", (before + 0.8, 1), (before + 0.26, 1), arrowprops=arrow)
            axes.annotate("compute\ngradients", (before + 0.5, 1), **at, color=MUTED_COLOR)
    phases = [moment.phase for moment in step]
    for phase in PHASES:
        first = phases.index(phase)
        look = {"color": MUTED_COLOR, "fontsize": 9, "style": "italic"}
        axes.text(first - (0.74 if first else 0.44), -0.98, phase, ha="left", **look)
        if first:
            axes.axvline(first - 0.79, color="#B4B4AC", lw=1, zorder=0)  # before what it does
    axes.set_xlim(-0.5, widest - 0.5)
    axes.set_ylim(len(KINDS) - 0.5, -1.25)
    axes.set_yticks(range(len(KINDS)), ["parameters", "gradients", "optimizer"])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _behind(axes: Any) -> dict[str, Any]:
    """Looks of a word that no phase's line crosses, and that covers no box."""
    box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.5}
    return {"bbox": box, "zorder": 0.5}


def _box(x: float, y: float, width: float, height: float, letter: Placement) -> list[Any]:
    """Filled for R, hatched for P; for S an empty one with a filled part."""
    from matplotlib.patches import Rectangle

    look = {"ec": MUTED_COLOR, "lw": 0.6}
    color = FILL if letter is R else CARD
    box = [Rectangle((x, y), width, height, fc=color, hatch=HATCH[letter], **look)]
    if letter is S:
        box.append(Rectangle((x, y), PART * width, height, fc=FILL, **look))
    return box


def _ground(letter: Placement) -> dict[str, Any] | None:
    """What keeps hatches away from a letter."""
    return {"fc": CARD, "ec": "none", "pad": 0.8} if HATCH[letter] else None


class _Key:
    """The box of a letter in the legend; the class also draws it there, as matplotlib asks."""

    def __init__(self, letter: Placement) -> None:
        self.letter = letter

    @staticmethod
    def legend_artist(legend: Any, key: _Key, fontsize: float, handlebox: Any) -> None:
        left, low = -handlebox.xdescent, -handlebox.ydescent
        for patch in _box(left, low, handlebox.width, handlebox.height, key.letter):
            patch.set_transform(handlebox.get_transform())
            handlebox.add_artist(patch)


def _alt(stage: int) -> str:
    step = moments(stage)
    parts = []
    for kind in KINDS:
        letters = [getattr(moment, kind) for moment in step]
        values = [letter.value if letter else "none" for letter in letters]
        parts.append(f"{kind} {' '.join(values)}")
    return f"A step of stage {stage}, {strategy(stage).name}, in letters: {'; '.join(parts)}."


def _table(stages: tuple[int, ...]) -> Table:
    rows: list[list[Any]] = [["stage", "moment", "phase", *KINDS, "then"]]
    for stage in stages:
        then = {before: f"{kind}: {name}" for before, kind, name in changes(stage)}
        for place, moment in enumerate(moments(stage)):
            letters = [getattr(moment, kind) for kind in KINDS]
            values = [letter.value if letter else "none" for letter in letters]
            rows.append([stage, place, moment.phase, *values, then.get(place, "")])
    return rows
