"""The optimizer of every stage: a torch optimizer on this rank's pieces, and what is around it.

    reduce     Partial to Shard: the gradients of the pieces become final     (ZeRO-1)
    unscale    fp16: divide by the loss scale; an inf on any rank skips the step on all
    step       the torch optimizer, on pieces
    publish    Shard to Replicate: the new parameters become whole            (ZeRO-1, ZeRO-2)

On a mesh with ZeRO-1 outside, `reduce` and `publish` end with what moves across, at every stage.

Schedulers, `add_param_group`, closures and `zero_grad` work as with any `torch.optim.Optimizer`.

[Note: groups] `inner` has groups of its own, over pieces. Their options are one thing with those of
the groups outside: they go in before every call of `inner` and come out after it. So a scheduler
is obeyed, and what an optimizer counts in its groups (schedule-free, Prodigy) is kept and seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.clip import clip_grad_norm_
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.gradient import own_grad, set_own_grad
from ddpz_lite.strategies.precision import LossScale


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer on pieces: here the pieces are the parameters (DDP: whole; ZeRO-3: shards).

    `param_groups` holds the parameters as given; `inner` is the torch optimizer, with the same
    groups and options over their pieces, and `state` is its state.

    Args:
        params: parameters or groups, as for any torch optimizer.
        optimizer_class: one that works element by element: SGD, Adagrad, RMSprop, Adam, AdamW, ...
        comm: the ranks over which the pieces' gradients are sharded, for norms.
        loss_scale: fp16 only.
        whole: no parameter is cut, so any optimizer will do.
        options: for `optimizer_class`.

    Raises: TypeError for an optimizer that mixes elements of a parameter.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        comm: Comm,
        loss_scale: LossScale | None = None,
        whole: bool = False,
        **options: Any,
    ) -> None:
        self.inner: torch.optim.Optimizer | None = None
        self.flats: list[Flat] = []  # where the pieces lie, if this optimizer lays them
        super().__init__(params, options)
        self.comm, self.loss_scale = comm, loss_scale
        self._ready, self._scaled, self._finite = False, False, True
        self.before_reduce: Callable[[], None] = lambda: None  # DDP's, for what no_sync has left
        if not whole:
            params = (p for group in self.param_groups for p in group["params"])
            device = next((p.device for p in params), "cpu")  # none on a frozen pipeline stage
            check_elementwise(optimizer_class, options, device)
        self.adopt(self.param_groups)
        self.inner = optimizer_class([self._inner_group(g) for g in self.param_groups], **options)
        self.defaults = self.inner.defaults
        self._take_options()

    # -- what a strategy defines

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Take in new groups: lay their parameters flat."""

    def piece(self, param: nn.Parameter) -> nn.Parameter:
        """The part of `param` that this rank steps on."""
        return param

    def reduce(self) -> None:
        """Make the gradients of all pieces final: across too, two buffers at a time."""
        for flat, before_last in zip(self.flats, [None, None, *self.flats], strict=False):
            if before_last is not None:
                before_last.reduced()
            flat.reduce_across()
        for flat in self.flats[-2:]:
            flat.reduced()

    def waits(self) -> bool:
        """Whether there are gradients that only the step reduces."""
        return any(flat.partial is not None for flat in self.flats)

    def publish(self) -> None:
        """Let all that hold the updated parameters have them."""
        for handle in [flat.publish() for flat in self.flats]:
            handle.wait()

    # -- torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        if self._finite:
            self._call("step", **kwargs)
        self._ready = False
        return loss

    def __getattr__(self, name: str) -> Any:
        """What the optimizer class has beside torch's: `train` and `eval` of schedule-free, say.

        Every rank must call such a method: parameters may be new after it, and are made whole.
        """
        if name.startswith("_") or self.__dict__.get("inner") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.inner, name)
        return partial(self._call, name) if callable(value) else value

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of `inner`, which may read and change options, state and pieces."""
        for flat in self.flats:
            flat.absorb()
        self._give_options()
        with torch._C.DisableTorchFunctionSubclass():  # a sharded gradient is a plain one here
            result = getattr(self.inner, method)(*args, **kwargs)
        self._take_options()
        self.publish()
        return result

    def _give_options(self) -> None:
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options_of(outer))

    def _take_options(self) -> None:
        self.state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_options_of(inner))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the whole gradient; call it between backward and step, on every rank.

        Returns the norm before clipping, equal on all ranks; see `clip.clip_grad_norm_`.
        """
        self.settle()
        return clip_grad_norm_(self.pieces(), max_norm, norm_type, self.comm)

    def pieces(self) -> list[nn.Parameter]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            super().zero_grad(set_to_none=False)
        else:
            for flat in self.flats:
                flat.partial = None
            for owner in (*self.param_groups, *({"params": f.pieces} for f in self.flats)):
                for param in owner["params"]:
                    set_own_grad(param, None)
        self._ready, self._scaled, self._finite = False, False, True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.inner is not None:
            group = self.param_groups[-1]
            self.adopt([group])
            self.inner.add_param_group(self._inner_group(group))

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state, for the same world; `save_checkpoint` fits any world."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._give_options()
        state_dict = self.inner.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.inner.load_state_dict(state_dict)
        self._take_options()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Pieces that are empty are left out: they would cost state, and some optimizers fail."""
        pieces = [self.piece(p) for p in group["params"]]
        return _options_of(group) | {"params": [p for p in pieces if p.numel()] or pieces[:1]}

    def settle(self) -> None:
        """Make the gradients of the pieces those to step by: once, unless a backward follows."""
        self.before_reduce()
        if not self._ready or self.waits():
            self.reduce()
        frozen = self.loss_scale is not None and not self._ready and not self.pieces()
        if self._scaled or frozen:  # a frozen pipeline stage takes part in the agreement
            device = next((piece.device for piece in self.pieces()), "cpu")
            self._finite = self.loss_scale.unscale_(self._gradients(), self.comm, device)
        self._ready, self._scaled = True, False

    def receive(self) -> None:
        """A reduced gradient comes, under fp16 times the loss scale: so must be what is there."""
        if self.loss_scale is not None and not self._scaled:
            self._scaled, there = True, self._gradients()
            if there:
                torch._foreach_mul_(there, self.loss_scale.scale)

    def _gradients(self) -> list[Tensor]:
        with torch._C.DisableTorchFunctionSubclass():  # a sharded gradient is a plain one here
            found = [own_grad(piece) for piece in self.pieces()]
            return [grad.as_subclass(Tensor) for grad in found if grad is not None]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def check_elementwise(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device | str = "cpu",
) -> None:
    """Raise TypeError unless each element's update depends on that element alone.

    Found by trying: a 2x4 parameter is cut as ranks would cut it, each part has an optimizer of its
    own, and three steps of all, the last with large gradients, must do what three steps on the
    whole do, and leave the same numbers in the groups. Muon (matrices), Adafactor (row and column
    means), L-BFGS (inner products), Prodigy (sums over all parameters) and whatever divides by a
    global norm do not.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    values = torch.linspace(-1.0, 1.0, 8, device=device).view(2, 4)
    grads = torch.linspace(0.5, -2.5, 8, device=device).view(2, 4) ** 3
    cuts = (
        lambda t: [[t]],
        lambda t: [[t[0]], [t[1]]],  # a row each
        lambda t: [[t.flatten()[:3]], [t.flatten()[3:], t.flatten()[:0]]],  # and one holds nothing
    )
    optimizer_class([nn.Parameter(values.clone())], **options)  # wrong options raise as they are
    first: list[Any] = []
    for cut in cuts:
        try:
            pairs = zip(cut(values), cut(grads), strict=True)
            ranks = [_try(optimizer_class, options, *pair) for pair in pairs]
        except Exception as error:
            raise TypeError(_unsupported(name, f"it fails on one ({error})")) from error
        after = torch.cat([elements for elements, _ in ranks], dim=1)  # (steps, 8)
        first = first or [after, ranks[0][1]]
        if not torch.allclose(first[0], after):
            raise TypeError(_unsupported(name, "an element's update depends on other elements"))
        for key, value in first[1].items():
            if not all(_same(value, numbers.get(key)) for _, numbers in ranks):
                raise TypeError(_unsupported(name, f"its {key!r} depends on all elements"))


def _try(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    values: list[Tensor],
    grads: list[Tensor],
) -> tuple[Tensor, dict[str, Any]]:
    """Three steps of one rank: its elements after each, and at the end the options of its group."""
    parts = [nn.Parameter(part.clone()) for part in values]
    optimizer, after = optimizer_class(parts, **options), []
    getattr(optimizer, "train", int)()  # schedule-free ones have two modes
    for size in (1.0, 1.0, 1e3):
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad * size
        optimizer.step()
        after.append(torch.cat([p.detach().flatten() for p in parts]))
    return torch.stack(after), _options_of(optimizer.param_groups[0])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | float) and isinstance(b, Tensor | float):
        a, b = (torch.as_tensor(x, dtype=torch.double, device="cpu") for x in (a, b))
        return torch.allclose(a, b, atol=0)
    return a == b


def _unsupported(name: str, reason: str) -> str:
    return (
        f"{name} cannot step on a shard: {reason}. Fix: take an optimizer that works element by "
        "element (SGD, Adagrad, RMSprop, Adam, AdamW), or stage 0 without mixed_precision and "
        "offload, where every rank holds whole parameters."
    )
