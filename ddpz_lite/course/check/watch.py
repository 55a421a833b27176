"""What jobs of several lessons do next to an answer: they watch, and return what they saw as data.

Nothing here judges or knows an expected value: it runs in the answer's process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from ddpz_lite.meter.memory_use import storages
from ddpz_lite.wire import callsite, span

TIMEOUT_S = 2.0  # seconds to wait for other threads
BLIND = 0.3  # seconds to wait where the system does not say whether they are busy
PAUSE = 0.002


class Holding(TorchDispatchMode):
    """Bytes of the storages that an answer made or used and that are still there.

    `with holding:` around each call of the answer, and around nothing else. No matter who holds a
    storage, it counts: an attribute, a closure, a partial, a global, a hook, autograd's graph, a
    view. It counts whole and once. `known` are the job's own and count nothing, nor does what the
    job makes outside of the block.

    peak: the most that was there at once inside the blocks.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._paused = False
        self._known: dict[int, StorageWeakRef] = {}
        self._there: dict[int, StorageWeakRef] = {}
        self.know(known)
        gc.freeze()  # what was here before need not be searched each time

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these from now on: they are the job's own."""
        for storage in storages(tensors):
            self._known[storage._cdata] = StorageWeakRef(storage)
            self._there.pop(storage._cdata, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the job computes, though it was the answer that called it."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._paused:
            return made
        for storage in storages(_tensors((args, kwargs, made))):
            if storage._cdata not in self._known:
                self._there.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, self._bytes())
        return made

    def now(self, besides: Iterable[torch.Tensor] = ()) -> int:
        """What is held now, without the storages behind `besides`: parameters, say."""
        gc.collect()
        _settle()
        left_out = {storage._cdata for storage in storages(besides)}
        with callsite.frames_lock:  # the launcher's heartbeat keeps what it looks at
            return self._bytes(left_out)

    def _bytes(self, left_out: Iterable[int] = ()) -> int:
        for key, reference in list(self._there.items()):
            if reference.expired():
                del self._there[key]
        total = 0
        for key in self._there.keys() - set(left_out):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            total += 0 if storage is None else storage.nbytes()
        return total


def _settle() -> None:
    """Wait until no other thread of this process computes: gloo's threads free the tensors of
    a collective a moment after `wait` has returned.
    """
    sees = os.path.isdir("/proc/self/task")  # not in a sandbox, and not on macOS
    idle, deadline = 0, time.monotonic() + (TIMEOUT_S if sees else BLIND)
    while idle < 2 and time.monotonic() < deadline:
        time.sleep(PAUSE)
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    me = str(threading.get_native_id())
    try:
        others = [task for task in os.listdir("/proc/self/task") if task != me]
        stats = [Path("/proc/self/task", task, "stat").read_text() for task in others]
    except OSError:  # not on this system, or a thread has just ended
        return True
    return any(stat.rpartition(")")[2].split()[0] == "R" for stat in stats)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Kept:
    """Inputs as they were handed over: `Kept(weights=weights).changed()` -> ["weights[0]"].

    Values by their bits, dtype, shape and requires_grad; lists and dicts of tensors and numbers.
    """

    def __init__(self, **inputs: Any) -> None:
        self._inputs = inputs
        self._before = {path: _copy(leaf) for path, leaf in _leaves(inputs).items()}

    def changed(self) -> list[str]:
        """The names of what is not what it was."""
        now = _leaves(self._inputs)
        both = [path for path in now if path in self._before]
        changed = [path for path in both if not _alike(now[path], self._before[path])]
        return changed + sorted(now.keys() ^ self._before.keys())


def _leaves(tree: dict[str, Any]) -> dict[str, Any]:
    pairs, _ = tree_flatten_with_path(tree)
    return {path[0].key + "".join(str(key) for key in path[1:]): leaf for path, leaf in pairs}


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _alike(now: Any, before: Any) -> bool:
    if not isinstance(before, torch.Tensor):
        return type(now) is type(before) and now == before
    form = [(t.dtype, t.shape, t.requires_grad) for t in (now, before)]
    return form[0] == form[1] and torch.equal(_bits(now), _bits(before))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def form(tensor: Any) -> dict[str, Any] | None:
    """What does not travel with a tensor's values: its layout, device and ties to autograd."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return {
        "contiguous": tensor.is_contiguous(),
        "device": tensor.device.type,
        "requires_grad": tensor.requires_grad,
        "leaf": tensor.is_leaf,
    }


def tell_when_reached(x: torch.Tensor, layer: int) -> None:
    """A span "layer 2" of no length, when backward comes to layer 2, whose output is x.

    By then the gradients of all later layers are there, and their hooks have run.
    """

    def tell(_: torch.Tensor) -> None:
        with span(f"layer {layer}"):
            pass

    if x.requires_grad:
        x.register_hook(tell)
