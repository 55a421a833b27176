"""Models that cannot be wrapped, and what must not be done to one that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.placement import Placement, Strategy


def check_separate(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two parameters share memory without being the same: they would be cut."""
    spans = []
    for name, param in {param: (name, param) for name, param in named}.values():
        if param.numel() and not param.is_meta:
            reach = sum((n - 1) * step for n, step in zip(param.shape, param.stride(), strict=True))
            start, size = param.storage_offset(), param.element_size()
            storage = param.untyped_storage()._cdata
            spans.append((storage, start * size, (start + reach + 1) * size, name))
    for (one, _, stop, name), (other, start, _, also) in pairwise(sorted(spans)):
        if one == other and start < stop:
            raise ValueError(
                f"{name} and {also} share memory but are two parameters, so each would train a "
                "copy of its own. Fix: one Parameter in both places, or clone() one; or stage 0."
            )


def check_frozen(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise RuntimeError if one of these, frozen when the model was wrapped, is trainable now."""
    for name, param in frozen:
        if param.requires_grad:
            raise RuntimeError(
                f"{name} was frozen when the model was wrapped and has requires_grad=True now; "
                "its gradient would never be reduced. Fix: set requires_grad before wrapping."
            )


def check_hooks(module: nn.Module, sharded: bool) -> None:
    """Raise ValueError if a parameter has a hook that would be lost, or was wrapped before."""
    for name, param in module.named_parameters():
        if param._post_accumulate_grad_hooks or (sharded and param._backward_hooks):
            raise ValueError(
                f"{name} has a gradient hook: of an earlier parallelize, or one that its shards "
                "would not call. Fix: build a new module; change gradients after backward."
            )


def check_same_storage(
    params: Sequence[Tensor], full: Tensor, shards: Sequence[Tensor], shard: Tensor
) -> None:
    """Raise RuntimeError if the optimizer and the model no longer see the same values."""
    for tensors, flat in ((params, full), (shards, shard)):
        at = flat.untyped_storage()._cdata
        if any(tensor.untyped_storage()._cdata != at for tensor in tensors):
            raise RuntimeError(
                "a parameter was moved or cast, or its .data replaced, after sharding, so the "
                "optimizer steps on another tensor. Fix: module.to(...) before sharding; "
                "change values in place."
            )


def check_published(version: int, published: int) -> None:
    """Raise RuntimeError if a shard changed that other ranks compute with (ZeRO-1 outside)."""
    if version != published:
        raise RuntimeError(
            "a shard was changed outside of a step, but ranks that compute with the same "
            "parameters each hold a part of it (ZeRO-1 outside), and the others do not have the "
            "change. Fix: optimizer.publish() after the change, on every rank."
        )


def check_dense(grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise TypeError(
            f"a gradient is {grad.layout}; only dense gradients can be laid flat. Fix: build the "
            "embedding with sparse=False."
        )


def check_shard_hooks(shards: Iterable[nn.Parameter], model: nn.Module) -> None:
    """Raise RuntimeError if the user has hooked a shard of ZeRO-3, which autograd never reaches."""
    for shard in shards:
        if len(shard._backward_hooks or ()) > 1:  # the first is ZeRO-3's own
            name = next(n for n, p in model.named_parameters() if p is shard)
            raise RuntimeError(
                f"register_hook was called on a shard of {name}: autograd does not reach shards, "
                "so the hook would never run. Fix: remove it; hooks of "
                "register_post_accumulate_grad_hook get the shard with its final gradient. In "
                "place of torch's MemTracker, which registers such hooks: dz.MemoryTimeline."
            )


def refuse_gradient(name: str, _: Tensor) -> NoReturn:
    """A hook on a shard of ZeRO-3."""
    raise RuntimeError(
        f"backward reached a shard of {name}: outside forward a parameter is only this rank's "
        "shard, as it is in parameters() at any time, and the loss used it. Fix: compute the term "
        "inside forward, with parameters by name, as in self.layer.weight; or stage 2."
    )


def check_stage(stage: Any, row: Strategy, gather_dtype: Any, clash: str | None) -> None:
    """Raise ValueError for an option of another stage, or a name in two stages of a pipeline."""
    if gather_dtype is not None and row.parameter is not Placement.SHARD:
        raise ValueError(
            f"gather_dtype={gather_dtype} is for parameters that are gathered to compute with, at "
            f"stage 3, and this is stage={stage}. Fix: leave it out."
        )
    if clash is not None:
        raise ValueError(
            f"two stages have a parameter named {clash}, and checkpoints know them by name. "
            "Fix: stages whose parameters have the names of the whole model, as gpt_stages makes."
        )


def check_zero3_options(world: int, reshard_after_forward: Any, gather_dtype: Any) -> None:
    n = reshard_after_forward
    if not isinstance(n, int) or n > world or (n is not False and (n < 1 or world % n)):
        raise ValueError(
            "reshard_after_forward must be True, False, or a number of ranks that divides the "
            f"{world} of the sharding group, got {n!r}"
        )
    if gather_dtype not in (None, torch.int8):
        raise ValueError(f"gather_dtype must be None or torch.int8, got {gather_dtype!r}")


def refuse_create_graph() -> NoReturn:
    raise RuntimeError(
        "backward with create_graph=True: ZeRO-3 has freed the parameters when the second "
        "derivative needs them. Fix: stage 2."
    )
