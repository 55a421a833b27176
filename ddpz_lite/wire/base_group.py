"""Publish, compare and forward every operation from torch to the backend.

Each operation is described once per kind (`Call`), published in the status file, compared with what
the other ranks of the group published for the same call number, issued on the inner group, and its
handle is wrapped.

[Note: two objects]
`inner` is a plain ProcessGroup with the real backends registered. Calls go through it, and so
through torch's dispatcher, as they would without the wire: profilers, CommDebugMode and FakeTensor
see what they expect. The same backends are also registered on the outer object: torch's C++ asks it
for its devices, its backend's name and its group name, and calls that pybind cannot override
(`reduce` from C++, for example) reach the backend unrecorded instead of failing.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from ddpz_lite.wire import call as calls
from ddpz_lite.wire import callsite
from ddpz_lite.wire.call import Call
from ddpz_lite.wire.ledger import Entry
from ddpz_lite.wire.mismatch import Members, compare_calls, compare_parts
from ddpz_lite.wire.shaping import Transfer
from ddpz_lite.wire.status_format import COLLECTIVE, RECV, SEND, digest
from ddpz_lite.wire.wire_state import WireState
from ddpz_lite.wire.work import WireWork

_BLOCKING = frozenset({"send", "recv"})
_C10D = "torch.distributed.distributed_c10d"


class BaseGroup(ProcessGroup):
    """A process group on the wire, without torch's method names (`group.TorchMethods`).

    ranks: its members as global ranks, in group order. rank: this rank's index among them. devices:
    the backend for each device type, {"cpu": "gloo"}. index: the group's index in the status file.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: tuple[int, ...],
        inner: ProcessGroup,
        devices: dict[str, str],
        index: int,
        state: WireState,
    ) -> None:
        super().__init__(rank, len(ranks))  # the constructor with a store cannot be subclassed
        self._store, self.inner, self.ranks, self.devices = store, inner, ranks, devices
        self._state, self._index, self._me = state, index, rank
        self.key = state.status_file.key(state.status_file.rank, index)
        self._members = Members(ranks, self.key)
        self._number = 0  # collectives issued so far
        self._order = (
            threading.Lock()
        )  # so that call numbers follow the order of the backend's queue
        self._calls: dict[Any, Call] = {}
        self._tables: list[tuple[int, int]] = []  # (peer, the group's index in its table)
        self._unseen = [peer for peer in ranks if peer != state.status_file.rank]
        self._channels: dict[tuple[str, int, int], tuple[bytes, bytes]] = {}

    def get_group_store(self) -> Any:
        return self._store

    # -- collectives -------------------------------------------------------------------------------

    def _collective(
        self,
        call: Call,
        blocking: bool,
        method: str,
        args: tuple,
        device: str,
        parts: tuple[int, ...] = (),
    ) -> Work | None:
        where = callsite.caller()
        with self._order:
            entry, arrival = self._announce(call, where, parts)
            transfer = self._collective_transfer(entry, arrival)
            position = {
                "kind": COLLECTIVE,
                "op": call.op.encode(),
                "where": where,
                "index": self._index,
                "number": entry.group_seq,
                "peer": -1 if call.root is None else call.root,
                # NCCL releases a rank once its part is sent, so such a wait may end early.
                "bounded": call.op in ("broadcast", "scatter") and self.devices[device] == "nccl",
            }
            return self._run(method, args, entry, position, transfer, blocking, device)

    def _announce(self, call: Call, where: str, parts: tuple[int, ...]) -> tuple[Entry, float]:
        """Number the call, publish it and compare it; raises CollectiveMismatch."""
        state, number = self._state, self._number
        self._number = number + 1
        arrival = time.monotonic() if state.link is None else state.link.arrive("both")
        status_file = state.status_file
        status_file.publish(
            self._index, number, arrival, call.signature, call.description, where, parts
        )
        if self._unseen:
            self._look_for_tables()
        for peer, index in self._tables:
            if status_file.disagrees(peer, index, number, call.signature):
                compare_calls(status_file, self._members, peer, number, call, where)
            elif parts:
                compare_parts(status_file, self._members, peer, number, where, parts)
        entry = Entry(call, self.ranks, number, call.root, where)
        state.ledger.entries.append(entry)
        return entry, arrival

    def _look_for_tables(self) -> None:
        for peer in list(self._unseen):
            index = self._state.status_file.find_group(peer, self.key)
            if index is not None:
                self._tables.append((peer, index))
                self._unseen.remove(peer)

    def _collective_transfer(self, entry: Entry, arrival: float) -> Transfer | None:
        state, number = self._state, entry.group_seq
        if state.link is None:
            return None
        status_file, price = state.status_file, entry.call.cost
        latency, bandwidth = state.network.link(self.ranks, status_file.world_size)
        others = [peer for peer in self.ranks if peer != status_file.rank]

        def ready(done: bool) -> float | None:
            arrivals = [status_file.arrival(peer, self.key, number) for peer in others]
            if None in arrivals and not done:
                return None
            return max([arrival, *(at for at in arrivals if at is not None)])

        # A collective occupies the link from its first step to its last, like a NCCL stream.
        return Transfer(ready, 0.0, price.steps * latency + price.path / bandwidth, "both")

    def _run(
        self,
        method: str,
        args: tuple,
        entry: Entry,
        position: dict[str, Any],
        transfer: Transfer | None,
        blocking: bool,
        device: str,
    ) -> Work | None:
        """Issue on the inner group and wrap the work."""
        state = self._state
        on_gpu = self.devices.get(device) == "nccl"
        if on_gpu:
            state.gpu.begin(entry)
        if transfer is not None:
            state.link.add(transfer)
        try:
            work = getattr(self.inner, method)(*args)
        except BaseException:
            if transfer is not None:
                state.link.drop(transfer)
            raise
        if on_gpu:
            state.gpu.end(entry, work)
            if transfer is None:
                return work
        wired = WireWork(work, entry, state, position, transfer)
        if on_gpu and work is None:  # NCCL has put a blocking call on the current stream
            wired.wait()
        elif not blocking:
            wired.watch(entry.group_seq is not None and not on_gpu)
        return wired

    # -- messages ----------------------------------------------------------------------------------

    def _message(
        self, method: str, tensors: list[torch.Tensor], peer: int, tag: int, args: tuple
    ) -> Work | None:
        """A send or a recv; peer: global rank, -1 for a recv from any rank."""
        state, tensor = self._state, tensors[0]
        op = "send" if method == "send" else "recv"
        where = callsite.caller()
        entry = Entry(calls.message(op, tensor, self.ranks, peer), self.ranks, None, peer, where)
        state.ledger.entries.append(entry)
        number, transfer = self._announce_message(entry, op, peer, tag)
        position = {
            "kind": SEND if op == "send" else RECV,
            "op": op.encode(),
            "where": where,
            "index": self._index,
            "number": number,
            "peer": peer,
            "tag": tag,
            "bounded": False,
        }
        blocking = _is_blocking(sys._getframe(3))  # above the method and its wrapper
        return self._run(method, args, entry, position, transfer, blocking, tensor.device.type)

    def _announce_message(
        self, entry: Entry, op: str, peer: int, tag: int
    ) -> tuple[int, Transfer | None]:
        """Publish the message; returns its number and its transfer on a shaped network."""
        state, status_file = self._state, self._state.status_file
        local, theirs = self._channel(op, peer, tag)
        if state.link is None:
            return status_file.count_message(local, entry.started), None
        ends = (status_file.rank,) if peer < 0 else (status_file.rank, peer)
        latency, bandwidth = state.network.link(ends, status_file.world_size)
        seconds = entry.call.cost.path / bandwidth
        link = state.link
        arrival = link.depart(seconds) if op == "send" else link.arrive("in")
        number = status_file.count_message(local, arrival)

        def ready(done: bool) -> float | None:
            known = peer >= 0 and number >= 0
            other = status_file.message_arrival(peer, theirs, number) if known else None
            if other is None:
                return arrival if done else None
            return max(arrival, other)

        return number, Transfer(ready, latency, seconds, "booked" if op == "send" else "in")

    def _channel(self, op: str, peer: int, tag: int) -> tuple[bytes, bytes]:
        """The keys of this rank's side of a channel and of the other side."""
        known = self._channels.get((op, peer, tag))
        if known is None:
            here = self._state.status_file.rank
            ends = (here, peer) if op == "send" else (peer, here)
            other = "recv" if op == "send" else "send"
            known = digest(self.key, op, *ends, tag), digest(self.key, other, *ends, tag)
            self._channels[op, peer, tag] = known
        return known


def _is_blocking(frame: FrameType | None) -> bool:
    """Whether torch's blocking form called this send or recv: the group's method is the same."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        if frame.f_code.co_name in _BLOCKING and frame.f_globals["__name__"] == _C10D:
            return True
        frame = frame.f_back
    return False
