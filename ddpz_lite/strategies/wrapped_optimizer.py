"""The interface of `torch.optim.Optimizer` around an optimizer on shards: groups, options, states.

[Note: groups] `inner` has groups of its own, over shards. Their options are the same as those of
the groups outside: they are copied in before every call of `inner` and out after it. So a scheduler
works, and what an optimizer counts in its groups (schedule-free, Prodigy) is kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.guards.optimizers import check_position


class WrappedOptimizer(torch.optim.Optimizer):
    """A torch optimizer around another one, `inner`, with the same groups over other tensors."""

    comm: Comm
    inner: torch.optim.Optimizer | None = None
    whole: list[bool]  # by group; groups added later are like the last

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        """Lay the parameters of new groups in flat buffers."""

    def shard_of(self, param: nn.Parameter) -> nn.Parameter:
        """The part of `param` that this rank steps on."""
        return param

    def owns_whole(self, group: dict[str, Any]) -> bool:
        """Whether shards of this group are whole parameters, in their shapes, or empty."""
        index = next(i for i, other in enumerate(self.param_groups) if other is group)
        return self.whole[min(index, len(self.whole) - 1)]

    def call_inner(self, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What the optimizer class has besides torch's: `train` and `eval` of schedule-free, say.

        Every rank must call such a method: it may change parameters, which are published after it.
        """
        if name.startswith("_") or self.__dict__.get("inner") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.inner, name)
        return partial(self.call_inner, name) if callable(value) else value

    def give_options(self) -> None:
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options_of(outer))

    def take_options(self) -> None:
        self.state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_options_of(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.inner is not None:
            group = self.param_groups[-1]
            self.flatten([group])
            self.inner.add_param_group(self.inner_group(group))

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state, for the same world; `save_checkpoint` fits any world."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self.give_options()
        state_dict = self.inner.state_dict() | {"position": self.comm.position}
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        check_position(state_dict, self.comm)
        self.inner.load_state_dict(state_dict)
        self.take_options()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Empty shards are left out: they would cost state, and some optimizers fail.

        Some also fail on no shard at all, so one stays; but an empty one is not a matrix.
        """
        shards = [self.shard_of(p) for p in group["params"]]
        stay = [] if self.owns_whole(group) else shards[:1]
        return _options_of(group) | {"params": [p for p in shards if p.numel()] or stay}


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
