"""What runs beside an answer, in the answer's process: it hands over inputs and returns data.

A job is `job(answer, **inputs) -> data`. It runs on every rank, inside a process group, as a
plain program of torch.distributed would. It holds no expected value and no reference: whoever reads
this process's memory finds nothing to copy. `dz.span("...")` names what a judge wants to look at.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ddpz_lite.course.check.data import pack
from ddpz_lite.course.check.guard import own_work
from ddpz_lite.course.check.task import TASKS


def find(name: str) -> Callable[..., Any]:
    """The job of that name: "lesson03.weighted_mean"."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"{TASKS}.{module}.job"), function)


def run(name: str, answer: Any, inputs: dict[str, Any], guarded: bool = True) -> bytes:
    """Run a job on this rank; its data, packed.

    guarded: ready-made strategies of torch and of this library raise while it runs.
    """
    job = find(name)
    if not guarded:
        return pack(job(answer, **inputs))
    with own_work():
        return pack(job(answer, **inputs))
