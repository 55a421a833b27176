"""The units of ZeRO-3: which modules they are, where a parameter shows, what a rank has of each.

A parameter belongs to the innermost unit around it. One that several units share (tied weights)
belongs to the root, which is whole while any unit computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from .flat import Flat

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


class Held(Enum):
    """What this rank has of a unit's parameters; only the methods of `Unit` change it.

    SHARD -gather-> GATHERING -use-> WHOLE -free-> SHARD      (a gather unused is freed too)
                                     WHOLE -summon-> SUMMONED -dismiss-> SHARD
    """

    SHARD = "its shard, and no memory for more"
    GATHERING = "its shard; the whole is on its way"
    WHOLE = "all, shown to the modules"
    SUMMONED = "all, until the user is done: `free` changes nothing"


class Backward(Enum):
    """How far the backward that runs is with a unit; WAITING between two of them."""

    WAITING = "not reached"
    OPEN = "reached: its gradients come in"
    CLOSED = "freed, its gradients on their way; a second use in the same backward opens it again"


class Unit:
    """Parameters that are gathered and freed together.

    `slots` are the places in modules that show them: by flat buffer, by parameter. `uses` counts
    the forwards whose backward has not begun. A unit is born whole: its modules show the
    parameters that were given.
    """

    def __init__(self, name: str, flats: list[Flat], slots: list[list[list[Slot]]]) -> None:
        self.name, self.flats, self.slots = name, flats, slots
        self.trainable = [flat for flat in flats if flat.params[0].requires_grad]
        self.held, self.backward, self.uses = Held.WHOLE, Backward.WAITING, 0
        self.position = 0  # in the order of the forward that runs

    def gather(self) -> None:
        """Start to make the unit whole, if it is not."""
        if self.held is Held.SHARD:
            for flat in self.flats:
                flat.gather()
            self.held = Held.GATHERING

    def use(self) -> None:
        """Make the unit whole, and show whole parameters to its modules."""
        self.gather()
        if self.held is Held.GATHERING:
            for flat in self.flats:
                flat.gathered()
            self.held = Held.WHOLE
            self._show([flat.params for flat in self.flats])

    def free(self) -> None:
        """Back to shards, unless the user asked for whole parameters."""
        if self.held is Held.WHOLE:
            self._show([flat.pieces for flat in self.flats])
        if self.held in (Held.GATHERING, Held.WHOLE):
            for flat in self.flats:
                flat.free()
            self.held = Held.SHARD

    def summon(self) -> None:
        """Make the unit whole until `dismiss`."""
        self.use()
        self.held = Held.SUMMONED

    def dismiss(self) -> None:
        """Back to shards, after `summon`."""
        if self.held is Held.SUMMONED:
            self.held = Held.WHOLE
        self.free()

    def rest(self) -> None:
        """Backward is over, or was given up."""
        self.free()
        self.backward, self.uses = Backward.WAITING, 0

    def _show(self, params: list[list[nn.Parameter]]) -> None:
        for of_flat, slots_of_flat in zip(params, self.slots, strict=True):
            for param, slots in zip(of_flat, slots_of_flat, strict=True):
                for slot in slots:
                    slot.put(param)

    def nested(self, other: Unit) -> bool:
        """Whether one is inside the other, or both are the same; everything is inside the root."""
        mine, its = f".{self.name}".rstrip(".") + ".", f".{other.name}".rstrip(".") + "."
        return mine.startswith(its) or its.startswith(mine)


def split(module: nn.Module, units: Units = None) -> dict[str, dict[nn.Parameter, list[Slot]]]:
    """{unit name: {parameter: slots}}, the root ("") first.

    Raises ValueError if there is nothing to shard.
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


class Builder:
    """Gives what is on the meta device memory and values: unit by unit, each module once.

    [Note: tied across units] A module that holds a parameter of another unit, because it is tied,
    is filled as a whole with the first of its units: `reset_parameters()` sets all of a module's
    parameters, and could not once some of them are shards.

    Args:
        module: the model.
        units: what `split` found in it.
        init_fn: called with each module; default: its own `reset_parameters()`.
        device: default: CUDA where there is one, else the host.

    Attribute: `empty` are the modules that have no values yet, in the order of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        units: dict[str, dict[nn.Parameter, list[Slot]]],
        init_fn: Callable[[nn.Module], Any] | None,
        device: torch.device | str | None,
    ) -> None:
        self.slots = {param: where for held in units.values() for param, where in held.items()}
        self.init_fn = init_fn
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.empty = [child for child in module.modules() if _on_meta(child)]

    def materialize(self, slots: dict[nn.Parameter, list[Slot]]) -> dict[nn.Parameter, list[Slot]]:
        """The unit's slots by its new parameters; those of later units stay on the meta device."""
        holders = {slot.module for where in slots.values() for slot in where}
        self.fill([module for module in self.empty if module in holders])
        places = ((where[0].module, where[0].attribute, where) for where in slots.values())
        return {module._parameters[attribute]: where for module, attribute, where in places}

    def fill(self, modules: list[nn.Module]) -> None:
        """Give the own tensors of these modules memory, where they have none, and values."""
        for module in modules:
            for param in module._parameters.values():
                if param is not None and param.is_meta:
                    new = torch.empty_like(param, device=self.device)
                    new = nn.Parameter(new, requires_grad=param.requires_grad)
                    for slot in self.slots[param]:
                        slot.put(new)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self.device)
        for module in modules:
            reset = self.init_fn or getattr(type(module), "reset_parameters", None)
            if reset is None:
                raise RuntimeError(
                    f"{type(module).__name__} is on the meta device and has no "
                    "reset_parameters(). Cure: pass init_fn, a function that fills a module's "
                    "parameters and buffers in place."
                )
            with torch.no_grad():
                reset(module)
        self.empty = [module for module in self.empty if module not in modules]


def _on_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)
