"""Schedules of a pipeline, played and drawn: who computes what when, who waits, what is kept.

A schedule is a list of actions for each stage, in the order in which it does them: ("F", 3) is the
forward of micro-batch 3, ("B", 3) its backward. With interleaving a stage has several chunks of the
model, and an action names the chunk, too: ("F", 3, 1). `read` takes a line such as "F0 F1 B0 B1".

`play` gives each action its time: it starts when its stage is free and what it needs is there.
Messages take no time. `live` counts the micro-batches that a stage keeps, `idle` the waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpz_lite.show.canvas import figure, house_style
from ddpz_lite.show.page import Table, show_figure
from ddpz_lite.show.style import CARD, INK, look

Action = tuple[Any, ...]  # ("F" or "B", micro-batch) or ("F" or "B", micro-batch, chunk)
Schedule = Sequence[Sequence[Action]]  # by stage
CHUNK = ("#56B4E9", "#9AD3F2", "#3C8DBC", "#C9E7F8")  # forward, by chunk
CHUNK_BACK = ("#0072B2", "#4A9CCB", "#00507D", "#86BEDD")


@dataclass(frozen=True)
class Bar:
    """One action of a stage, with its time."""

    stage: int
    kind: str
    micro: int
    chunk: int
    start: float
    end: float


# -- schedules -------------------------------------------------------------------------------------


def read(line: str) -> list[Action]:
    """The actions of a stage from a line: "F0 F1 B0 B1"."""
    return [(word[0], int(word[1:])) for word in line.split()]


def gpipe(stages: int, micros: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    one = [(kind, i) for kind in "FB" for i in range(micros)]
    return [list(one) for _ in range(stages)]


def interleaved(stages: int, micros: int, chunks: int = 1) -> list[list[Action]]:
    """1F1B (Narayanan et al. 2021, section 2.2); with several chunks, the interleaved one.

    Virtual stage chunk * stages + stage is the stage's part number `chunk`. Raises ValueError if
    there are several chunks and the stages do not divide the micro-batches.
    """
    if chunks > 1 and micros % stages:
        raise ValueError(
            f"interleaved: {micros} micro-batches over {stages} stages. They go in groups as large "
            f"as the pipeline. Cure: a multiple of {stages}."
        )
    return [_one_stage(stages, micros, chunks, stage) for stage in range(stages)]


def _one_stage(stages: int, micros: int, chunks: int, stage: int) -> list[Action]:
    def at(number: int, kind: str) -> Action:
        if chunks == 1:
            return kind, number
        group, place = divmod(number, stages * chunks)
        chunk = place // stages
        return kind, group * stages + place % stages, chunk if kind == "F" else chunks - 1 - chunk

    total = micros * chunks
    ahead = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    ahead = min(ahead, total)
    actions = [at(i, "F") for i in range(ahead)]
    for i in range(total - ahead):
        actions += [at(ahead + i, "F"), at(i, "B")]
    return actions + [at(i, "B") for i in range(total - ahead, total)]


# -- play ------------------------------------------------------------------------------------------


def play(
    schedule: Schedule, forward: float | Sequence[float] = 1.0, backward: float | None = None
) -> list[Bar]:
    """The actions with their times. forward: seconds of a stage's forward, one for all or one each.

    backward: seconds, twice the forward by default. A chunk takes its share of them. Raises
    ValueError for a schedule in which every stage waits for another.
    """
    stages = len(schedule)
    seconds = [forward] * stages if isinstance(forward, int | float) else list(forward)
    chunks = 1 + max((a[2] for line in schedule for a in line if len(a) > 2), default=0)
    free, done, bars = [0.0] * stages, {}, []
    waiting = [list(line) for line in schedule]
    while any(waiting):
        ready = [s for s in range(stages) if waiting[s] and _needs(waiting[s][0], s, stages, chunks,
                                                                   done) is not None]  # fmt: skip
        if not ready:
            said = "; ".join(f"stage {s}: {_name(w[0])}" for s, w in enumerate(waiting) if w)
            raise ValueError(f"play: no stage can go on. First in line is {said}.")
        for stage in ready:
            action = waiting[stage].pop(0)
            kind, micro, chunk = (*action, 0)[:3]
            start = max(free[stage], _needs(action, stage, stages, chunks, done))
            back = 2 * seconds[stage] if backward is None else backward
            end = start + (seconds[stage] if kind == "F" else back) / chunks
            free[stage] = done[kind, micro, chunk * stages + stage] = end
            bars.append(Bar(stage, kind, micro, chunk, start, end))
    return bars


def _needs(action: Action, stage: int, stages: int, chunks: int, done: dict) -> float | None:
    """When all that an action needs is there; None if it is not known yet."""
    kind, micro, chunk = (*action, 0)[:3]
    place = chunk * stages + stage
    needed = []
    if kind == "F" and place > 0:
        needed = [("F", micro, place - 1)]
    if kind == "B":
        needed = [("F", micro, place)]
        needed += [("B", micro, place + 1)] if place + 1 < stages * chunks else []
    times = [done.get(key) for key in needed]
    return None if None in times else max(times, default=0.0)


def _name(action: Action) -> str:
    return f"{action[0]}{action[1]}" + (f" of chunk {action[2]}" if len(action) > 2 else "")


def length(bars: Sequence[Bar]) -> float:
    """Seconds until the last action ends."""
    return max(bar.end for bar in bars)


def idle(bars: Sequence[Bar]) -> float:
    """The share of all stages' time in which they wait."""
    stages = 1 + max(bar.stage for bar in bars)
    return 1 - sum(bar.end - bar.start for bar in bars) / (stages * length(bars))


def live(bars: Sequence[Bar]) -> list[float]:
    """For each stage the most micro-batches that it keeps at once, a chunk as its share of one."""
    chunks = 1 + max(bar.chunk for bar in bars)
    return [most / chunks for most in _live(bars)]


def _live(bars: Sequence[Bar]) -> Iterator[int]:
    for stage in range(1 + max(bar.stage for bar in bars)):
        own = sorted((bar for bar in bars if bar.stage == stage), key=lambda bar: bar.start)
        now = most = 0
        for bar in own:
            now += 1 if bar.kind == "F" else -1
            most = max(most, now)
        yield most


# -- drawing ---------------------------------------------------------------------------------------


def schedule(
    lines: Sequence[str] | Schedule, forward: float | Sequence[float] = 1.0, *, title: str = ""
) -> None:
    """Draw a schedule and show it: a row a stage. lines: of `read`, or actions."""
    actions = [read(line) if isinstance(line, str) else line for line in lines]
    fig, alt, table = picture(actions, forward, title=title)
    show_figure(fig, alt=alt, table=table)


def picture(
    actions: Schedule, forward: float | Sequence[float] = 1.0, *, title: str = ""
) -> tuple[Any, str, Table]:
    """The same as (figure, alt, table): what a function for `explore` returns."""
    bars = play(actions, forward)
    until, kept, share = length(bars), live(bars), idle(bars)
    fig, axes = figure(height=min(1.25 + 0.36 * len(actions), 4.6))
    said = f"{until:.4g} units of time, {share:.1%} of it idle"
    with house_style():
        for bar in bars:
            _draw(axes, bar, until)
        axes.set_facecolor(look("idle").color)
        names = [f"stage {s}\nkeeps {k:.3g}" for s, k in enumerate(kept)]
        axes.set_yticks(range(len(actions)), names, fontsize=8.5)
        axes.set_ylim(len(actions) - 0.5, -0.5)
        axes.set_xlim(0, until)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("units of time; light: forward, dark: backward, grey: idle")
        axes.set_title(f"{title}: {said}" if title else said)
    alt = f"{title or 'A schedule'} of {len(actions)} stages: {said}. At most "
    alt += ", ".join(f"{k:.3g}" for k in kept) + " micro-batches are kept, by stage."
    rows = [["stage", "most kept", "order"]]
    for stage, line in enumerate(actions):
        order = " ".join(f"{a[0]}{a[1]}" + ("abcdefgh"[a[2]] if len(a) > 2 else "") for a in line)
        rows.append([stage, kept[stage], order])
    return fig, alt, rows


def _draw(axes: Any, bar: Bar, until: float) -> None:
    """One box, with its micro-batch's number where there is room."""
    width = bar.end - bar.start
    colours = CHUNK if bar.kind == "F" else CHUNK_BACK
    colour = colours[bar.chunk % len(colours)]
    axes.barh(bar.stage, width, left=bar.start, height=0.84, color=colour, edgecolor=CARD,
              linewidth=0.6)  # fmt: skip
    if width / until > 0.012:
        light = colour in (*CHUNK, CHUNK_BACK[3])
        axes.text(bar.start + width / 2, bar.stage, str(bar.micro), ha="center", va="center",
                  fontsize=7.5, color=INK if light else "white")  # fmt: skip


def knobs() -> None:
    """The widget: a schedule, with knobs for stages, micro-batches and interleaving."""
    from ddpz_lite.show.knobs import explore, options, slider

    explore(
        _turned,
        order=options("Schedule", ["GPipe", "1F1B"], default="1F1B"),
        stages=options("Stages", [2, 4, 8], default=4),
        micros=options("Micro-batches", [1, 2, 4, 8, 16, 32], default=8),
        chunks=slider("Chunks per stage", 1, 4, default=1, until=_most_chunks),
        slow=options("Last stage takes", ["1", "1.5", "2"], default="1", unit="x"),
    )


def _most_chunks(order: str, stages: int, micros: int, **_: Any) -> int:
    return 4 if order == "1F1B" and micros % stages == 0 else 1


def _turned(order: str, stages: int, micros: int, chunks: int, slow: str) -> tuple[Any, str, Table]:
    actions = gpipe(stages, micros) if order == "GPipe" else interleaved(stages, micros, chunks)
    seconds = [1.0] * (stages - 1) + [float(slow)]
    return picture(actions, seconds, title=order + (f", {chunks} chunks" if chunks > 1 else ""))
