"""The ring all-reduce, one step at a time, drawn from what a learner's ring really did.

Before the ring starts, rank r fills its tensor with 10**r. Then each element tells whose numbers
went into it: its decimal digit r counts rank r, so 1101 is the sum of ranks 0, 2 and 3, each once.
Nothing is drawn that is not in the tensors: a ring with a mistake shows its mistake.

`RingSteps` is the model, without a browser; `ring_steps` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.live import show_live
from ddpz_lite.course.show.page import Table, figure_html, in_notebook, prose
from ddpz_lite.course.show.style import IDLE, MUTED_COLOR, SERIES, TEXT_COLOR, need
from ddpz_lite.meter.speed import home

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

LARGEST = 7  # ranks: float32 holds seven decimal digits
Trace = Sequence[Sequence["Tensor"]]  # [rank][step], each (length,)
Counts = list[list[tuple[int, ...]]]  # [rank][chunk][r]: how often rank r's numbers are in it


class Move(NamedTuple):
    """A chunk that arrived in a step. how: "added", "copied", or "other" for what neither gives."""

    sender: int
    receiver: int
    chunk: int
    how: str


class RingSteps:
    """The traces, and which step of which world size is shown."""

    def __init__(self, traces: Mapping[int, Trace]) -> None:
        if not traces:
            raise ValueError("ring_steps: expected a trace for at least one world size, got none.")
        self.traces = {world: _read(world, trace) for world, trace in traces.items()}
        self.world, self.step = max(self.traces), 0

    @property
    def last(self) -> int:
        """The number of steps that the ring made."""
        return len(self.traces[self.world]) - 1

    def choose(self, world: int) -> None:
        """Show another world size, from the start."""
        if world not in self.traces:
            raise ValueError(f"ring_steps: no trace of {world} ranks, only of {list(self.traces)}.")
        self.world, self.step = world, 0

    def go(self, by: int) -> None:
        """So many steps on, or back; it stops at both ends."""
        self.step = min(max(self.step + by, 0), self.last)

    def counts(self, step: int | None = None) -> Counts:
        """What each rank holds after a step, by chunk: how often each rank's numbers."""
        return self.traces[self.world][self.step if step is None else step]

    def moves(self, step: int | None = None) -> list[Move]:
        """What changed in a step, by receiver; nothing in step 0."""
        step = self.step if step is None else step
        if step == 0:
            return []
        before, after = self.counts(step - 1), self.counts(step)
        found = []
        for rank in range(self.world):
            left = (rank - 1) % self.world
            for chunk in range(self.world):
                own, sent, now = before[rank][chunk], before[left][chunk], after[rank][chunk]
                if now == own:
                    continue
                both = tuple(a + b for a, b in zip(own, sent, strict=True))
                how = "added" if now == both else "copied" if now == sent else "other"
                found.append(Move(left, rank, chunk, how))
        return found

    def name(self, step: int) -> str:
        """A step as the code counts it: from 0 in each half."""
        half, within = divmod(step - 1, self.world - 1)
        return f"{'first' if half == 0 else 'second'} half, step {within}"

    @property
    def finished(self) -> int:
        """How many chunks, over all ranks, hold the numbers of every rank once."""
        whole = (1,) * self.world
        return sum(chunk == whole for chunks in self.counts() for chunk in chunks)

    @property
    def sentence(self) -> str:
        """The step in words."""
        if self.step == 0:
            return f"Before the first of {self.last} steps: each rank holds its own numbers."
        says = {
            "added": "receives one chunk from the rank on its left and adds it",
            "copied": "receives one chunk from the rank on its left in place of its own",
            "other": "ends up with what neither adding nor copying a chunk gives",
        }
        parts = []
        for how, words in says.items():
            moved = [move for move in self.moves() if move.how == how]
            if moved:
                each = ", ".join(f"rank {move.receiver} chunk {move.chunk}" for move in moved)
                who = "each rank" if len(moved) == self.world else "a rank"
                parts.append(f"{who} {words}: {each}")
        what = "; ".join(parts) or "nothing changes"
        done = f"{self.finished} of {self.world**2} chunks hold the whole sum."
        return f"{self.name(self.step).capitalize()}: {what}. {done}"

    @property
    def table(self) -> Table:
        """Rank by chunk, each as the ranks whose numbers are in it: "0+1"."""
        head = ["rank", *(f"chunk {chunk}" for chunk in range(self.world))]
        rows = [
            [f"rank {rank}", *(_sum(chunk) for chunk in chunks)]
            for rank, chunks in enumerate(self.counts())
        ]
        return [head, *rows]


def ring_steps(traces: Mapping[int, Trace]) -> None:
    """Show a ring step by step. Without a kernel: four moments of the largest world.

    traces: by world size, what the ranks returned: for each rank the list of its tensors (length,),
    one before the first step and one after each. Rank r starts with 10**r in every element, and
    chunks are `x.tensor_split(world_size)`. Raises ValueError for traces that are no such thing.
    """
    model = RingSteps(traces)
    film = figure_html(film_strip(model), alt=_film_alt(model), table=_film_table(model))
    note = "<p><small>Run the cell to go through it step by step.</small></p>"
    controls = _view(model) if in_notebook() else []
    show_live(controls, still=film + note, text=_film_alt(model))


def ring_film(*halves: Callable[[Sequence[Tensor], int], object]) -> list[Tensor]:
    """Run a ring on this rank and keep its tensor before the first step and after each.

    halves: functions of (chunks, step), each called for the N - 1 steps of its half.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((world,), 10.0**rank, device=home())
    film = [x.cpu().clone()]
    for one_step in halves:
        for step in range(world - 1):
            one_step(x.tensor_split(world), step)
            film.append(x.cpu().clone())
    return film


def picture(model: RingSteps) -> Figure:
    """The step that the model shows: a row for each rank, a column for each chunk."""
    fig, axes = figure(height=0.7 + 0.72 * model.world)
    with house_style():
        _draw(axes, model, model.step, size=9)
        axes.set_xticks(range(model.world), [f"chunk {chunk}" for chunk in range(model.world)])
        axes.set_yticks(range(model.world), [f"rank {rank}" for rank in range(model.world)])
    return fig


def film_strip(model: RingSteps) -> Figure:
    """Four moments of the model's world size: before, the first step, half-way, and the last."""
    moments = list(dict.fromkeys((0, 1, model.world - 1, model.last)))
    fig, grid = figure(1, len(moments), height=2.3, squeeze=False)
    with house_style():
        for step, axes in zip(moments, grid.flat, strict=True):
            _draw(axes, model, step, size=6)
            axes.set_title(model.name(step) if step else "before", fontsize=9)
            axes.set_xticks([])
            axes.set_yticks(range(model.world), [f"rank {rank}" for rank in range(model.world)])
            axes.tick_params(labelsize=7)
            if step:
                axes.set_yticks([])
    return fig


def _draw(axes: Axes, model: RingSteps, step: int, size: float) -> None:
    """One step: each cell has a place for each rank, filled if its numbers are in it.

    What arrived in this step has a frame and an arrow.
    """
    world = model.world
    for rank, chunks in enumerate(model.counts(step)):
        for chunk, counts in enumerate(chunks):
            _draw_cell(axes, rank, chunk, counts, size)
    for move in model.moves(step):
        x, y = move.chunk, move.receiver
        axes.add_patch(_rectangle(x - 0.46, y - 0.4, 0.92, 0.8, fill=False, ec=TEXT_COLOR, lw=1.8))
        axes.annotate(
            "",
            xy=(x, y - 0.38),
            xytext=(x, y - 0.66),
            arrowprops={
                "arrowstyle": "-|>",
                "color": TEXT_COLOR,
                "lw": 1.4,
                "shrinkA": 0,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )
    axes.set_xlim(-0.55, world - 0.45)
    axes.set_ylim(world - 0.45, -0.7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_cell(axes: Axes, rank: int, chunk: int, counts: Sequence[int], size: float) -> None:
    width = 0.88 / len(counts)
    for source, count in enumerate(counts):
        look = SERIES[source] if count else IDLE
        left = chunk - 0.44 + source * width
        style = {"fc": look.color if count else "none", "ec": MUTED_COLOR, "lw": 0.5}
        axes.add_patch(_rectangle(left, rank - 0.36, width, 0.72, **style))
        if count:
            text = str(source) if count == 1 else f"{count}x{source}"
            axes.text(left + width / 2, rank, text, ha="center", va="center", fontsize=size,
                      color=look.text_color)  # fmt: skip


def _rectangle(left: float, bottom: float, width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), width, height, **style)


def _film_alt(model: RingSteps) -> str:
    return (
        f"The ring of {model.world} ranks in {model.last} steps. Before the first, each rank holds "
        "its own numbers. In each step every rank receives one chunk from its left neighbour."
    )


def _film_table(model: RingSteps) -> Table:
    rows: list[list[Any]] = [["step", *(f"rank {rank}" for rank in range(model.world))]]
    for step in range(model.last + 1):
        each = ["; ".join(_sum(chunk) for chunk in chunks) for chunks in model.counts(step)]
        rows.append([model.name(step) if step else "before", *each])
    return rows


def _view(model: RingSteps) -> list[Any]:
    ipywidgets = need("ipywidgets")
    shown, status = ipywidgets.HTML(), ipywidgets.HTML()

    def draw() -> None:
        shown.value = figure_html(picture(model), alt=model.sentence, table=model.table)
        status.value = f'<p role="status">{prose(model.sentence)}</p>'

    def step_button(name: str, by: int) -> Any:
        button = ipywidgets.Button(description=name)

        def pressed(_: Any) -> None:
            model.go(by)
            draw()

        button.on_click(pressed)
        return button

    worlds = ipywidgets.Dropdown(
        options=sorted(model.traces), value=model.world, description="World size"
    )

    def chosen(change: dict[str, Any]) -> None:
        model.choose(change["new"])
        draw()

    worlds.observe(chosen, names="value")
    buttons = [step_button("Next step", 1), step_button("Step back", -1)]
    buttons.append(step_button("To the start", -1_000_000))
    draw()
    return [worlds, ipywidgets.HBox(buttons), status, shown]


def _read(world: int, trace: Trace) -> list[Counts]:
    """A trace [rank][step] as counts by step. Raises ValueError if it is no trace of a ring."""
    if not 2 <= world <= LARGEST:
        raise ValueError(f"ring_steps: expected 2 to {LARGEST} ranks, got {world}.")
    lengths = {len(steps) for steps in trace}
    if len(trace) != world or len(lengths) != 1 or not min(lengths):
        raise ValueError(
            f"ring_steps: the trace of {world} ranks needs one list of tensors for each rank, all "
            f"of the same length; got {len(trace)} lists of lengths {sorted(lengths)}. Fix: "
            "append x.clone() before the first step and after each."
        )
    return [
        [_chunks(world, rank, steps[step]) for rank, steps in enumerate(trace)]
        for step in range(min(lengths))
    ]


def _chunks(world: int, rank: int, x: Tensor) -> list[tuple[int, ...]]:
    found = []
    for chunk, values in enumerate(x.tensor_split(world)):
        one = set(values.tolist())
        value = one.pop() if len(one) == 1 else -1
        if not 0 <= value < 10**world or value != int(value):
            raise ValueError(
                f"ring_steps: rank {rank}, chunk {chunk}: expected one value throughout, a sum of "
                f"powers of ten, got {values.tolist()[:4]}. Fix: let rank r start with 10**r in "
                f"each of at least {world} elements."
            )
        found.append(tuple(int(value) // 10**source % 10 for source in range(world)))
    return found


def _sum(counts: Sequence[int]) -> str:
    """The ranks in a chunk: "0+1+3", "2x0" if one is in it twice."""
    parts = [str(r) if n == 1 else f"{n}x{r}" for r, n in enumerate(counts) if n]
    return "+".join(parts) or "nothing"
