"""Parameters that were replaced after wrapping, and outputs that no gradient reaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

from ddpz_lite.strategies.forwards import tensors_in
from ddpz_lite.strategies.gradient import own_grad


class KnownModules:
    """The parameters and modules that a model had when it was wrapped.

    shard_of: of ZeRO-3, whose modules hold full parameters at times, in place of these shards.

    [Note: cost] A check compares pointers and does not walk over the tree: 30 us for the 149
    parameters of twelve blocks, where `list(model.parameters())` takes 100. Modules that came
    without parameters are known from then on.
    """

    def __init__(
        self, model: nn.Module, shard_of: Mapping[Any, nn.Parameter] | None = None
    ) -> None:
        self._shard_of = shard_of or {}
        self._learn(model)

    def _learn(self, model: nn.Module) -> None:
        self._names = {self._shard_of.get(p, p): n for n, p in model.named_parameters()}
        self._modules = list(model.modules())
        self._found = self._look()

    def _look(self) -> list[Any]:
        params = [p for module in self._modules for p in module._parameters.values()]
        found = [self._shard_of.get(p, p) for p in params] if self._shard_of else params
        for module in self._modules:
            found += module._modules.values()
        return found

    def check(self, model: nn.Module) -> None:
        """Raise RuntimeError if the model has a new parameter, which no optimizer knows.

        A part that was removed is only unused: a rank may leave it out.
        """
        now = self._look()
        if len(now) == len(self._found) and all(map(is_, now, self._found)):
            return
        names = {n: self._shard_of.get(p, p) for n, p in model.named_parameters()}
        added = [name for name, param in names.items() if param not in self._names]
        if added:
            raise RuntimeError(
                f"{added[0]} was set or replaced after the model was wrapped "
                "(as load_state_dict(assign=True) does), so the optimizer has another parameter "
                "and this one would never be trained. Fix: change the module before wrapping it; "
                "load values without assign."
            )
        self._learn(model)


def is_detached(output: Any, model: nn.Module) -> bool:
    """Whether the output needs no gradient, though parameters do."""
    floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not floats or any(tensor.requires_grad for tensor in floats):
        return False
    return any(param.requires_grad for param in model.parameters())


def check_reached(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise RuntimeError if none of these has a gradient, after a forward with such an output."""
    if all(own_grad(tensor) is None for tensor in tensors):
        raise RuntimeError(
            f"{name}.step() was called, but no parameter has a gradient: the model's output needs "
            "none. Fix: no detach(), no .data and no torch.no_grad() inside forward; run a forward "
            "without backward under torch.no_grad()."
        )
