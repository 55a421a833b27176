"""Reads and replacements of parameters in modules whose units come and go (ZeRO-3).

[Note: read outside] Code may read a parameter of a unit that does not compute: the root a gain of a
block, a hook the weight of a unit that is sharded. `module.name` ends in `__getitem__`, which calls
`read` first. Code that walks over all parameters (`parameters()`, `state_dict()`) does not come
here, and gets what is there: shards, between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from ddpz_lite.strategies.units import Unit


class WatchedParameters(dict):
    """The `_parameters` of a module: reads are reported, changes refused."""

    def __init__(self, params: dict[str, Any], read: Callable[[Unit], None]) -> None:
        super().__init__(params)
        self.units: dict[str, Unit] = {}
        self._read = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        unit = self.units.get(name)
        if unit is not None and not unit.is_unsharded:
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
            "full_state_dict(model) into a new module; for an average, dz.AveragedModel(model)."
        )


def watch_parameters(units: list[Unit], read: Callable[[Unit], None]) -> None:
    """Call `read` with a unit before a parameter of it is read that is not unsharded."""
    for unit in units:
        for slot in (s for of_flat in unit.slots for slots in of_flat for s in slots):
            if not isinstance(slot.module._parameters, WatchedParameters):
                watched = WatchedParameters(slot.module._parameters, read)
                slot.module.__dict__["_parameters"] = watched
            slot.module._parameters.units[slot.attribute] = unit
