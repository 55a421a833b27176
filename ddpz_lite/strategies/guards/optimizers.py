"""Torch optimizers that step on parameters that no longer exist, or that no gradient reached.

[Note: every optimizer] One that was built before sharding holds parameters whose values are gone,
and nothing leads from the model to it: only torch's hook for all optimizers sees it. A process
without ZeRO3 has no hook.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.ownership import needs_whole

_models: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_optimizers(model: Any) -> None:
    """Check every step of any torch optimizer from now on, as long as this ZeRO3 exists."""
    _models.add(model)
    _register()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def check_position(state_dict: dict[str, Any], comm: Comm) -> None:
    """Raise ValueError for the state of another rank, or of another world."""
    saved, here = state_dict.get("position"), comm.position  # torch's own optimizers have none
    for axis, (index, parts) in (saved or {}).items():
        own = here.get(axis, (0, 1))
        if (index, parts) != own:
            raise ValueError(
                f"this optimizer state is part {index} of {parts} along {axis!r}, and this rank "
                f"steps on part {own[0]} of {own[1]}. Fix: load on each rank what its own "
                "state_dict() returned; or save_checkpoint and load_checkpoint, for any world."
            )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    name = type(optimizer).__name__
    for model in list(_models):
        if lost := [p for p in params if p in model.names_before_sharding]:
            raise RuntimeError(
                f"this {name} was built before sharding: it holds "
                f"{model.names_before_sharding[lost[0]]}, whose values now live in shards. Fix: "
                "build it from model.parameters() after model = ZeRO3(module)."
            )
        shards = [p for p in params if p in model.shards]
        if not shards or model.own_backward:  # a hook steps inside backward
            continue
        if needs_whole(type(optimizer)):
            raise RuntimeError(
                f"{name} needs whole parameters, and these are shards of ZeRO-3, on which it would "
                "step otherwise. Fix: ZeRO2(module.parameters(), optimizer_class), where every "
                "parameter has one owner; or an optimizer that works element by element."
            )
        if model.awaits_backward and all(p.grad is None for p in shards):
            raise RuntimeError(
                f"{name}.step() was called after forward, but no backward reached the model: none "
                "was called, it raised, or it was backward(inputs=...), which does not know "
                "shards. Fix: call loss.backward(); run a forward without backward under "
                "torch.no_grad()."
            )
        model.reshard()  # full parameters are stale after the step
