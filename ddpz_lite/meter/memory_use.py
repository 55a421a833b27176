"""Bytes that a model and its optimizer hold, by kind.

The unit is the storage, the block of memory behind a tensor, and each storage counts once, in full.
So a tied weight counts once, a flat buffer counts once with its padding, however many views it has,
and a DTensor counts its local shard. A storage with two roles has the first of them in KINDS.

A strategy that keeps tensors where they cannot be found (in another object, in a closure) names
them with one method on its model or optimizer:

    def memory_extra(self) -> dict[str, Iterable[Tensor]]:  # by kind, one of KINDS
        return {"transient": [bucket.flat for bucket in self.buckets]}

Tensors named so do not count for the optimizer, even if they are reachable from it: ZeRO-3's
optimizer refers to the flat buffers, which hold the unsharded unit for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

KINDS = ("parameters", "gradients", "optimizer", "buffers", "transient")


@runtime_checkable
class NamesMemory(Protocol):
    """A model or optimizer that names tensors that `memory` would not find."""

    def memory_extra(self) -> dict[str, Iterable[Tensor]]: ...


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes held now on this rank, by kind.

    parameters   storages of model.parameters().
    gradients    storages of their .grad, views into buckets included. Sharded gradients are fp32,
                 also in mixed precision: 4 bytes, see `costs.MIXED`.
    optimizer    every tensor of the optimizer: its state, step counters too (4 bytes each in
                 torch's AdamW), tensors among its options (a learning rate kept on the device), and
                 parameters of its own, such as an fp32 master copy; also those of an optimizer
                 inside it.
    buffers      model.buffers(): BatchNorm statistics and the like.
    transient    what else the model keeps for communication or caching: tensors in plain
                 attributes of its modules (also inside lists, dicts and dataclasses), and what
                 `memory_extra()` names. A plain torch module has 0. Memory that torch keeps in C++,
                 such as DDP's own buckets, cannot be seen.

    A CUDA tensor counts the bytes it requested; the allocator rounds up to 512. On the meta device
    the result is what the tensors would take. Raises TypeError for other types of model or
    optimizer.
    """
    total = dict.fromkeys(KINDS, 0)
    seen: set[int] = set()
    for kind, tensors in state_tensors(model, optimizer).items():
        for storage in storages(tensors):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total[kind] += storage.nbytes()
    return total


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """The tensors of each kind, in the order of KINDS; one tensor may appear under two kinds."""
    _check_types(model, optimizer)
    parameters = list(model.parameters())
    found: dict[str, list[Tensor]] = {
        "parameters": parameters,
        "gradients": [grad for p in parameters if (grad := _grad(p)) is not None],
        "optimizer": [],
        "buffers": list(model.buffers()),
        "transient": [],
    }
    named = _add_named(found, (*model.modules(), optimizer))
    seen: set[int] = {id(module) for module in model.modules()}
    for module in model.modules():
        registered = ("_parameters", "_buffers", "_modules")
        plain = [value for name, value in vars(module).items() if name not in registered]
        found["transient"] += _tensors_in(plain, seen)
    if optimizer is not None:
        of_optimizer = list(_tensors_in(optimizer, seen))
        of_model = {id(p) for p in parameters}
        shards = [t for t in of_optimizer if id(t) not in of_model and t.is_leaf]
        found["gradients"] += [grad for t in shards if (grad := _grad(t)) is not None]
        found["optimizer"] += [
            tensor
            for tensor in of_optimizer
            if not any(storage._cdata in named for storage in storages([tensor]))
        ]
    return found


def _check_types(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory: the model must be a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "memory: the optimizer must be a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}."
        )


def _add_named(found: dict[str, list[Tensor]], owners: Iterable[Any]) -> set[int]:
    """Add the tensors that the owners name in `memory_extra()`; returns their storages."""
    named: set[int] = set()
    for owner in owners:
        if not isinstance(owner, NamesMemory):
            continue
        for kind, tensors in owner.memory_extra().items():
            if kind not in found:
                raise ValueError(
                    f"{type(owner).__name__}.memory_extra: no kind {kind!r}; the kinds are {KINDS}."
                )
            tensors = list(tensors)
            found[kind] += tensors
            named |= {storage._cdata for storage in storages(tensors)}
    return named


def storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages behind tensors; of a DTensor the local part, of a sparse one both parts."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            inner, _ = tensor.__tensor_flatten__()
            parts = (getattr(tensor, name) for name in inner)  # a DTensor names its mesh here, too
            yield from storages(part for part in parts if isinstance(part, Tensor))
        elif tensor.layout is torch.sparse_coo:
            yield from storages((tensor._indices(), tensor._values()))
        else:
            yield tensor.untyped_storage()


def _grad(tensor: Tensor) -> Tensor | None:
    """`.grad` as stored, bypassing a parameter subclass that overrides the attribute."""
    return Tensor.grad.__get__(tensor)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors inside containers, dataclasses and optimizers, each object visited once.

    [Note: modules] They are not entered: a module inside another is visited directly, and one that
    is hidden on purpose, for example in a list, has parameters that no `parameters()` contains.
    """
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, torch.optim.Optimizer):
        inner = vars(value).values()
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    if id(value) in seen:
        return
    seen.add(id(value))
    for item in inner:
        yield from _tensors_in(item, seen)
