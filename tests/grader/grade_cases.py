"""Programs for ranks, run in the notebook's way and in the grader's way, for the grader's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ddpz_lite.course.check.run import observe
from ddpz_lite.course.check.task import Case, Observed, find
from ddpz_lite.course.grader import Limits, observe_in_sandbox
from ddpz_lite.wire import Network

# The job of this task hands over a list and returns it: a program may put anything into it.
TASK = find("03.weighted_mean")
FREE = replace(TASK, uses_own=False)
GIVEN = (
    "import os, torch\nimport torch.distributed as dist\nfrom torch.distributed import ReduceOp\n"
)


def program(source: str) -> str:
    """The answer that runs `source` with r, n, x (this rank's tensor) and returns the list `out`.

    Line k of `source` is line k + 3 of the cell.
    """
    lines = [
        "def weighted_mean(gradients, samples):",
        "    r, n, x = dist.get_rank(), dist.get_world_size(), gradients[0]",
        "    out = []",
        *(f"    {line}" for line in source.strip().splitlines()),
        "    gradients[:] = out",
    ]
    return "\n".join(lines) + "\n"


def case(world: int, timeout: float = 20.0, network: Network | None = None) -> Case:
    rng = torch.Generator().manual_seed(world)
    inputs = [{"gradients": [torch.randn(3, 5, generator=rng)], "samples": 1} for _ in range(world)]
    return Case(f"{world} ranks", inputs, network=network, timeout=timeout)


def by_launch(source: str, a_case: Case) -> Observed:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(GIVEN + program(source), space)
    return observe(FREE, space["weighted_mean"], [a_case])[0]


def by_broker(
    source: str,
    a_case: Case,
    *,
    sandboxed: bool = True,
    earlier: Sequence[tuple[str, str]] = (),
    limits: Limits | None = None,
) -> Observed:
    cells = [("given", GIVEN), *earlier, ("weighted_mean-answer", program(source))]
    return observe_in_sandbox(FREE, cells, [a_case], limits, sandboxed)[0]


def returned(seen: Observed) -> list[list]:
    """What each rank put into `out`."""
    return [rank["gradients"] for rank in seen.data]
