"""The wire: an instrumented backend for torch.distributed.

It stands between torch and gloo or NCCL and serves five ends with one mechanism: the ledger (what
was sent, from which line), the timeline, the hang report, the shaped network, and grading by what
an answer really communicates.

    board = wire.Board.open(path, rank)
    wire.attach(board, backend="gloo", origin=origin)
    dist.init_process_group("wire", store=store, rank=rank, world_size=world_size)
    ...
    records, spans = wire.detach()

`dz.launch` does this for every rank. What needs torch is imported by `attach`: the launcher uses
the board without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpz_lite.wire import callsite
from ddpz_lite.wire.board import Board, Position
from ddpz_lite.wire.ledger import Record, Span, span
from ddpz_lite.wire.network import Network

if TYPE_CHECKING:
    from ddpz_lite.wire.backend import attach, detach, mark, renew
    from ddpz_lite.wire.mismatch import CollectiveMismatch

__all__ = [
    "Board",
    "CollectiveMismatch",
    "Network",
    "Position",
    "Record",
    "Span",
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
