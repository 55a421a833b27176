"""Register the wire as a backend of torch.distributed, and remove it again.

`attach` registers a backend called "wire", after which `dist.init_process_group("wire", ...)` and
every group made from it (`new_group`, DeviceMesh) is a `WireGroup`.

[Note: the name in get_backend]
torch and its users choose paths by name: `dist.get_backend() == "gloo"` decides how objects are
sent, whether monitored_barrier is allowed, how sub-groups are made. So a group on the wire must
report the name of its inner backend. torch keeps the name in a table that it fills after it has
made the group, and reads again to make sub-groups. So `attach` wraps the function that makes all
groups: the wrapper asks for "wire" for any real backend, and afterwards writes the real name into
the table. `detach` restores the function.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ddpz_lite.wire import callsite, ledger
from ddpz_lite.wire.group import WireGroup
from ddpz_lite.wire.ledger import Record, Span
from ddpz_lite.wire.mismatch import compare_members
from ddpz_lite.wire.network import Network
from ddpz_lite.wire.shaping import sharpen_sleep
from ddpz_lite.wire.status_file import StatusFile
from ddpz_lite.wire.status_format import OTHER
from ddpz_lite.wire.wire_state import WireState

WIRED = {"gloo", "nccl"}
_KINDS = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}

_state: WireState | None = None
_make_group = c10d._new_process_group_helper  # torch's own
_requested = ""  # the real backend of the group that is being made


def attach(
    status_file: StatusFile, *, backend: str, network: Network | None = None, origin: float = 0.0
) -> None:
    """Put this rank on the wire; then call `dist.init_process_group("wire", ...)`.

    backend: the real one, "gloo", "nccl" or "cpu:gloo,cuda:nccl". origin: time.monotonic() at the
    start of the job. Raises ValueError for a backend that the wire does not support or a status
    file without a rank, RuntimeError if the wire is attached already.
    """
    global _state
    if _state is not None:
        raise RuntimeError("the wire is attached already. Fix: call wire.detach() first.")
    if status_file.rank is None:
        raise ValueError("wire.attach needs the status file of a rank: StatusFile(path, rank)")
    _devices(backend)  # raises for unsupported backends
    _state = WireState(status_file, backend, network, origin)
    ledger.current = _state.ledger
    if network is not None:
        sharpen_sleep()
    if "WIRE" not in dist.Backend._plugins:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend("wire", _create, extended_api=True, devices=devices)
    c10d._new_process_group_helper = _make_wired_group
    status_file.mark("running")


def detach() -> tuple[list[Record], list[Span]]:
    """Remove the wire from this rank and return its records and spans. Existing groups work on."""
    global _state
    if _state is None:
        return [], []
    state, _state = _state, None
    c10d._new_process_group_helper = _make_group
    ledger.current = None
    state.gpu.resolve()
    return state.ledger.records(), state.ledger.spans


def renew() -> tuple[list[Record], list[Span]]:
    """Return the records and spans since `attach`, and start again with an empty ledger at time 0.

    The caller destroys the default group before and makes it again after. Raises RuntimeError if
    the wire is not attached.
    """
    if _state is None:
        raise RuntimeError("this process is not on the wire: there is nothing to renew")
    before = _state
    history = detach()
    attach(
        before.status_file, backend=before.backend, network=before.network, origin=time.monotonic()
    )
    return history


def mark(phase: str) -> None:
    """Publish that this rank is "running", has "returned" or has "raised"."""
    _state.status_file.mark(phase)


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
    """Replaces torch's function, see [Note: the name in get_backend]."""
    global _requested
    args = (store, name, *args)
    requested = str(backend)
    names = {part.rpartition(":")[2] for part in requested.split(",")}
    if requested == "wire":
        requested = _state.backend
    elif not names <= WIRED:  # "fake", "mpi": not wrapped
        return _make_group(group_size, group_rank, ranks, backend, *args, **options)
    _requested = requested
    if ranks:  # the default group has none
        compare_members(_state.status_file, store, name, tuple(ranks), callsite.caller())
    wire = dist.Backend("wire")
    group, store = _make_group(group_size, group_rank, ranks, wire, *args, **options)
    if isinstance(group, WireGroup):
        name = dist.Backend(requested)
        c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))
    return group, store


def _create(options: Any, _: Any) -> WireGroup:
    """torch calls this for every new group, on its members."""
    if _state is None:
        raise RuntimeError(
            "this process is not on the wire: call wire.attach first, or start it with dz.launch"
        )
    state, status_file = _state, _state.status_file
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    index = status_file.join(options.group_id, ranks)
    op = b"new_group" if options.global_ranks_in_group else b"init_process_group"
    status_file.enter(OTHER, op, callsite.caller(), bounded=True)
    try:
        inner = ProcessGroup(options.store, options.group_rank, options.group_size)
        devices = _devices(_requested)
        group = WireGroup(options.store, options.group_rank, ranks, inner, devices, index, state)
        _register_backends(inner, group, options)
    finally:
        status_file.leave()
    return group


def _register_backends(inner: ProcessGroup, group: WireGroup, options: Any) -> None:
    """Make the real backends and register them on both groups."""
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
