"""Receive everything about a job: messages and output of the ranks, events of the fork server.

One loop reads all of them without blocking, so a slow rank never delays the others.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import time
from collections.abc import Callable
from socket import socket
from typing import Any

from ddpz_lite.launcher.failure import Failure, JobFolder, from_exception, from_status
from ddpz_lite.launcher.forkserver import ForkServerGone
from ddpz_lite.launcher.messages import MessageReader
from ddpz_lite.launcher.printer import Printer
from ddpz_lite.launcher.processes import Processes
from ddpz_lite.launcher.progress import Bar
from ddpz_lite.wire.callsite import uncollected

TICK = 0.05  # seconds between two checks of the status file


class EventLoop:
    """Receives messages and output from all ranks and stores them.

    results: pickled, by rank. histories: (records, spans) by rank. started: the processes exist
    and wait for their job. over: all processes have ended. killed: the launcher ended them.
    lost: deaths that the other ranks may survive.
    """

    def __init__(
        self, world_size: int, printer: Printer, folder: JobFolder, survivors: bool = False
    ):
        self.world_size, self.printer, self.folder = world_size, printer, folder
        self.results: dict[int, bytes] = {}
        self.histories: dict[int, tuple[list, list]] = {}
        self.failures: list[Failure] = []
        self.lost: list[Failure] = []
        self.survivors = survivors
        self.started = self.over = self.killed = False
        self._selector = selectors.DefaultSelector()
        self._readers: list[MessageReader] = []
        self._outputs: list[int] = []
        self._event_data = b""
        self._bar: Bar | None = None

    def register(self, processes: Processes) -> None:
        """Start receiving from these processes."""
        self._readers = [MessageReader(control) for control in processes.controls]
        self._outputs = processes.outputs
        for rank, (reader, output) in enumerate(zip(self._readers, self._outputs, strict=True)):
            self._selector.register(
                reader.sock, selectors.EVENT_READ, (self._receive, rank, reader)
            )
            self._selector.register(output, selectors.EVENT_READ, (self._print, rank, output))
        events = processes.events
        events.setblocking(False)
        self._selector.register(events, selectors.EVENT_READ, (self._server_event, 0, events))

    def run_until(self, done: Callable[[], bool], check: Callable[[], None] | None = None) -> None:
        """Receive until `done()`; `check` runs after every round."""
        while not done():
            for key, _ in self._selector.select(TICK):
                handler, rank, source = key.data
                handler(rank, source)
            if check:
                check()

    def all_returned(self) -> bool:
        return len(self.results) + len(self.lost) == self.world_size

    def unfinished(self) -> set[int]:
        """The ranks that have neither returned nor failed."""
        failed = {failure.rank for failure in (*self.failures, *self.lost)}
        return set(range(self.world_size)) - failed - self.results.keys()

    def drain(self) -> None:
        """Print what is still in the pipes."""
        for rank, output in enumerate(self._outputs):
            while output in self._selector.get_map() and self._print(rank, output):
                pass

    def ledger(self) -> tuple[list, list]:
        """(records, spans) of all ranks, by rank."""
        known = [self.histories[rank] for rank in sorted(self.histories)]
        return [r for records, _ in known for r in records], [
            s for _, spans in known for s in spans
        ]

    def progress_of(self, rank: int) -> str:
        """ "step 12 of 200": what the rank last reported to `progress`; "" if it never did."""
        return self._bar.text_of(rank) if self._bar else ""

    def close(self) -> None:
        self._selector.close()
        if self._bar:
            self._bar.close()

    # -- one handler for each kind of source -------------------------------------------------------

    def _receive(self, rank: int, reader: MessageReader) -> None:
        """Messages of a rank: its result, its exception, or its progress."""
        if reader.sock not in self._selector.get_map():
            return  # closed earlier in the same round
        try:
            for kind, body in reader.messages():
                if kind == "result":
                    self.results[rank], self.histories[rank] = _loads(body)
                elif kind == "raised":
                    message = _loads(body)
                    self.histories[rank] = message["history"]
                    self.failures.append(from_exception(rank, time.monotonic(), message))
                elif kind == "bar":
                    self._bar = self._bar or Bar(self.world_size)
                    self._bar.update(rank, *json.loads(body))
        except EOFError:
            self._selector.unregister(reader.sock)

    def _print(self, rank: int, output: int) -> bool:
        """Print the new output of a rank; returns whether there was any."""
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.printer.feed(rank, data)
        else:
            self._selector.unregister(output)
        return bool(data)

    def _server_event(self, _: int, events: socket) -> None:
        """The fork server reports: the ranks exist, one has ended, all have ended."""
        try:
            data = events.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(events)
            self._server_died()
            return
        *lines, self._event_data = (self._event_data + data).split(b"\n")
        for event in map(json.loads, lines):
            if "started" in event:
                self.started = True
            elif "rank" in event:
                self._process_ended(event["rank"], event["status"])
            elif "over" in event:
                self.over = True

    def _server_died(self) -> None:
        """The fork server closed its socket, so the ranks are dead."""
        self.over = True
        if self.all_returned() or self.failures:
            return
        if not self.started:
            raise ForkServerGone("launch: the process that starts the ranks has died")
        raise RuntimeError(
            "launch: the process that started the ranks was killed, and the ranks with it. "
            "Fix: run the cell again."
        )

    def _process_ended(self, rank: int, status: int) -> None:
        """That is a failure unless the rank has reported; its last messages are read first."""
        self._receive(rank, self._readers[rank])
        reported = rank in self.results or any(failure.rank == rank for failure in self.failures)
        if not reported:
            self._rank_died(from_status(rank, time.monotonic(), status, self.folder))
        elif rank in self.results and status != 0 and not self.killed:
            print(f"[rank {rank}] returned, then its process ended with status {status}")

    def _rank_died(self, death: Failure) -> None:
        """A rank ended without a report: the job has failed, unless survivors may continue."""
        if not self.survivors or self.killed or len(self.lost) + 1 == self.world_size:
            self.failures.append(death)
            return
        self.lost.append(death)
        print(f"[rank {death.rank}] {death.sentence}", flush=True)
        if self._bar:
            self._bar.forget(death.rank)


def _loads(body: bytes) -> Any:
    """Unpickle a message. A history may have a million records, so no garbage is collected."""
    with uncollected():
        return pickle.loads(body)
