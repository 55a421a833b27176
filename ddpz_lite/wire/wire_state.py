"""The state of the wire on one rank, from attach to detach."""

from __future__ import annotations

import threading
import time

import torch
from torch.distributed import Work

from ddpz_lite.wire.ledger import Entry, Ledger
from ddpz_lite.wire.network import Network
from ddpz_lite.wire.shaping import Link, Timer
from ddpz_lite.wire.status_file import StatusFile
from ddpz_lite.wire.worker_threads import WorkerThreads

GPU_TIMEOUT_S = 1.0  # how long detach waits for the GPU to finish what is queued


class WireState:
    """The status file, the ledger, and for a shaped network the link and its timer."""

    def __init__(
        self, status_file: StatusFile, backend: str, network: Network | None, origin: float
    ) -> None:
        self.status_file, self.backend, self.network = status_file, backend, network
        self.ledger = Ledger(status_file.rank, origin, network, status_file.world_size)
        self.main_thread = threading.main_thread().ident
        self.link = None if network is None else Link()
        self.timer = Timer(self._one_more_thread)
        self.workers = WorkerThreads(self._one_more_thread)
        self.futures = (
            threading.Lock()
        )  # between a caller of get_future and the thread with the result
        self.gpu = GpuTimes()
        self._threads = threading.active_count()
        status_file.set_helper_threads(self._threads)

    def _one_more_thread(self) -> None:
        self._threads += 1
        self.status_file.set_helper_threads(self._threads)


class GpuTimes:
    """Times of NCCL operations on the GPU: CUDA events, read at the end, so nothing waits."""

    def __init__(self) -> None:
        self._zero: tuple[torch.cuda.Event, float] | None = None  # an event and its clock time
        self._timed: list[Entry] = []

    def begin(self, entry: Entry) -> None:
        """Record an event before the operation on the current stream."""
        if self._zero is None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.Stream())
            event.synchronize()
            self._zero = (event, time.monotonic())
        entry.events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        entry.events[0].record()
        self._timed.append(entry)

    def end(self, entry: Entry, work: Work | None) -> None:
        """Record an event after it. work: None if NCCL used the current stream itself.

        [Note: not by wait] `work.wait()` on another stream would tell torch that the tensors are
        no longer needed. The future's callback runs on a stream that waits for the operation.
        """
        last = entry.events[1]
        if work is None:
            last.record()
        else:
            work.get_future().add_done_callback(lambda _: last.record())

    def resolve(self) -> None:
        """Convert the events to times of this machine's clock; a stuck operation gets no end."""
        deadline = time.monotonic() + GPU_TIMEOUT_S
        for entry in self._timed:
            first, last = entry.events
            while not last.query() and time.monotonic() < deadline:
                time.sleep(0.001)
            if entry.finished is None and last.query():
                event, zero = self._zero
                entry.started = zero + event.elapsed_time(first) / 1000
                entry.finished = zero + event.elapsed_time(last) / 1000
        self._timed.clear()
