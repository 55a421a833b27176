"""Gradient descent with gradients that are some updates old."""

from __future__ import annotations

import math
from typing import Any

from ddpz_lite.course.show.charts import line_figure
from ddpz_lite.course.show.page import Table

STEPS, HIGHEST = 60, 3.0  # of the figure


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
