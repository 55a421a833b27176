"""The handle that torch gets back for each operation; it notices when the operation ends.

torch waits for a Work in three ways: `wait()` from Python, `wait()` from C++ (functional
collectives), and a future (DDP's reducer). All three go through `WireWork`, so on the shaped
network no caller gets the data before its time. A blocking call is finished by the thread that
waits for it. For the others something must watch while the program computes: the backend's own
callback where it has one, otherwise a thread of `WorkerThreads`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from ddpz_lite.wire.ledger import Entry
from ddpz_lite.wire.shaping import Transfer, sleep_until
from ddpz_lite.wire.wire_state import WireState

FOREVER = timedelta(0)  # C++ passes it when the caller gave no time limit


class WireWork(Work):
    """An operation of the inner backend, watched.

    position: the entry in the status file while the main thread waits for it. transfer: None unless
    the network is shaped. inner: None for a call that NCCL put on the current stream itself.
    """

    def __init__(
        self,
        inner: Work | None,
        entry: Entry,
        state: WireState,
        position: dict[str, Any],
        transfer: Transfer | None,
    ) -> None:
        super().__init__()
        self._inner, self._entry, self._state = inner, entry, state
        self._position, self._transfer = position, transfer
        self._gpu = None if entry.events is None else torch.cuda.current_device()
        self._done: threading.Event | None = None  # the backend is done; made if a thread watches
        self._error: BaseException | None = None
        self._value: Any = None  # of the backend's future
        self._future: torch.futures.Future | None = None  # ours, if asked for on a shaped network
        self._waited = False

    # -- noticing the end --------------------------------------------------------------------------

    def watch(self, calls_back: bool) -> None:
        """Notice the end of an operation that runs while the program computes.

        Most collectives of gloo have a future with a callback. Sends and receives have none, nor
        have those that gloo composes of others (reduce_scatter), and NCCL's calls back too early.
        For those a thread waits. On an unshaped network only the time is recorded, and a caller of
        `wait()` waits on the backend itself.
        """
        future = self._future_inside() if calls_back else None
        if future is not None and self._transfer is None:
            future.add_done_callback(self._note)
            return
        self._done = threading.Event()
        if future is not None:
            future.add_done_callback(self._arrived)
        else:
            self._state.workers.run(self._wait_in_thread)

    def _future_inside(self) -> torch.futures.Future | None:
        try:
            return self._inner.get_future()
        except RuntimeError:  # this kind of work has none
            return None

    def _note(self, _: Any) -> None:
        self._entry.finished = time.monotonic()

    def _arrived(self, future: torch.futures.Future) -> None:
        try:
            self._value = future.value()
        except RuntimeError as error:
            self._error = error
        self._data_arrived()

    def _wait_in_thread(self) -> None:
        """Runs in a thread of `WorkerThreads`."""
        try:
            with contextlib.nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
                self._inner.wait()
                self._synchronize_stream()
            if self._transfer is not None and self._entry.group_seq is not None:
                self._value = self._inner.result()
        except RuntimeError as error:
            self._error = error
        self._data_arrived()

    def _synchronize_stream(self) -> None:
        """NCCL only queues; the shaped network counts from when the GPU has finished."""
        if self._gpu is not None:
            torch.cuda.current_stream().synchronize()

    def _data_arrived(self) -> None:
        """The backend is done; on the shaped network the remaining time must still pass."""
        now = time.monotonic()
        if self._transfer is None:
            self._entry.finished = now
        elif self._error is not None:
            self._state.link.drop(self._transfer)
            self._entry.finished = now
        else:
            self._entry.finished = max(self._state.link.finish_time(self._transfer), now)
        with self._state.futures:
            self._done.set()
            future = self._future
        if future is not None:
            self._complete_in_time()

    def _complete_in_time(self) -> None:
        """Complete our future at the computed time.

        Its callbacks are foreign code and may wait for the next operation (PowerSGD's do). So they
        must not run in the timer's thread, which has to complete that one.
        """
        state = self._state
        state.timer.at(self._entry.finished, lambda: state.workers.run(self._complete))

    def _complete(self) -> None:
        if self._error is None:
            self._future.set_result(self._value)
        else:
            self._future.set_exception(self._error)

    # -- methods of torch's Work -------------------------------------------------------------------

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Block until the result may be used. Raises what the backend raised."""
        if self._waited:
            return True
        status_file, began = self._state.status_file, time.monotonic()
        on_main_thread = threading.get_ident() == self._state.main_thread
        if on_main_thread:
            bounded = self._position["bounded"] or timeout != FOREVER
            status_file.enter(**{**self._position, "bounded": bounded})
        try:
            self._wait_inside(timeout)
        except RuntimeError:
            if self._done is None and self._transfer is not None:
                self._state.link.drop(self._transfer)  # a watching thread does it itself
            raise
        finally:
            if on_main_thread:
                status_file.leave()
        self._waited = True
        if self._done is None:
            self._record_end()
        if on_main_thread:
            self._entry.waited = (began, time.monotonic())
        return True

    def _wait_inside(self, timeout: timedelta) -> None:
        """Wait for the backend, or for the thread that watches it."""
        if self._done is not None:
            limit = None if timeout == FOREVER else timeout.total_seconds()
            latest = math.inf if limit is None else time.monotonic() + limit
            here = self._done.wait(limit)
            if self._error is not None:
                raise self._error
            if here:
                sleep_until(min(self._entry.finished, latest))
            if not here or self._entry.finished > latest:
                call = self._entry.call
                raise RuntimeError(f"{call.op} at {self._entry.where} took longer than {limit} s")
            if self._gpu is not None:
                self._inner.wait()  # orders the caller's stream after it
        elif self._inner is not None:
            self._inner.wait() if timeout == FOREVER else self._inner.wait(timeout)

    def _record_end(self) -> None:
        """Record the end in the thread that waited, after the remaining time of the network."""
        if self._transfer is not None:
            self._synchronize_stream()
            sleep_until(self._state.link.finish_time(self._transfer))
            self._entry.finished = time.monotonic()
        elif self._entry.finished is None:
            self._entry.finished = time.monotonic()

    def is_completed(self) -> bool:
        if self._done is not None:
            return self._done.is_set() and time.monotonic() >= self._entry.finished
        return self._waited or (self._transfer is None and self._inner.is_completed())

    def is_success(self) -> bool:
        return self._error is None and self._inner.is_success()

    def exception(self) -> Any:
        return self._error if self._error is not None else self._inner.exception()

    def get_future(self) -> torch.futures.Future:
        if self._done is None or self._transfer is None:
            return self._inner.get_future()
        with self._state.futures:
            first, self._future = self._future is None, self._future or torch.futures.Future()
            here = self._done.is_set()
        if first and self._waited:  # DDP's reducer has waited, and asks for the value at once
            self._complete()
        elif first and here:
            self._complete_in_time()
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def synchronize(self) -> None:
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def source_rank(self) -> int:
        """The group rank that a recv from any rank received from."""
        return self._inner._source_rank()

    _source_rank = source_rank
