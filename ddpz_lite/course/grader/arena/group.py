"""The rank's side: a process group whose every operation is a frame to the broker.

It has torch's names from where the wire's group has them (`wire.group.TorchMethods`): each of them
ends in `_collective` or `_message`, which here put the inputs into one frame and leave a `Sent`
behind. A thread receives the answers, writes them into the outputs, and wakes the waiters.

Only CPU tensors travel. What this file says about itself to the broker is a claim: the broker
counts what arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from ddpz_lite.course.grader.sandbox.frames import DTYPES, FrameSocket
from ddpz_lite.wire import call as calls
from ddpz_lite.wire import callsite
from ddpz_lite.wire import group as wired
from ddpz_lite.wire.call import Call
from ddpz_lite.wire.work import FOREVER
from ddpz_lite.wire.worker_threads import WorkerThreads

BEAT = 0.2  # seconds between two notes of where the main thread is
SPIN = 0.002  # seconds that a wait may take before the broker is notified of it
Tensors = Sequence[torch.Tensor]


class Line:
    """This rank's line to the broker."""

    def __init__(self, frames: FrameSocket) -> None:
        self.frames = frames
        self._open: dict[int, Sent] = {}  # by number, until the broker has answered
        self._next = 0
        self._order = threading.Lock()
        self.waiters = WorkerThreads(lambda: None)
        self.main = threading.main_thread().ident
        self.over = threading.Event()

    def start(self) -> None:
        """Receive in a separate thread."""
        threading.Thread(target=self._listen, name="ddpz-line", daemon=True).start()
        threading.Thread(target=self._beat, name="ddpz-beat", daemon=True).start()
        self._own_threads = (
            threading.active_count() - 1
        )  # this class's threads besides the main one

    def issue(self, head: dict[str, Any], inputs: Tensors, outputs: Tensors) -> Sent:
        """Send a call or a message; its result will be written into `outputs`."""
        where = callsite.caller()
        bodies = [_bytes(tensor) for tensor in inputs]
        with self._order:  # numbers rise in the order in which frames are sent
            self._next += 1
            sent = self._open[self._next] = Sent(self, self._next, outputs)
            self.frames.send({**head, "id": self._next, "where": where}, *bodies)
        return sent

    def tell_wait(self, number: int, bounded: bool) -> None:
        """The main thread waits; sure: nothing else of this process can move it on."""
        if threading.get_ident() == self.main:
            sure = not bounded and threading.active_count() <= 1 + self._own_threads
            self.frames.send({"kind": "wait", "id": number, "sure": sure})

    def tell_resumed(self) -> None:
        """The main thread's bounded wait is over."""
        if threading.get_ident() == self.main:
            self.frames.send({"kind": "go"})

    def tell_where(self) -> None:
        """Say which line of the learner's the main thread is in."""
        where = callsite.of_thread(self.main)
        self.frames.send({"kind": "at", "where": where or callsite.UNKNOWN})

    def _listen(self) -> None:
        try:
            while True:
                head, body = self.frames.receive()
                if head["kind"] == "done":
                    self._open.pop(head["id"]).arrived(body, head.get("source", -1))
                elif head["kind"] == "ask":
                    self.tell_where()
                elif head["kind"] == "bye":
                    self.over.set()
        except (EOFError, OSError):
            self.over.set()

    def _beat(self) -> None:
        try:
            while not self.over.wait(BEAT):
                self.tell_where()
        except OSError:
            return


class Sent(Work):
    """An operation that the broker has been asked for."""

    def __init__(self, line: Line, number: int, outputs: Tensors) -> None:
        super().__init__()
        self._line, self._number, self._outputs = line, number, list(outputs)
        self._done, self._lock = threading.Event(), threading.Lock()
        self._future: torch.futures.Future | None = None
        self._source = -1

    def arrived(self, body: bytearray, source: int) -> None:
        """The broker's answer; empty where this rank gets nothing."""
        if body:
            at = 0
            for tensor in self._outputs:
                count = tensor.numel()
                if count:
                    part = torch.frombuffer(body, dtype=tensor.dtype, count=count, offset=at)
                    tensor.data.copy_(part.view(tensor.shape))
                at += count * tensor.element_size()
        self._source = source
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def _complete(self, future: torch.futures.Future) -> None:
        # Its callbacks may wait for another operation: not in the thread that takes answers.
        self._line.waiters.run(lambda: future.set_result(self._outputs))

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        bounded = timeout != FOREVER
        if self._done.wait(min(SPIN, timeout.total_seconds()) if bounded else SPIN):
            return True
        self._line.tell_wait(self._number, bounded)
        if not self._done.wait(timeout.total_seconds() if bounded else None):
            self._line.tell_resumed()
            raise RuntimeError(f"the operation took longer than {timeout.total_seconds()} s")
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set()

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future:
        with self._lock:
            first, self._future = self._future is None, self._future or torch.futures.Future()
            here = self._done.is_set()
        if first and here:
            self._complete(self._future)
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The group rank that a recv from anyone came from."""
        return self._source

    _source_rank = source_rank


class BrokerGroup(wired.TorchMethods, ProcessGroup):
    """A process group whose operations the broker performs."""

    def __init__(self, store: Any, rank: int, ranks: tuple[int, ...], name: str, line: Line):
        ProcessGroup.__init__(self, rank, len(ranks))
        self.ranks, self.devices, self._me, self._calls = ranks, {"cpu": "gloo"}, rank, {}
        self._store, self._name, self._line = store, name, line

    def get_group_store(self) -> Any:
        return self._store

    def _collective(
        self,
        call: Call,
        blocking: bool,
        method: str,
        args: tuple,
        device: str,
        parts: tuple[int, ...] = (),
    ) -> Sent:
        sends, returns, sizes = _layout(method, args, len(self.ranks))
        _check([*sends, *returns], call.dtype)
        root = None if call.root is None else self.ranks.index(call.root)
        reduce_op = None
        if call.op in ("all_reduce", "reduce", "reduce_scatter"):
            reduce_op = _reduction(args[-1].reduceOp.op.name, sends[0].dtype)
        head = {
            "kind": "call",
            "group": self._name,
            "op": call.op,
            "dtype": call.dtype,
            "elements": call.elements,
            "reduce": reduce_op,
            "root": root,
            "parts": sizes,
            "says": call.description.decode(errors="replace"),
        }
        if call.op == "all_to_all":
            head["expects"] = _received(method, args, len(self.ranks))
        silent = root is not None and call.op in ("broadcast", "scatter") and self._me != root
        return self._line.issue(head, () if silent else sends, returns)

    def _message(
        self, method: str, tensors: list[torch.Tensor], peer: int, tag: int, args: tuple
    ) -> Sent:
        tensor, sending = tensors[0], method == "send"
        dtype = calls.dtype_name(tensor.dtype)
        _check(tensors, dtype)
        head = {
            "kind": "send" if sending else "recv",
            "group": self._name,
            "peer": peer if peer < 0 else self.ranks.index(peer),
            "tag": tag,
            "dtype": dtype,
            "elements": tensor.numel(),
        }
        return self._line.issue(head, [tensor] if sending else [], [] if sending else [tensor])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait(*([timeout] if timeout else []))


def join(line: Line, rank: int, world: int) -> None:
    """Make this process rank `rank` of `world`, in a default group that the broker serves.

    Groups that an answer makes, of whatever backend, are the broker's too.
    """

    def create(options: Any, _: Any) -> BrokerGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        line.frames.send({"kind": "join", "group": options.group_id, "ranks": ranks})
        group = BrokerGroup(options.store, options.group_rank, ranks, options.group_id, line)
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        hollow = FakeProcessGroup._create_internal(options.group_rank, options.group_size)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, hollow)
        return group

    make = c10d._new_process_group_helper

    def make_brokered(
        size: int, me: int, ranks: list[int], backend: Any, *args: Any, **options: Any
    ):
        group, store = make(size, me, ranks, dist.Backend("broker"), *args, **options)
        if isinstance(group, BrokerGroup):
            name = dist.Backend("gloo")
            c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))
        return group, store

    dist.Backend.register_backend("broker", create, extended_api=True, devices=["cpu"])
    c10d._new_process_group_helper = make_brokered
    dist.init_process_group("gloo", store=Alone(), rank=rank, world_size=world)


class Alone(dist.Store):
    """A store of one rank: ranks with a shared store could pass each other data through it.

    torch waits in it for the other members of a new group. That wait is not needed: the broker
    holds a group's first call until all members have called.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._kept[key] = value

    def get(self, key: str) -> Any:
        return self._kept[key]

    def add(self, key: str, amount: int) -> int:
        self._kept[key] = total = int(self._kept.get(key, 0)) + amount
        return total

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        return None

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def set_timeout(self, timeout: Any) -> None:
        return None


def _layout(
    method: str, args: tuple, size: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """(what is sent, in order; where the answer goes, in order; elements sent in each part)."""
    if method == "barrier":
        return [], [], []
    if method in ("allreduce", "allreduce_coalesced", "broadcast", "reduce"):
        sends = returns = list(args[0])
    elif method in ("allgather", "allgather_coalesced", wired._ALL_GATHER, wired._ALL_GATHERS):
        returns, sends = _gathered(method, args[0], args[1], size)
    elif method == "gather":
        returns, sends = [t for row in args[0] for t in row], list(args[1])
    elif method == "scatter":
        returns, sends = list(args[0]), [t for row in args[1] for t in row]
        parts = [t.numel() for t in sends] or [returns[0].numel()]
        return sends, returns, parts
    elif method in ("alltoall", wired._ALL_TO_ALL):
        return _exchanged(method, args, size)
    else:
        return _scattered(method, args[0], args[1], size)
    return sends, returns, [calls.total(sends)]


def _gathered(method: str, outputs: Any, inputs: Any, size: int) -> tuple[list, list]:
    """Outputs in the order in which the parts come: by rank, and for each rank by input."""
    if method == wired._ALL_GATHER:
        return [outputs], [inputs]
    if method == wired._ALL_GATHERS:
        chunks = [whole.view(-1).chunk(size) for whole in outputs]
        return [local[rank] for rank in range(size) for local in chunks], list(inputs)
    if method == "allgather_coalesced":
        return [t for row in outputs for t in row], list(inputs)
    for row, part in zip(outputs, inputs, strict=True):
        _even("allgather", row, part.numel())
    return [row[rank] for rank in range(size) for row in outputs], list(inputs)


def _even(method: str, tensors: Tensors, wanted: int) -> None:
    """gloo takes lists of tensors of one size; so does this group."""
    for index, tensor in enumerate(tensors):
        if tensor.numel() != wanted:
            raise RuntimeError(
                f"ProcessGroupGloo::{method}: invalid tensor size at index {index} "
                f"(expected ({wanted}), got ({tensor.numel()}))"
            )


def _scattered(method: str, outputs: Any, inputs: Any, size: int) -> tuple[list, list, list[int]]:
    """Inputs by rank, and for each rank by output."""
    if method == wired._REDUCE_SCATTER:
        return [inputs], [outputs], [inputs.numel() // size] * size
    if method == wired._REDUCE_SCATTERS:
        inputs = [whole.reshape(-1).chunk(size) for whole in inputs]
    sends = [row[rank] for rank in range(size) for row in inputs]
    parts = [sum(row[rank].numel() for row in inputs) for rank in range(size)]
    return sends, list(outputs), parts


def _exchanged(method: str, args: tuple, size: int) -> tuple[list, list, list[int]]:
    if method == "alltoall":
        for tensors in args[:2]:
            _even("alltoall", tensors, tensors[0].numel())
        return list(args[1]), list(args[0]), [t.numel() for t in args[1]]
    output, whole, _, splits, _ = args
    return [whole], [output], wired._split(whole, splits, size)


def _received(method: str, args: tuple, size: int) -> list[int]:
    if method == "alltoall":
        return [t.numel() for t in args[0]]
    return wired._split(args[0], args[2], size)


def _check(tensors: Tensors, dtype: str) -> None:
    if dtype not in DTYPES:
        raise RuntimeError(f"Invalid scalar type: {dtype} cannot be sent")
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                "a sparse tensor cannot be sent where answers are graded. "
                "Send it dense: tensor.to_dense()"
            )
        if tensor.device.type != "cpu":
            raise RuntimeError(
                f"No backend type associated with a tensor on {tensor.device}: "
                "ranks of a grader pass tensors on the CPU"
            )
        if calls.dtype_name(tensor.dtype) != dtype:
            raise RuntimeError(f"one call takes one dtype, got {dtype} and {tensor.dtype}")


def _reduction(name: str, dtype: torch.dtype) -> str:
    """The name of a reduction that gloo would do. Raises RuntimeError in gloo's words."""
    if name == "PREMUL_SUM":
        raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")
    if name.startswith("B") and dtype.is_floating_point:
        raise RuntimeError(f"Cannot use ReduceOp.{name} with non-integral dtype")
    return name.lower()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A copy of a tensor's elements, in order: a storage that numpy has seen cannot be freed."""
    plain = tensor.detach().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).clone().numpy())
