"""Putting the wire into torch.distributed, and taking it out again.

`attach` registers a backend called "wire", after which `dist.init_process_group("wire", ...)` and
every group made from it (`new_group`, DeviceMesh) is a `WireGroup`.

[Note: what get_backend says]
torch and its users choose paths by name: `dist.get_backend() == "gloo"` decides how objects travel,
whether monitored_barrier is allowed, how sub-groups are made. A group on the wire must therefore be
called what it is inside. torch keeps the name in a table that it fills after it has made the group,
and reads again to make sub-groups. So `attach` wraps the one function that makes all groups: it
asks for "wire" whatever real backend was asked for, and afterwards writes the real name into the
table. `detach` puts the function back.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ddpz_lite.wire import callsite, ledger
from ddpz_lite.wire.board import Board
from ddpz_lite.wire.format import OTHER
from ddpz_lite.wire.group import WireGroup
from ddpz_lite.wire.ledger import Record, Span
from ddpz_lite.wire.mismatch import compare_members
from ddpz_lite.wire.network import Network
from ddpz_lite.wire.shaping import sharpen_sleep
from ddpz_lite.wire.tap import Tap

WIRED = {"gloo", "nccl"}
_KINDS = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}

_tap: Tap | None = None
_make_group = c10d._new_process_group_helper  # torch's own
_asked = ""  # the real backend of the group that is being made


def attach(
    board: Board, *, backend: str, network: Network | None = None, origin: float = 0.0
) -> None:
    """Put this rank on the wire; then call `dist.init_process_group("wire", ...)`.

    backend: what runs inside, "gloo", "nccl" or "cpu:gloo,cuda:nccl". origin: time.monotonic() at
    the start of the job. Raises ValueError for a backend that the wire does not know or a board
    that is nobody's, RuntimeError if it is attached already.
    """
    global _tap
    if _tap is not None:
        raise RuntimeError("the wire is attached already; call wire.detach() first")
    if board.rank is None:
        raise ValueError("wire.attach needs the board of a rank: Board.open(path, rank)")
    _devices(backend)  # raises for what it does not know
    _tap = Tap(board, backend, network, origin)
    ledger.current = _tap.ledger
    if network is not None:
        sharpen_sleep()
    if "WIRE" not in dist.Backend._plugins:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend("wire", _create, extended_api=True, devices=devices)
    c10d._new_process_group_helper = _make_wired_group
    board.mark("running")


def detach() -> tuple[list[Record], list[Span]]:
    """Take this rank off the wire; returns all that it did. Groups that exist still work."""
    global _tap
    if _tap is None:
        return [], []
    tap, _tap = _tap, None
    c10d._new_process_group_helper = _make_group
    ledger.current = None
    tap.gpu.resolve()
    return tap.ledger.records(), tap.ledger.spans


def renew() -> tuple[list[Record], list[Span]]:
    """What this rank did since `attach`; from here on the ledger is empty, and time begins at 0.

    The default group must be gone, and is made again by the caller. Raises RuntimeError for a
    process that is not on the wire.
    """
    if _tap is None:
        raise RuntimeError("this process is not on the wire: there is nothing to renew")
    before = _tap
    history = detach()
    attach(before.board, backend=before.backend, network=before.network, origin=time.monotonic())
    return history


def mark(phase: str) -> None:
    """Tell the launcher that this rank now is "running", has "returned" or has "raised"."""
    _tap.board.mark(phase)


def _devices(backend: str) -> dict[str, str]:
    """{"cpu": "gloo", "cuda": "gloo"} for "gloo", {"cuda": "nccl"} for "nccl", and so on."""
    devices: dict[str, str] = {}
    for part in backend.split(","):
        device, _, name = part.rpartition(":")
        if name not in WIRED:
            raise ValueError(f"the wire runs over gloo and nccl, got {backend!r}")
        both = ["cpu", "cuda"] if name == "gloo" else ["cuda"]
        devices.update(dict.fromkeys([device] if device else both, name))
    return devices


def _make_wired_group(
    group_size: int,
    group_rank: int,
    ranks: list[int],
    backend: Any,
    store: dist.Store,
    name: str,
    *args: Any,
    **options: Any,
) -> Any:
    """In the place of torch's function: see [Note: what get_backend says]."""
    global _asked
    args = (store, name, *args)
    asked = str(backend)
    names = {part.rpartition(":")[2] for part in asked.split(",")}
    if asked == "wire":
        asked = _tap.backend
    elif not names <= WIRED:  # "fake", "mpi": not ours
        return _make_group(group_size, group_rank, ranks, backend, *args, **options)
    _asked = asked
    if ranks:  # the default group has none
        compare_members(_tap.board, store, name, tuple(ranks), callsite.caller())
    wire = dist.Backend("wire")
    group, store = _make_group(group_size, group_rank, ranks, wire, *args, **options)
    if isinstance(group, WireGroup):
        name = dist.Backend(asked)
        c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))
    return group, store


def _create(options: Any, _: Any) -> WireGroup:
    """torch calls this for every new group, on its members."""
    if _tap is None:
        raise RuntimeError(
            "this process is not on the wire: call wire.attach first, or start it with dz.launch"
        )
    tap, board = _tap, _tap.board
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    index = board.join(options.group_id, ranks)
    op = b"new_group" if options.global_ranks_in_group else b"init_process_group"
    board.enter(OTHER, op, callsite.caller(), bounded=True)
    try:
        inner = ProcessGroup(options.store, options.group_rank, options.group_size)
        devices = _devices(_asked)
        group = WireGroup(options.store, options.group_rank, ranks, inner, devices, index, tap)
        _put_inside(inner, group, options)
    finally:
        board.leave()
    return group


def _put_inside(inner: ProcessGroup, group: WireGroup, options: Any) -> None:
    """Make the real backends and register them on both objects."""
    made: dict[str, Any] = {}
    default = _KINDS["nccl" if "nccl" in group.devices.values() else "gloo"]
    for holder in (inner, group):
        holder._set_default_backend(default)
    for device, name in group.devices.items():
        if name not in made:
            made[name] = _gloo(options) if name == "gloo" else _nccl(options)
        for holder in (inner, group):
            holder._register_backend(torch.device(device), _KINDS[name], made[name])


def _gloo(options: Any) -> Any:
    made = dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    made.options.global_ranks_in_group = options.global_ranks_in_group
    made.options.group_name = options.group_id
    made._set_sequence_number_for_group()
    return made


def _nccl(options: Any) -> Any:
    wanted = dist.ProcessGroupNCCL.Options()
    wanted._timeout = options.timeout
    wanted.global_ranks_in_group = options.global_ranks_in_group
    wanted.group_name = options.group_id
    made = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, wanted)
    made._set_sequence_number_for_group()
    return made
