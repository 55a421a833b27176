"""What one rank's wire consists of, from attach to detach."""

from __future__ import annotations

import threading
import time

import torch
from torch.distributed import Work

from ddpz_lite.wire.board import Board
from ddpz_lite.wire.ledger import Entry, Ledger
from ddpz_lite.wire.network import Network
from ddpz_lite.wire.shaping import Clock, Link
from ddpz_lite.wire.waiters import Waiters

SETTLE = 1.0  # seconds that detach gives the GPU to finish what is queued


class Tap:
    """The board, the ledger, and for a shaped network the link and its clock."""

    def __init__(self, board: Board, backend: str, network: Network | None, origin: float) -> None:
        self.board, self.backend, self.network = board, backend, network
        self.ledger = Ledger(board.rank, origin, network, board.world_size)
        self.main_thread = threading.main_thread().ident
        self.link = None if network is None else Link()
        self.clock = Clock(self._one_more_thread)
        self.waiters = Waiters(self._one_more_thread)
        self.futures = threading.Lock()  # between who asks for a future and who has its result
        self.gpu = GpuTimes()
        self._threads = threading.active_count()
        board.quiet(self._threads)

    def _one_more_thread(self) -> None:
        self._threads += 1
        self.board.quiet(self._threads)


class GpuTimes:
    """When a GPU ran what NCCL was asked for: CUDA events, read at the end, so nothing waits."""

    def __init__(self) -> None:
        self._zero: tuple[torch.cuda.Event, float] | None = None  # an event and its clock time
        self._timed: list[Entry] = []

    def begin(self, entry: Entry) -> None:
        """The operation is being put on a stream; it starts when the stream gets there."""
        if self._zero is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.Stream())
            event.synchronize()
            self._zero = (event, time.monotonic())
        entry.events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        entry.events[0].record()
        self._timed.append(entry)

    def end(self, entry: Entry, work: Work | None) -> None:
        """work: None for a call that NCCL put on the current stream itself.

        [Note: not by wait] `work.wait()` on a stream of ours would tell torch that the tensors are
        no longer needed. The future's callback runs on a stream that waits for the operation.
        """
        last = entry.events[1]
        if work is None:
            last.record()
        else:
            work.get_future().add_done_callback(lambda _: last.record())

    def resolve(self) -> None:
        """Turn the events into times of this machine's clock; what is stuck keeps no end."""
        patience = time.monotonic() + SETTLE
        for entry in self._timed:
            first, last = entry.events
            while not last.query() and time.monotonic() < patience:
                time.sleep(0.001)
            if entry.finished is None and last.query():
                event, zero = self._zero
                entry.started = zero + event.elapsed_time(first) / 1000
                entry.finished = zero + event.elapsed_time(last) / 1000
        self._timed.clear()
