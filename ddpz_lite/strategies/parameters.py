"""Parameters whose `.grad` is shown as what it is: a part, of which other ranks have the rest.

Only the class of a parameter changes, and no value of it; see `gradient` for what `.grad` is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.gradient import (
    GradState,
    LocalGrad,
    in_backward,
    own_grad,
    set_own_grad,
)


class _PlainCopies(nn.Parameter):
    """Copies, and what is saved, are of the class that the user gave."""

    def _plain(self) -> nn.Parameter:
        return Tensor._make_subclass(type(self).__bases__[1], self.detach(), self.requires_grad)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return memo.setdefault(id(self), self._plain().__deepcopy__({}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


@cache
def subclass(base: type[_PlainCopies], kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of class `kind` that becomes a `base`."""
    return kind if issubclass(kind, base) else type(kind.__name__, (base, kind), {})


class UnshardedParameter(_PlainCopies):
    """A parameter that is unsharded here, while this rank's optimizer steps on its shard.

    `place` is its flat buffer and the index in it. `.data`, once read, may be changed at any time;
    so from then on it is compared with the master copy before a step. Copies are plain.
    """

    place: tuple[Any, int]

    @property
    def data(self) -> Tensor:
        self.place[0].exposed = True
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        flat, index = self.place
        own, stepper, shard = own_grad(self), flat.owner, flat.shards[index]
        if stepper is None or in_backward():
            return own
        if own is None and shard.grad is None and stepper.reduces_later and stepper.has_unreduced():
            own = torch.zeros_like(self)  # other ranks may have one
        if own is None:
            return shard.grad
        if flat.comm.size == 1 and not flat.comm.axes and stepper.loss_scale is None:
            return own
        state = GradState.OWN if shard.grad is None else GradState.PARTIAL
        return LocalGrad.of(own, shard, flat.comm, stepper, state)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        flat, index = self.place
        own, shard = own_grad(self), flat.shards[index]
        if isinstance(value, LocalGrad) and value.state is GradState.FINAL:
            shard.grad = LocalGrad.of(value.as_subclass(Tensor), shard, flat.comm)
        elif own is None or value is None or value.data_ptr() != own.data_ptr():  # not p.grad *= 2
            if value is not None and flat.owner is not None and flat.owner.loss_scale is not None:
                raise RuntimeError(
                    "cannot assign p.grad under fp16: it is unknown whether the value is scaled. "
                    "Fix: call optimizer.finalize_grads() on every rank; then change p.grad, which "
                    "is this rank's part of the mean, in place."
                )
            shard.grad = None
            set_own_grad(self, None if value is None else value.as_subclass(Tensor))


class PartParameter(_PlainCopies):
    """A parameter of a rank that has other parts of the model than the ranks on `axes`.

    torch's clipping and GradScaler count the other ranks (see `gradient`), so that a Pipeline or a
    tensor-parallel model may do without `parallelize`.
    """

    axes: Comm

    @property
    def grad(self) -> Tensor | None:
        own = own_grad(self)
        if own is None or isinstance(own, LocalGrad) or in_backward():
            return own
        return LocalGrad.of(own, self, self.axes)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_own_grad(self, value.as_subclass(Tensor) if isinstance(value, LocalGrad) else value)


def show_parts(params: Iterable[nn.Parameter], axis: str, comm: Comm) -> Comm:
    """Make parameters PartParameters, with `axis` next to the axes that they have already.

    Returns what has these axes; where `comm` is one rank alone nothing changes.
    """
    if comm.world == 1:
        return Comm.alone()
    params = list(params)
    axes = {n: g for p in params if isinstance(p, PartParameter) for n, g in p.axes.axes.items()}
    shown = Comm.alone(axes | {axis: comm.group})  # one for all: norms are reduced by comm
    for param in params:
        param.__class__, param.axes = subclass(PartParameter, type(param)), shown
    return shown


class EmptyParameter(nn.Parameter):
    """What a pipeline stage has next to its own parameters: no elements (0, 0).

    It has a gradient where none of these has one: they are frozen, or this step did not use them.
    So every rank takes part in torch's clipping and GradScaler, which skip a rank without gradient.
    """

    axes: Comm
    own: Callable[[], Iterable[nn.Parameter]]

    @property
    def grad(self) -> Tensor | None:
        if any(param.grad is not None for param in self.own()):
            return None
        return LocalGrad.of(torch.zeros_like(self), None, self.axes)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        pass


def empty_parameter(axes: Comm, own: Callable[[], Iterable[nn.Parameter]]) -> nn.Parameter:
    """own: gives the stage's own parameters, which change with its units."""
    device = next((param.device for param in own()), "cpu")
    empty = torch.zeros(0, 0, device=device)  # two dimensions: Muon takes no others
    param = Tensor._make_subclass(EmptyParameter, empty, True)
    param.axes, param.own = axes, own
    return param
