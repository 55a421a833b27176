"""What a rank has of each parameter, the same at every stage: a range of its elements, laid flat.

Checkpoints and full state dicts are made of these parts, so they know nothing of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .comm import Comm
from .flat import Flat
from .optim import ShardedOptimizer
from .replica import Replica


@dataclass
class Part:
    """What this rank has of a logical 1-D tensor: elements start to start + len(tensor) of `total`.

    The three dunder methods are what torch.distributed.checkpoint asks of a tensor that is sharded.
    """

    tensor: Tensor  # (stop - start,)
    start: int
    total: int

    def like(self, value: Tensor) -> Part:
        """The same range of another tensor: of the parameter's momentum, say."""
        return Part(value.reshape(-1), self.start, self.total)

    def size(self) -> torch.Size:
        return torch.Size([self.total])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.tensor.numel():
            return []
        return [ChunkStorageMetadata(torch.Size([self.start]), self.tensor.size())]

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
        return self.tensor


@dataclass
class Held:
    """One parameter, as this rank has it."""

    key: nn.Parameter  # what the optimizer knows it by
    part: Part
    shape: list[int]


def flats_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Flat]:
    """The flat buffers that hold the model; the optimizer's where it was built without one."""
    flats = [*model.flats, *model.masters] if isinstance(model, Replica) else []
    return flats or (optimizer.flats if isinstance(optimizer, ShardedOptimizer) else [])


def comm_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Comm:
    """The ranks that hold this model together: those it was sharded over, else the world."""
    if isinstance(model, Replica):
        return model.comm
    return optimizer.comm if isinstance(optimizer, ShardedOptimizer) else Comm()


def plain(model: nn.Module) -> nn.Module:
    """The user's module."""
    return model.module if isinstance(model, Replica) else model


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Held]:
    """Every parameter by its plain name: a piece where it is flat, whole where it is not."""
    flat_of: dict[int, tuple[Flat, int]] = {}
    for flat in flats_of(model, optimizer):
        flat.absorb()
        for index, pair in enumerate(zip(flat.params, flat.pieces, strict=True)):
            flat_of |= {id(param): (flat, index) for param in pair}
    held = {}
    for name, param in plain(model).named_parameters():
        if id(param) in flat_of:
            flat, index = flat_of[id(param)]
            shape, piece = flat.layout.shapes[index], flat.pieces[index]
            part = Part(piece.detach(), flat.layout.owned(index)[0], shape.numel())
            held[name] = Held(piece, part, list(shape))
        else:
            whole = Part(param.detach().reshape(-1), 0, param.numel())
            held[name] = Held(param, whole, list(param.shape))
    return held


def write_back(here: Held) -> None:
    if not here.key.is_contiguous():  # its part was a copy
        here.key.copy_(here.part.tensor.view(here.key.shape))


def refresh(flat: Flat) -> None:
    """After the shards changed: tell all that hold them, and make resident parameters whole."""
    flat.publish().wait()
    if flat.full.untyped_storage().size():
        flat.gather()
        flat.gathered()


def check_shapes(model: Mapping[str, list[int]], other: Mapping[str, list[int]], what: str) -> None:
    for name in [*model, *other]:
        here, there = model.get(name), other.get(name)
        if here != there:
            raise ValueError(
                f"{what} is of another model: {name} has shape {_told(there)} there and "
                f"{_told(here)} in the model. Cure: build the model with the configuration "
                "that was saved."
            )


def _told(shape: list[int] | None) -> str:
    return "none" if shape is None else f"{list(shape)}"
