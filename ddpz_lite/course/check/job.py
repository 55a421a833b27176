"""What runs next to an answer, in the answer's process: it hands over inputs and returns data.

A job is `job(answer, **inputs) -> data`. It runs on every rank, inside a process group, as a
plain program of torch.distributed would. It holds no expected value and no reference: code that
reads this process's memory finds nothing to copy. `dz.span("...")` names what a judge looks at.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpz_lite.course.check.data import pack
from ddpz_lite.course.check.guard import own_work
from ddpz_lite.course.check.task import TASKS


def find(name: str) -> Callable[..., Any]:
    """The job of that name: "lesson03.weighted_mean"."""
    module, _, function = name.partition(".")
    return getattr(_own_copy(f"{TASKS}.{module}.job"), function)


@functools.cache
def _own_copy(name: str) -> ModuleType:
    """The module of a lesson's jobs, loaded once more under another name: to replace a name in the
    one that an import gives, `job.span` say, changes nothing here.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"there is no module {name}")
    spec = importlib.util.spec_from_file_location(f"{name}, as it runs", found.origin)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for pickle
    spec.loader.exec_module(module)
    return module


def run(name: str, answer: Any, inputs: dict[str, Any], guarded: bool = True) -> bytes:
    """Run a job on this rank; its data, packed.

    guarded: ready-made strategies of torch and of this library raise while it runs.
    """
    job = find(name)
    if not guarded:
        return pack(job(answer, **inputs))
    with own_work():
        return pack(job(answer, **inputs))
