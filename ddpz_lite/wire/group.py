"""torch's methods of a process group, each turned into one call on the wire.

torch calls these methods from Python (`dist.all_reduce`) and, through pybind, from C++ (DDP's
reducer, functional collectives). The lists of lists and the option objects are torch's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch.distributed import ProcessGroup, ReduceOp

from ddpz_lite.wire import call as calls
from ddpz_lite.wire import callsite
from ddpz_lite.wire.base_group import BaseGroup
from ddpz_lite.wire.call import Call
from ddpz_lite.wire.status_format import COLLECTIVE, SPLITS

_NEW_NAMES = hasattr(ProcessGroup, "all_gather_single")  # torch 2.13 renamed five operations
_ALL_GATHER = "all_gather_single" if _NEW_NAMES else "_allgather_base"
_ALL_GATHERS = "all_gather_single_coalesced" if _NEW_NAMES else "allgather_into_tensor_coalesced"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW_NAMES else "_reduce_scatter_base"
_REDUCE_SCATTERS = (
    "reduce_scatter_single_coalesced" if _NEW_NAMES else "reduce_scatter_tensor_coalesced"
)
_ALL_TO_ALL = "all_to_all_single" if _NEW_NAMES else "alltoall_base"
_dynamo = torch._C._dynamo.eval_frame

Tensors = list[torch.Tensor]


def _do_not_trace(cls: type) -> type:
    """[Note: compile]
    torch.compile would trace these methods, and stops at the first attribute of a process group. So
    each is marked to be called, not traced, and runs with tracing off. `torch.compiler.disable`
    does the same, but importing it costs every rank a second.
    """
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("__"):
            setattr(cls, name, _untraced(method))
    return cls


def _untraced(method: FunctionType) -> FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _dynamo.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            _dynamo.set_eval_frame(before)

    call._torchdynamo_disable = True
    return call


@_do_not_trace
class TorchMethods:
    """torch's methods of a process group, each turned into a `Call`.

    The class that inherits it has `ranks` (its members as global ranks), `devices` (the backend for
    each device type), `_me` (its own index in `ranks`), `_calls` (an empty dict), and the methods
    `_collective` and `_message`, which receive the calls.

    [Note: a handle that only C++ holds] torch's Join counts the participating ranks by an
    all-reduce of one number, gives the handle to DDP's reducer and drops its own. C++ keeps only
    its half of the handle; once the Python half is gone, it waits in the base class of all handles,
    forever. So the group keeps the last such handle.
    """

    _for_join: Any = None

    # -- one tensor, the same on every rank --------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = _options(c10d.AllreduceOptions, opts, timeout)
        work = self._reducing("all_reduce", "allreduce", tensors, opts)
        if opts.asyncOp and _is_for_join(sys._getframe(2)):  # above the wrapper of this method
            self._for_join = work
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._reducing("all_reduce", "allreduce_coalesced", tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors, opts = [tensors], _root(c10d.ReduceOptions, opts, *rest)
        return self._reducing("reduce", "reduce", tensors, opts, opts.rootRank)

    def _reducing(
        self, op: str, method: str, tensors: Tensors, opts: Any, root: int | None = None
    ) -> Any:
        t, reduce_op = tensors[0], opts.reduceOp.op
        device = t.device.type
        key = (op, t.dtype, _shape(tensors), reduce_op, root, device)
        call = self._calls.get(key)
        if t.is_sparse:
            call = calls.sparse(t, self.ranks, self._me, reduce_op.name.lower())
        elif call is None:
            named = reduce_op.name.lower()
            total = calls.total(tensors)
            call = self._call(key, op, tensors, total, reduce_op=named, root=root)
        return self._collective(call, not opts.asyncOp, method, (tensors, opts), device)

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors, opts = [tensors], _root(c10d.BroadcastOptions, opts, *rest)
        t, root = tensors[0], opts.rootRank
        device = t.device.type
        key = ("broadcast", t.dtype, t.shape, root, device)
        call = self._calls.get(key) or self._call(key, "broadcast", tensors, t.numel(), root=root)
        return self._collective(call, not opts.asyncOp, "broadcast", (tensors, opts), device)

    # -- gather: parts to a full tensor ------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """outputs: for each input, a list with a place for every rank's."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.AllgatherOptions, opts, timeout)
        return self._gathering("allgather", outputs, inputs, opts, _flat(outputs))

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """outputs: for each rank, a list with a place for every input."""
        opts = opts or c10d.AllgatherOptions()
        return self._gathering("allgather_coalesced", outputs, inputs, opts, _flat(outputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._gathering(_ALL_GATHER, output, input, opts, [output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._gathering(_ALL_GATHERS, outputs, inputs, opts, outputs)

    def _gathering(self, method: str, outputs: Any, inputs: Any, opts: Any, full: Tensors) -> Any:
        parts = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        t = parts[0]
        device = t.device.type
        elements = calls.total(full)
        key = ("all_gather", t.dtype, _shape(parts), elements, device)
        call = self._calls.get(key)
        if call is None:
            call = self._call(key, "all_gather", parts, elements)
        return self._collective(call, not opts.asyncOp, method, (outputs, inputs, opts), device)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """outputs: at the root, one list with a place for every rank's part; empty elsewhere."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
            opts = _root(c10d.GatherOptions, opts, *rest)
        return self._rooted("gather", inputs[0], opts, (outputs, inputs, opts))

    # -- scatter: a full tensor to parts -----------------------------------------------------------

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """inputs: for each output, a list with every rank's part."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(c10d.ReduceScatterOptions, opts, timeout)
        return self._scattering("reduce_scatter", outputs, inputs, opts, _flat(inputs))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        return self._scattering(_REDUCE_SCATTER, output, input, opts, [input])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        return self._scattering(_REDUCE_SCATTERS, outputs, inputs, opts, inputs)

    def _scattering(self, method: str, outputs: Any, inputs: Any, opts: Any, full: Tensors) -> Any:
        t, reduce_op = full[0], opts.reduceOp.op
        device = t.device.type
        key = ("reduce_scatter", t.dtype, _shape(full), reduce_op, device)
        call = self._calls.get(key)
        if call is None:
            total, named = calls.total(full), reduce_op.name.lower()
            call = self._call(key, "reduce_scatter", full, total, reduce_op=named)
        return self._collective(call, not opts.asyncOp, method, (outputs, inputs, opts), device)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> Any:
        """inputs: at the root, one list with every rank's part; empty elsewhere."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
            opts = _root(c10d.ScatterOptions, opts, *rest)
        return self._rooted("scatter", outputs[0], opts, (outputs, inputs, opts))

    def _rooted(self, op: str, part: torch.Tensor, opts: Any, args: tuple) -> Any:
        device, root = part.device.type, opts.rootRank
        key = (op, part.dtype, part.shape, root, device)
        call = self._calls.get(key)
        if call is None:
            call = self._call(key, op, [part], len(self.ranks) * part.numel(), root=root)
        return self._collective(call, not opts.asyncOp, op, args, device)

    # -- all to all --------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """splits: rows for each rank; an empty list means equal parts."""
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        sends = _split(input, input_splits, len(self.ranks))
        receives = _split(output, output_splits, len(self.ranks))
        args = (output, input, output_splits, input_splits, opts)
        return self._exchange(_ALL_TO_ALL, [input], sends, receives, opts, args)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None
    ) -> Any:
        opts = _options(c10d.AllToAllOptions, opts, timeout)
        sends, receives = [t.numel() for t in inputs], [t.numel() for t in outputs]
        return self._exchange("alltoall", inputs, sends, receives, opts, (outputs, inputs, opts))

    def _exchange(
        self,
        method: str,
        inputs: Tensors,
        sends: list[int],
        receives: list[int],
        opts: Any,
        args: tuple,
    ) -> Any:
        t = inputs[0]
        device = t.device.type
        parts = (*sends, *receives)  # elements
        key = ("all_to_all", t.dtype, _shape(inputs), parts, device)
        call = self._calls.get(key)
        if call is None:
            call = self._call(key, "all_to_all", inputs, sum(sends), equal=False)
            call = calls.uneven(call, sends, receives, self._me, t.element_size())
            self._calls[key] = call
        shown = parts if len(self.ranks) <= SPLITS else ()
        return self._collective(call, not opts.asyncOp, method, args, device, shown)

    # -- barriers and messages ---------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(c10d.BarrierOptions, opts, timeout)
        device = "cpu" if "cpu" in self.devices else "cuda"
        call = self._calls.get("barrier")
        if call is None:
            call = calls.barrier(self.ranks, self._me, self.devices[device])
            self._calls["barrier"] = call
        return self._collective(call, not opts.asyncOp, "barrier", (opts,), device)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        return self._message("send", tensors, self.ranks[dst], tag, (tensors, dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, self.ranks[src], tag, (tensors, src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._message("recv_anysource", tensors, -1, tag, (tensors, tag))

    # torch 2.11 and 2.12 know only these names; torch 2.13 still accepts them.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _call(
        self, key: tuple, op: str, tensors: Sequence[torch.Tensor], elements: int, **options: Any
    ) -> Call:
        """Describe a new kind of call of this group, and keep it under `key`."""
        backend = self.devices.get(tensors[0].device.type, "gloo")
        made = calls.build(
            op,
            tensors,
            ranks=self.ranks,
            rank=self._me,
            backend=backend,
            elements=elements,
            **options,
        )
        self._calls[key] = made
        return made


@_do_not_trace
class WireGroup(TorchMethods, BaseGroup):
    """A process group on the wire."""

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """gloo's barrier that names the missing ranks. It has a time limit, so it never hangs."""
        where, status_file = callsite.caller(), self._state.status_file
        with self._order:
            call = calls.barrier(self.ranks, self._me, "gloo", "monitored_barrier")
            entry, _ = self._announce(call, where, ())
            number = entry.group_seq
            at = {"index": self._index, "number": number, "bounded": True}
            status_file.enter(COLLECTIVE, b"monitored_barrier", where, **at)
            try:
                self.inner.monitored_barrier(timeout, wait_all_ranks)
            finally:
                status_file.leave()
        entry.finished = time.monotonic()


def _is_for_join(frame: FrameType | None) -> bool:
    """Whether torch's Join called `dist.all_reduce`."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        if frame.f_code.co_name == "notify_join_context":
            return True
        frame = frame.f_back
    return False


def _shape(tensors: Tensors) -> Any:
    return tensors[0].shape if len(tensors) == 1 else tuple(t.shape for t in tensors)


def _flat(rows: list[Tensors]) -> Tensors:
    return [t for row in rows for t in row]


def _options(kind: type, opts: Any, timeout: Any) -> Any:
    """The options of a call, also of the short form `group.allreduce(tensor, op, timeout)`."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if isinstance(opts, ReduceOp | ReduceOp.RedOpType):
        made.reduceOp = opts
        opts = timeout
    if opts is not None:
        made.timeout = opts
    return made


def _root(kind: type, root: int, *rest: Any) -> Any:
    """The options of the short forms `group.broadcast(t, root)`, `group.reduce(t, root, op)`."""
    made = kind()
    made.rootRank = root
    for extra in rest:
        if isinstance(extra, ReduceOp | ReduceOp.RedOpType):
            made.reduceOp = extra
        elif extra is not None:
            made.timeout = extra
    return made


def _split(tensor: torch.Tensor, splits: list[int], size: int) -> list[int]:
    """Elements for each rank."""
    if not splits:
        return [tensor.numel() // size] * size
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    return [row * rows for rows in splits]
