"""Checkpoints: saved at any stage and world size, loaded at any other; whole or not there at all.

Every strategy sees a parameter in the same way: a range of its elements, flat, on each rank
(`Part`). So a checkpoint holds, under the parameter's own name, one 1-D tensor for it and one for
each tensor of its optimizer state, and `torch.distributed.checkpoint` cuts and joins ranges as the
reader needs them.

    path/CURRENT               the name of the folder that counts; replaced in one atomic rename,
    last path/<name>/               tensors (torch.distributed.checkpoint)
    path/<name>/extra.pt       options of the groups, loss scale, what the caller passed
    path/<name>/rng-<r>.pt     random generators of rank r: restored where the world is the same
    path/<name>/manifest.json  shapes, and the SHA-256 of every file

A kill at any moment leaves CURRENT on the last complete folder. The folder must be one that all
ranks see.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .comm import Comm
from .flat import Flat
from .precision import LossScale


@dataclass
class Part:
    """Elements start : start + len(tensor) of a logical 1-D tensor of `total` elements, on this
    rank.

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

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
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


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return _tensor(self.state_dict[index.fqn])


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """The default one would drop what is no tensor, a Part too."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _tensor(self.state_dict[index.fqn])


def _tensor(value: Part | Tensor) -> Tensor:
    return value.tensor if isinstance(value, Part) else value


@dataclass
class _Held:
    """One parameter, as this rank has it."""

    key: nn.Parameter  # what the optimizer knows it by
    part: Part
    shape: list[int]


def _flats(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Flat]:
    return getattr(model, "flats", None) or getattr(optimizer, "flats", [])


def _plain(model: nn.Module) -> nn.Module:
    return model.module if hasattr(model, "comm") else model


def _held(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, _Held]:
    """Every parameter by its plain name: a piece where it is flat, whole where it is not."""
    flat_of: dict[int, tuple[Flat, int]] = {}
    for flat in _flats(model, optimizer):
        for index, pair in enumerate(zip(flat.params, flat.pieces, strict=True)):
            flat_of |= {id(param): (flat, index) for param in pair}
    held = {}
    for name, param in _plain(model).named_parameters():
        if id(param) in flat_of:
            flat, index = flat_of[id(param)]
            shape, piece = flat.layout.shapes[index], flat.pieces[index]
            part = Part(piece.detach(), flat.layout.owned(index)[0], shape.numel())
            held[name] = _Held(piece, part, list(shape))
        else:
            whole = Part(param.detach().reshape(-1), 0, param.numel())
            held[name] = _Held(param, whole, list(param.shape))
    return held


# -- full state


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain module: its names, its shapes, master precision, on the host.

    Every rank must call it and every rank gets it; one flat buffer is gathered at a time.
    """
    whole: dict[int, Tensor] = {}
    for flat in _flats(model, None):
        for param, piece, value in zip(flat.params, flat.pieces, flat.gather_master(), strict=True):
            whole[id(param)] = whole[id(piece)] = value.cpu()
    state = _plain(model).state_dict(keep_vars=True)
    return {
        name: whole[id(value)].clone() if id(value) in whole else value.detach().cpu().clone()
        for name, value in state.items()
    }


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a plain module's state dict into a model of any stage; each rank keeps its part.

    Raises ValueError for names or shapes that are not the model's.
    """
    held = _held(model, None)
    current = _plain(model).state_dict(keep_vars=True)
    shapes = {id(h.key): h.shape for h in held.values()}
    wanted = {n: shapes.get(id(v), list(v.shape)) for n, v in current.items()}
    _check_shapes(
        wanted, {name: list(value.shape) for name, value in state.items()}, "the state dict"
    )
    for name, here in held.items():
        part, source = here.part, state[name].reshape(-1)
        part.tensor.copy_(source[part.start : part.start + part.tensor.numel()])
        _write_back(here)
    for name, value in current.items():
        if name not in held and list(value.shape) == list(state[name].shape):
            value.copy_(state[name])
    for flat in _flats(model, None):
        _refresh(flat)


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


def _write_back(here: _Held) -> None:
    if not here.key.is_contiguous():  # its part was a copy
        here.key.copy_(here.part.tensor.view(here.key.shape))


def _refresh(flat: Flat) -> None:
    """After the shards changed: make resident parameters whole again."""
    if flat.full.untyped_storage().size():
        flat.gather()
        flat.gathered()


def _check_shapes(
    model: Mapping[str, list[int]], other: Mapping[str, list[int]], what: str
) -> None:
    for name in [*model, *other]:
        here, there = model.get(name), other.get(name)
        if here != there:
            raise ValueError(
                f"{what} is of another model: {name} has shape {there or 'none'} there and "
                f"{here or 'none'} in the model. Cure: build the model with the configuration "
                "that was saved."
            )


# -- sharded checkpoints


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Write model, optimizer and `extra` to the folder `path`, in place of the checkpoint it held.

    Every rank must call it; it returns on all when the checkpoint counts. Random generators and
    loss scale are saved too. extra: numbers, strings, tensors, lists, tuples, dicts, rank 0's; give
    samplers and schedulers as their `state_dict()`.

    Raises TypeError for an `extra` that could not be loaded again without running code.
    """
    comm, root = Comm(), Path(path)
    loss_scale = getattr(optimizer, "loss_scale", None)
    packed = _pack(
        {
            "extra": extra,
            "groups": _group_options(model, optimizer),
            "loss_scale": asdict(loss_scale) if loss_scale else None,
        }
    )
    held = _held(model, optimizer)
    tensors = _tensors(model, optimizer, held, comm.rank)
    name = comm.gather_objects(uuid.uuid4().hex)[0]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    with _quiet():
        dcp.save(tensors, storage_writer=writer, planner=_SavePlanner(flatten_state_dict=False))
    _write(folder / f"rng-{comm.rank}.pt", _pack(_rng_state()))
    if comm.rank == 0:
        _write(folder / "extra.pt", packed)
    comm.gather_objects(None)  # all files are there
    files = sorted(p.name for p in folder.iterdir())
    sums = {name: _sha256(folder / name) for name in files[comm.rank :: comm.world]}
    sums = {name: value for some in comm.gather_objects(sums) for name, value in some.items()}
    if comm.rank == 0:
        shapes = {name: here.shape for name, here in held.items()}
        manifest = {"world": comm.world, "shapes": shapes, "sha256": sums}
        _write(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync(folder)
        _write(root / "CURRENT.new", name.encode())
        os.replace(root / "CURRENT.new", root / "CURRENT")
        _sync(root)
        for old in root.glob("[0-9a-f]" * 32 + "/"):  # no other folder that may be there
            if old.name != name:
                shutil.rmtree(old)
    comm.gather_objects(None)


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into a model and optimizer of any stage and world size; returns `extra`.

    Every rank must call it. Random generators are restored where the world has the size that was
    saved.

    Raises: FileNotFoundError if `path` holds no complete checkpoint; ValueError if a file is
    damaged or the checkpoint is of another model.
    """
    comm, root = Comm(), Path(path)
    if not (root / "CURRENT").is_file():
        raise FileNotFoundError(
            f"{root} holds no complete checkpoint. Cure: save one there with save_checkpoint(), "
            "or check the path."
        )
    folder = root / (root / "CURRENT").read_text().strip()
    manifest = json.loads((folder / "manifest.json").read_text())
    _verify(folder, manifest["sha256"], comm)
    held = _held(model, optimizer)
    _check_shapes({name: h.shape for name, h in held.items()}, manifest["shapes"], f"{root}")
    saved = torch.load(folder / "extra.pt", weights_only=True)
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    buffers = {f"buffer/{n}": list(b.shape) for n, b in _plain(model).named_buffers()}
    there = {key: list(metadata[key].size) for key in buffers if key in metadata}
    _check_shapes(buffers, there, f"{root}")
    states = _empty_state(held, metadata, optimizer)
    tensors = _tensors(model, None, held, 0)
    for name, state in states.items():
        for key, value in state.items():
            full_key = f"optimizer/{name}/{key}"
            is_cut = bool(metadata[full_key].size)
            tensors[full_key] = held[name].part.like(value) if is_cut else value
    with _quiet():
        dcp.load(tensors, storage_reader=reader, planner=_LoadPlanner(flatten_state_dict=False))
    if optimizer is not None:
        for name, state in states.items():
            optimizer.state.pop(held[name].key, None)
            if state:
                optimizer.state[held[name].key] = state
        _restore_options(model, optimizer, saved["groups"])
        if saved["loss_scale"] and getattr(optimizer, "loss_scale", None) is not None:
            vars(optimizer.loss_scale).update(asdict(LossScale(**saved["loss_scale"])))
    for here in held.values():
        _write_back(here)
    for flat in _flats(model, optimizer):
        _refresh(flat)
    if manifest["world"] == comm.world:
        _restore_rng(torch.load(folder / f"rng-{comm.rank}.pt", weights_only=True))
    return saved["extra"]


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, held: dict[str, _Held], rank: int
) -> dict[str, Any]:
    """Everything of this rank by its key in the checkpoint; buffers are rank 0's."""
    tensors: dict[str, Any] = {f"parameter/{name}": here.part for name, here in held.items()}
    if rank == 0:
        tensors |= {f"buffer/{name}": b for name, b in _plain(model).named_buffers()}
    for name, here in held.items() if optimizer is not None else ():
        for key, value in optimizer.state.get(here.key, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"the optimizer keeps {key}={value!r} for {name}; only tensors can be sharded "
                    "and saved"
                )
            is_cut = value.shape == here.key.shape and key != "step"  # else the same on every rank
            tensors[f"optimizer/{name}/{key}"] = here.part.like(value) if is_cut else value
    return tensors


def _empty_state(
    held: dict[str, _Held], saved: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, Tensor]]:
    """Room for the optimizer's state of this rank's parts, as the checkpoint has it."""
    states: dict[str, dict[str, Tensor]] = {name: {} for name in held}
    if optimizer is None:
        return states
    on_device = {
        id(p): bool(group.get("fused") or group.get("capturable"))
        for group in getattr(optimizer, "inner", optimizer).param_groups
        for p in group["params"]
    }
    for full_key, meta in saved.items():
        kind, _, rest = full_key.partition("/")
        name, _, key = rest.rpartition("/")
        here = held.get(name)
        if kind != "optimizer" or here is None or not here.part.tensor.numel():
            continue
        dtype = meta.properties.dtype
        if meta.size:
            room = torch.zeros(here.key.shape, dtype=dtype, device=here.key.device)
        else:  # a step counter
            device = here.key.device if on_device.get(id(here.key)) else "cpu"
            room = torch.zeros((), dtype=dtype, device=device)
        states[name][key] = room
    return states


def _names(model: nn.Module) -> dict[int, str]:
    """{id: name} of every parameter, and of its piece: ZeRO-3's modules show one or the other."""
    pieces = {id(here.key): name for name, here in _held(model, None).items()}
    return pieces | {id(p): name for name, p in _plain(model).named_parameters()}


def _group_options(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """{parameter name: options of its group}."""
    if optimizer is None:
        return {}
    names = _names(model)
    return {
        names[id(p)]: {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _restore_options(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> None:
    names = _names(model)
    for group in optimizer.param_groups:
        options = [saved.get(names[id(p)]) for p in group["params"]]
        if any(other != options[0] for other in options[1:]):
            raise ValueError(
                "parameters of one group had different options when the checkpoint was saved. "
                "Cure: build the optimizer with the same groups."
            )
        group.update(options[0] or {})


# -- files


@contextmanager
def _quiet() -> Iterator[None]:
    """One process alone is no mistake: torch warns that it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            "extra may hold numbers, strings, tensors, and lists, tuples and dicts of them; for "
            f"an object, pass its state_dict(). ({error})"
        ) from error
    return buffer.getvalue()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(folder: Path, sums: dict[str, str], comm: Comm) -> None:
    """Each rank reads its share of the files; all ranks raise if one is damaged."""
    mine = sorted(sums)[comm.rank :: comm.world]
    bad = [n for n in mine if not (folder / n).is_file() or _sha256(folder / n) != sums[n]]
    bad = [name for some in comm.gather_objects(bad) for name in some]
    if bad:
        raise ValueError(
            f"{folder / bad[0]} is damaged: its SHA-256 is not the one in manifest.json. Cure: "
            "copy the checkpoint again, or load an older one."
        )


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
