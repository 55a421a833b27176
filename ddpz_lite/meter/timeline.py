"""Live bytes by kind through a training step, exact after every operation.

A dispatch mode sees each operation of torch and keeps a weak reference to each new storage; when
the storage is freed, its bytes are subtracted. Watching keeps nothing alive, and nothing is
estimated. The kind of a storage is often known only later (a gradient is created as a result of
backward like any other tensor). So the log holds storages, and kinds are assigned when it is read:
a storage that ever became a gradient counts as one from its creation.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from ddpz_lite.meter.memory_use import KINDS, state_tensors, storages

TIMELINE_KINDS = (*KINDS, "activations", "temporary")


@dataclass(eq=False)
class _Block:
    """One storage in the log; it outlives the storage, because the log is read later."""

    kind: str
    size: int
    watch: weakref.ref | None = None


@dataclass
class _Log:
    """What happened, in order: at `seconds`, `block` changed by `change` bytes."""

    events: list[tuple[float, _Block, int]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)


class MemoryTimeline(TorchDispatchMode):
    """Follow the live bytes of a step.

        with MemoryTimeline(model, optimizer) as timeline:
            loss = next_token_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        timeline.peak, timeline.at_peak, timeline.samples, timeline.marks

    The kinds are those of `memory`, and two more:

    activations   results created while autograd records, whether it keeps them or not. The second
                  forward of checkpointing counts here too, although it runs inside backward.
    temporary     results created while it does not record: gradients of activations, the
                  optimizer's scratch, evaluation, and everything that a hand-written autograd
                  Function creates in its forward, even what it keeps.

    The storages of the model and the optimizer and everything created inside the `with` count; a
    batch created before does not. Memory that one operation allocates and frees is not seen.

    [Note: resize_] Changing a storage's size is not an operation in torch, so
    `UntypedStorage.resize_` is watched while the context is open. A storage that was empty until
    then counts as transient, unless it is of another kind: FSDP2 keeps empty storages for its
    unsharded parameters, in objects that `memory` does not search. Several timelines must nest.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._log = _Log()
        self._live: dict[int, _Block] = {}  # by address of the storage
        self._undo: list[Any] = []
        self._origin = 0.0
        self._in_backward = False
        state_tensors(model, optimizer)  # raises at once for a wrong argument

    def __getstate__(self) -> dict[str, Any]:
        """A rank that returns its timeline sends the log, without the model."""
        return {"_log": self._log}

    # ---- reading

    @property
    def samples(self) -> list[tuple[float, dict[str, int]]]:
        """(seconds since entry, {kind: live bytes}) after each change, in order."""
        now = dict.fromkeys(TIMELINE_KINDS, 0)
        out: list[tuple[float, dict[str, int]]] = []
        for seconds, block, change in self._log.events:
            now[block.kind] += change
            out.append((seconds, dict(now)))
        return out

    @property
    def marks(self) -> list[tuple[float, str]]:
        """(seconds, name) where "forward", "backward", "step" begin, "end", and of each mark()."""
        return list(self._log.marks)

    @property
    def peak(self) -> int:
        """The most bytes that were live at once."""
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> dict[str, int]:
        """{kind: bytes} at the moment of the peak, the first one where there are several."""
        samples = [kinds for _, kinds in self.samples]
        return max(
            samples, key=lambda kinds: sum(kinds.values()), default=dict.fromkeys(TIMELINE_KINDS, 0)
        )

    def at(self, name: str) -> dict[str, int]:
        """{kind: bytes} when the first mark of this name was set. Raises ValueError without one."""
        moment = next((seconds for seconds, mark in self.marks if mark == name), None)
        if moment is None:
            there = ", ".join(dict.fromkeys(mark for _, mark in self.marks))
            raise ValueError(f"MemoryTimeline: no mark {name!r}; there are {there or 'none'}.")
        before = [kinds for seconds, kinds in self.samples if seconds <= moment]
        return before[-1] if before else dict.fromkeys(TIMELINE_KINDS, 0)

    def mark(self, name: str) -> None:
        """Put a name on this moment."""
        self._log.marks.append((self._now(), name))

    # ---- watching

    def __enter__(self) -> MemoryTimeline:
        if self._undo:
            raise RuntimeError(
                "MemoryTimeline: this timeline is open already. Fix: create a second one."
            )
        self._log, self._live, self._in_backward = _Log(), {}, False
        self._origin = time.perf_counter()
        self._classify()
        self._hook()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self._classify()
        self.mark("end")
        for block in list(self._live.values()):  # one may be freed meanwhile, and leave `_live`
            block.watch = None  # what is freed from now on is not part of this step
        self._live = {}

    def _hook(self) -> None:
        handles = [self._model.register_forward_pre_hook(lambda *_: self._begin("forward"))]
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                handles.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))
        if self._optimizer is not None:
            handles.append(self._optimizer.register_step_pre_hook(lambda *_: self._begin("step")))
            handles.append(self._optimizer.register_step_post_hook(lambda *_: self._classify()))
        self._undo = [handle.remove for handle in handles]
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            was_empty = storage.nbytes() == 0
            result = original(storage, size)
            if was_empty and storage._cdata not in self._live:
                self._watch(storage, "transient")  # all of its bytes are created here
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        self._undo.append(lambda: setattr(torch.UntypedStorage, "resize_", original))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            # A DTensor replaces the operation by ones on its local tensor, which arrive here again.
            return NotImplemented
        kwargs = kwargs or {}
        running = torch._C._current_graph_task_id() != -1
        if running and not self._in_backward:
            self.mark("backward")
        elif self._in_backward and not running:
            self._classify()
        self._in_backward = running
        result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if made:
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            given = {storage._cdata for storage in storages(inputs)}
            kind = "activations" if torch.is_grad_enabled() else "temporary"
            for storage in storages(made):
                if storage._cdata in self._live:
                    self._resized(storage)  # an operation with out= may have grown it
                elif storage._cdata not in given:  # else: a view of a tensor that does not count
                    self._watch(storage, kind)
        return result

    def _watch(self, storage: torch.UntypedStorage, kind: str) -> None:
        if storage.device.type == "meta":
            return  # shapes without memory: DTensor's planning
        address = storage._cdata
        block = _Block(kind, storage.nbytes())

        def freed(_: weakref.ref, block: _Block = block) -> None:
            if block.watch is not None and self._live.pop(address, None) is block:
                self._record(block, -block.size)
            block.watch = None

        block.watch = weakref.ref(storage, freed)
        self._live[address] = block
        self._record(block, block.size)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        block = self._live.get(storage._cdata)
        if block is not None and block.size != storage.nbytes():
            change, block.size = storage.nbytes() - block.size, storage.nbytes()
            self._record(block, change)

    def _record(self, block: _Block, change: int) -> None:
        self._log.events.append((self._now(), block, change))

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _begin(self, name: str) -> None:
        # Checkpointing may run the model again inside backward, which is not a new forward.
        if torch._C._current_graph_task_id() == -1:
            self._classify()
            self.mark(name)

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # a strategy's own hook may have freed it
            self._name("gradients", [parameter.grad])

    def _classify(self) -> None:
        """Set the kind of each storage of the model and the optimizer: the first in KINDS."""
        tensors = state_tensors(self._model, self._optimizer)
        for kind in reversed(KINDS):
            self._name(kind, tensors[kind])

    def _name(self, kind: str, tensors: list[Tensor]) -> None:
        for storage in storages(tensors):
            block = self._live.get(storage._cdata)
            if block is None:
                self._watch(storage, kind)
            else:
                block.kind = kind
