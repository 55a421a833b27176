"""One launch, seen from the kernel: start the ranks, hear them, judge, and leave nothing behind.

The loop runs in the caller's thread, so Ctrl-C interrupts it like any cell, and prints what ranks
print, because a kernel does not forward the output of its child processes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ddpz_lite.launcher.control import Control
from ddpz_lite.launcher.crowd import kept_waiting
from ddpz_lite.launcher.failure import (
    Failure,
    Folder,
    RankFailed,
    explain,
    root_cause,
    running_place,
)
from ddpz_lite.launcher.forkserver import ForkServer
from ddpz_lite.launcher.hearing import Hearing
from ddpz_lite.launcher.interrupts import Interrupts
from ddpz_lite.launcher.printer import Printer
from ddpz_lite.launcher.processes import Processes
from ddpz_lite.launcher.rank import Orders
from ddpz_lite.launcher.run import Run

START_DEADLINE = 120.0  # seconds for the fork server to import torch, on the slowest disk
GRACE = 0.1  # seconds to hear the other ranks once the cause is known
STACKS = 2.0  # seconds at most until each living rank has written its stack
GRACE_CONSEQUENCE = 2.0  # seconds to wait for the cause when only its consequences are known
LEAVE = 5.0  # seconds for ranks to end by themselves when all have returned


class Job:
    """The state of one launch, from the first process to the last descriptor."""

    def __init__(self, orders: Orders, server: ForkServer, printer: Printer):
        self.world_size = orders.world_size
        self.orders, self.server, self.printer = orders, server, printer
        self.began = time.monotonic()
        self.origin: float | None = None  # when the ranks got their orders
        self.stacks_fresh = False
        self.doom: Any = None  # the stall that the board reported at the last look

    def run(self) -> Run:
        """Run the job to its end. Raises RankFailed; leaves nothing behind."""
        with Interrupts() as self.interrupts:
            self.path = tempfile.mkdtemp(prefix="ddpz-")
            self.folder = Folder(self.path)
            self.board: Any = None
            self.processes: Processes | None = None
            self.heard = Hearing(self.world_size, self.printer, self.folder, self.orders.survivors)
            try:
                self._start()
                self.heard.until(self.heard.all_returned, self._watch_over)
                self._dismiss()
                return self._result()
            except KeyboardInterrupt:
                self._tell_interrupted()
                raise
            finally:
                try:
                    self._end()
                finally:
                    self._close()

    # -- the start ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Ask for the processes, and send each its orders once they exist."""
        if self.orders.record:
            self.board = self._new_board()
        self.processes = self.server.start(self.world_size, self.path)
        self.heard.listen(self.processes)
        self.heard.until(lambda: self.heard.started, self._watch_start)
        self.origin = time.monotonic()
        for rank, control in enumerate(self.processes.controls):
            own = replace(self.orders, rank=rank, folder=self.path, origin=self.origin)
            self._tell(control, "orders", pickle.dumps(own))

    def _new_board(self) -> Any:
        from ddpz_lite.wire import Board

        try:
            return Board.create(os.path.join(self.path, "board"), self.world_size)
        except OSError as error:
            error.add_note("launch keeps its files there: make room, or set TMPDIR to another disk")
            raise

    def _watch_start(self) -> None:
        self.interrupts.obey()
        if time.monotonic() > self.began + START_DEADLINE:
            raise RuntimeError(f"launch: no process could be started within {START_DEADLINE:.0f} s")

    def _tell(self, control: socket.socket, kind: str, body: bytes = b"") -> None:
        control.setblocking(True)
        with contextlib.suppress(ConnectionError):  # it is gone: an event says how, or has said
            Control(control).send(kind, body)
        control.setblocking(False)

    # -- judging -----------------------------------------------------------------------------------

    def _watch_over(self) -> None:
        """Raise RankFailed as soon as it is clear that the job cannot end well, and why."""
        self.interrupts.obey()
        if self.heard.failures:
            self._judge_failures()
        elif self._time_is_up():
            self._fail_timeout()
        elif self.board is not None:
            doom = self.board.stall(gone=set(self.heard.results))
            if doom is not None and doom == self.doom:  # twice: not a moment between two calls
                self._ask_for_stacks()
                self._fail_hang("stalled", doom.rank, doom.sentence)
            self.doom = doom

    def _time_is_up(self) -> bool:
        passed = time.monotonic() - self.origin
        if passed <= self.orders.timeout:
            return False
        return passed - kept_waiting(self.heard.pids, passed) > self.orders.timeout

    def _judge_failures(self) -> None:
        """Wait a little for the others to speak; then the failure that explains the rest."""
        failures = self.heard.failures
        if not self.stacks_fresh:
            self._ask_for_stacks()
        root = root_cause(failures)
        if root.consequence:  # of a death, which the others may have been meant to survive
            root = root_cause([*self.heard.lost, *failures])
        grace = GRACE_CONSEQUENCE if root.consequence else GRACE
        if not self.heard.silent() or time.monotonic() > failures[0].at + grace:
            self._fail(root, root.rank)

    def _ask_for_stacks(self) -> None:
        """Have every living rank write its stack into the job's folder; a hung one can."""
        sizes = {rank: self.folder.stack_bytes(rank) for rank in range(self.world_size)}
        self.processes.ask_for_stacks()
        asked = time.monotonic()

        def answered() -> bool:
            silent, passed = self.heard.silent(), time.monotonic() - asked
            late = any(-1 < sizes[rank] == self.folder.stack_bytes(rank) for rank in silent)
            return not silent or passed > (STACKS if late else GRACE)

        self.heard.until(answered)
        self.stacks_fresh = True

    def _fail_timeout(self) -> None:
        """Time is up: look first at a rank that runs by itself, else at one that has left."""
        self._ask_for_stacks()
        results = self.heard.results
        here = [rank for rank in range(self.world_size) if rank not in results]
        running = [rank for rank in here if not self._place(rank)[0]]
        rank = [*running, *sorted(results), *here][0]
        late = f"the job did not end within timeout={self.orders.timeout:g} s"
        first = f"Look first at rank {rank}: it {dict(self._positions())[rank]}"
        self._fail_hang("timeout", rank, f"{late}. {first}")

    def _fail_hang(self, kind: str, rank: int, sentence: str) -> None:
        where = self.folder.stack_place(rank)
        self._fail(Failure(-1, kind, time.monotonic(), sentence, where), rank)

    def _fail(self, root: Failure, rank: int) -> None:
        positions = dict(self._positions())
        self._end()
        self.printer.finish()
        records, _ = self.heard.ledger()
        raise RankFailed(explain(root, positions), rank, root.kind, root.where, records)

    def _positions(self) -> Iterator[tuple[int, str]]:
        """(rank, where it is) in words, for every rank."""
        failed = {f.rank: f for f in (*self.heard.lost, *self.heard.failures)}
        for rank in range(self.world_size):
            if rank in self.heard.results:
                yield rank, "had returned"
            elif rank in failed:
                yield rank, failed[rank].short
            else:
                yield rank, self._place(rank)[1]

    def _place(self, rank: int) -> tuple[bool, str]:
        """(whether it waits in a collective, where it is): by the board, or else by its stack."""
        if self.board is not None and (position := self.board.position(rank)).phase != "running":
            return position.phase == "waiting", self.board.describe(rank)
        return running_place(self.folder, rank, self.stacks_fresh)

    def _tell_interrupted(self) -> None:
        """Ctrl-C: say where the ranks were, and that they are gone."""
        words: list[tuple[int, str]] = []
        if self.origin is not None:
            self._ask_for_stacks()
            words = list(self._positions())
        self._end()
        self.printer.finish()
        print("interrupted; the ranks have been ended.")
        for rank, text in words:
            print(f"  rank {rank} {text}")

    # -- the end -----------------------------------------------------------------------------------

    def _dismiss(self) -> None:
        """All have returned: let them go, and hear what they still print."""
        for control in self.processes.controls:
            self._tell(control, "bye")
        deadline = time.monotonic() + LEAVE
        self.heard.until(
            lambda: self.heard.over or time.monotonic() > deadline, self.interrupts.obey
        )

    def _end(self) -> None:
        """Kill what still runs, wait until it is gone, and read what was printed up to then."""
        if self.processes is None:
            return
        if not self.heard.over:
            self.heard.killed = True
            self.processes.kill()
            deadline = time.monotonic() + LEAVE
            self.heard.until(lambda: self.heard.over or time.monotonic() > deadline)
        self.heard.drain()

    def _close(self) -> None:
        if self.processes is not None:
            self.processes.close()
        if self.board is not None:
            self.board.close()
        self.heard.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _result(self) -> Run:
        self.printer.finish()
        records, spans = self.heard.ledger()
        values = [self._value(rank) for rank in range(self.world_size)]
        seconds = time.monotonic() - self.began
        began = time.time() - (time.monotonic() - self.origin)
        return Run(values, seconds, self.orders.backend, records, spans, self.printer.lines, began)

    def _value(self, rank: int) -> Any:
        if any(failure.rank == rank for failure in self.heard.lost):
            return None
        try:
            return pickle.loads(self.heard.results[rank])
        except Exception as error:
            raise RankFailed(
                f"rank {rank} ended well, but its result cannot be rebuilt in the notebook "
                f"({type(error).__name__}: {error}). "
                "Return data: numbers, strings, tensors, lists, dicts.",
                rank,
                "raised",
                ledger=self.heard.ledger()[0],
            ) from error
