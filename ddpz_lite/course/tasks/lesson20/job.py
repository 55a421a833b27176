"""Jobs of lesson 20: plans for clusters in which something is always broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpz_lite.course.check.watch import Kept


def goodput(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the keyword arguments of each."""
    return _called(answer, calls)


def spares(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the keyword arguments of each."""
    return _called(answer, calls)


def diagnose(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the keyword argument of each, a log."""
    return _called(answer, calls)


def plan(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: the keyword arguments of each. A ValueError is a result, too: its words."""

    def refusing(**call: Any) -> dict[str, Any]:
        try:
            return {"plan": answer(**call), "refused": None}
        except ValueError as error:
            return {"plan": None, "refused": str(error)}

    return _called(refusing, calls)


def _called(answer: Callable[..., Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    kept = Kept(calls=calls)
    return {"results": [answer(**call) for call in calls], "changed": kept.changed()}
