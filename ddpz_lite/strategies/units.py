"""The units of ZeRO-3: parameters that are gathered and freed together.

`unit_choice` says which modules are units. Only the methods of `Unit` change its two states.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.unit_choice import Slot


class ShardedState(Enum):
    """What this rank has of a unit's parameters.

    SHARDED -unshard-> UNSHARDING -wait_for_unshard-> UNSHARDED -reshard-> SHARDED
    UNSHARDED -summon-> SUMMONED -dismiss-> SHARDED     UNSHARDING, unused -reshard-> SHARDED
    """

    SHARDED = "its shard, and no memory for more"
    UNSHARDING = "its shard; the all-gather of the rest is in flight"
    UNSHARDED = "all of them, registered in the modules"
    SUMMONED = "all of them, until the user is done: `reshard` changes nothing"


class BackwardState(Enum):
    """How far the backward that runs is with a unit."""

    WAITING = "not reached"
    PRE_BACKWARD = "reached: its gradients arrive"
    POST_BACKWARD = "resharded, its gradients in flight; a second use in this backward goes back"


class Unit:
    """One unit. It is created unsharded: its modules have the parameters that were given.

    flats: its flat buffers, one for each kind of parameter. slots: where modules hold them; by flat
    buffer, by parameter.
    """

    def __init__(self, name: str, flats: list[Flat], slots: list[list[list[Slot]]]) -> None:
        self.name, self.flats, self.slots = name, flats, slots
        self.state, self.backward = ShardedState.UNSHARDED, BackwardState.WAITING
        self.uses = 0  # forwards whose backward has not begun
        # Whether code outside this unit's forward has read its parameters. If so, the unit stays
        # unsharded for the whole backward. Always True for the root.
        self.read_outside = not name
        self.position = 0  # in the order of the forward that runs

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if any(p.requires_grad for p in flat.params)]

    @property
    def is_unsharded(self) -> bool:
        return self.state in (ShardedState.UNSHARDED, ShardedState.SUMMONED)

    @property
    def is_done(self) -> bool:
        """Whether backward has reached all uses of the unit."""
        reached = self.backward is BackwardState.PRE_BACKWARD
        return reached and not self.uses and not self.read_outside

    def unshard(self) -> None:
        """Start the all-gather of a sharded unit."""
        if self.state is ShardedState.SHARDED:
            for flat in self.flats:
                flat.unshard()
            self.state = ShardedState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, started now if it was not, and register full parameters."""
        self.unshard()
        if self.state is ShardedState.UNSHARDING:
            for flat in self.flats:
                flat.wait_for_unshard()
            self.state = ShardedState.UNSHARDED
            self._register(unsharded=True)

    def reshard(self, after_forward: bool = False) -> None:
        """Back to shards, unless the user summoned the unit; see `Flat.reshard`."""
        if self.state is ShardedState.UNSHARDED:
            self._register(unsharded=False)
        again = after_forward and self.state is ShardedState.SHARDED
        if self.state is not ShardedState.SUMMONED and not again:
            for flat in self.flats:
                flat.reshard(after_forward)
            self.state = ShardedState.SHARDED

    def summon(self) -> None:
        """Unshard until `dismiss`."""
        self.wait_for_unshard()
        self.state = ShardedState.SUMMONED

    def dismiss(self) -> None:
        """Back to shards, after `summon`."""
        if self.state is ShardedState.SUMMONED:
            self.state = ShardedState.UNSHARDED
        self.reshard()

    def pre_backward(self, first: bool) -> None:
        """Backward reached a use of the unit; `first` if by no other output of this use before."""
        self.uses = max(self.uses - first, 0)
        self.backward = BackwardState.PRE_BACKWARD
        self.wait_for_unshard()

    def post_backward(self) -> None:
        self.reshard()
        self.backward = BackwardState.POST_BACKWARD

    def reset(self) -> None:
        """Backward is over, or was given up."""
        self.reshard()
        self.backward, self.uses = BackwardState.WAITING, 0
        self.read_outside = not self.name

    def owns_any(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of the tensors is a parameter of the unit, or a view of one."""
        own = {flat.full.untyped_storage()._cdata for flat in self.flats}
        dense = [t for t in tensors if t.layout is torch.strided]
        return any(t.untyped_storage()._cdata in own for t in dense)

    def _register(self, unsharded: bool) -> None:
        """Put full parameters in place of shards, or the reverse; users may have frozen some."""
        for flat, slots_of_flat in zip(self.flats, self.slots, strict=True):
            for param, shard, slots in zip(flat.params, flat.shards, slots_of_flat, strict=True):
                new, old = (param, shard) if unsharded else (shard, param)
                if new.requires_grad != old.requires_grad:
                    new.requires_grad_(old.requires_grad)
                for slot in slots:
                    slot.put(new)

    def is_nested(self, other: Unit) -> bool:
        """Whether one is inside the other, or both are the same; everything is inside the root."""
        one, two = f".{self.name}".rstrip(".") + ".", f".{other.name}".rstrip(".") + "."
        return one.startswith(two) or two.startswith(one)
