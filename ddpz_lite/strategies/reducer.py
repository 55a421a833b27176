"""Buckets of gradients, and when a bucket goes: the part of DDP and ZeRO-2 that runs in backward.

A gradient is copied once, into its bucket, as soon as autograd has it, and scaled meanwhile; from
then on `param.grad` is a view of the bucket, so nothing is copied back. ZeRO-2 uses the same
Reducer with buckets that are reduced to shards.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ddpz_lite.strategies.comm import Comm, Handle
from ddpz_lite.strategies.flat import sent_as
from ddpz_lite.strategies.gradient import LocalGrad, own_grad, set_own_grad
from ddpz_lite.strategies.layout import Layout
from ddpz_lite.strategies.mesh import apart, comm_for, experts

CommHook = Callable[[Tensor, Comm], Handle]


class HookPerBucket(Protocol):
    """A hook with shapes or a state: see `hooks`."""

    def for_bucket(self, gradients: Sequence[Tensor], comm: Comm) -> CommHook: ...


class Bucket:
    """Gradients of `params` end to end, (numel + flags,); see [Note: flags] in flat.

    sparse: those of `params` whose `.grad` is sparse; they are sent dense.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        comm: Comm,
        reduce_dtype: torch.dtype | None = None,
        hook: CommHook | HookPerBucket | None = None,
        sparse: Collection[nn.Parameter] = (),
    ) -> None:
        comm = comm_for(params[0], comm)
        self.params, self.comm, self.sparse = params, comm, sparse
        layout = Layout(tuple(p.shape for p in params), world=1, rank=0)
        self.numel = layout.padded
        dtype = sent_as(params[0].dtype, reduce_dtype)
        self.flat = torch.zeros(self.numel + len(params), dtype=dtype, device=params[0].device)
        self.views = layout.views(self.flat)
        made = getattr(hook, "for_bucket", None)
        self.hook: CommHook | None = hook if made is None else made(self.views, comm)
        if comm.axes:  # other ranks hold other parts of the model
            pairs = zip(self.views, params, strict=True)
            self.views = [LocalGrad.of(view, param, comm.other_axes) for view, param in pairs]
        self._missing: list[int] = []
        self._handles: list[Handle] = []

    def collect(self, index: int, param: nn.Parameter) -> None:
        """Move the gradient into the bucket; afterwards `param.grad` is the view."""
        view, grad = self.views[index], own_grad(param)
        scale = 1.0 if self.hook is not None else 1.0 / self.comm.size  # a hook takes the mean
        if grad is view:  # accumulated in place under no_sync
            view.mul_(scale)
        elif grad.dtype == view.dtype and not grad.is_sparse:
            torch.mul(grad.detach(), scale, out=view)
            set_own_grad(param, view)
        else:
            view.copy_(grad.to_dense()).mul_(scale)

    def reduce(self, missing: list[int]) -> None:
        """Start the all-reduce; parameters without a gradient count as zero."""
        flags = self.flat[self.numel :]  # (len(params),)
        flags.fill_(1)
        for index in missing:
            self.views[index].zero_()
            flags[index] = 0
        self._missing = missing
        if self.hook is None:
            self._handles = [self.comm.all_reduce(self.flat)]
        else:
            self._handles = [self.hook(self.flat[: self.numel], self.comm)]
            self._handles.append(self.comm.all_reduce(flags))

    def wait_for_reduce(self) -> None:
        """Wait, and make every `.grad` final. A parameter that no rank used keeps none."""
        for handle in self._handles:
            handle.wait()
        used = self.flat[self.numel :].tolist() if self._missing else None
        for index, (param, view) in enumerate(zip(self.params, self.views, strict=True)):
            if used is not None and not used[index]:
                continue
            fits = param.grad_dtype in (None, view.dtype)
            grad = view if fits else view.to(param.dtype)
            set_own_grad(param, grad.to_sparse(1) if param in self.sparse else grad)
        self._missing, self._handles = [], []

    def forget(self) -> None:
        """After a backward that raised: wait for what is in flight, for it writes into `flat`."""
        while self._handles:
            self._handles.pop().wait()

    def abandon(self) -> None:
        """As `forget`, without waiting: a rank is gone, and what is in flight will never end."""
        self._handles = []


class Reducible(Protocol):
    """What the Reducer drives: DDP's Bucket, and the bucket of ZeRO-2."""

    params: Sequence[nn.Parameter]

    def collect(self, index: int, param: nn.Parameter) -> None: ...
    def reduce(self, missing: list[int]) -> None: ...
    def wait_for_reduce(self) -> None: ...


class Backward:
    """The backward that runs through a model, with those that begin inside it; calls `end` after.

    Autograd numbers its runs. Reentrant checkpoints and reversible layers start one inside another,
    and the first gradient may come in one of those. So a run that ends looks for a node of autograd
    that computes at this moment: that node belongs to the run around it, and is followed there.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._runs: set[int] = set()  # that have begun; one that raised has no end

    def __bool__(self) -> bool:
        return bool(self._runs)

    def enter(self) -> bool:
        """Autograd has reached this point. Returns whether a backward begins with it."""
        run, is_first = torch._C._current_graph_task_id(), not self._runs
        if run not in self._runs:
            self._runs.add(run)
            Variable._execution_engine.queue_callback(partial(self._leave, run))
        return is_first

    def _leave(self, run: int) -> None:
        if (node := torch._C._current_autograd_node()) is not None:
            node.register_hook(lambda *_: self._surface(run))
            return
        raised = self._runs - {run}
        self._runs = set()
        if raised:
            raise RuntimeError(
                "a backward ended after one that raised and has left gradients. Fix: call "
                "optimizer.zero_grad() after an exception in backward."
            )
        self._end()

    def _surface(self, run: int) -> None:
        """The node in which the run began is over: go on in the run around it."""
        self.enter()
        self._runs.discard(run)

    def forget(self) -> None:
        """The backward raised."""
        self._runs = set()


class Reducer:
    """Reduces each bucket as soon as backward has filled it, and all before backward returns.

    Buckets go in index order (see [Note: order] in comm): a full bucket waits for those before it.
    `in_flight` bounds how many are in flight at once, and so the memory of their buffers.

    If a backward raised, the owner calls `reset` before the next.
    """

    def __init__(self, buckets: Sequence[Reducible], in_flight: int) -> None:
        self.buckets: list[Reducible] = []
        self.in_flight, self.enabled = in_flight, True
        self._kept = False  # whether no_sync has kept a gradient that was not reduced since
        self._backward = Backward(self._end)
        self.add(buckets)

    def add(self, buckets: Sequence[Reducible]) -> None:
        """More buckets, to be reduced after those that are here."""
        for b, bucket in enumerate(buckets, start=len(self.buckets)):
            for i, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(partial(self._ready, b, i))
        self.buckets += buckets
        self.reset()

    def reset(self) -> None:
        """Forget a backward that did not come to its end."""
        self._backward.forget()
        self._next = self._done = 0
        self._arrived: list[set[int]] = [set() for _ in self.buckets]

    def abandon(self) -> None:
        """Forget what no_sync has kept, too."""
        self._kept = False
        self.reset()

    def _ready(self, b: int, i: int, param: nn.Parameter) -> None:
        if not self.enabled:
            self._kept = True
            return
        self._backward.enter()
        bucket, arrived = self.buckets[b], self._arrived[b]
        if i in arrived:
            raise RuntimeError(
                "a parameter received two gradients in one backward: another one ran inside it, of "
                "a reentrant checkpoint or a reversible layer, for a parameter that is also used "
                "elsewhere. Fix: run one backward per graph; checkpoint(..., use_reentrant=False)."
            )
        arrived.add(i)
        bucket.collect(i, param)
        if len(arrived) == len(bucket.params):
            self._release(only_full=True)

    def _release(self, only_full: bool) -> None:
        while self._next < len(self.buckets):
            bucket, arrived = self.buckets[self._next], self._arrived[self._next]
            if only_full and len(arrived) < len(bucket.params):
                return
            self._finish(up_to=self._next - self.in_flight + 1)
            bucket.reduce([i for i in range(len(bucket.params)) if i not in arrived])
            self._next += 1

    def _finish(self, up_to: int) -> None:
        while self._done < up_to:
            self.buckets[self._done].wait_for_reduce()
            self._done += 1

    def _end(self) -> None:
        for bucket, arrived in zip(self.buckets, self._arrived, strict=True):
            for i, param in enumerate(bucket.params):
                if i not in arrived and own_grad(param) is not None:  # from backwards under no_sync
                    arrived.add(i)
                    bucket.collect(i, param)
        self._release(only_full=False)
        self._finish(up_to=len(self.buckets))
        self._kept = False
        self.reset()

    def flush(self) -> None:
        """Reduce what no_sync has kept, if no backward came after it; every rank calls it."""
        if self._kept:
            self._end()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


def buckets_of(params: Sequence[nn.Parameter], bucket_mb: float) -> list[list[nn.Parameter]]:
    """Trainable parameters in reverse order, about that of backward, in groups of `bucket_mb`.

    bucket_mb: megabytes (1e6 bytes). A group is of one kind; a larger parameter is one.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be positive, in megabytes, got {bucket_mb!r}")
    groups: list[list[nn.Parameter]] = []
    # by kind: the open group, and its megabytes
    last: dict[Any, tuple[list[nn.Parameter], float]] = {}
    for param in reversed([p for p in dict.fromkeys(params) if p.requires_grad]):
        kind, size = kind_of(param), param.numel() * param.element_size() / 1e6
        group, held = last.get(kind, ([], 0.0))
        if not group or held + size > bucket_mb:
            group, held = [], 0.0
            groups.append(group)
        group.append(param)
        last[kind] = group, held + size
    return groups


def kind_of(param: nn.Parameter) -> tuple[Any, ...]:
    """What the parameters of one buffer have in common: dtype, device, and the ranks that share it.

    One that `mesh.apart` names is its own kind.
    """
    return param.dtype, param.device, experts(param), id(param) if apart(param) else None
