"""The handle that torch gets back for each operation, and who notices that the operation is over.

torch waits for a Work in three ways: `wait()` from Python, `wait()` from C++ (functional
collectives), and a future (DDP's reducer). All of them come through `Wired`, so on the shaped
network the data is not given out before its time, whoever asks. A blocking call is finished by the
thread that waits for it. For the others somebody must look while the program computes: the
backend's own callback where it has one, otherwise a thread of `waiters.Waiters`.
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
from ddpz_lite.wire.tap import Tap

FOREVER = timedelta(0)  # what C++ passes when the caller gave no time limit


class Wired(Work):
    """An operation of the inner backend, watched.

    position: what the board says while the main thread waits for it. transfer: None unless the
    network is shaped. inner: None for a call that NCCL put on the current stream itself.
    """

    def __init__(
        self,
        inner: Work | None,
        entry: Entry,
        tap: Tap,
        position: dict[str, Any],
        transfer: Transfer | None,
    ) -> None:
        super().__init__()
        self._inner, self._entry, self._tap = inner, entry, tap
        self._position, self._transfer = position, transfer
        self._gpu = None if entry.events is None else torch.cuda.current_device()
        self._done: threading.Event | None = None  # the backend is done; made if a thread watches
        self._error: BaseException | None = None
        self._value: Any = None  # of the backend's future
        self._future: torch.futures.Future | None = None  # ours, if asked for on a shaped network
        self._over = False

    # -- who notices the end -----------------------------------------------------------------------

    def watch(self, calls_back: bool) -> None:
        """Notice the end of an operation that runs while the program computes.

        Most collectives of gloo have a future that calls back. Sends and receives have none, nor
        have those that gloo composes of others (reduce_scatter), and NCCL's says too early: there
        a thread waits. An unshaped collective only gets its time noted; whoever waits for it waits
        on the backend itself.
        """
        future = self._future_inside() if calls_back else None
        if future is not None and self._transfer is None:
            future.add_done_callback(self._note)
            return
        self._done = threading.Event()
        if future is not None:
            future.add_done_callback(self._arrived)
        else:
            self._tap.waiters.run(self._wait_here)

    def _future_inside(self) -> torch.futures.Future | None:
        try:
            return self._inner.get_future()
        except RuntimeError:  # torch's way to say that this kind of work has none
            return None

    def _note(self, _: Any) -> None:
        self._entry.finished = time.monotonic()

    def _arrived(self, future: torch.futures.Future) -> None:
        try:
            self._value = future.value()
        except RuntimeError as error:
            self._error = error
        self._data_is_here()

    def _wait_here(self) -> None:
        """A waiter's job."""
        try:
            with contextlib.nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
                self._inner.wait()
                self._catch_up()
            if self._transfer is not None and self._entry.group_seq is not None:
                self._value = self._inner.result()
        except RuntimeError as error:
            self._error = error
        self._data_is_here()

    def _catch_up(self) -> None:
        """NCCL only queues: the shaped network counts from when the GPU has really done it."""
        if self._gpu is not None:
            torch.cuda.current_stream().synchronize()

    def _data_is_here(self) -> None:
        """The backend is done; on the shaped network the rest of the time still has to pass."""
        now = time.monotonic()
        if self._transfer is None:
            self._entry.finished = now
        elif self._error is not None:
            self._tap.link.drop(self._transfer)
            self._entry.finished = now
        else:
            self._entry.finished = max(self._tap.link.settle(self._transfer), now)
        with self._tap.futures:
            self._done.set()
            future = self._future
        if future is not None:
            self._complete_in_time()

    def _complete_in_time(self) -> None:
        """Complete our future when its time has come.

        Its callbacks are anyone's code and may wait for the next operation (PowerSGD's do). They
        must not run in the clock's thread, which has to complete that one.
        """
        tap = self._tap
        tap.clock.at(self._entry.finished, lambda: tap.waiters.run(self._complete))

    def _complete(self) -> None:
        if self._error is None:
            self._future.set_result(self._value)
        else:
            self._future.set_exception(self._error)

    # -- what torch calls --------------------------------------------------------------------------

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Block until the result may be used. Raises what the backend raised."""
        if self._over:
            return True
        board, began = self._tap.board, time.monotonic()
        on_board = threading.get_ident() == self._tap.main_thread
        if on_board:
            bounded = self._position["bounded"] or timeout != FOREVER
            board.enter(**{**self._position, "bounded": bounded})
        try:
            self._wait_inside(timeout)
        except RuntimeError:
            if self._done is None and self._transfer is not None:
                self._tap.link.drop(self._transfer)  # a watcher does so itself
            raise
        finally:
            if on_board:
                board.leave()
        self._over = True
        if self._done is None:
            self._finish_here()
        if on_board:
            self._entry.waited = (began, time.monotonic())
        return True

    def _wait_inside(self, timeout: timedelta) -> None:
        """Until the backend is done, or the watcher says so."""
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

    def _finish_here(self) -> None:
        """The thread that waited notes the end, after sleeping off what the network asks."""
        if self._transfer is not None:
            self._catch_up()
            sleep_until(self._tap.link.settle(self._transfer))
            self._entry.finished = time.monotonic()
        elif self._entry.finished is None:
            self._entry.finished = time.monotonic()

    def is_completed(self) -> bool:
        if self._done is not None:
            return self._done.is_set() and time.monotonic() >= self._entry.finished
        return self._over or (self._transfer is None and self._inner.is_completed())

    def is_success(self) -> bool:
        return self._error is None and self._inner.is_success()

    def exception(self) -> Any:
        return self._error if self._error is not None else self._inner.exception()

    def get_future(self) -> torch.futures.Future:
        if self._done is None or self._transfer is None:
            return self._inner.get_future()
        with self._tap.futures:
            first, self._future = self._future is None, self._future or torch.futures.Future()
            here = self._done.is_set()
        if first and self._over:  # DDP's reducer has waited, and asks for the value at once
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
        """The group rank that a recv from anyone came from."""
        return self._inner._source_rank()

    _source_rank = source_rank
