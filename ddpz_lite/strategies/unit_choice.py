"""Which modules of a model are the units of ZeRO-3, and where each of their parameters shows.

A parameter belongs to the innermost unit around it. One that several units share (tied weights)
belongs to the root, which is unsharded while any unit computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import nn

from ddpz_lite.strategies.mesh import Chunks

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

    They are the members of lists, and of dicts with one kind; of a Sequential, if they have modules
    of their own, or are all of one kind; and of what is left, two or more of one kind with modules
    of their own.
    """
    if isinstance(module, Chunks):
        return [name for chunk in module for name in _blocks(chunk, path)]
    children = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children()}
    children = {n: child for n, child in children.items() if any(True for _ in child.parameters())}
    called = [name for name, child in children.items() if is_called(child)]
    composite = [name for name in called if any(True for _ in children[name].children())]
    row: list[str] = []
    same = isinstance(module, nn.ModuleDict) and len({type(m) for m in children.values()}) == 1
    if isinstance(module, nn.ModuleList) or (same and len(called) > 1):
        row = called
    elif isinstance(module, nn.Sequential):
        row = composite if len({type(children[name]) for name in called}) > 1 else called
        row = row if len(row) > 1 else []
    inside = {n: [n] if n in row else _blocks(child, n) for n, child in children.items()}
    left = [name for name in composite if not inside[name]]
    kinds = Counter(type(children[name]) for name in left)
    inside |= {name: [name] for name in left if kinds[type(children[name])] > 1}
    return [name for names in inside.values() for name in names]
