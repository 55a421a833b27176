"""Models on the meta device: memory and values, unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddpz_lite.strategies.mesh import mark
from ddpz_lite.strategies.unit_choice import Slot


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
