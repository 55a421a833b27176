"""What the user sees of a gradient in shards, and does to it between backward and step.

torch's clipping, a GradScaler and loops over `p.grad` must do what they do in one process:

    norm                    that of the gradient on all ranks
    check of a GradScaler   an inf on one rank is an inf on all
    change in place         each rank changes its shard
    anything else           ZeRO-1 and 2: with the whole mean, gathered for it. ZeRO-3: with the
                            shard, as for its parameters

The first, the second and the last are collectives, so all ranks do the same. Under fp16 what is
seen here is unscaled, at stage 0 too, so the first look is one: all agree whether all is finite. A
hook inside backward sees what is there: this rank's own gradient (ZeRO-2 has taken it already;
ZeRO-3 has a shard of the mean), under fp16 times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ddpz_lite.strategies.clip import total_norm
from ddpz_lite.strategies.comm import Comm

if TYPE_CHECKING:
    from ddpz_lite.strategies.flat import Flat

NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm")
SCALER = "_amp_foreach_non_finite_check_and_unscale_"
CHANGES = ("zero_", "fill_", "copy_", "masked_fill_", "normal_", "uniform_")  # beside pointwise


def own_grad(param: Tensor) -> Tensor | None:
    """What autograd has left in `.grad`: this rank's own, or DDP's mean."""
    return Tensor.grad.__get__(param)


def set_own_grad(param: Tensor, grad: Tensor | None) -> None:
    Tensor.grad.__set__(param, grad)


def in_backward() -> bool:
    """Whether autograd runs here: a hook then, or a forward that is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Shard(Tensor):
    """The gradient of a shard of ZeRO-3, (n,): a tensor, but its norm is that over all ranks."""

    flat: Flat

    @classmethod
    def of(cls, grad: Tensor, flat: Flat) -> Shard:
        self = grad.as_subclass(cls)
        self.flat = flat
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        mine = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Shard))
        flat = mine.flat
        with torch._C.DisableTorchFunctionSubclass():
            if name != "__get__":  # shape, dtype, data
                flat.settle()
            if name in NORMS:
                return _norms(args, kwargs, flat.comm)
            if name == SCALER:
                return _unscale(*args, flat.comm)
            out = func(*args, **kwargs)
            is_gradient = type(out) is Tensor and out.shape == mine.shape
            return cls.of(out, flat) if is_gradient else out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


class Placed(nn.Parameter):
    """A parameter that knows its `place`: a flat buffer, and the index in it. Copies are plain."""

    place: tuple[Flat, int]

    def _plain(self) -> nn.Parameter:
        return Tensor._make_subclass(type(self).__bases__[1], self.detach(), self.requires_grad)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return memo.setdefault(id(self), self._plain().__deepcopy__({}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class Waiting(Placed, nn.Parameter):
    """A shard of ZeRO-3 with ZeRO-1 outside: its gradient waits for the step, or to be read.

    Until then it is reduced inside only; see `Flat.partial`.
    """

    @property
    def grad(self) -> Tensor | None:
        flat, _ = self.place
        if flat.partial is not None:
            flat.settle()
        return own_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        flat, index = self.place
        flat.drop(index)
        set_own_grad(self, value)


class Resident(Placed):
    """A whole parameter of which this rank's optimizer has a piece: the piece gets what is done.

    `.data`, once read, may be changed at any time; so from then on it is compared with the master
    copy before a step. `.grad` is the mean, in shards, as soon as it is reduced.
    """

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
        own, reduced = own_grad(self), flat.pieces[index].grad
        later = flat.owner is not None and flat.owner.changes_later
        if own is not None and (not later or in_backward()):
            return own
        waits = flat.partial is not None or (later and flat.owner.waits())
        if own is None and reduced is None and not waits:
            return None
        if flat.comm.size > 1 or flat.shard.device != self.device:
            return Gradient(self)
        flat.settle()
        final = flat.pieces[index].grad
        return None if final is None else final.view(self.shape)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if isinstance(value, Gradient):
            if value.param is self:  # p.grad *= 2
                return
            value = value.clone()
        flat, index = self.place
        final = flat.pieces[index].grad
        if value is not None and final is not None and value.data_ptr() == final.data_ptr():
            return  # p.grad *= 2, in a world of one
        if value is not None and flat.owner is not None and flat.owner.loss_scale is not None:
            raise RuntimeError(
                "p.grad = ... under fp16: nobody can tell whether this gradient carries the loss "
                "scale. Fix: after backward p.grad.copy_(g), with a g that does not."
            )
        if value is None or value is not own_grad(self):
            flat.pieces[index].grad = None
            flat.drop(index)
        set_own_grad(self, value)


@cache
def resident(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of this class that becomes resident."""
    return kind if issubclass(kind, Resident) else type(kind.__name__, (Resident, kind), {})


class Gradient(Tensor):
    """The mean gradient of a resident parameter, in its shape: a handle, without memory."""

    @staticmethod
    def __new__(cls, param: Resident) -> Gradient:
        flat, index = param.place
        kind = {"dtype": flat.shard.dtype, "device": param.device}
        self = Tensor._make_wrapper_subclass(cls, param.shape, **kind)
        self.param, self.flat, self.index = param, flat, index
        self.owned = slice(*flat.layout.owned(index))  # this rank's elements
        return self

    def __repr__(self) -> str:
        return f"Gradient(size={tuple(self.shape)}, here={self.owned})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Where its memory is, as torch and the meter ask; nothing is reduced for it."""
        own = own_grad(self.param)
        self.held = self.flat.pieces[self.index].grad if own is None else own
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(held: dict[str, Tensor], *_: Any) -> Tensor:
        return held["held"]

    def shard(self) -> Tensor:
        """This rank's part (n,); zeros if no rank has used the parameter."""
        self.flat.settle()
        piece = self.flat.pieces[self.index]
        return torch.zeros_like(piece) if piece.grad is None else piece.grad

    def part_of(self, other: Any) -> Any:
        """This rank's part of another operand of an elementwise change."""
        if isinstance(other, Gradient):
            return other.shard()
        if not isinstance(other, Tensor) or other.ndim == 0:
            return other
        return other.expand(self.shape).reshape(-1)[self.owned].to(self.flat.shard.device)

    def whole(self) -> Tensor:
        full = torch.zeros(self.shape.numel(), dtype=self.dtype, device=self.device)
        full[self.owned] = self.shard()
        return self.flat.comm.reduce_scalar(full).to(self.device).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        mine = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        target = kwargs.get("out", args[0])
        changes = func._schema.is_mutable and isinstance(tree_leaves(target)[0], cls)
        if name in ("detach", "alias", "detach_"):
            return mine if name == "detach_" else cls(mine.param)
        if name in NORMS and len(args) < 3:  # over all dimensions
            shards = tree_map_only(cls, cls.shard, args[0])
            return _norms((shards, *args[1:]), kwargs, mine.flat.comm)
        if name == SCALER:
            return _unscale([g.shard() for g in args[0]], *args[1:], mine.flat.comm)
        if changes and isinstance(args[0], list):  # _foreach_: operands of each, or of all
            pairs = partial(zip, args[0], strict=True)
            rest = [
                [g.part_of(o) for g, o in pairs(a)] if isinstance(a, list) else a for a in args[1:]
            ]
            return func([g.shard() for g in args[0]], *rest, **kwargs)
        if changes and (name in CHANGES or torch.Tag.pointwise in func.tags):
            if name == "zero_" and (own := own_grad(target.param)) is not None:
                own.zero_()  # nothing to reduce for
            else:
                parts = {key: target.part_of(value) for key, value in kwargs.items()}
                func(*map(target.part_of, args), **parts)
            return target
        if changes or (args[0] is mine and any(r.alias_info for r in func._schema.returns)):
            raise TypeError(
                f"{name} on p.grad: the gradient lies in shards; it can be changed element by "
                "element (mul_, clamp_, copy_, ...) and read whole, but has no views. Fix: "
                "g = p.grad.clone(), change that, then p.grad.copy_(g)."
            )
        return func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs))


def _norms(args: Sequence[Any], kwargs: dict[str, Any], comm: Comm) -> Any:
    """torch's norms, of shards: (gradient or gradients, order, ...)."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    order = 2 if order in (None, "fro") else order
    if isinstance(args[0], Tensor):
        return total_norm([args[0]], order, comm)
    return [total_norm([one], order, comm) for one in args[0]]


def _unscale(shards: list[Tensor], found: Tensor, inverse: Tensor, comm: Comm) -> None:
    """A GradScaler's: multiply by `inverse`; set `found` to 1 where a rank has an inf or nan."""
    device = shards[0].device
    bad = torch.zeros((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(shards, bad, inverse.to(device))
    found.copy_(torch.maximum(found, comm.reduce_scalar(bad, maximum=True).to(found.device)))
