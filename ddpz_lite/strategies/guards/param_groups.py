"""The parameter groups of an optimizer: given before sharding, by name, and needed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

ParamGroups = Callable[[nn.Module], Iterable[Any]]


def with_params(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with parameters in place of names; at stage 3 they are other ones by now."""
    params = dict(module.named_parameters())
    return [group | {"params": [params[name] for name in group["params"]]} for group in groups]


def with_names(
    module: nn.Module, param_groups: ParamGroups | None, may_be_frozen: bool = False
) -> list[dict[str, Any]]:
    """The groups with names in place of parameters; every trainable parameter is in one of them.

    may_be_frozen: the module is a stage of a pipeline, and others have what is trained.
    """
    names = {param: name for name, param in module.named_parameters()}
    if not may_be_frozen and not any(param.requires_grad for param in names):
        raise ValueError(
            f"{type(module).__name__} has no parameter with requires_grad=True to train"
        )
    if param_groups is None:
        return [{"params": [name for param, name in names.items() if param.requires_grad]}]
    given, groups, seen = list(param_groups(module)), [], set()
    if given and isinstance(given[0], torch.Tensor):
        given = [{"params": given}]
    for group in given:
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        params = list(params)
        strangers = [p for p in params if p not in names]
        if strangers:
            raise ValueError(
                f"param_groups returned a tensor of shape {tuple(strangers[0].shape)} that is no "
                "parameter of the module. Fix: take it from module.parameters() inside the "
                "function."
            )
        groups.append(group | {"params": [names[p] for p in params]})
        seen.update(groups[-1]["params"])
    lost = [name for param, name in names.items() if param.requires_grad and name not in seen]
    if lost:
        raise ValueError(
            f"{len(lost)} trainable parameters are in no group, {lost[0]} for one, so they would "
            "never be updated. Fix: put them in a group, or set requires_grad=False."
        )
    return groups or [{"params": []}]
