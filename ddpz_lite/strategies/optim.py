"""The optimizer of every stage: a torch optimizer on this rank's pieces, and what is around it.

    reduce     Partial to Shard: the gradients of the pieces become final     (ZeRO-1)
    unscale    fp16: divide by the loss scale; an inf on any rank skips the step on all
    step       the torch optimizer, on pieces
    publish    Shard to Replicate: the new parameters become whole            (ZeRO-1, ZeRO-2)

Schedulers, `add_param_group`, closures and `zero_grad` work as with any `torch.optim.Optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .clip import clip_grad_norm_
from .comm import Comm
from .flat import Flat


class Scaler(Protocol):
    """What the step needs of a loss scale; see `precision.LossScale`."""

    def unscale_(self, gradients: Sequence[Tensor], comm: Comm, device: torch.device) -> bool: ...


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
        waiting: ZeRO-3: whole parameters, which hold gradients under `no_sync`.
        options: for `optimizer_class`.

    Raises: TypeError for an optimizer that mixes elements of a parameter.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        comm: Comm,
        loss_scale: Scaler | None = None,
        whole: bool = False,
        waiting: Sequence[nn.Parameter] = (),
        **options: Any,
    ) -> None:
        self.inner: torch.optim.Optimizer | None = None
        self.flats: list[Flat] = []  # where the pieces lie, if this optimizer lays them
        super().__init__(params, options)
        self.comm, self.loss_scale, self.waiting = comm, loss_scale, waiting
        self._ready, self._finite = False, True
        if not whole:
            device = self.param_groups[0]["params"][0].device
            check_elementwise(optimizer_class, options, device)
        self.adopt(self.param_groups)
        self.inner = optimizer_class([self._inner_group(g) for g in self.param_groups], **options)
        self.defaults, self.state = self.inner.defaults, self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_options_of(inner))

    # -- what a strategy defines

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Take in new groups: lay their parameters flat."""

    def piece(self, param: nn.Parameter) -> nn.Parameter:
        """The part of `param` that this rank steps on."""
        return param

    def reduce(self) -> None:
        """Make the gradients of all pieces final."""

    def publish(self) -> None:
        """Make the updated parameters whole."""

    # -- torch.optim.Optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        if self._finite:
            for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
                inner.update(_options_of(outer))
            self.inner.step()
            self.publish()
        self._ready = False
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm of the whole gradient; call it between backward and step, on every rank.

        Returns the norm before clipping, equal on all ranks; see `clip.clip_grad_norm_`.
        """
        self._prepare()
        return clip_grad_norm_(self.pieces(), max_norm, norm_type, self.comm)

    def pieces(self) -> list[nn.Parameter]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)
        for param in self.waiting:
            param.grad = None
        self._ready = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.inner is not None:
            group = self.param_groups[-1]
            self.adopt([group])
            self.inner.add_param_group(self._inner_group(group))
            group.update(_options_of(self.inner.param_groups[-1]))

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state, for the same world; `save_checkpoint` fits any world."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_options_of(inner))

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return _options_of(group) | {"params": [self.piece(p) for p in group["params"]]}

    def _prepare(self) -> None:
        """Reduce and unscale, once per step: clipping comes first if there is any."""
        if self._ready:
            return
        self.reduce()
        if self.loss_scale is not None:
            gradients = [p.grad for p in self.pieces() if p.grad is not None]
            self._finite = self.loss_scale.unscale_(gradients, self.comm, self.pieces()[0].device)
        self._ready = True


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def check_elementwise(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device | str = "cpu",
) -> None:
    """Raise TypeError unless each element's update depends on that element alone.

    Found by trying: two steps on a 2x4 parameter must equal two steps on its rows and on its
    columns laid flat. Muon (matrices), Adafactor (row and column means) and L-BFGS (inner products)
    do not.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    values = torch.linspace(-1.0, 1.0, 8, device=device).view(2, 4)
    grads = torch.linspace(0.5, -2.5, 8, device=device).view(2, 4) ** 3
    cuts = (lambda t: [t], lambda t: [t[0], t[1]], lambda t: [t.flatten()[:3], t.flatten()[3:]])
    optimizer_class([nn.Parameter(values.clone())], **options)  # wrong options raise as they are
    results = []
    for cut in cuts:
        parts = [nn.Parameter(part.clone()) for part in cut(values)]
        try:
            optimizer = optimizer_class(parts, **options)
            for _ in range(2):
                for part, grad in zip(parts, cut(grads), strict=True):
                    part.grad = grad.clone()
                optimizer.step()
        except (TypeError, RuntimeError, ValueError) as error:
            raise TypeError(_unsupported(name, f"it fails on one ({error})")) from error
        results.append(torch.cat([part.detach().flatten() for part in parts]))
    if not all(torch.allclose(results[0], other) for other in results[1:]):
        raise TypeError(_unsupported(name, "an element's update depends on other elements"))


def _unsupported(name: str, reason: str) -> str:
    return (
        f"{name} cannot step on a shard: {reason}. Cure: take an optimizer that works element by "
        "element (SGD, Adagrad, RMSprop, Adam, AdamW), or stage 0, where every rank holds whole "
        "parameters."
    )
