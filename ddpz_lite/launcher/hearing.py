"""What the kernel hears of a job: frames and output from the ranks, news from the fork server.

One loop reads them all. It never waits for one rank while another has something to say.
"""

from __future__ import annotations

import json
import pickle
import selectors
import time
from collections.abc import Callable
from typing import Any

from ddpz_lite.launcher.control import Inbox
from ddpz_lite.launcher.failure import Failure, Folder, from_exception, from_status
from ddpz_lite.launcher.forkserver import ForkServerGone
from ddpz_lite.launcher.printer import Printer
from ddpz_lite.launcher.processes import Processes
from ddpz_lite.launcher.progress import Bar
from ddpz_lite.wire.callsite import uncollected

TICK = 0.05  # seconds between two looks at the board


class Hearing:
    """The loop, and what it has heard so far.

    results: pickled, by rank. histories: (records, spans) by rank. started: the processes `pids`
    exist and wait for their orders. over: all of them are gone. killed: by us. lost: ranks that
    have died where survivors may go on.
    """

    def __init__(self, world_size: int, printer: Printer, folder: Folder, survivors: bool = False):
        self.world_size, self.printer, self.folder = world_size, printer, folder
        self.results: dict[int, bytes] = {}
        self.histories: dict[int, tuple[list, list]] = {}
        self.failures: list[Failure] = []
        self.lost: list[Failure] = []
        self.survivors = survivors
        self.started = self.over = self.killed = False
        self.pids: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._inboxes: list[Inbox] = []
        self._outputs: list[Any] = []
        self._event_data = b""
        self._bar: Bar | None = None

    def listen(self, processes: Processes) -> None:
        """Hear these processes from now on."""
        self._inboxes = [Inbox(control) for control in processes.controls]
        self._outputs = processes.outputs
        for rank, (inbox, output) in enumerate(zip(self._inboxes, self._outputs, strict=True)):
            self._selector.register(inbox.sock, selectors.EVENT_READ, (self._hear, rank, inbox))
            self._selector.register(output, selectors.EVENT_READ, (self._print, rank, output))
        events = processes.events
        events.setblocking(False)
        self._selector.register(events, selectors.EVENT_READ, (self._event, 0, events))

    def until(self, done: Callable[[], bool], watch: Callable[[], None] | None = None) -> None:
        """Hear the ranks until `done()`; `watch` looks for trouble after every round."""
        while not done():
            for key, _ in self._selector.select(TICK):
                handler, rank, source = key.data
                handler(rank, source)
            if watch:
                watch()

    def all_returned(self) -> bool:
        return len(self.results) + len(self.lost) == self.world_size

    def silent(self) -> set[int]:
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

    def close(self) -> None:
        self._selector.close()
        if self._bar:
            self._bar.close()

    # -- one handler for each kind of source -------------------------------------------------------

    def _hear(self, rank: int, inbox: Inbox) -> None:
        """Frames from a rank: its result, its exception, or how far it is."""
        if inbox.sock not in self._selector.get_map():
            return  # closed earlier in the same round
        try:
            for kind, body in inbox.frames():
                if kind == "result":
                    self.results[rank], self.histories[rank] = _loads(body)
                elif kind == "raised":
                    told = _loads(body)
                    self.histories[rank] = told["history"]
                    self.failures.append(from_exception(rank, time.monotonic(), told))
                elif kind == "bar":
                    self._bar = self._bar or Bar(self.world_size)
                    self._bar.update(rank, *json.loads(body))
        except EOFError:
            self._selector.unregister(inbox.sock)

    def _print(self, rank: int, output: Any) -> bool:
        """Print what has come from a rank; returns whether there was something."""
        try:
            data = output.read(1 << 16)
        except BlockingIOError:
            return False
        if data:
            self.printer.feed(rank, data)
        else:
            self._selector.unregister(output)
        return bool(data)

    def _event(self, _: int, events: Any) -> None:
        """News from the fork server: the ranks exist, one has ended, all have ended."""
        try:
            data = events.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(events)
            self._lose_the_server()
            return
        *lines, self._event_data = (self._event_data + data).split(b"\n")
        for line in map(json.loads, lines):
            if "pids" in line:
                self.started, self.pids = True, line["pids"]
            elif "rank" in line:
                self._ended(line["rank"], line["status"])
            elif "over" in line:
                self.over = True

    def _lose_the_server(self) -> None:
        """Its end of the socket is closed. If the ranks have not spoken, they never will."""
        self.over = True
        if self.all_returned() or self.failures:
            return
        if not self.started:
            raise ForkServerGone("launch: the process that starts the ranks has died")
        raise RuntimeError(
            "launch: the process that started the ranks was killed, and the ranks with it; "
            "run the cell again"
        )

    def _ended(self, rank: int, status: int) -> None:
        """A process is gone. That is a failure unless it has spoken; its last frames come first."""
        self._hear(rank, self._inboxes[rank])
        spoke = rank in self.results or any(failure.rank == rank for failure in self.failures)
        if not spoke:
            self._died(from_status(rank, time.monotonic(), status, self.folder))
        elif rank in self.results and status != 0 and not self.killed:
            print(f"[rank {rank}] returned, then its process ended with status {status}")

    def _died(self, death: Failure) -> None:
        """A rank ended without a word: the job has failed, unless others are left to go on."""
        if not self.survivors or self.killed or len(self.lost) + 1 == self.world_size:
            self.failures.append(death)
            return
        self.lost.append(death)
        print(f"[rank {death.rank}] {death.sentence}", flush=True)
        if self._bar:
            self._bar.forget(death.rank)


def _loads(body: bytes) -> Any:
    """What a rank has pickled; a history may have a million records."""
    with uncollected():
        return pickle.loads(body)
