"""The broker: one event loop in the trusted process serves all ranks of one case.

The ranks have no other channel to each other. So the ledger records what passed here, with this
process's clock, and a hang or a mismatch is observed rather than inferred. A rank's frames are
data: each is checked before use, and a frame that no honest rank sends ends the case.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpz_lite.course.grader.arena.client import Client, line_of_code, records
from ddpz_lite.course.grader.arena.crowd import kept_waiting
from ddpz_lite.course.grader.arena.exchange import Exchange
from ddpz_lite.course.grader.arena.perform import count_of
from ddpz_lite.course.grader.sandbox.frames import Inbox, Refused, clean
from ddpz_lite.course.grader.sandbox.handle import NoRanks, SandboxHandle, release
from ddpz_lite.course.grader.sandbox.limits import MIB, Limits
from ddpz_lite.course.grader.sandbox.usage import family, memory
from ddpz_lite.launcher.failure import Failure, from_exception, root_cause
from ddpz_lite.wire import Network, Record, Span

TICK = 0.05  # seconds between two checks of the clock
LOOK = 0.1  # seconds between two checks of the memory
GRACE = 0.1  # seconds in which other ranks may still report once one has failed
MOST = 20  # times its timeout that a case may take, however busy the machine
BURST = 64  # frames read from one rank before the other ranks' turn
CELL = re.compile(r"(cell [\w.-]+):(\d+)")


@dataclass(frozen=True)
class Ending:
    """How a case ended; see `Observed`. cell: the earlier cell that caused it, or None."""

    outcome: str
    sentence: str = ""
    results: Sequence[bytes] = ()
    ledger: Sequence[Record] = ()
    spans: Sequence[Span] = ()
    cell: int | None = None


class Broker:
    """One case, from its orders to its ending.

    It knows the ranks' state, their results and failures. Data between ranks passes its exchange.
    orders: for each rank a head and the packed inputs. cells: how many there are.
    """

    def __init__(
        self,
        handles: Sequence[SandboxHandle],
        orders: Sequence[tuple[dict[str, Any], bytes]],
        *,
        timeout: float,
        limits: Limits,
        network: Network | None,
        cells: int,
    ) -> None:
        self.clients = [
            Client(rank, handle, Inbox(handle.line, limits.message + MIB))
            for rank, handle in enumerate(handles)
        ]
        self.exchange = Exchange(self.clients, limits, network)
        self.watch = self.exchange.watch
        self.orders, self.limits, self.cells = orders, limits, cells
        self.timeout = timeout * limits.timeout_factor
        self.failures: list[Failure] = []
        self.ruling: tuple[str, str, int | None] | None = None  # outcome, sentence, rank
        self.asked_at = self.looked = 0.0
        self.selector = selectors.DefaultSelector()

    @property
    def verdict(self) -> tuple[str, str, int | None] | None:
        """How the case ends, once the broker or the exchange knows."""
        return self.ruling or self.exchange.verdict

    def run(self) -> Ending:
        """Serve the ranks until the case ends; no rank is left afterwards. Raises NoRanks."""
        self.began = time.monotonic()
        try:
            self._register()
            while self.verdict is None:
                self._round()
                self._judge()
            return self._ending()
        finally:
            self.selector.close()
            release([client.handle for client in self.clients])

    # -- the loop ----------------------------------------------------------------------------------

    def _register(self) -> None:
        for client in self.clients:
            for sock, handler in (
                (client.handle.line, self._receive),
                (client.handle.control, self._supervisor_message),
                (client.handle.output, self._printed),
            ):
                self.selector.register(sock, selectors.EVENT_READ, (handler, client))

    def _round(self) -> None:
        """Send what is due, then receive from every rank once."""
        wait = self.exchange.give_due()
        self._ask_for_room()
        for key, events in self.selector.select(TICK if wait is None else min(TICK, wait)):
            handler, client = key.data
            if events & selectors.EVENT_WRITE:
                client.flush()
            if events & selectors.EVENT_READ:
                handler(client)

    def _ask_for_room(self) -> None:
        """Select on writability for sockets with unsent data."""
        for client in self.clients:
            if client.here:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
                key = self.selector.get_key(client.handle.line)
                if key.events != events:
                    self.selector.modify(client.handle.line, events, key.data)

    def _receive(self, client: Client) -> None:
        """Frames from a rank."""
        try:
            for _ in range(BURST):
                taken = client.inbox.take() if client.here else None
                if taken is None or self.verdict is not None:
                    return
                self._obey(client, *taken)
        except EOFError:
            self._forget(client)
        except Refused as refused:
            self.ruling = ("refused", f"rank {client.rank} {refused}", client.rank)

    def _forget(self, client: Client) -> None:
        client.here = False
        with contextlib.suppress(KeyError):
            self.selector.unregister(client.handle.line)

    def _supervisor_message(self, client: Client) -> None:
        """Receive from a rank's supervisor: its pid, its exit status, or why it could not start."""
        if client.handle.receive():
            self._ended(client)
        if not client.handle.supervised:
            self.selector.unregister(client.handle.control)
            if client.handle.status is None and self.verdict is None:
                raise NoRanks("the supervisor of a rank has died")

    def _printed(self, client: Client) -> None:
        if not client.handle.drain(self.limits.output):
            self.selector.unregister(client.handle.output)

    def _ended(self, client: Client) -> None:
        """A rank's process has ended. Its last frames are read first."""
        while client.here and self.verdict is None:
            before = client.frames
            self._receive(client)
            if client.frames == before:
                break
        if not client.done and self.verdict is None:
            at = "" if client.where == "?" else f"; last seen at {client.where}"
            sentence = _death(client.handle.status) + at
            self.failures.append(Failure(client.rank, "died", time.monotonic(), sentence))
            self._finish(client, "ended")

    def _finish(self, client: Client, phase: str) -> None:
        client.phase = phase
        self.watch.resume(client.rank, "raised" if phase == "ended" else phase)

    # -- frames of a rank -------------------------------------------------------------------------

    def _obey(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        client.frames += 1
        if client.frames > self.limits.frames:
            raise Refused(f"sent more than {self.limits.frames} frames")
        try:
            kind = head.get("kind")
            if not (kind in OWN_KINDS or kind in EXCHANGE_KINDS) or (
                body and kind not in WITH_BODY
            ):
                raise Refused("sent a frame of no known kind")
            if (client.phase == "starting") != (kind == "ready"):
                raise Refused("spoke out of turn")
            if kind in EXCHANGE_KINDS:
                EXCHANGE_KINDS[kind](self.exchange, client, head, body)
            else:
                OWN_KINDS[kind](self, client, head, body)
        except (TypeError, ValueError, LookupError, AttributeError):  # a list for a word, say
            raise Refused("sent a frame that makes no sense") from None

    def _ready(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        client.phase = "running"
        if any(other.phase == "starting" for other in self.clients):
            return
        self.exchange.begin()
        for other, (orders, inputs) in zip(self.clients, self.orders, strict=True):
            self.watch.resume(other.rank)
            self.exchange.send(other, orders, [inputs])

    def _cell(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        client.cell = count_of(head.get("index"), self.cells - 1)

    def _at(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        client.where = line_of_code(head.get("where"))
        client.asked = False

    def _span(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        name, now = clean(head.get("name"), 60), self.exchange.now()
        if head.get("edge") == "begin":
            client.begun[name].append(now)
        elif client.begun[name]:
            if len(client.spans) >= self.limits.spans:
                raise Refused(f"made more than {self.limits.spans} spans")
            client.spans.append(Span(client.rank, name, client.begun[name].pop(), now))
        else:
            raise Refused("ended a span that it had not begun")

    def _wait(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        number = count_of(head.get("id"))
        if number in client.open:
            client.waits = number
            self.watch.wait(client.rank, head.get("sure") is True, **client.open[number])

    def _go(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        client.waits = None
        self.watch.resume(client.rank)

    def _result(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        if client.done:
            raise Refused("sent a second result")
        client.result = bytes(body)
        self._finish(client, "returned")
        self.exchange.hold(client, len(body))

    def _raised(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        if client.done:
            raise Refused("sent a second result")
        message = {
            "type": clean(head.get("type"), 60),
            "summary": clean(head.get("summary"), 300),
            "messages": [clean(head.get("message"), 300)],
            "where": None if head.get("where") is None else line_of_code(head["where"]),
            "traceback": "",
        }
        failure = from_exception(client.rank, time.monotonic(), message)
        failure.kind = "unsolved" if head.get("stub") is True else "raised"
        failure.consequence = False
        self.failures.append(failure)
        self._finish(client, "raised")

    # -- judging -----------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Decide whether the case is over, and how."""
        now = time.monotonic()
        if self.verdict is not None:
            return
        if self.failures:
            if now > self.failures[0].at + GRACE or all(client.done for client in self.clients):
                self._blame(root_cause(self.failures))
        elif all(client.phase == "returned" for client in self.clients):
            self.ruling = ("ok", "", None)
        elif not self.exchange.origin:
            if now > self.began + self.limits.start:
                raise NoRanks(f"the ranks had not started after {self.limits.start:g} s")
        elif self._time_is_up(now - self.exchange.origin):
            self._late(now)
        elif (stall := self.watch.stall()) is not None:
            self.ruling = ("stuck", stall.sentence, stall.rank)
        elif now > self.looked + LOOK:
            self.looked = now
            self._look_at_memory()

    def _time_is_up(self, passed: float) -> bool:
        """Compare the clock, minus the time other programs took, with the timeout. A process that
        a rank forked does not count as another program.
        """
        if passed <= self.timeout:
            return False
        first = [client.handle.pid for client in self.clients if client.handle.pid is not None]
        waited = kept_waiting([pid for one in first for pid in family(one)], passed)
        return passed > MOST * self.timeout or passed - waited > self.timeout

    def _blame(self, root: Failure) -> None:
        ranks = [root.rank, *root.also]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"
        if root.kind == "unsolved":
            sentence = "not attempted yet"
        else:
            at = f" at {root.where}" if root.where and root.where not in root.sentence else ""
            text = (
                root.sentence.replace("was killed", "were killed") if root.also else root.sentence
            )
            sentence = f"{who} {text}{at}"
        self.ruling = (root.kind, sentence, root.rank)

    def _late(self, now: float) -> None:
        """The time is over: ask every rank where it is, then name the one to look at first."""
        here = [client for client in self.clients if not client.done]
        if not self.asked_at:
            self.asked_at = now
            for client in here:
                client.asked = True
                self.exchange.send(client, {"kind": "ask"}, [])
        if any(client.asked for client in here) and now < self.asked_at + 2 * GRACE:
            return
        busy = [client for client in here if client.waits is None]
        returned = [client for client in self.clients if client.phase == "returned"]
        first = [*busy, *returned, *here][0]
        words = self.watch.describe(first.rank)
        if words == "is running":
            words = f"was running {first.where}"
        sentence = (
            f"the job did not end within timeout={self.timeout:g} s. "
            f"Look first at rank {first.rank}: it {words}"
        )
        self.ruling = ("stuck", sentence, first.rank)

    def _look_at_memory(self) -> None:
        for client in self.clients:
            if client.handle.pid is not None and not client.done:
                used = memory(client.handle.pid, self.limits.memory)
                if used > self.limits.memory:
                    most = self.limits.memory // MIB
                    sentence = f"used more than {most} MiB of memory; last seen at {client.where}"
                    self.ruling = ("died", f"rank {client.rank} {sentence}", client.rank)

    def _ending(self) -> Ending:
        outcome, sentence, rank = self.verdict
        cell = None if rank is None else self.clients[rank].cell
        if outcome not in ("stuck", "died") or cell == self.cells - 1:
            cell = None
        return Ending(
            outcome,
            CELL.sub(r"\1, line \2", sentence),
            [client.result for client in self.clients] if outcome == "ok" else [],
            [record for client in self.clients for record in records(client)],
            [span for client in self.clients for span in client.spans],
            cell,
        )


# Kind of frame -> the method that handles it.
OWN_KINDS = {
    "ready": Broker._ready,
    "cell": Broker._cell,
    "at": Broker._at,
    "span": Broker._span,
    "wait": Broker._wait,
    "go": Broker._go,
    "result": Broker._result,
    "raised": Broker._raised,
}
EXCHANGE_KINDS = {
    "join": Exchange.join,
    "call": Exchange.call,
    "send": Exchange.message,
    "recv": Exchange.message,
}
WITH_BODY = ("call", "send", "result")


def _death(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"left with exit status {status}, without returning"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    why = {
        signal.SIGSEGV: " (segmentation fault: native code touched memory that is not its own)",
        signal.SIGKILL: " (too much memory or processor time)",
    }.get(-status, "")
    return f"was killed by {name}{why}"


def _list(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
