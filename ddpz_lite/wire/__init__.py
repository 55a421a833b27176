"""The wire: an instrumented backend for torch.distributed.

It stands between torch and gloo or NCCL. One mechanism serves five purposes: the ledger (what was
sent, from which line), the timeline, the hang report, the shaped network, and grading by what an
answer communicates.

    status_file = wire.StatusFile(path, rank)
    wire.attach(status_file, backend="gloo", origin=origin)
    dist.init_process_group("wire", store=store, rank=rank, world_size=world_size)
    ...
    records, spans = wire.detach()

`dz.launch` does this for every rank. `attach` imports what needs torch; the launcher uses the
status file without torch. In the order to read:

backend         register the backend in torch.distributed, and remove it
group           torch's methods of a process group, each turned into a `call`
base_group      publish, compare and forward each operation
work            the handle that torch gets back
cost            bytes and messages of each algorithm
ledger          the records and spans of a rank
callsite        the line of user code behind a call
status_file     what each rank has called and waits for (`status_reader`, `status_format`)
mismatch        compare the calls of a group's ranks
stall           find ranks that can never continue
network         a slower network; `shaping` computes when an operation ends on it
wire_state      all of this for one rank; `worker_threads` wait for the backend
trace           records and spans as a file for Perfetto
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpz_lite.wire import callsite
from ddpz_lite.wire.ledger import Record, Span, span
from ddpz_lite.wire.network import Network
from ddpz_lite.wire.status_file import Position, StatusFile

if TYPE_CHECKING:
    from ddpz_lite.wire.backend import attach, detach, mark, renew
    from ddpz_lite.wire.mismatch import CollectiveMismatch

__all__ = [
    "CollectiveMismatch",
    "Network",
    "Position",
    "Record",
    "Span",
    "StatusFile",
    "attach",
    "callsite",
    "detach",
    "mark",
    "renew",
    "span",
]

_WITH_TORCH = {
    **dict.fromkeys(("attach", "detach", "mark", "renew"), "backend"),
    "CollectiveMismatch": "mismatch",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)
