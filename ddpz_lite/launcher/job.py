"""One job in the kernel: a single loop hears every rank, and decides when the job is over and why.

The loop runs in the caller's thread, so Ctrl-C interrupts it like any cell, and prints what ranks
print, because a kernel does not forward the output of its child processes. It never waits for one
rank while another has something to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .channel import Channel, Inbox
from .engines import Engine
from .failure import (
    Failure,
    Folder,
    RankFailed,
    explain,
    from_exception,
    from_status,
    root_cause,
    running_place,
)
from .interrupts import Interrupts
from .printer import Printer
from .progress import Bar
from .rank import Orders
from .ranks import START_DEADLINE, EngineGone, Ranks
from .run import Run

if TYPE_CHECKING:
    from ..wire.stall import Stall

TICK = 0.05  # seconds between two looks at the board
GRACE = 0.1  # seconds to hear the other ranks once the cause is known
GRACE_CONSEQUENCE = 2.0  # seconds to wait for the cause when only its consequences are known
LEAVE = 5.0  # seconds for ranks to end by themselves when all have returned


class Job:
    """The state of one launch, from the first process to the last descriptor."""

    def __init__(self, orders: Orders, engine: Engine, printer: Printer):
        self.world_size = orders.world_size
        self.orders, self.engine, self.printer = orders, engine, printer
        self.began = time.monotonic()
        self.results: dict[int, bytes] = {}
        self.histories: dict[int, tuple[list, list]] = {}
        self.failures: list[Failure] = []
        self.status: dict[int, int] = {}
        self.started = self.over = self.killed = self.stacks_fresh = False
        self.doom: Stall | None = None  # the stall that the board reported at the last look
        self.bar: Bar | None = None

    def run(self) -> Run:
        """Run the job to its end. Raises RankFailed; leaves nothing behind."""
        with Interrupts() as self.interrupts:
            self.path = tempfile.mkdtemp(prefix="ddpz-")
            self.folder = Folder(self.path)
            self.board: Any = None
            self.ranks: Ranks | None = None
            self.selector = selectors.DefaultSelector()
            try:
                self.board = self._new_board() if self.orders.record else None
                self.ranks = self.engine.start(self.world_size, self.path)
                self._register()
                self._until(lambda: len(self.results) == self.world_size, self._watch_over)
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

    def _new_board(self) -> Any:
        from ..wire import Board

        try:
            return Board.create(os.path.join(self.path, "board"), self.world_size)
        except OSError as error:
            error.add_note("launch keeps its files there: make room, or set TMPDIR to another disk")
            raise

    # -- the loop ----------------------------------------------------------------------------------

    def _register(self) -> None:
        self.inboxes = [Inbox(control) for control in self.ranks.controls]
        for rank, (inbox, output) in enumerate(zip(self.inboxes, self.ranks.outputs, strict=True)):
            self.selector.register(inbox.sock, selectors.EVENT_READ, (self._hear, rank, inbox))
            self.selector.register(output, selectors.EVENT_READ, (self._print, rank, output))
        self.ranks.events.setblocking(False)
        self._event_data = b""
        self.selector.register(
            self.ranks.events, selectors.EVENT_READ, (self._event, 0, self.ranks.events)
        )

    def _until(self, done: Callable[[], bool], watch: Callable[[], None] | None = None) -> None:
        """Hear the ranks until `done()`; `watch` looks for trouble after every round."""
        while not done():
            for key, _ in self.selector.select(TICK):
                handler, rank, source = key.data
                handler(rank, source)
            if watch:
                watch()

    def _hear(self, rank: int, inbox: Inbox) -> None:
        """Frames from a rank: its result, its exception, or how far it is."""
        if inbox.sock not in self.selector.get_map():
            return  # closed earlier in the same round
        try:
            for kind, body in inbox.frames():
                if kind == "result":
                    self.results[rank], self.histories[rank] = pickle.loads(body)
                elif kind == "raised":
                    told = pickle.loads(body)
                    self.histories[rank] = told["history"]
                    self.failures.append(from_exception(rank, time.monotonic(), told))
                elif kind == "bar":
                    self.bar = self.bar or Bar(self.world_size)
                    self.bar.update(rank, *json.loads(body))
        except EOFError:
            self.selector.unregister(inbox.sock)

    def _print(self, rank: int, output: Any) -> bool:
        """Print what has come from a rank; returns whether there was something."""
        try:
            data = output.read(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if data:
            self.printer.feed(rank, data)
        else:
            self.selector.unregister(output)
        return bool(data)

    def _event(self, _: int, events: Any) -> None:
        """News from the engine: the ranks have been started, one has ended, all have ended."""
        try:
            data = events.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self.selector.unregister(events)
            self.over = True
            if len(self.results) < self.world_size and not self.failures:
                if not self.started:
                    raise EngineGone("launch: the process that starts the ranks has died")
                raise RuntimeError(
                    "launch: the process that started the ranks was killed, and the ranks with it; "
                    "run the cell again"
                )
            return
        *lines, self._event_data = (self._event_data + data).split(b"\n")
        for line in map(json.loads, lines):
            if "pids" in line:
                self._give_orders()
            elif "rank" in line:
                self._ended(line["rank"], line["status"])
            elif "over" in line:
                self.over = True

    def _give_orders(self) -> None:
        self.started = True
        self.origin = time.monotonic()
        for rank, control in enumerate(self.ranks.controls):
            own = replace(self.orders, rank=rank, folder=self.path, origin=self.origin)
            control.setblocking(True)
            with contextlib.suppress(ConnectionError):  # it died at birth: an event will say how
                Channel(control).send("orders", pickle.dumps(own))
            control.setblocking(False)

    def _ended(self, rank: int, status: int) -> None:
        """A process is gone. That is a failure unless it has returned or raised; its last frames
        are read first.
        """
        self.status[rank] = status
        self._hear(rank, self.inboxes[rank])
        spoke = rank in self.results or any(failure.rank == rank for failure in self.failures)
        if not spoke:
            self.failures.append(from_status(rank, time.monotonic(), status, self.folder))
        elif rank in self.results and status != 0 and not self.killed:
            print(f"[rank {rank}] returned, then its process ended with status {status}")

    # -- judging -----------------------------------------------------------------------------------

    def _watch_over(self) -> None:
        """Raise RankFailed as soon as it is clear that the job cannot end well, and why."""
        self.interrupts.obey()
        now = time.monotonic()
        if self.failures:
            if not self.stacks_fresh:
                self._ask_for_stacks()
            root = root_cause(self.failures)
            grace = GRACE_CONSEQUENCE if root.consequence else GRACE
            if self._all_heard() or now > self.failures[0].at + grace:
                self._fail(root)
        elif not self.started:
            if now > self.began + START_DEADLINE:
                raise RuntimeError(
                    f"launch: no process could be started within {START_DEADLINE:.0f} s"
                )
        elif now > self.origin + self.orders.timeout:
            self._fail_timeout()
        elif self.board and (doom := self.board.stall(gone=set(self.results))) is not None:
            if doom == self.doom:  # twice in a row: not a moment between two calls
                self._fail_stalled(doom)
            self.doom = doom
        else:
            self.doom = None

    def _ask_for_stacks(self) -> None:
        """Have every living rank write its stack into the job's folder; a hung one can."""
        self.ranks.ask_for_stacks()
        deadline = time.monotonic() + GRACE
        self._until(lambda: self._all_heard() or time.monotonic() > deadline)
        self.stacks_fresh = True

    def _all_heard(self) -> bool:
        """Whether every rank has returned or failed."""
        spoke = {failure.rank for failure in self.failures} | self.results.keys()
        return len(spoke) == self.world_size

    def _fail_stalled(self, stall: Stall) -> None:
        """Ranks wait for what can never come."""
        self._ask_for_stacks()
        self._fail_hang("stalled", stall.rank, stall.sentence)

    def _fail_timeout(self) -> None:
        """Time is up: look first at a rank that runs by itself, else at one that has left."""
        self._ask_for_stacks()
        here = [rank for rank in range(self.world_size) if rank not in self.results]
        running = [rank for rank in here if not self._place(rank)[0]]
        rank = [*running, *sorted(self.results), *here][0]
        late = f"the job did not end within timeout={self.orders.timeout:g} s"
        first = f"Look first at rank {rank}: it {self._positions()[rank]}"
        self._fail_hang("timeout", rank, f"{late}. {first}")

    def _fail_hang(self, kind: str, rank: int, sentence: str) -> None:
        where = self.folder.stack_place(rank)
        self._fail(Failure(-1, kind, time.monotonic(), sentence, where), rank)

    def _fail(self, root: Failure, rank: int | None = None) -> None:
        positions = self._positions()
        self._end()
        self.printer.finish()
        raise RankFailed(
            explain(root, positions),
            root.rank if rank is None else rank,
            root.kind,
            root.where,
            self._ledger()[0],
        )

    def _positions(self) -> dict[int, str]:
        """{rank: where it is}, in words, for the ranks that have not failed themselves."""
        failed = {failure.rank: failure for failure in self.failures}
        words = {}
        for rank in range(self.world_size):
            if rank in self.results:
                words[rank] = "had returned"
            elif rank in failed:
                words[rank] = failed[rank].short
            else:
                words[rank] = self._place(rank)[1]
        return words

    def _place(self, rank: int) -> tuple[bool, str]:
        """(whether it waits in a collective, where it is in words), by the board if there is one,
        else by its stack.
        """
        if self.board is not None and (position := self.board.position(rank)).phase != "running":
            return position.phase == "waiting", self.board.describe(rank)
        return running_place(self.folder, rank, self.stacks_fresh)

    def _tell_interrupted(self) -> None:
        """Ctrl-C: say where the ranks were, and that they are gone."""
        words = {}
        if self.started:
            self._ask_for_stacks()
            words = self._positions()
        self._end()
        self.printer.finish()
        print("interrupted; the ranks have been ended.")
        for rank, text in words.items():
            print(f"  rank {rank} {text}")

    # -- the end -----------------------------------------------------------------------------------

    def _dismiss(self) -> None:
        """All have returned: let them go, and hear what they still print."""
        for control in self.ranks.controls:
            control.setblocking(True)
            with contextlib.suppress(ConnectionError):  # it is gone already; its result is here
                Channel(control).send("bye")
            control.setblocking(False)
        deadline = time.monotonic() + LEAVE
        self._until(lambda: self.over or time.monotonic() > deadline, self.interrupts.obey)

    def _end(self) -> None:
        """Kill what still runs, wait until it is gone, and read what was printed up to then."""
        if self.ranks is None:
            return
        if not self.over:
            self.killed = True
            self.ranks.kill()
            deadline = time.monotonic() + LEAVE
            self._until(lambda: self.over or time.monotonic() > deadline)
        for rank, output in enumerate(self.ranks.outputs):
            while output in self.selector.get_map() and self._print(rank, output):
                pass

    def _close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        if self.board is not None:
            self.board.close()
        self.selector.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if self.bar:
            self.bar.close()

    def _ledger(self) -> tuple[list, list]:
        records = [record for rank in sorted(self.histories) for record in self.histories[rank][0]]
        spans = [span for rank in sorted(self.histories) for span in self.histories[rank][1]]
        return records, spans

    def _result(self) -> Run:
        self.printer.finish()
        records, spans = self._ledger()
        values = [self._value(rank) for rank in range(self.world_size)]
        seconds = time.monotonic() - self.began
        return Run(values, seconds, self.orders.backend, records, spans, self.printer.lines)

    def _value(self, rank: int) -> Any:
        try:
            return pickle.loads(self.results[rank])
        except Exception as error:
            raise RankFailed(
                f"rank {rank} ended well, but its result cannot be rebuilt in the notebook "
                f"({type(error).__name__}: {error}). "
                "Return data: numbers, strings, tensors, lists, dicts.",
                rank,
                "raised",
                ledger=self._ledger()[0],
            ) from error
