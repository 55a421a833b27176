"""What a rank holds of each parameter, in the same form at every stage: ranges of its elements.

Usually it is one range of the flattened parameter. Where a layer is cut over the tensor axis of a
mesh there are more: some of its columns, for example, are a range in every row.

Checkpoints and full state dicts consist of these parts, so they do not depend on stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.mesh import cuts_of, experts
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.pipeline.pipeline import Pipeline, check_axes
from ddpz_lite.strategies.replica import Replica

T = TypeVar("T")


@dataclass
class Part:
    """What this rank holds of a logical 1-D tensor of `total` elements.

    spans: (start, length) of its ranges in the full tensor, in the order of `tensor`. The three
    dunder methods are what torch.distributed.checkpoint asks of a sharded tensor.
    """

    tensor: Tensor  # (sum of lengths,)
    spans: list[tuple[int, int]]
    total: int

    def like(self, value: Tensor) -> Part:
        """The same ranges of another tensor: of the parameter's momentum, say."""
        return Part(value.reshape(-1), self.spans, self.total)

    def copy_from(self, full: Tensor) -> None:
        """Copy this rank's elements from a full tensor (total,)."""
        for start, length in self.spans:
            self._ranges[start].copy_(full[start : start + length])

    @cached_property
    def _ranges(self) -> dict[int, Tensor]:
        """{start in the full tensor: the elements from there}."""
        views = self.tensor.split([length for _, length in self.spans])
        return {start: view for (start, _), view in zip(self.spans, views, strict=True)}

    def size(self) -> torch.Size:
        return torch.Size([self.total])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.tensor.numel():
            return []
        return [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([length]))
            for start, length in self.spans
        ]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._ranges[index.offset[0]]


@dataclass
class LocalParameter:
    """One parameter, as this rank holds it."""

    key: nn.Parameter  # the one that the optimizer has
    part: Part
    shape: list[int]


def flats_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Flat]:
    """The flat buffers that hold the model; the optimizer's where it was built without one."""
    model = sharded(model)
    flats = [*model.flats, *model.masters] if isinstance(model, Replica) else []
    return flats or (optimizer.flats if isinstance(optimizer, ShardedOptimizer) else [])


def comm_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Comm:
    """The ranks that hold this model together: those it was sharded over, else the world.

    Of a model on a mesh these hold one part of it together, and those of `comm.everyone` all of it.
    """
    owner = sharded(model) if isinstance(sharded(model), Replica) else optimizer
    comm = owner.comm if isinstance(owner, Replica | ShardedOptimizer) else Comm()
    check_axes(model, comm)
    return comm


def of_all_parts(model: nn.Module, comm: Comm, local: Mapping[str, T]) -> dict[str, T]:
    """A dict by parameter name with other ranks' experts and stages too; all ranks call it."""
    of_experts = {name for name, p in plain(model).named_parameters() if experts(p) is not None}
    some = {name: value for name, value in local.items() if name in of_experts}
    dense = {name: value for name, value in local.items() if name not in of_experts}
    joined = _join([dense, *same_experts(model).gather_along("expert", some)])
    return _join(comm.gather_along("pipe", joined))


def same_experts(model: nn.Module) -> Comm:
    """The ranks that have this rank's experts; this rank alone if all ranks have all of them."""
    found = map(experts, plain(model).parameters())
    return next((comm for comm in found if comm is not None), Comm.alone())


def _join(parts: list[dict[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}


def sharded(model: nn.Module) -> nn.Module:
    """The module that `parallelize` returned; of a Pipeline, that of its stage."""
    return model.stage if isinstance(model, Pipeline) else model


def plain(model: nn.Module) -> nn.Module:
    """The user's module; of a Pipeline, this rank's stage."""
    model = sharded(model)
    return model.module if isinstance(model, Replica) else model


def local_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, LocalParameter]:
    """Every parameter by its plain name: a shard if it is flat, otherwise the full tensor."""
    flat_of: dict[int, tuple[Flat, int]] = {}
    for flat in flats_of(model, optimizer):
        flat.copy_edits()
        for index, pair in enumerate(zip(flat.params, flat.shards, strict=True)):
            flat_of |= {id(param): (flat, index) for param in pair}
    found, cuts = {}, cuts_of(plain(model))
    for name, param in plain(model).named_parameters():
        key, tensor, shape, start = param, param.detach().reshape(-1), param.shape, 0
        if id(param) in flat_of:
            flat, index = flat_of[id(param)]
            key, shape, start = (
                flat.shards[index],
                flat.layout.shapes[index],
                flat.layout.owned(index)[0],
            )
            tensor = key.detach().reshape(-1)
        spans = [(start, tensor.numel())]
        if name in cuts:
            shape, spans = cuts[name].shape, cuts[name].spans(start, start + tensor.numel())
        found[name] = LocalParameter(key, Part(tensor, spans, prod(shape)), list(shape))
    return found


def write_back(here: LocalParameter) -> None:
    if not here.key.is_contiguous():  # then the part is a copy
        here.key.copy_(here.part.tensor.view(here.key.shape))


def refresh(flat: Flat) -> None:
    """After the shards changed: publish them, and gather parameters that are unsharded now."""
    flat.publish().wait()
    if flat.full.untyped_storage().size():
        flat.unshard()
        flat.wait_for_unshard()


def check_shapes(model: Mapping[str, list[int]], other: Mapping[str, list[int]], what: str) -> None:
    for name in [*model, *other]:
        here, there = model.get(name), other.get(name)
        if here != there:
            raise ValueError(
                f"{what} is of another model: {name} has shape {_shape(there)} there and "
                f"{_shape(here)} in the model. Fix: build the model with the configuration "
                "that was saved."
            )


def _shape(shape: list[int] | None) -> str:
    return "none" if shape is None else f"{list(shape)}"
