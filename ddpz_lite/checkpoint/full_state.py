"""The full state of the plain module: read from a model of any stage, or loaded into one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ddpz_lite.checkpoint.all_ranks import on_all_ranks
from ddpz_lite.checkpoint.folder import claim, index
from ddpz_lite.checkpoint.parts import (
    check_shapes,
    comm_of,
    flats_of,
    local_parameters,
    of_all_parts,
    plain,
    refresh,
    write_back,
)
from ddpz_lite.strategies.mesh import cuts_of


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain module: its names, its shapes, master precision, on the host.

    Every rank must call it and gets the result; one flat buffer is gathered at a time. On a mesh
    the parts of the model on other ranks are joined on the host.
    """
    full: dict[int, Tensor] = {}
    for flat in flats_of(model):
        for param, shard, value in zip(flat.params, flat.shards, flat.gather_master(), strict=True):
            full[id(param)] = full[id(shard)] = value.cpu()
    state = {
        name: full[id(value)].clone() if id(value) in full else value.detach().cpu().clone()
        for name, value in plain(model).state_dict(keep_vars=True).items()
    }
    comm, cuts = comm_of(model), cuts_of(plain(model))
    parts = comm.gather_along("tensor", {name: state[name] for name in cuts})
    state |= {name: cut.join([part[name] for part in parts]) for name, cut in cuts.items()}
    return of_all_parts(model, comm, state)


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a plain module's state dict into a model of any stage; each rank keeps its part.

    Raises ValueError for names or shapes that are not the model's.
    """
    params, comm = local_parameters(model), comm_of(model)
    current = plain(model).state_dict(keep_vars=True)
    shapes = {id(p.key): p.shape for p in params.values()}
    wanted = {n: shapes.get(id(v), list(v.shape)) for n, v in current.items()}
    wanted |= {name: here.shape for name, here in params.items()}
    given = {name: list(value.shape) for name, value in state.items()}
    check_shapes(of_all_parts(model, comm, wanted), given, "the state dict")
    for name, here in params.items():
        here.part.copy_from(state[name].reshape(-1))
        write_back(here)
    for name, value in current.items():
        if name not in params and list(value.shape) == list(state[name].shape):
            value.copy_(state[name])
    for flat in flats_of(model):
        refresh(flat)


def save_safetensors(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write `full_state_dict(model)` to one file that other programs read.

    `safetensors.torch.load_file(path)` gives it back, for the plain module's `load_state_dict`. For
    a model of `transformers`, name the file model.safetensors, next to its configuration:

        dz.save_safetensors(folder / "model.safetensors", model)
        if dist.get_rank() == 0:
            model.module.config.save_pretrained(folder)  # then Class.from_pretrained(folder)

    Every rank of the model must call it, and holds the full state on the host meanwhile. The first
    rank writes a new file, which replaces an old one in one rename. Tied parameters are written
    under each of their names. This is for trained models; to continue training, save_checkpoint.

    Raises on all ranks, and leaves no file: OSError if it cannot be written; RuntimeError if
    another group of ranks saves to this path.
    """
    path, comm = Path(path), comm_of(model).everyone
    ranks = comm.gather_objects(dist.get_rank() if dist.is_initialized() else 0)
    state = {name: value.contiguous() for name, value in full_state_dict(model).items()}

    def write() -> None:
        claim(path, ranks)
        new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")
        try:
            save_file(state, new, metadata={"format": "pt"})  # transformers asks for the format
            os.replace(new, path)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"{path} was not saved: {error}. Fix: free disk space, or use a writable folder."
            ) from error
        finally:
            if new.exists():
                new.unlink()

    on_all_ranks(
        comm, write if index(comm) == 0 else lambda: None
    )  # the file exists when any rank returns
