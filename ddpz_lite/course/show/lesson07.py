"""Figures of lessons 07 and 07b: slow steps, losses on two axes, gradients that are updates old."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.charts import line_figure
from ddpz_lite.course.show.page import Table, show_figure
from ddpz_lite.course.show.style import MUTED_COLOR, SERIES, TEXT_COLOR

WORKERS = [2**k for k in range(9)]
STEPS, HIGHEST = 60, 3.0  # of the figure of delayed steps
Curve = Sequence[tuple[float, int, float]]  # seconds, updates, loss


def share_of_gradients(
    points: Mapping[str, float], of_100: int, factor: float
) -> tuple[Any, str, Table]:
    """Figure, alt text and table of the gradients that slow steps leave, for `show.explore`.

    points: what was measured with 3 workers where 25 of 100 steps took 4 times as long.
    of_100, factor: so many of 100 steps take so many times as long.
    """
    slowest = [1 + (factor - 1) * (1 - (1 - of_100 / 100) ** count) for count in WORKERS]
    times = {"lockstep": slowest, "at once": [1 + (factor - 1) * of_100 / 100] * len(WORKERS)}
    ends = ", ".join(f"{name} {1 / seconds[-1]:.2f}" for name, seconds in times.items())
    fig, alt, table = line_figure(
        {name: (WORKERS, [1 / one for one in seconds]) for name, seconds in times.items()},
        x="workers",
        y="share of gradients left",
        log="x",
        dots={n: ([3], [y]) for n, y in points.items()} if (of_100, factor) == (25, 4) else None,
        title=f"{of_100} of 100 steps take {factor} times as long (lines: modelled)",
        alt=f"Share of the gradients over 1 to 256 workers. With 256: {ends}.",
    )
    axes = fig.axes[0]
    axes.set_ylim(0, 1.05)
    axes.set_xticks(WORKERS, [str(count) for count in WORKERS])
    axes.minorticks_off()
    return fig, alt, table


def losses_on_two_axes(curves: Mapping[str, Sequence[Curve]], updates: int) -> None:
    """Show the loss against the updates, up to so many, and against seconds.

    curves: of each rule, a curve for each seed. All seeds are drawn, in the colour of the rule.
    """
    fig, both = figure(columns=2, height=3.1, sharey=True)
    with house_style():
        for look, (name, runs) in zip(SERIES, curves.items(), strict=False):
            for seed, run in enumerate(runs):
                style = {"color": look.color, "linewidth": 1.2, "marker": look.marker}
                label = None if seed else name
                losses = [loss for *_, loss in run]
                for axes, place, last in ((both[0], 1, updates + 1), (both[1], 0, len(run))):
                    places = [point[place] for point in run[:last]]
                    every = max(1, last // 6)
                    axes.plot(places, losses[:last], label=label, markevery=every, **style)
        both[0].set(xlabel="updates", ylabel="loss", title="Per update")
        both[1].set(xlabel="seconds (simulated compute)", title="Per second")
        both[0].legend()
    rows = [
        [name, seed, run[updates][2], run[-1][2], run[-1][1]]
        for name, runs in curves.items()
        for seed, run in enumerate(runs)
    ]
    words = "; ".join(
        f"{name}, seed {seed}: {early:.2f} and {late:.2f}" for name, seed, early, late, _ in rows
    )
    alt = f"Loss after {updates} updates and at the end. {words}."
    head = ["rule", "seed", f"loss after {updates} updates", "loss at the end", "updates"]
    show_figure(fig, alt=alt, table=[head, *rows])


def path(rate: float, delay: int, steps: int = STEPS) -> list[float]:
    """w after each step of w <- w - rate · (w of `delay` updates ago), from w = 1 on."""
    w = [1.0] * (delay + 1)
    for _ in range(steps):
        w.append(w[-1] - rate * w[-1 - delay])
    return w[delay:]


def delay(delay: int, rate: float) -> tuple[Any, str, Table]:
    """Figure, alt text and table of w against the step, for `show.explore`; the curvature is 1.

    Source of the limit: Arjevani, Shamir and Srebro, "A Tight Convergence Analysis for Stochastic
    Gradient Descent with Delayed Updates", 2018.
    """
    limit = 2 * math.sin(math.pi / (4 * delay + 2))
    word = "shrinks" if rate < limit else "grows"
    fig, alt, table = line_figure(
        {f"delay {delay}, rate {rate}": (range(STEPS + 1), path(rate, delay))},
        x="step",
        y="w",
        marks=False,
        at={"": 0.0},
        title=f"The limit is {limit:.3f}: w {word}",
        alt=f"w over {STEPS} steps with delay {delay} and rate {rate}: it {word}.",
    )
    fig.axes[0].set_ylim(-HIGHEST, HIGHEST)
    return fig, alt, table


def chord(delay: int = 2) -> None:
    """Show why w swings at the rate 2 sin(θ/2), θ = π / (2 · delay + 1): one step as a chord.

    A swing of constant height is a point that turns around the unit circle by θ in each step. The
    circle is turned so that the middle of the drawn step is at the top.
    """
    turn = math.pi / (2 * delay + 1)
    angles = {k: math.pi / 2 + (k - 0.5) * turn for k in range(-delay, 2)}  # of point t + k
    places = {k: (math.cos(angle), math.sin(angle)) for k, angle in angles.items()}
    old, start, end = places[-delay], places[0], places[1]
    middle, names = (0.0, math.cos(turn / 2)), {k: f"t{k:+d}" if k else "t" for k in places}
    names[-delay] += "\n(old)"
    titles = ("1. w turns by θ per step", "2. A step is a chord", "3. The old point")
    fig, panels = figure(columns=3, height=2.4)
    with house_style():
        for number, (axes, title) in enumerate(zip(panels, titles, strict=True)):
            around = [math.pi * k / 60 for k in range(-2, 43)]
            axes.plot([math.cos(a) for a in around], [math.sin(a) for a in around],
                      color=MUTED_COLOR, linewidth=1, marker="")  # fmt: skip
            shown = places if number == 0 else {k: places[k] for k in (-delay, 0, 1)}
            if number == 1:
                shown = {k: places[k] for k in (0, 1)}
            for k, place in shown.items():
                axes.plot([0, place[0]], [0, place[1]], color=MUTED_COLOR, linewidth=1, marker="")
                axes.plot(*place, "o", color=SERIES[0].color)
                axes.text(1.17 * place[0], 1.14 * place[1], names[k], ha="center", va="center")
            axes.plot(0, 0, "o", color=TEXT_COLOR, markersize=3)
            axes.set(xlim=(-0.6, 1.3), ylim=(-0.12, 1.32), title=title, aspect="equal")
            axes.set_axis_off()
        for k in range(-delay, 1):
            _arc(panels[0], angles[k], angles[k + 1], 0.35 if k % 2 else 0.3, "θ")
        for axes in panels[1:]:
            axes.plot([0, 0], [0, 1], color=TEXT_COLOR, linewidth=1, linestyle="--", marker="")
            _arrow(axes, start, end, SERIES[1].color)
        _arc(panels[1], math.pi / 2 - turn / 2, math.pi / 2, 0.55, "θ/2")
        _square(panels[1], middle)
        panels[1].text(0.0, 1.2, "length 2 sin(θ/2)", ha="center", color=TEXT_COLOR)
        _arrow(panels[2], (0.0, 0.0), old, SERIES[0].color)
        _arc(panels[2], angles[-delay], math.pi / 2, 0.45, "(τ + ½) θ")
        _square(panels[2], (0.0, 0.0))
        panels[2].text(0.0, 1.2, "step = −ηλ · old point", ha="center", color=TEXT_COLOR)
    alt = (
        f"Three drawings of the unit circle for a delay of {delay}. First: the points of the steps "
        f"t-{delay} to t+1, each {math.degrees(turn):.0f} degrees further. Second: the step from t "
        "to t+1 is a chord of length 2 sin(θ/2), at right angles to the line from the centre to "
        "its middle. Third: the chord is parallel to the radius of the old point, so that radius "
        "is at right angles to the same line, and the angle between them is (τ + ½) θ."
    )
    table = [
        ["delay τ", "angle θ, degrees", "(τ + ½) θ, degrees", "rate · λ = 2 sin(θ/2)"],
        [delay, math.degrees(turn), (delay + 0.5) * math.degrees(turn), 2 * math.sin(turn / 2)],
    ]
    show_figure(fig, alt=alt, table=table)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    arrow = {"arrowstyle": "-|>", "color": color, "lw": 2.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)


def _arc(axes: Any, begin: float, end: float, radius: float, words: str) -> None:
    """The arc of an angle around the centre, with its name outside of it."""
    steps = [begin + (end - begin) * k / 20 for k in range(21)]
    places = [radius * math.cos(a) for a in steps], [radius * math.sin(a) for a in steps]
    axes.plot(*places, color=TEXT_COLOR, linewidth=1, marker="")
    half, out = (begin + end) / 2, radius + (0.13 if len(words) < 4 else 0.3)
    axes.text(out * math.cos(half), out * math.sin(half), words, ha="center", va="center",
              fontsize=9)  # fmt: skip


def _square(axes: Any, corner: tuple[float, float], side: float = 0.08) -> None:
    """The mark of a right angle, up and to the right of its corner or below it."""
    x, y = corner
    up = side if y == 0 else -side
    axes.plot(
        [x, x + side, x + side], [y + up, y + up, y], color=TEXT_COLOR, linewidth=1, marker=""
    )
