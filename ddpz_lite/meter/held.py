"""Bytes that a model and its optimizer hold, by kind.

The unit of counting is the storage, the block of memory behind a tensor, and each storage is
counted once, whole. So a tied weight counts once, a flat buffer counts once however many views look
into it, its padding included, and a DTensor counts what lies on this rank. A storage with two roles
has the first of them in the order of KINDS.

A strategy that keeps tensors where nobody can find them (in an object of its own, in a closure)
tells the meter with one method on its model or optimizer:

    def memory_extra(self) -> dict[str, Iterable[Tensor]]:  # by kind, one of KINDS
        return {"transient": [bucket.flat for bucket in self.buckets]}

What is named so is not the optimizer's, although the optimizer may lead to it: ZeRO-3's optimizer
knows the flat buffers, and a unit that is whole for a moment lies in one of them.
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
class TellsMemory(Protocol):
    """A model or optimizer that names tensors which the meter would not find."""

    def memory_extra(self) -> dict[str, Iterable[Tensor]]: ...


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes held now on this rank, by kind.

    parameters   storages of model.parameters().
    gradients    storages of their .grad, views into buckets included. In shards they are fp32, also
                 in mixed precision: 4 bytes, see `costs.MIXED`.
    optimizer    every tensor of the optimizer: its state, step counters too (4 bytes each in
                 torch's AdamW), tensors among its options (a learning rate kept on the device), and
                 parameters of its own, such as an fp32 master copy; also those of an optimizer
                 inside it.
    buffers      model.buffers(): BatchNorm statistics and the like.
    transient    what the model keeps beside these for communication or caching: tensors in plain
                 attributes of its modules (also inside lists, dicts and dataclasses), and what
                 `memory_extra()` names. A plain torch module has 0. Memory that torch keeps in C++,
                 such as DDP's own buckets, cannot be seen.

    A CUDA tensor counts the bytes it asked for; the allocator rounds up to 512. On the meta device
    the result says what the tensors would take. Raises TypeError where a model or an optimizer is
    something else.
    """
    held = dict.fromkeys(KINDS, 0)
    seen: set[int] = set()
    for kind, tensors in state_tensors(model, optimizer).items():
        for storage in storages(tensors):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                held[kind] += storage.nbytes()
    return held


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, list[Tensor]]:
    """The tensors of each kind, in the order of KINDS; one tensor may appear under two kinds."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory: the model must be a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "memory: the optimizer must be a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}."
        )
    parameters = list(model.parameters())
    found: dict[str, list[Tensor]] = {
        "parameters": parameters,
        "gradients": [grad for p in parameters if (grad := _grad(p)) is not None],
        "optimizer": [],
        "buffers": list(model.buffers()),
        "transient": [],
    }
    named: set[int] = set()  # storages
    for owner in (*model.modules(), optimizer):
        if not isinstance(owner, TellsMemory):
            continue
        for kind, tensors in owner.memory_extra().items():
            if kind not in found:
                raise ValueError(
                    f"{type(owner).__name__}.memory_extra: no kind {kind!r}; the kinds are {KINDS}."
                )
            tensors = list(tensors)
            found[kind] += tensors
            named |= {storage._cdata for storage in storages(tensors)}
    seen: set[int] = {id(module) for module in model.modules()}
    for module in model.modules():
        registered = ("_parameters", "_buffers", "_modules")
        plain = [value for name, value in vars(module).items() if name not in registered]
        found["transient"] += _tensors_in(plain, seen)
    if optimizer is not None:
        of_optimizer = list(_tensors_in(optimizer, seen))
        own = {id(p) for p in parameters}
        pieces = [t for t in of_optimizer if id(t) not in own and t.is_leaf]
        found["gradients"] += [grad for t in pieces if (grad := _grad(t)) is not None]
        found["optimizer"] += [
            tensor
            for tensor in of_optimizer
            if not any(storage._cdata in named for storage in storages([tensor]))
        ]
    return found


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
    """`.grad` as it lies here: a strategy's own parameters may reduce it when it is read."""
    return Tensor.grad.__get__(tensor)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors inside containers, dataclasses and optimizers, each object visited once.

    [Note: modules] They are not entered: a module held by another is visited as itself, and one
    kept out of sight on purpose, in a list say, has parameters that are in nobody's `parameters()`.
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
