"""ddpz_lite: distributed training, from one device to ZeRO-3, as a course that you run.

    import ddpz_lite as dz

Names are imported on first use, so importing the package takes milliseconds and never imports
torch.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

__version__ = "0.1.0"

# public name -> the module that defines it
_DEFINED_IN = {
    name: module
    for module, names in {
        "launcher": ("launch", "RankFailed", "Run", "device", "progress"),
        "wire": ("Network", "CollectiveMismatch", "span"),
        "meter": ("memory", "MemoryTimeline"),
        "strategies.costs": ("zero_memory",),
        "strategies.parallelize": ("parallelize",),
        "strategies.per_group": ("per_group",),
        "strategies.ddp": ("DDP",),
        "strategies.hooks": ("Rounded", "Int8", "TopK", "PowerSGD"),
        "strategies.local": ("LocalSGD", "DiLoCo"),
        "strategies.pipeline.pipeline": ("Pipeline",),
        "strategies.tensor.layers": ("tensor_parallel",),
        "strategies.context.attention": ("context_parallel", "ContextAttention"),
        "strategies.experts": ("MoE", "with_experts", "expert_parallel"),
        "strategies.zero1": ("ZeRO1",),
        "strategies.zero2": ("ZeRO2",),
        "strategies.zero3": ("ZeRO3",),
        "checkpoint.save_load": ("save_checkpoint", "load_checkpoint"),
        "checkpoint.background": ("save_in_background",),
        "checkpoint.averaged": ("AveragedModel",),
        "checkpoint.full_optimizer": (
            "full_optimizer_state_dict",
            "load_full_optimizer_state_dict",
        ),
        "trainer.survivors": ("Survivors",),
        "checkpoint.full_state": ("full_state_dict", "load_full_state_dict", "save_safetensors"),
        "course.check.cell": ("check",),
        "model": ("GPT", "GPTConfig", "MLP", "CNN", "next_token_loss"),
    }.items()
    for name in names
}
_MODULES = {"data": "data", "meter": "meter", "show": "course.show"}
__all__ = [*_DEFINED_IN, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name in _DEFINED_IN:
        value = getattr(importlib.import_module(f".{_DEFINED_IN[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(
        f"module 'ddpz_lite' has no attribute {name!r}; it has {', '.join(sorted(__all__))}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _warm() -> None:
    """Start the fork server in the background if cells or lines are typed into this process.

    [Note: a process started by import]
    The first result in a notebook should appear within a second and a half, and importing torch
    takes longer. So the fork server starts while the reader is still at the next cell: in a kernel,
    in IPython and at Python's prompt. Scripts, tests, tools and ranks, which may never launch,
    start it with their first launch.
    """
    ipython = sys.modules.get("IPython")
    typed = hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)
    if typed and sys.platform != "win32":
        from ddpz_lite.launcher import warm

        with contextlib.suppress(OSError):  # no process can start now: launch would report it
            warm()


_warm()
