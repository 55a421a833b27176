"""Save at any stage and world size, load at any other; a checkpoint is complete or absent.

Every strategy holds a parameter in the same way: a range of its elements, flattened, on each rank
(`Part`). So a checkpoint stores, under the parameter's name, one 1-D tensor for it and one for each
tensor of its optimizer state, and `torch.distributed.checkpoint` cuts and joins ranges as the
reader needs them.

A kill at any moment, or a disk that fills on one rank, leaves the last complete checkpoint in place
(`checkpoint.folder`). All ranks must see the folder. The ranks that save and load are those that
the model was parallelized over; groups of ranks with separate models use separate paths. On a mesh
all ranks save one checkpoint, with the names and shapes of the full model, so it loads on another
mesh, or on none.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ddpz_lite.checkpoint.all_ranks import on_all_ranks
from ddpz_lite.checkpoint.files import check_extra, pack, restore_rng, rng_state, write
from ddpz_lite.checkpoint.folder import checked, index, saving
from ddpz_lite.checkpoint.parts import (
    LocalParameter,
    Part,
    check_shapes,
    comm_of,
    flats_of,
    local_parameters,
    of_all_parts,
    plain,
    refresh,
    write_back,
)
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.parameters import EmptyParameter
from ddpz_lite.strategies.precision import LossScale


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Write model, optimizer and `extra` to the folder `path`, replacing the checkpoint there.

    Every rank of the model must call it; it returns on all ranks once the checkpoint counts. Random
    generators and loss scale are saved too. extra: rank 0's numbers, strings, tensors, lists,
    tuples, dicts; pass samplers and schedulers as their `state_dict()`.

    Raises on all ranks, and leaves no files: TypeError for an `extra` that could not be loaded
    again without running code; OSError if a rank cannot write; RuntimeError if another group of
    ranks of this job saves to this folder. Two jobs need two folders.
    """
    comm = comm_of(model, optimizer).everyone
    save_content(path, content_of(model, optimizer, extra, comm), comm)


@dataclass
class Content:
    """What this rank writes of a checkpoint. Its tensors are the model's own until `copy`."""

    tensors: dict[str, Part | Tensor]
    options: bytes  # everything but tensors of the model; empty on all ranks but the first
    random: bytes
    shapes: dict[str, list[int]]

    def copy(self) -> Content:
        """The same with copies of the tensors, in host memory."""

        def copied(value: Part | Tensor) -> Part | Tensor:
            own = _tensor(value).detach().to("cpu", copy=True)
            return value.like(own) if isinstance(value, Part) else own

        return replace(self, tensors={name: copied(t) for name, t in self.tensors.items()})


def content_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any], comm: Comm
) -> Content:
    """What is to be saved, as it is now; an error on one rank is raised on all."""
    own = comm_of(model, optimizer)  # of this part of the model
    params = local_parameters(model, optimizer)
    groups = of_all_parts(model, own, _group_options(model, optimizer))
    shapes = of_all_parts(model, own, {name: here.shape for name, here in params.items()})

    def found() -> Content:
        loss_scale, options = _loss_scale(optimizer), b""
        if index(comm) == 0:
            check_extra(extra)
            scale = asdict(loss_scale) if loss_scale else None
            name = _class_name(optimizer)
            options = pack(
                {"extra": extra, "groups": groups, "loss_scale": scale, "optimizer": name}
            )
        tensors = tensors_of(model, optimizer, params, own.place)
        return Content(tensors, options, pack(rng_state()), shapes)

    return on_all_ranks(comm, found)


def save_content(path: str | os.PathLike[str], content: Content, comm: Comm) -> None:
    """Write the content to the folder `path`; all ranks of `comm` call it."""
    with saving(Path(path), content.shapes, comm) as folder:
        on_all_ranks(comm, lambda: _write(folder, content, comm))


def _write(folder: Path, content: Content, comm: Comm) -> None:
    """This rank's files; where all replicas hold the same tensors, the first writes them."""
    if index(comm) < comm.shards:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        how = {"storage_writer": writer, "planner": _SavePlanner(flatten_state_dict=False)}
        _dcp(lambda **ranks: dcp.save(content.tensors, **how, **ranks), comm)
    write(folder / f"rng-{index(comm)}.pt", content.random)
    if content.options:
        write(folder / "extra.pt", content.options)


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a model and optimizer of any stage and world size; returns `extra`.

    Every rank of the model must call it, while no job saves to the folder. Random generators are
    restored if the world has the same size. State of the optimizer in another floating-point dtype
    than its parameter is cast to it, as torch's `load_state_dict` does; single numbers, such as
    step counters, keep theirs.

    Raises on all ranks: FileNotFoundError if `path` holds no complete checkpoint; ValueError if a
    file is damaged, or the checkpoint is of another model or another class of optimizer.
    """
    own, root = comm_of(model, optimizer), Path(path)
    comm = own.everyone
    folder, manifest = checked(root, comm)
    params = local_parameters(model, optimizer)
    shapes = of_all_parts(model, own, {name: here.shape for name, here in params.items()})
    on_all_ranks(comm, lambda: check_shapes(shapes, manifest["shapes"], f"{root}"))
    saved = on_all_ranks(comm, lambda: torch.load(folder / "extra.pt", weights_only=True))
    on_all_ranks(comm, lambda: _check_class(optimizer, saved.get("optimizer"), root))
    states = on_all_ranks(comm, lambda: _load_tensors(folder, model, params, optimizer, comm))
    same_world = manifest["world"] == comm.size
    rng_file = folder / f"rng-{index(comm)}.pt"
    rng = on_all_ranks(
        comm, lambda: torch.load(rng_file, weights_only=True) if same_world else None
    )
    if optimizer is not None:
        by_key = {params[name].key: state for name, state in states.items()}
        restore(model, optimizer, by_key, saved)
    for here in params.values():
        write_back(here)
    for flat in flats_of(model, optimizer):
        refresh(flat)
    if rng is not None:
        restore_rng(rng)
    return saved["extra"]


# -- tensors, as torch.distributed.checkpoint takes them


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return _range(self.state_dict[index.fqn], index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """The default one would drop everything that is not a tensor, a Part too."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _range(self.state_dict[index.fqn], index)


def _range(value: Part | Tensor, index: MetadataIndex) -> Tensor:
    return value.__get_tensor_shard__(index) if isinstance(value, Part) else value


def _tensor(value: Part | Tensor) -> Tensor:
    return value.tensor if isinstance(value, Part) else value


def tensors_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    params: dict[str, LocalParameter],
    rank: int,
) -> dict[str, Any]:
    """The tensors of this rank by their key in the checkpoint; buffers are saved by rank 0."""
    tensors: dict[str, Any] = {f"parameter/{name}": here.part for name, here in params.items()}
    if rank == 0:
        tensors |= {f"buffer/{name}": b for name, b in plain(model).named_buffers()}
    for name, here in params.items() if optimizer is not None else ():
        if not here.part.tensor.numel():
            continue  # other ranks hold it, and loading would not restore a step counter here
        for key, value in optimizer.state.get(here.key, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"the optimizer keeps {key}={value!r} for {name}; only tensors can be sharded "
                    "and saved"
                )
            is_cut = value.shape == here.key.shape and key != "step"  # else equal on every rank
            if not is_cut and value.numel() > 1 and here.part.tensor.numel() < here.part.total:
                raise TypeError(
                    f"the optimizer keeps {key} of shape {list(value.shape)} for a part of {name}, "
                    "and such parts cannot be joined. Fix: use an optimizer that works element by "
                    "element."
                )
            tensors[f"optimizer/{name}/{key}"] = here.part.like(value) if is_cut else value
    return tensors


def _dcp(call: Callable[..., None], comm: Comm) -> None:
    """Save or load with the ranks of `comm`; raises torch's failures as OSError or ValueError.

    torch raises on all ranks what happened on one. With one process alone it would warn.
    """
    try:
        if comm.shards > 1:
            return call(process_group=comm.holders)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            call(no_dist=True)
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        kind = OSError if isinstance(first, OSError) else ValueError
        raise kind(f"rank {rank}: {type(first).__name__}: {first}") from error


# -- what an optimizer keeps


def empty_state(
    params: dict[str, LocalParameter],
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, dict[str, Tensor]]:
    """Empty tensors for the optimizer state of this rank's parts that the checkpoint has."""
    states: dict[str, dict[str, Tensor]] = {name: {} for name in params}
    if optimizer is None:
        return states
    stepping = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in stepping.param_groups
        for p in group["params"]
    }
    for full_key, meta in saved.items():
        kind, _, rest = full_key.partition("/")
        name, _, key = rest.rpartition("/")
        here = params.get(name)
        if kind != "optimizer" or here is None or not here.part.tensor.numel():
            continue
        dtype = meta.properties.dtype
        if meta.size:
            if dtype.is_floating_point and here.key.is_floating_point():
                dtype = here.key.dtype
            shape = here.key.shape if is_cut(meta, here) else meta.size
            empty = torch.zeros(shape, dtype=dtype, device=here.key.device)
        else:  # a step counter
            device = here.key.device if on_device.get(id(here.key)) else "cpu"
            empty = torch.zeros((), dtype=dtype, device=device)
        states[name][key] = empty
    return states


def is_cut(meta: TensorStorageMetadata, here: LocalParameter) -> bool:
    """Whether it was saved in flat parts. Adafactor's means of rows and columns are not."""
    return meta.size == here.part.size()


def _load_tensors(
    folder: Path,
    model: nn.Module,
    params: dict[str, LocalParameter],
    optimizer: torch.optim.Optimizer | None,
    comm: Comm,
) -> dict[str, dict[str, Tensor]]:
    """Read parameters and buffers into the model; returns the optimizer's state by parameter."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    buffers = {f"buffer/{n}": list(b.shape) for n, b in plain(model).named_buffers()}
    there = {key: list(metadata[key].size) for key in buffers if key in metadata}
    check_shapes(buffers, there, f"{folder.parent}")
    states = empty_state(params, metadata, optimizer)
    tensors = tensors_of(model, None, params, 0)
    for name, state in states.items():
        for key, value in state.items():
            full_key = f"optimizer/{name}/{key}"
            cut = is_cut(metadata[full_key], params[name])
            tensors[full_key] = params[name].part.like(value) if cut else value
    planner = _LoadPlanner(flatten_state_dict=False)
    _dcp(lambda **ranks: dcp.load(tensors, storage_reader=reader, planner=planner, **ranks), comm)
    return states


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: dict[nn.Parameter, dict[str, Tensor]],
    saved: Mapping[str, Any],
) -> None:
    """Restore the optimizer's state, the options of its groups, and its loss scale."""
    for key, state in states.items():
        optimizer.state.pop(key, None)
        if state:
            optimizer.state[key] = state
    _restore_options(model, optimizer, saved["groups"])
    if saved["loss_scale"] and (loss_scale := _loss_scale(optimizer)) is not None:
        vars(loss_scale).update(saved["loss_scale"])


def _class_name(optimizer: torch.optim.Optimizer | None) -> str | None:
    stepping = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    return None if stepping is None else type(stepping).__name__


def _check_class(optimizer: torch.optim.Optimizer | None, saved: str | None, root: Path) -> None:
    """Raise ValueError if another class of optimizer was saved: its options would be taken over."""
    here = _class_name(optimizer)
    if None not in (here, saved) and here != saved:
        raise ValueError(
            f"{root} has the state of {saved}, and the optimizer here is {here}, for which its "
            f"state and options have no meaning. Fix: load into {saved}; or load_checkpoint(path, "
            "model) for the model alone, with a new optimizer."
        )


def _loss_scale(optimizer: torch.optim.Optimizer | None) -> LossScale | None:
    return optimizer.loss_scale if isinstance(optimizer, ShardedOptimizer) else None


def names_of(model: nn.Module) -> dict[int, str]:
    """{id: name} of every parameter and of its shard: ZeRO-3's modules have one or the other."""
    local = {id(here.key): name for name, here in local_parameters(model).items()}
    return local | {id(p): name for name, p in plain(model).named_parameters()}


def names_in(group: dict[str, Any], names: dict[int, str]) -> list[str]:
    """The names of the parameters of a group; a pipeline's empty one has none."""
    return [names[id(p)] for p in group["params"] if not isinstance(p, EmptyParameter)]


def _group_options(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """{parameter name: options of its group}."""
    if optimizer is None:
        return {}
    names = names_of(model)
    return {
        name: {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
        for name in names_in(group, names)
    }


def _restore_options(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> None:
    names = names_of(model)
    for group in optimizer.param_groups:
        options = [saved.get(name) for name in names_in(group, names)]
        if any(other != options[0] for other in options[1:]):
            raise ValueError(
                "parameters of one group had different options when the checkpoint was saved. "
                "Fix: build the optimizer with the same groups."
            )
        if any(options):  # else a group without parameters, or one that was not saved
            group.update(options[0])
