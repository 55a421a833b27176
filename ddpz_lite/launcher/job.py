"""One launch: start the ranks, receive from them, explain a failure, and clean up.

The loop runs in the caller's thread, so that Ctrl-C interrupts it like any cell. It prints what the
ranks print, because a kernel does not forward the output of its child processes.
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

from ddpz_lite.launcher.event_loop import EventLoop
from ddpz_lite.launcher.failure import (
    Failure,
    JobFolder,
    RankFailed,
    explain,
    root_cause,
    running_place,
)
from ddpz_lite.launcher.forkserver import ForkServer
from ddpz_lite.launcher.interrupts import Interrupts
from ddpz_lite.launcher.messages import MessageSocket
from ddpz_lite.launcher.printer import Printer
from ddpz_lite.launcher.processes import Processes
from ddpz_lite.launcher.rank import JobSpec
from ddpz_lite.launcher.run import Run

START_DEADLINE = 120.0  # seconds for the fork server to import torch, on the slowest disk
GRACE = 0.1  # seconds to receive the other ranks' reports once the cause is known
STACKS = 2.0  # seconds at most until each living rank has written its stack
GRACE_CONSEQUENCE = 2.0  # seconds to wait for the cause when only its consequences are known
LEAVE = 5.0  # seconds for the processes to exit once all ranks have returned


class Job:
    """The state of one launch, from the first process to the last descriptor."""

    def __init__(self, spec: JobSpec, server: ForkServer, printer: Printer):
        self.world_size = spec.world_size
        self.spec, self.server, self.printer = spec, server, printer
        self.began = time.monotonic()
        self.origin: float | None = None  # when the job was sent to the ranks
        self.stacks_fresh = False
        self.last_stall: Any = None  # what the status file showed in the round before

    def run(self) -> Run:
        """Run the job to its end. Raises RankFailed; leaves nothing behind."""
        with Interrupts() as self.interrupts:
            self.path = tempfile.mkdtemp(prefix="ddpz-")
            self.folder = JobFolder(self.path)
            self.status_file: Any = None
            self.processes: Processes | None = None
            self.loop = EventLoop(self.world_size, self.printer, self.folder, self.spec.survivors)
            try:
                self._start()
                self.loop.run_until(self.loop.all_returned, self._check)
                self._let_exit()
                return self._result()
            except KeyboardInterrupt:
                self._report_interrupt()
                raise
            finally:
                try:
                    self._end()
                finally:
                    self._close()

    # -- the start ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Ask for the processes, and send each its job once they exist."""
        if self.spec.record:
            self.status_file = self._new_status_file()
        self.processes = self.server.start(self.world_size, self.path)
        self.loop.register(self.processes)
        self.loop.run_until(lambda: self.loop.started, self._check_start)
        self.origin = time.monotonic()
        for rank, control in enumerate(self.processes.controls):
            own = replace(self.spec, rank=rank, folder=self.path, origin=self.origin)
            self._send(control, "spec", pickle.dumps(own))

    def _new_status_file(self) -> Any:
        from ddpz_lite.wire import StatusFile

        try:
            return StatusFile.create(os.path.join(self.path, "status"), self.world_size)
        except OSError as error:
            error.add_note("Fix: free space there, or set TMPDIR to a folder on another disk.")
            raise

    def _check_start(self) -> None:
        self.interrupts.raise_pending()
        if time.monotonic() > self.began + START_DEADLINE:
            raise RuntimeError(f"launch: no process could be started within {START_DEADLINE:.0f} s")

    def _send(self, control: socket.socket, kind: str, body: bytes = b"") -> None:
        control.setblocking(True)
        with contextlib.suppress(ConnectionError):  # the rank has died: an event reports how
            MessageSocket(control).send(kind, body)
        control.setblocking(False)

    # -- failures ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise RankFailed as soon as it is certain that the job cannot end well, and why."""
        self.interrupts.raise_pending()
        if self.loop.failures:
            self._check_failures()
        elif time.monotonic() - self.origin > self.spec.timeout:
            self._fail_timeout()
        elif self.status_file is not None:
            stall = self.status_file.stall(gone=set(self.loop.results))
            if stall is not None and stall == self.last_stall:  # twice: not between two calls
                self._ask_for_stacks()
                self._fail_hang("stalled", stall.rank, stall.sentence)
            self.last_stall = stall

    def _check_failures(self) -> None:
        """Wait a little for other reports, then fail with the one that explains the rest."""
        failures = self.loop.failures
        if not self.stacks_fresh:
            self._ask_for_stacks()
        root = root_cause(failures)
        if root.consequence:  # of a death, which the others may have been meant to survive
            root = root_cause([*self.loop.lost, *failures])
        grace = GRACE_CONSEQUENCE if root.consequence else GRACE
        if not self.loop.unfinished() or time.monotonic() > failures[0].at + grace:
            self._fail(root, root.rank)

    def _ask_for_stacks(self) -> None:
        """Have every living rank, even a hung one, write its stack into the job's folder."""
        sizes = {rank: self.folder.stack_bytes(rank) for rank in range(self.world_size)}
        self.processes.ask_for_stacks()
        asked = time.monotonic()

        def answered() -> bool:
            waiting, passed = self.loop.unfinished(), time.monotonic() - asked
            late = any(-1 < sizes[rank] == self.folder.stack_bytes(rank) for rank in waiting)
            return not waiting or passed > (STACKS if late else GRACE)

        self.loop.run_until(answered)
        self.stacks_fresh = True

    def _fail_timeout(self) -> None:
        """Time is up: name a rank that is running, else one that has returned."""
        self._ask_for_stacks()
        results = self.loop.results
        here = [rank for rank in range(self.world_size) if rank not in results]
        running = [rank for rank in here if not self._place(rank)[0]]
        rank = [*running, *sorted(results), *here][0]
        late = f"the job did not end within timeout={self.spec.timeout:g} s"
        first = f"Look first at rank {rank}: it {dict(self._positions())[rank]}"
        self._fail_hang("timeout", rank, f"{late}. {first}")

    def _fail_hang(self, kind: str, rank: int, sentence: str) -> None:
        where = self.folder.stack_place(rank)
        self._fail(Failure(-1, kind, time.monotonic(), sentence, where), rank)

    def _fail(self, root: Failure, rank: int) -> None:
        positions = dict(self._positions())
        self._end()
        self.printer.finish()
        records, _ = self.loop.ledger()
        raise RankFailed(explain(root, positions), rank, root.kind, root.where, records)

    def _positions(self) -> Iterator[tuple[int, str]]:
        """(rank, where it is) in words, for every rank."""
        failed = {f.rank: f for f in (*self.loop.lost, *self.loop.failures)}
        for rank in range(self.world_size):
            if rank in self.loop.results:
                yield rank, "had returned"
            elif rank in failed:
                yield rank, failed[rank].short
            else:
                yield rank, self._place(rank)[1]

    def _place(self, rank: int) -> tuple[bool, str]:
        """(whether it waits in a collective, where it is): from the status file or its stack."""
        if (
            self.status_file is not None
            and (position := self.status_file.position(rank)).phase != "running"
        ):
            return position.phase == "waiting", self.status_file.describe(rank)
        return running_place(self.folder, rank, self.stacks_fresh)

    def _report_interrupt(self) -> None:
        """Ctrl-C: print where the ranks were, and that they have been ended."""
        positions: list[tuple[int, str]] = []
        if self.origin is not None:
            self._ask_for_stacks()
            positions = list(self._positions())
        self._end()
        self.printer.finish()
        print("interrupted; the ranks have been ended.")
        for rank, text in positions:
            done = self.loop.progress_of(rank)
            print(f"  rank {rank} {text}" + (f"; it had finished {done}" if done else ""))

    # -- the end -----------------------------------------------------------------------------------

    def _let_exit(self) -> None:
        """All ranks have returned: let their processes exit, and print what they still print."""
        for control in self.processes.controls:
            self._send(control, "exit")
        deadline = time.monotonic() + LEAVE
        self.loop.run_until(
            lambda: self.loop.over or time.monotonic() > deadline, self.interrupts.raise_pending
        )

    def _end(self) -> None:
        """Kill the processes that still run, wait for their end, and read their last output."""
        if self.processes is None:
            return
        if not self.loop.over:
            self.loop.killed = True
            self.processes.kill()
            deadline = time.monotonic() + LEAVE
            self.loop.run_until(lambda: self.loop.over or time.monotonic() > deadline)
        self.loop.drain()

    def _close(self) -> None:
        if self.processes is not None:
            self.processes.close()
        if self.status_file is not None:
            self.status_file.close()
        self.loop.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _result(self) -> Run:
        self.printer.finish()
        records, spans = self.loop.ledger()
        values = [self._value(rank) for rank in range(self.world_size)]
        seconds = time.monotonic() - self.began
        began = time.time() - (time.monotonic() - self.origin)
        return Run(values, seconds, self.spec.backend, records, spans, self.printer.lines, began)

    def _value(self, rank: int) -> Any:
        if any(failure.rank == rank for failure in self.loop.lost):
            return None
        try:
            return pickle.loads(self.loop.results[rank])
        except Exception as error:
            raise RankFailed(
                f"rank {rank} returned, but its result cannot be rebuilt in the notebook "
                f"({type(error).__name__}: {error}). "
                "Fix: return data: numbers, strings, tensors, lists, dicts.",
                rank,
                "raised",
                ledger=self.loop.ledger()[0],
            ) from error
