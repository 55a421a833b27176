"""The units of ZeRO-3: which modules they are, where a parameter shows, what a rank has of each.

A parameter belongs to the innermost unit around it. One that several units share (tied weights)
belongs to the root, which is whole while any unit computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.mesh import Chunks, mark

Units = Callable[[str, nn.Module], bool] | Collection[type] | None


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a parameter; a tied parameter has several."""

    module: nn.Module
    attribute: str
    name: str  # from the root, for messages and checkpoints

    def put(self, param: nn.Parameter) -> None:
        dict.__setitem__(self.module._parameters, self.attribute, param)
        if type(self.module).__setattr__ is not nn.Module.__setattr__:
            setattr(self.module, self.attribute, param)  # RNNs keep a second list of their weights


class Watched(dict):
    """The `_parameters` of a module whose units come and go: reads are seen, changes refused.

    [Note: read elsewhere] Code may read a parameter of a unit that does not compute: the root a
    gain of a block, a hook the weight of a unit that is freed. `module.name` ends in `__getitem__`,
    which tells `read` of the unit first. Whoever walks over all parameters (`parameters()`,
    `state_dict()`) does not come here, and gets what is there: shards, at rest.
    """

    def __init__(self, params: dict[str, Any], read: Callable[[Unit], None]) -> None:
        super().__init__(params)
        self.units: dict[str, Unit] = {}
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not unit.is_whole:
            self._read(unit)
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if value is not self.get(name, self):
            self._refuse(name)

    def __delitem__(self, name: str) -> NoReturn:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"parameter {name!r} of a module was set, replaced or removed after sharding, as "
            "functional_call does: ZeRO-3 would neither gather nor train it. Fix: change the "
            "module before ZeRO3(module); for other values, summon() or load_full_state_dict."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "a module in ZeRO3 cannot be copied: the copy would gather the original. Fix: load "
            "full_state_dict(model) into a new module; for an average, average model.parameters()."
        )


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
    """How far the backward that runs is with a unit; only the methods of `Unit` change it."""

    WAITING = "not reached"
    OPEN = "reached: its gradients come in"
    CLOSED = "freed, its gradients on their way; a second use in the same backward opens it again"


class Unit:
    """Parameters that are gathered and freed together.

    `slots` are the places in modules that show them: by flat buffer, by parameter. `uses` counts
    the forwards whose backward has not begun. `lent` says that others than the unit's own forward
    have read its parameters, so that it is whole from the start of backward to the end; the root
    always is. A unit is born whole: its modules show the parameters that were given.
    """

    def __init__(self, name: str, flats: list[Flat], slots: list[list[list[Slot]]]) -> None:
        self.name, self.flats, self.slots = name, flats, slots
        self.held, self.backward, self.uses, self.lent = Held.WHOLE, Backward.WAITING, 0, not name
        self.position = 0  # in the order of the forward that runs

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if any(p.requires_grad for p in flat.params)]

    @property
    def is_whole(self) -> bool:
        return self.held is Held.WHOLE or self.held is Held.SUMMONED

    @property
    def is_done(self) -> bool:
        """Whether backward has come to all uses of the unit."""
        return self.backward is Backward.OPEN and not self.uses and not self.lent

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
            self._show(whole=True)

    def free(self, again: bool = False) -> None:
        """Back to shards, unless the user asked for whole parameters; `again`: see `Flat.free`."""
        if self.held is Held.WHOLE:
            self._show(whole=False)
        if self.held is not Held.SUMMONED and not (again and self.held is Held.SHARD):
            for flat in self.flats:
                flat.free(again)
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

    def open(self, first: bool) -> None:
        """Backward has come to a use of the unit; `first` if not by another output of it before."""
        self.uses = max(self.uses - first, 0)
        self.backward = Backward.OPEN
        self.use()

    def close(self) -> None:
        """The backward of the unit is over, as far as one knows."""
        self.free()
        self.backward = Backward.CLOSED

    def rest(self) -> None:
        """Backward is over, or was given up."""
        self.free()
        self.backward, self.uses, self.lent = Backward.WAITING, 0, not self.name

    def shows(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of the tensors is a parameter of the unit, or a view of one."""
        mine = {flat.full.untyped_storage()._cdata for flat in self.flats}
        dense = [t for t in tensors if t.layout is torch.strided]
        return any(t.untyped_storage()._cdata in mine for t in dense)

    def _show(self, whole: bool) -> None:
        """Put parameters in place of pieces, or the reverse; users may have frozen some."""
        for flat, slots_of_flat in zip(self.flats, self.slots, strict=True):
            for param, piece, slots in zip(flat.params, flat.pieces, slots_of_flat, strict=True):
                new, old = (param, piece) if whole else (piece, param)
                if new.requires_grad != old.requires_grad:
                    new.requires_grad_(old.requires_grad)
                for slot in slots:
                    slot.put(new)

    def nested(self, other: Unit) -> bool:
        """Whether one is inside the other, or both are the same; everything is inside the root."""
        mine, its = f".{self.name}".rstrip(".") + ".", f".{other.name}".rstrip(".") + "."
        return mine.startswith(its) or its.startswith(mine)


def split(module: nn.Module, units: Units = None) -> dict[str, dict[nn.Parameter, list[Slot]]]:
    """{unit name: {parameter: slots}}, the root ("") first. Units are modules that are called.

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
        yield from _blocks(module, "")
        return
    chosen = 0
    for name, child in module.named_modules():
        wanted = units(name, child) if callable(units) else isinstance(child, tuple(units))
        if name and wanted:
            if not is_called(child):
                raise ValueError(
                    f"{name} is a {type(child).__name__}, which is never called, so it cannot be "
                    "a unit. Fix: choose its members."
                )
            chosen += 1
            yield name
    if not chosen:
        raise ValueError(
            f"no module of {type(module).__name__} fits units={units!r}. Fix: pass the class of "
            "its blocks, or None for the default."
        )


def is_called(module: nn.Module) -> bool:
    """Whether the module has a forward: a ModuleList, say, has none."""
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def _blocks(module: nn.Module, path: str) -> list[str]:
    """The blocks of a model, none inside another: in `module` or below.

    They are the members of lists; of a Sequential, if they have modules of their own, or are all of
    one kind; and of what is left, two or more of one kind with modules of their own.
    """
    if isinstance(module, Chunks):
        return [name for chunk in module for name in _blocks(chunk, path)]
    children = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    children = {n: child for n, child in children.items() if any(True for _ in child.parameters())}
    called = [name for name, child in children.items() if is_called(child)]
    composite = [name for name in called if any(True for _ in children[name].children())]
    row: list[str] = []
    if isinstance(module, nn.ModuleList):
        row = called
    elif isinstance(module, nn.Sequential):
        row = composite if len({type(children[name]) for name in called}) > 1 else called
        row = row if len(row) > 1 else []
    inside = {n: [n] if n in row else _blocks(child, n) for n, child in children.items()}
    left = [name for name in composite if not inside[name]]
    kinds = Counter(type(children[name]) for name in left)
    inside |= {name: [name] for name in left if kinds[type(children[name])] > 1}
    return [name for names in inside.values() for name in names]


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
                    mark(new, like=param)
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
                    "reset_parameters(). Fix: pass init_fn, a function that fills a module's "
                    "parameters and buffers in place."
                )
            with torch.no_grad():
                reset(module)
        self.empty = [module for module in self.empty if module not in modules]


def _on_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)
