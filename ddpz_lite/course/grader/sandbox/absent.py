"""Replaces, in the sandbox, what a task asks to build: each strategy of this library.

Every name can be imported from it, so that modules which import one still load; a call raises.
"""

from __future__ import annotations

from typing import Any, NoReturn


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        from ddpz_lite.course.check.guard import refused

        raise refused(f"{__name__}.{name}")

    return type(name, (), {"__init__": refuse})
