"""Which modules are the units of ZeRO-3, and where in them each parameter shows.

A parameter belongs to the innermost unit around it. One that several units share (tied weights)
belongs to the root, which is whole while any unit computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Units = Callable[[str, nn.Module], bool] | Collection[type] | None


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a parameter; a tied parameter has several."""

    module: nn.Module
    attribute: str
    name: str  # from the root, for messages and checkpoints

    def put(self, param: nn.Parameter) -> None:
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = param
        else:  # RNNs keep a second list of their weights
            setattr(self.module, self.attribute, param)


def split(module: nn.Module, units: Units = None) -> dict[str, dict[nn.Parameter, list[Slot]]]:
    """{unit name: {parameter: slots}}, the root ("") first. Raises ValueError if nothing is to
    shard.
    """
    names = list(_chosen(module, units))
    owner: dict[nn.Parameter, str] = {}
    slots: dict[nn.Parameter, list[Slot]] = defaultdict(list)
    for path, child in module.named_modules(remove_duplicate=False):
        unit = max((n for n in names if f"{path}.".startswith(f"{n}.")), key=len, default="")
        for attribute, param in child._parameters.items():
            if param is None:
                continue
            if owner.setdefault(param, unit) != unit:
                owner[param] = ""
            slot = Slot(child, attribute, f"{path}.{attribute}".lstrip("."))
            if all(s.module is not child or s.attribute != attribute for s in slots[param]):
                slots[param].append(slot)
    if not owner:
        raise ValueError(f"{type(module).__name__} has no parameters, so there is nothing to shard")
    found: dict[str, dict[nn.Parameter, list[Slot]]] = {"": {}} | {name: {} for name in names}
    for param, unit in owner.items():
        found[unit][param] = slots[param]
    return {name: held for name, held in found.items() if held or not name}


def _chosen(module: nn.Module, units: Units) -> Iterator[str]:
    if units is None:
        yield from _repeated_blocks(module, "")
        return
    chosen = 0
    for name, child in module.named_modules():
        wanted = units(name, child) if callable(units) else isinstance(child, tuple(units))
        if name and wanted:
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                raise ValueError(
                    f"{name} is a {type(child).__name__}, which is never called, so it cannot be "
                    "a unit. Cure: choose its members."
                )
            chosen += 1
            yield name
    if not chosen:
        raise ValueError(
            f"no module of {type(module).__name__} fits units={units!r}. Cure: pass the class of "
            "its blocks, or None for the default."
        )


def _repeated_blocks(module: nn.Module, path: str) -> Iterator[str]:
    """Members of the outermost lists of equal blocks, in `module` or below."""
    children = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        blocks = [n for n, child in children.items() if any(True for _ in child.parameters())]
        least = 2 if isinstance(module, nn.Sequential) else 1  # blocks that make a row, or a list
        if len(blocks) >= least and len({type(children[name]) for name in blocks}) == 1:
            yield from blocks
            return
    for name, child in children.items():
        yield from _repeated_blocks(child, name)


def materialize(
    slots: dict[nn.Parameter, list[Slot]],
    init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device | str | None,
) -> dict[nn.Parameter, list[Slot]]:
    """Give the unit's parameters on the meta device memory and values: only this unit's."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    real: dict[nn.Parameter, list[Slot]] = {}
    for param, where in slots.items():
        new = nn.Parameter(
            torch.empty_like(param, device=device), requires_grad=param.requires_grad
        )
        real[new] = where
        for slot in where:
            slot.put(new)
    for module in dict.fromkeys(slot.module for where in slots.values() for slot in where):
        fill(module, init_fn, device)
    return real


def fill(
    module: nn.Module,
    init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device | str | None,
) -> None:
    """Give the module's own buffers on the meta device memory, and all its own tensors values."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)
    reset = init_fn or getattr(type(module), "reset_parameters", None)
    if reset is None:
        raise RuntimeError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters(). "
            "Cure: pass init_fn, a function that fills a module's parameters and buffers in place."
        )
    with torch.no_grad():
        reset(module)
