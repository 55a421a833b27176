"""The optimizer of every stage: a torch optimizer on this rank's shards, and what is around it.

    finalize_grads  Partial to Shard: the gradients of the shards become final     (ZeRO-1)
    check           fp16: an inf on any rank skips the step on all
    step            the torch optimizer, on shards
    publish         Shard to Replicate: the new parameters reach all ranks         (ZeRO-1, ZeRO-2)

On a mesh with ZeRO-1 outside, the first and the last end with what is sent across, at every stage.
Schedulers, `add_param_group`, closures and `zero_grad` work as with any `torch.optim.Optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.clip import clip_grad_norm_
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.gradient import own_grad, set_own_grad
from ddpz_lite.strategies.guards.elementwise import check_class
from ddpz_lite.strategies.ownership import whole_groups
from ddpz_lite.strategies.precision import LossScale
from ddpz_lite.strategies.wrapped_optimizer import WrappedOptimizer


class ShardedOptimizer(WrappedOptimizer):
    """A torch optimizer on shards: here these are the parameters (DDP: full ones; ZeRO-3: shards).

    `param_groups` holds the parameters as given; `inner` is the torch optimizer, with the same
    groups and options over their shards, and `state` is its state.

    Args:
        params: parameters or groups, as for any torch optimizer.
        optimizer_class: one that works element by element (Adam, AdamW, ...), or see `ownership`.
        comm: the ranks over which gradients are sharded, for norms.
        loss_scale: fp16 only.
        cuts: whether ranks hold different elements, so that not every optimizer works.
        ownership: "parameter" if it needs whole matrices; None: Muon and Adafactor do.
        options: for `optimizer_class`.

    Raises: TypeError for an optimizer that mixes elements of a parameter.
    """

    may_own = False  # whether a rank can own whole parameters

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        comm: Comm,
        loss_scale: LossScale | None = None,
        cuts: bool = True,
        ownership: str | None = None,
        **options: Any,
    ) -> None:
        check_class(optimizer_class)
        self.flats: list[Flat] = []  # of the shards, if this optimizer has them in flat buffers
        super().__init__(params, options)
        self.comm, self.loss_scale = comm, loss_scale
        self._is_final = False
        self.before_finalize: Callable[[], None] = lambda: None  # DDP's, for what no_sync has left
        given = optimizer_class, options, self.param_groups
        self.whole = whole_groups(*given, ownership, cuts, self.may_own, comm.axes)
        self.flatten(self.param_groups)
        self.inner = optimizer_class([self.inner_group(g) for g in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self.take_options()

    # -- what a strategy adds to

    def reduce(self) -> None:
        """Reduce across, two buffers at a time; strategies reduce inside before that."""
        for flat, before_last in zip(self.flats, [None, None, *self.flats], strict=False):
            if before_last is not None:
                before_last.wait_for_reduce()
            flat.reduce_across()
        for flat in self.flats[-2:]:
            flat.wait_for_reduce()

    def has_unreduced(self) -> bool:
        """Whether there are gradients that `finalize_grads` would reduce."""
        return any(flat.partial is not None for flat in self.flats)

    def publish(self) -> None:
        """Send the updated shards to all ranks that hold the same parameters."""
        for handle in [flat.publish() for flat in self.flats]:
            handle.wait()

    # -- torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finalize_grads()
        if self._is_finite():
            self.call_inner("step", **kwargs)
        self._is_final = False
        return loss

    def finalize_grads(self) -> None:
        """Reduce what waits for the step, on every rank; twice does what once does.

        Afterwards the gradient of each shard is this rank's part of the mean over ranks.
        """
        self.before_finalize()
        if not self._is_final or self.has_unreduced():
            self.reduce()
        self._is_final = True

    def unscale_(self, gradients: list[Tensor]) -> None:
        """fp16: divide reduced gradients, which just arrived, by the loss scale."""
        if self.loss_scale is not None and gradients:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale.scale)

    def _is_finite(self) -> bool:
        """Whether to step: False under fp16 if a gradient is inf or nan on any rank."""
        if self.loss_scale is None:
            return True
        shards = self.shards()
        grads = [own_grad(p).as_subclass(Tensor) for p in shards if own_grad(p) is not None]
        return self.loss_scale.update(grads, self.comm, shards[0].device if shards else "cpu")

    def call_inner(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of `inner`, which may read and change options, state and shards."""
        for flat in self.flats:
            flat.copy_edits()
        self.give_options()
        with torch._C.DisableTorchFunctionSubclass():  # a LocalGrad is a plain tensor here
            result = getattr(self.inner, method)(*args, **kwargs)
        self.take_options()
        self.publish()
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the full gradient; call it between backward and step, on every rank.

        Returns the norm before clipping, equal on all ranks; see `clip.clip_grad_norm_`.
        """
        self.finalize_grads()
        return clip_grad_norm_(self.shards(), max_norm, norm_type, self.comm)

    def shards(self) -> list[nn.Parameter]:
        """What the torch optimizer steps on."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for param in (*params, *(shard for flat in self.flats for shard in flat.shards)):
            if set_to_none:
                set_own_grad(param, None)
            elif (grad := own_grad(param)) is not None:
                grad.as_subclass(Tensor).detach().zero_()
        for waiting in (flat.waiting for flat in self.flats if flat.partial is not None):
            waiting.partial = None if set_to_none else waiting.partial.zero_()
        self._is_final = False
