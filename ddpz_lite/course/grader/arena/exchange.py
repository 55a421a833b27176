"""Collectives and messages between ranks, computed from the bytes that arrived.

Every call is recorded with this process's clock before it is answered. On a slower network the
answer is delayed until the wire's model says that it would arrive (`wire.shaping`): the same link
for each rank, the same costs.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddpz_lite.course.grader.arena import perform
from ddpz_lite.course.grader.arena.client import Client, Entry, Group, Message, line_of_code
from ddpz_lite.course.grader.arena.perform import Asked, Gathering, count_of
from ddpz_lite.course.grader.arena.watch import COLLECTIVE, KINDS, Watch
from ddpz_lite.course.grader.sandbox.frames import DTYPES, Refused
from ddpz_lite.course.grader.sandbox.limits import Limits
from ddpz_lite.wire import Network
from ddpz_lite.wire.shaping import Transfer

GROUPS = 64  # process groups of a case


class Exchange:
    """The ranks' calls, and the answers that they wait for.

    It knows nothing of processes, cells or results: those are the broker's. `verdict` says why the
    case cannot continue; `origin` is time.monotonic() when all ranks had started.
    """

    def __init__(self, clients: Sequence[Client], limits: Limits, network: Network | None) -> None:
        self.clients, self.limits, self.network = clients, limits, network
        self.world = len(clients)
        self.watch = Watch(self.world)
        self._groups: dict[str, Group] = {}
        self.verdict: tuple[str, str, int | None] | None = None  # outcome, sentence, rank
        self.origin = 0.0  # time.monotonic() when all ranks were there
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = itertools.count()

    def join(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        """Add a rank to a process group. Raises Refused."""
        name, ranks = head.get("group"), head.get("ranks")
        if not isinstance(name, str) or not isinstance(ranks, list) or len(name) > 200:
            raise Refused("joined a group that makes no sense")
        members = tuple(count_of(rank, self.world - 1) for rank in ranks)
        if len(set(members)) != len(members) or client.rank not in members:
            raise Refused("joined a group that makes no sense")
        known = self._groups.get(name)
        if known is None:
            if len(self._groups) >= GROUPS:
                raise Refused(f"made more than {GROUPS} process groups")
            self._groups[name] = Group(self.watch.add_group(name, members), members)
        elif known.ranks != members:
            self._mismatch(
                f"rank {client.rank} made a group of ranks {list(members)} where another rank made "
                f"one of ranks {list(known.ranks)}",
                client.rank,
            )

    # -- collectives -------------------------------------------------------------------------------

    def _member(self, client: Client, head: dict[str, Any]) -> tuple[Group, int]:
        """The group of a call and the rank's place in it."""
        group = self._groups.get(head.get("group")) if isinstance(head.get("group"), str) else None
        if group is None or client.rank not in group.ranks:
            raise Refused("called a group that it is not in")
        if len(client.entries) >= self.limits.calls:
            raise Refused(f"made more than {self.limits.calls} calls")
        return group, group.ranks.index(client.rank)

    def call(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        """A rank's part in a collective: record it, compare it, answer every rank that is ready.
        Raises Refused.
        """
        group, me = self._member(client, head)
        size = len(group.ranks)
        asked = perform.read(head, body, me, size)
        asked.where = line_of_code(head.get("where"))
        asked.arrival = client.link.arrive("both") if self.network else time.monotonic()
        parts = (*asked.parts, *asked.expects) if asked.op == "all_to_all" else ()
        number = self.watch.issue(client.rank, group.index, parts)
        root = None if asked.root is None else group.ranks[asked.root]
        price = perform.price(asked, me, size)
        asked.entry = Entry(
            asked.op,
            asked.dtype,
            asked.elements,
            price.sent,
            self._far(price.to, client.rank, group.ranks),
            self.now(),
            asked.where,
            group.ranks,
            root,
            number,
        )
        client.entries.append(asked.entry)
        self._open(client, asked.number, COLLECTIVE, asked.op, group, number, asked.where, root)
        gathering = group.gatherings[number]
        if self._mismatched(client, asked, group, gathering, number):
            return
        gathering.calls[me] = asked
        self.hold(client, len(body))
        self._answer_ready(group, gathering, number)

    def _far(self, to: dict[int, int], rank: int, ranks: tuple[int, ...]) -> int:
        """Of the bytes that a rank sends, those to other nodes."""
        if self.network is None:
            return 0
        return self.network.inter_node_bytes(to, rank, ranks, self.world)

    def _mismatched(
        self, client: Client, asked: Asked, group: Group, gathering: Gathering, number: int
    ) -> bool:
        """Whether this call cannot belong to the other ranks' calls; then the case is over."""
        for other, other_call in sorted(gathering.calls.items()):
            if other_call.signature != asked.signature:
                names = ", ".join(map(str, group.ranks))
                self._mismatch(
                    "the ranks of a group must make the same calls in the same order, but call "
                    f"#{number} of group ({names}) differs:\n"
                    f"  rank {client.rank} calls {asked.says} at {asked.where}\n"
                    f"  rank {group.ranks[other]} called {other_call.says} at {other_call.where}",
                    client.rank,
                )
                return True
        calls = {**gathering.calls, group.ranks.index(client.rank): asked}
        if (pair := perform.find_mismatch(calls)) is None:
            return False
        (sender, taker), (own, other_call) = pair, (calls[pair[0]], calls[pair[1]])
        self._mismatch(
            f"the split sizes of all_to_all #{number} do not fit together:\n"
            f"  rank {group.ranks[sender]} at {own.where} sends {own.parts[taker]} elements to "
            f"rank {group.ranks[taker]}\n"
            f"  rank {group.ranks[taker]} at {other_call.where} expects "
            f"{other_call.expects[sender]} of it",
            client.rank,
        )
        return True

    def _answer_ready(self, group: Group, gathering: Gathering, number: int) -> None:
        """Answer every rank whose inputs have all arrived."""
        size = len(group.ranks)
        for me, asked in gathering.calls.items():
            needs = perform.required(asked.op, me, asked.root, size)
            if me in gathering.left or not needs <= gathering.calls.keys():
                continue
            gathering.left.add(me)
            try:
                pieces = perform.answer(gathering, me, size)
            except (RuntimeError, NotImplementedError):
                raise Refused(f"asked for {asked.reduce} of {asked.dtype} elements") from None
            self._finish(self.clients[group.ranks[me]], group, me, asked, gathering, pieces)
        if len(gathering.left) == size:
            del group.gatherings[number]
            for me, asked in gathering.calls.items():
                self.clients[group.ranks[me]].unread -= len(asked.body)

    def _finish(
        self,
        client: Client,
        group: Group,
        me: int,
        asked: Asked,
        gathering: Gathering,
        pieces: Sequence[Any],
    ) -> None:
        """Answer at once, or when the slower network would have delivered."""
        if self.network is None:
            self._answer(client, asked.number, asked.entry, pieces)
            return
        ready = max(call.arrival for call in gathering.calls.values())
        latency, bandwidth = self.network.link(group.ranks, self.world)
        price = perform.price(asked, me, len(group.ranks))
        seconds = price.steps * latency + price.path / bandwidth
        self._schedule(client, Transfer(lambda _: ready, 0.0, seconds, "both"), asked, pieces)

    # -- messages ----------------------------------------------------------------------------------

    def message(self, client: Client, head: dict[str, Any], body: bytearray) -> None:
        """One end of a send or recv; both continue when both have arrived. Raises Refused."""
        op = head["kind"]
        group, _ = self._member(client, head)
        dtype, elements, tag = head.get("dtype"), count_of(head.get("elements")), head.get("tag")
        if dtype not in DTYPES or type(tag) is not int or abs(tag) > 1 << 31:
            raise Refused(f"sent a {op} that makes no sense")
        nbytes = elements * DTYPES[dtype]
        if len(body) != (nbytes if op == "send" else 0):
            raise Refused(f"sent a {op} whose sizes do not fit together")
        end = head.get("peer")
        anyone = end == -1 and op == "recv"
        other = -1 if anyone else group.ranks[count_of(end, len(group.ranks) - 1)]
        where, started = line_of_code(head.get("where")), self.now()
        sent, peer = nbytes if op == "send" else 0, None if anyone else other
        far = self._far({group.ranks.index(other): sent} if sent else {}, client.rank, group.ranks)
        entry = Entry(op, dtype, elements, sent, far, started, where, group.ranks, peer, None)
        client.entries.append(entry)
        number = self.watch.announce(client.rank, group.index, op, other, tag)
        own = count_of(head.get("id"))
        self._open(client, own, KINDS[op], op, group, number, where, other, tag)
        self.hold(client, len(body))
        arrival = self._depart(client, op, nbytes, (client.rank, other))
        message = Message(client.rank, own, nbytes, body, other, arrival, where, entry)
        if op == "send":
            group.sends[client.rank, other, tag].append(message)
        else:
            group.receives[client.rank, tag].append(message)
        self._match(group, other if op == "send" else client.rank, tag)

    def _depart(self, client: Client, op: str, nbytes: int, ends: tuple[int, int]) -> float:
        if self.network is None:
            return time.monotonic()
        if op == "recv":
            return client.link.arrive("in")
        _, bandwidth = self.network.link(ends, self.world)
        return client.link.depart(nbytes / bandwidth)

    def _match(self, group: Group, taker: int, tag: int) -> None:
        """Pair what this rank waits to receive with what was sent to it, in order."""
        waiting = group.receives[taker, tag]
        blocked: set[int] = set()  # a later recv must not overtake an earlier one
        for receive in list(waiting):
            sources = group.ranks if receive.peer < 0 else (receive.peer,)
            queues = [group.sends[source, taker, tag] for source in sources]
            queues = [q for q in queues if q and q[0].rank not in blocked]
            if not queues:
                blocked.update(sources)
                continue
            queue = min(queues, key=lambda q: q[0].arrival)
            waiting.remove(receive)
            self._deliver(group, queue.popleft(), receive)
            if self.verdict is not None:
                return

    def _deliver(self, group: Group, send: Message, receive: Message) -> None:
        sender, taker = self.clients[send.rank], self.clients[receive.rank]
        if send.nbytes != receive.nbytes:
            self._mismatch(
                f"rank {send.rank} sends {send.nbytes} bytes to rank {receive.rank} at "
                f"{send.where}, and rank {receive.rank} receives {receive.nbytes} bytes at "
                f"{receive.where}",
                receive.rank,
            )
            return
        sender.unread -= len(send.body)
        source = group.ranks.index(send.rank)
        if self.network is None:
            self._answer(taker, receive.number, receive.entry, [send.body], source)
            self._answer(sender, send.number, send.entry, [])
            return
        at = max(send.arrival, receive.arrival)
        latency, bandwidth = self.network.link((send.rank, receive.rank), self.world)
        for client, way, message, pieces, origin in (
            (sender, "booked", send, [], -1),
            (taker, "in", receive, [send.body], source),
        ):
            transfer = Transfer(lambda _: at, latency, send.nbytes / bandwidth, way)
            self._schedule(client, transfer, message, pieces, origin)

    # -- answers -----------------------------------------------------------------------------------

    def _open(
        self,
        client: Client,
        number: int,
        kind: int,
        op: str,
        group: Group,
        count: int,
        where: str,
        other: int | None,
        tag: int = 0,
    ) -> None:
        """Remember where a rank would wait, if it waits for this."""
        if number in client.open:
            raise Refused("used a number twice")
        client.open[number] = {
            "kind": kind,
            "op": op,
            "index": group.index,
            "number": count,
            "peer": -1 if other is None else other,
            "tag": tag,
            "where": where,
        }

    def hold(self, client: Client, nbytes: int) -> None:
        """Count what a rank sent and others have not taken yet."""
        client.unread += nbytes
        self._check_in_flight()

    def _check_in_flight(self) -> None:
        """End the case if its ranks together have more bytes in flight than allowed."""
        most = self.limits.waiting
        if self.verdict is None and sum(one.unread + one.coming for one in self.clients) > most:
            worst = max(self.clients, key=lambda one: max(one.unread, one.coming))
            if worst.coming > worst.unread:
                sentence = f"rank {worst.rank} takes nothing of what is sent"
            else:
                sentence = f"rank {worst.rank} has the most of more than {most} bytes in flight"
            self.verdict = ("refused", sentence, worst.rank)

    def _schedule(
        self,
        client: Client,
        transfer: Transfer,
        asked: Asked | Message,
        pieces: Sequence[Any],
        source: int = -1,
    ) -> None:
        """Answer when the slower network would have."""
        size = sum(memoryview(piece).nbytes for piece in pieces)
        client.coming += size

        def give() -> None:
            client.coming -= size
            self._answer(client, asked.number, asked.entry, pieces, source)

        client.link.add(transfer)
        heapq.heappush(self._due, (client.link.finish_time(transfer), next(self._tickets), give))

    def _answer(
        self, client: Client, number: int, entry: Entry, pieces: Sequence[Any], source: int = -1
    ) -> None:
        """The operation is over for this rank."""
        entry.finished = self.now()
        client.open.pop(number, None)
        if client.waits == number:
            client.waits = None
            self.watch.resume(client.rank)
        head = {"kind": "done", "id": number}
        self.send(client, head if source < 0 else {**head, "source": source}, pieces)

    def send(self, client: Client, head: dict[str, Any], pieces: Sequence[Any] = ()) -> None:
        """Send a frame to a rank, within the bytes that a case may have in flight."""
        client.send(head, pieces)
        self._check_in_flight()

    def give_due(self) -> float | None:
        """Send the answers that are due; returns the seconds until the next one."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def begin(self) -> None:
        """All ranks have started: the ledger's clock starts."""
        self.origin = time.monotonic()

    def now(self) -> float:
        """Seconds since all ranks had started: the ledger's clock."""
        return time.monotonic() - self.origin

    def _mismatch(self, sentence: str, rank: int) -> None:
        self.verdict = ("mismatch", sentence, rank)
