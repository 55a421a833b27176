"""The broker: one case, heard and answered by one loop in the trusted process.

The ranks have no other way to reach each other. So the ledger is what passed here, with this
process's clock, and a hang or a mismatch is known and not inferred. A rank's frames are data: each
is checked before it is used, and a rank that sends what no honest rank sends ends the case.
"""

from __future__ import annotations

import contextlib
import heapq
import re
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...launcher.failure import Failure, from_exception, root_cause
from ...wire import Network, Record, Span
from ..sandbox import leash
from ..sandbox.leash import NoRanks
from ..sandbox.limits import MIB, Limits
from ..sandbox.usage import memory
from .exchange import Exchange
from .frames import Inbox, Refused, clean
from .peer import Peer, place, records
from .perform import count_of

TICK = 0.05  # seconds between two looks at what is not a frame
LOOK = 0.1  # seconds between two looks at the memory
GRACE = 0.1  # seconds to hear the other ranks once the cause is known
BURST = 64  # frames taken from one rank before the others are heard
CELL = re.compile(r"(cell [\w.-]+):(\d+)")


@dataclass(frozen=True)
class Ending:
    """How a case ended; see `Observed`. cell: the earlier cell that is to blame, if one is."""

    outcome: str
    sentence: str = ""
    results: Sequence[bytes] = ()
    ledger: Sequence[Record] = ()
    spans: Sequence[Span] = ()
    cell: int | None = None


class Broker(Exchange):
    """One case, from its orders to its ending.

    lines: for each rank the three sockets of `server.SOCKETS`. orders: for each rank a head and the
    packed inputs. cells: how many there are.
    """

    def __init__(
        self,
        lines: Sequence[tuple[socket.socket, socket.socket, socket.socket]],
        orders: Sequence[tuple[dict[str, Any], bytes]],
        *,
        timeout: float,
        limits: Limits,
        network: Network | None,
        cells: int,
    ) -> None:
        peers = [
            Peer(rank, Inbox(line, limits.message + MIB), leash, output)
            for rank, (line, leash, output) in enumerate(lines)
        ]
        super().__init__(peers, limits, network)
        self.orders, self.timeout, self.cells = orders, timeout * limits.patience, cells
        self.failures: list[Failure] = []
        self.asked_at = self.looked = 0.0

    def run(self) -> Ending:
        """Serve the ranks to the end of the case. Raises NoRanks. All of them are gone then."""
        self.began = time.monotonic()
        try:
            self._register()
            while self.verdict is None:
                self._round()
                self._judge()
            return self._ending()
        finally:
            self._end()

    # -- the loop ----------------------------------------------------------------------------------

    def _register(self) -> None:
        for peer in self.peers:
            for sock, handler in (
                (peer.inbox.sock, self._hear),
                (peer.leash, self._news),
                (peer.output, self._printed),
            ):
                sock.setblocking(False)
                self.selector.register(sock, selectors.EVENT_READ, (handler, peer))

    def _round(self) -> None:
        """Hear everyone once, and give out what is due."""
        left = self.due[0][0] - time.monotonic() if self.due else TICK
        for key, events in self.selector.select(max(0.0, min(TICK, left))):
            handler, peer = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                handler(peer)
        while self.due and self.due[0][0] <= time.monotonic():
            heapq.heappop(self.due)[2]()

    def _hear(self, peer: Peer) -> None:
        """Frames from a rank."""
        try:
            for _ in range(BURST):
                taken = peer.inbox.take() if peer.here else None
                if taken is None or self.verdict is not None:
                    return
                self._obey(peer, *taken)
        except EOFError:
            self._forget(peer)
        except Refused as refused:
            self.verdict = ("refused", f"rank {peer.rank} {refused}", peer.rank)

    def _forget(self, peer: Peer) -> None:
        peer.here = False
        with contextlib.suppress(KeyError):
            self.selector.unregister(peer.inbox.sock)

    def _news(self, peer: Peer) -> None:
        """From the keeper of a rank: its process, how it ended, why it could not be made."""
        if leash.news(peer):
            self._ended(peer)
        if not peer.leashed:
            self.selector.unregister(peer.leash)
            if peer.status is None and self.verdict is None:
                raise NoRanks("the process that keeps a rank has died")

    def _printed(self, peer: Peer) -> None:
        if not leash.printed(peer, self.limits.output):
            self.selector.unregister(peer.output)

    def _ended(self, peer: Peer) -> None:
        """A process is gone. Its last frames are read first."""
        while peer.here and self.verdict is None:
            before = peer.frames
            self._hear(peer)
            if peer.frames == before:
                break
        if not peer.done and self.verdict is None:
            at = "" if peer.where == "?" else f"; last seen at {peer.where}"
            sentence = _death(peer.status) + at
            self._fail(Failure(peer.rank, "died", time.monotonic(), sentence))
            self._settle(peer, "ended")

    def _settle(self, peer: Peer, phase: str) -> None:
        peer.phase = phase
        self.watch.go_on(peer.rank, "raised" if phase == "ended" else phase)

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)

    # -- what a rank may say -----------------------------------------------------------------------

    def _obey(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        peer.frames += 1
        if peer.frames > self.limits.frames:
            raise Refused(f"sent more than {self.limits.frames} frames")
        try:
            kind = head.get("kind")
            if kind not in self.KINDS or (body and kind not in ("call", "send", "result")):
                raise Refused("sent a frame of no known kind")
            if (peer.phase == "starting") != (kind == "ready"):
                raise Refused("spoke out of turn")
            self.KINDS[kind](self, peer, head, body)
        except (TypeError, ValueError, LookupError, AttributeError):  # a list for a word, say
            raise Refused("sent a frame that makes no sense") from None

    def _ready(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        peer.phase = "running"
        if any(other.phase == "starting" for other in self.peers):
            return
        self.origin = time.monotonic()
        for other, (orders, inputs) in zip(self.peers, self.orders, strict=True):
            self.watch.go_on(other.rank)
            self._send(other, orders, [inputs])

    def _cell(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        peer.cell = count_of(head.get("index"), self.cells - 1)

    def _at(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        peer.where = place(head.get("where"))
        peer.asked = False

    def _span(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        name, now = clean(head.get("name"), 60), time.monotonic() - self.origin
        if head.get("edge") == "begin":
            peer.begun[name].append(now)
        elif peer.begun[name]:
            peer.spans.append(Span(peer.rank, name, peer.begun[name].pop(), now))
        else:
            raise Refused("ended a span that it had not begun")

    def _wait(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        number = count_of(head.get("id"))
        if number in peer.open:
            peer.waits = number
            self.watch.wait(peer.rank, head.get("sure") is True, **peer.open[number])

    def _go(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        peer.waits = None
        self.watch.go_on(peer.rank)

    def _result(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        if peer.done:
            raise Refused("sent a second result")
        peer.result = bytes(body)
        self._settle(peer, "returned")
        self._hold(peer, len(body))

    def _raised(self, peer: Peer, head: dict[str, Any], body: bytearray) -> None:
        if peer.done:
            raise Refused("sent a second result")
        told = {
            "type": clean(head.get("type"), 60),
            "summary": clean(head.get("summary"), 300),
            "messages": [clean(head.get("message"), 300)],
            "where": None if head.get("where") is None else place(head["where"]),
            "traceback": "",
        }
        failure = from_exception(peer.rank, time.monotonic(), told)
        failure.kind = "unsolved" if told["type"] == "NotImplementedError" else "raised"
        failure.consequence = False
        self._fail(failure)
        self._settle(peer, "raised")

    # -- judging -----------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Whether the case is over, and how."""
        now = time.monotonic()
        if self.verdict is not None:
            return
        if self.failures:
            if now > self.failures[0].at + GRACE or all(peer.done for peer in self.peers):
                self._blame(root_cause(self.failures))
        elif all(peer.phase == "returned" for peer in self.peers):
            self.verdict = ("ok", "", None)
        elif not self.origin:
            if now > self.began + self.limits.start:
                raise NoRanks(f"no ranks were there after {self.limits.start:g} s")
        elif now > self.origin + self.timeout:
            self._late(now)
        elif (stall := self.watch.stall(set())) is not None:
            self.verdict = ("stuck", stall.sentence, stall.rank)
        elif now > self.looked + LOOK:
            self.looked = now
            self._look_at_memory()

    def _blame(self, root: Failure) -> None:
        ranks = [root.rank, *root.also]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"
        if root.kind == "unsolved":
            sentence = "not attempted yet"
        else:
            place = f" at {root.where}" if root.where and root.where not in root.sentence else ""
            said = (
                root.sentence.replace("was killed", "were killed") if root.also else root.sentence
            )
            sentence = f"{who} {said}{place}"
        self.verdict = (root.kind, sentence, root.rank)

    def _late(self, now: float) -> None:
        """Time is up: ask everyone where they are, then say whom to look at first."""
        here = [peer for peer in self.peers if not peer.done]
        if not self.asked_at:
            self.asked_at = now
            for peer in here:
                peer.asked = True
                self._send(peer, {"kind": "ask"}, [])
        if any(peer.asked for peer in here) and now < self.asked_at + 2 * GRACE:
            return
        busy = [peer for peer in here if peer.waits is None]
        returned = [peer for peer in self.peers if peer.phase == "returned"]
        first = [*busy, *returned, *here][0]
        words = self.watch.describe(first.rank)
        if words == "is running":
            words = f"was running {first.where}"
        sentence = (
            f"the job did not end within timeout={self.timeout:g} s. "
            f"Look first at rank {first.rank}: it {words}"
        )
        self.verdict = ("stuck", sentence, first.rank)

    def _look_at_memory(self) -> None:
        for peer in self.peers:
            if peer.pid is not None and not peer.done:
                used = memory(peer.pid, self.limits.memory)
                if used > self.limits.memory:
                    most = self.limits.memory // MIB
                    sentence = f"used more than {most} MiB of memory; last seen at {peer.where}"
                    self.verdict = ("died", f"rank {peer.rank} {sentence}", peer.rank)

    def _ending(self) -> Ending:
        outcome, sentence, rank = self.verdict
        cell = None if rank is None else self.peers[rank].cell
        if outcome not in ("stuck", "died") or cell == self.cells - 1:
            cell = None
        return Ending(
            outcome,
            CELL.sub(r"\1, line \2", sentence),
            [peer.result for peer in self.peers] if outcome == "ok" else [],
            [record for peer in self.peers for record in records(peer)],
            [span for peer in self.peers for span in peer.spans],
            cell,
        )

    # -- the end -----------------------------------------------------------------------------------

    def _end(self) -> None:
        self.selector.close()
        leash.let_go(self.peers)

    KINDS = {  # noqa: RUF012 (the table of this class, never changed)
        "ready": _ready,
        "cell": _cell,
        "at": _at,
        "span": _span,
        "join": Exchange._join,
        "wait": _wait,
        "go": _go,
        "call": Exchange._call,
        "send": Exchange._message,
        "recv": Exchange._message,
        "result": _result,
        "raised": _raised,
    }


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
