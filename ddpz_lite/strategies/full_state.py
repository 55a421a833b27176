"""The state of the plain module, whole: out of a model of any stage, and into one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .comm import Comm
from .parts import check_shapes, flats_of, held_by, plain, refresh, write_back


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain module: its names, its shapes, master precision, on the host.

    Every rank must call it and every rank gets it; one flat buffer is gathered at a time.
    """
    whole: dict[int, Tensor] = {}
    for flat in flats_of(model):
        for param, piece, value in zip(flat.params, flat.pieces, flat.gather_master(), strict=True):
            whole[id(param)] = whole[id(piece)] = value.cpu()
    state = plain(model).state_dict(keep_vars=True)
    return {
        name: whole[id(value)].clone() if id(value) in whole else value.detach().cpu().clone()
        for name, value in state.items()
    }


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a plain module's state dict into a model of any stage; each rank keeps its part.

    Raises ValueError for names or shapes that are not the model's.
    """
    held = held_by(model)
    current = plain(model).state_dict(keep_vars=True)
    shapes = {id(h.key): h.shape for h in held.values()}
    wanted = {n: shapes.get(id(v), list(v.shape)) for n, v in current.items()}
    check_shapes(
        wanted, {name: list(value.shape) for name, value in state.items()}, "the state dict"
    )
    for name, here in held.items():
        part, source = here.part, state[name].reshape(-1)
        part.tensor.copy_(source[part.start : part.start + part.tensor.numel()])
        write_back(here)
    for name, value in current.items():
        if name not in held and list(value.shape) == list(state[name].shape):
            value.copy_(state[name])
    for flat in flats_of(model):
        refresh(flat)


def save_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write `full_state_dict(model)` to one file that other programs read.

    `safetensors.torch.load_file(path)` gives it back, for the plain module's `load_state_dict`. For
    a model of `transformers`, name the file model.safetensors, beside its configuration:

        dz.save_safetensors(folder / "model.safetensors", model)
        if dist.get_rank() == 0:
            model.module.config.save_pretrained(folder)  # then Class.from_pretrained(folder)

    Every rank must call it, and holds the whole state on the host meanwhile; rank 0 writes, to a
    new file that replaces an old one at once. Tied parameters are written under each of their
    names. It is for models that are done: to go on training, save_checkpoint.
    """
    path, comm = Path(path), Comm()
    state = {name: value.contiguous() for name, value in full_state_dict(model).items()}
    if comm.rank == 0:
        new = path.with_name(path.name + ".new")
        save_file(state, new, metadata={"format": "pt"})  # transformers asks for the format
        os.replace(new, path)
    comm.gather_objects(None)  # the file is there when any rank returns
