"""What `param.grad` is when ranks hold parts of a gradient, and how torch's own tools work on it.

    stage     `.grad` after backward
    DDP       the mean over ranks, in the shape of the parameter
    ZeRO-1    this rank's own gradient, in the shape of the parameter, until the step reduces it
    ZeRO-2    this rank's part of the mean, (n,); a part may be empty
    ZeRO-3    the same; the parameter is (n,) too

Reading a gradient never communicates: norms, sums and printing are of the part that is there. Two
tools of torch are made to count all ranks, so every rank has to call them:

    clip_grad_norm_   takes a norm of each gradient, which is local, and then the norm of these
                      norms: that is one all-reduce (`LocalNorm`)
    GradScaler        unscales gradients, and asks whether one is infinite: on any rank

Both finalize the gradients first. `optimizer.finalize_grads()` does that alone, on every rank:
afterwards `.grad` is this rank's part of the mean at stages 1, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpz_lite.strategies.clip import total_norm
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import counted

VECTOR_NORMS = ("linalg_vector_norm", "_foreach_norm")  # what torch.nn.utils.get_total_norm calls
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # what torch.amp.GradScaler calls
LINEAR = ("mul_", "div_", "zero_", "__imul__", "__itruediv__", "detach_", "requires_grad_")
CHANGES = ("__iadd__", "__isub__", "__setitem__")  # next to all names that end in "_"


def own_grad(param: Tensor) -> Tensor | None:
    """What autograd or a reduction has left in `.grad`, whatever class the parameter has."""
    return Tensor.grad.__get__(param)


def set_own_grad(param: Tensor, grad: Tensor | None) -> None:
    Tensor.grad.__set__(param, grad)


def in_backward() -> bool:
    """Whether autograd runs here: a hook then, or a forward that is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Stepper(Protocol):
    """The optimizer that a gradient is for: it steps on shards."""

    reduces_later: bool
    loss_scale: Any

    def finalize_grads(self) -> None: ...
    def has_unreduced(self) -> bool: ...
    def unscale_(self, gradients: list[Tensor]) -> None: ...


class GradState(Enum):
    """What is still to happen to a gradient before the step."""

    FINAL = "this rank's part of the mean"
    OWN = "this rank's own gradient, not reduced yet or times the loss scale"
    PARTIAL = "reduced only in part"


class LocalGrad(Tensor):
    """This rank's part of a gradient: a plain tensor, but for torch's clipping and GradScaler.

    param: where the final gradient is found, None for one computed from another. comm: the ranks
    that hold the other parts. stepper: finalizes it; None if it is final.
    """

    param: Tensor | None
    comm: Comm
    stepper: Stepper | None
    state: GradState

    @classmethod
    def of(
        cls,
        grad: Tensor,
        param: Tensor | None,
        comm: Comm,
        stepper: Stepper | None = None,
        state: GradState = GradState.FINAL,
    ) -> LocalGrad:
        self = grad.as_subclass(cls)
        self.param, self.comm, self.stepper, self.state = param, comm, stepper, state
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name == UNSCALE:
                return _unscale(*args)
            if name in VECTOR_NORMS and len(args) < 3 and "dim" not in kwargs:
                grads, *order = args[0], *args[1:], *kwargs.values()
                if isinstance(grads, Tensor):
                    return LocalNorm.of_one(grads, *order)
                return [LocalNorm.of_one(grad, *order) for grad in grads]
            _check_change(name, kwargs.get("out", args[0]))
            out = func(*args, **kwargs)
            if type(out) is not Tensor or func is Tensor.as_subclass:
                return out
            grad = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
            if out.shape != grad.shape:
                return out
            return cls.of(out, None, grad.comm, state=grad.state)  # p.grad * 0.5, say

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def show_partial(shard: Tensor, part: Tensor, comm: Comm, stepper: Stepper | None) -> None:
    """Show a gradient that waits for the step (`across`) as the gradient of its shard.

    Of an offloaded shard it is nan until it is final: a copy to the host would be for nothing.
    """
    grad = part if part.device == shard.device else shard.new_full((), torch.nan).expand_as(shard)
    shard.grad = LocalGrad.of(grad, shard, comm, stepper, GradState.PARTIAL)


def hide_partial(shards: Sequence[Tensor]) -> None:
    for shard in shards:
        if shard.grad is not None and shard.grad.state is GradState.PARTIAL:
            shard.grad = None


class LocalNorm(Tensor):
    """The norm () of this rank's part of a gradient, or several of them in a row (k,).

    `torch.linalg.vector_norm` of the row, the last line of torch's `get_total_norm`, is the norm of
    these gradients on all ranks. So clipping calls one collective, however many gradients a rank
    has: the stages of a pipeline have different numbers.
    """

    gradients: list[Tensor]

    @classmethod
    def of_one(cls, gradient: Tensor, order: float = 2.0) -> LocalNorm:
        local = gradient.as_subclass(Tensor)
        empty = torch.zeros((), dtype=local.dtype.to_real(), device=local.device)
        return cls.of(
            torch.linalg.vector_norm(local, order) if local.numel() else empty, [gradient]
        )

    @classmethod
    def of(cls, norm: Tensor, gradients: list[Tensor]) -> LocalNorm:
        self = norm.as_subclass(cls)
        self.gradients = gradients
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.linalg.vector_norm:
                return _norm_on_all_ranks(args[0].gradients, *args[1:], **(kwargs or {}))
            out = func(*args, **(kwargs or {}))
            if func not in (torch.stack, Tensor.to):
                return out
            norms = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            return cls.of(out, [g for n in norms for g in getattr(n, "gradients", [n])])


def _norm_on_all_ranks(gradients: list[Tensor], order: float = 2.0) -> Tensor:
    """The norm of these gradients, each with the parts that other ranks hold; plain ones as is."""
    by_ranks: dict[int, tuple[Comm, list[Tensor]]] = {}
    norms = [torch.linalg.vector_norm(g, order) for g in gradients if not isinstance(g, LocalGrad)]
    for grad in _final([g for g in gradients if isinstance(g, LocalGrad)]):
        group = by_ranks.setdefault(id(grad.comm), (grad.comm, []))
        if grad.param is None or counted(grad.param, grad.comm):
            group[1].append(grad.as_subclass(Tensor))
    norms += [total_norm(parts, order, comm, everywhere=True) for comm, parts in by_ranks.values()]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), order)


def _unscale(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """GradScaler's: multiply by `inverse_scale`; found_inf () becomes 1 if any rank has an inf."""
    shown = [g for g in gradients if isinstance(g, LocalGrad)]
    parts = [g for g in gradients if not isinstance(g, LocalGrad)]
    parts += [g.as_subclass(Tensor) for g in _final(shown)]
    device = parts[0].device if parts else found_inf.device
    bad = torch.zeros((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(parts, bad, inverse_scale.to(device))
    bad = shown[0].comm.reduce_scalar(bad, maximum=True, everywhere=True)
    found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf.device)))


def _final(gradients: list[LocalGrad]) -> list[LocalGrad]:
    """The final gradients in place of these; without those that turn out to be on no rank."""
    for stepper in dict.fromkeys(g.stepper for g in gradients if g.stepper is not None):
        stepper.finalize_grads()
    if any(g.param is None and g.state is not GradState.FINAL for g in gradients):
        raise RuntimeError(
            "the norm of something computed from a gradient that is not final: it is "
            f"{gradients[0].state.value}. Fix: optimizer.finalize_grads() before it, on every rank."
        )
    found = [g if g.stepper is None else own_grad(g.param) for g in gradients]
    return [g for g in found if g is not None]


def _check_change(name: str, target: Any) -> None:
    """Raise RuntimeError for a change in place that would not do what it does on one process."""
    changes = (name.endswith("_") and not name.startswith("__")) or name in CHANGES
    shown = next((t for t in tree_leaves(target) if isinstance(t, LocalGrad)), None)
    if shown is None or shown.state is GradState.FINAL or in_backward():
        return
    linear = name.removeprefix("_foreach_") in LINEAR
    if (changes or linear) and not (linear and shown.state is GradState.OWN):
        raise RuntimeError(
            f"{name} on p.grad (clip_grad_value_, say): it is {shown.state.value}, so the mean "
            "would change by something else. Fix: optimizer.finalize_grads() before it, on every "
            "rank; then p.grad is this rank's part of the mean."
        )
