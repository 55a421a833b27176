"""A flat buffer: many parameters laid end to end, so that one transition moves them all.

    full    (padded,)            every parameter, then padding up to a multiple of the shards
    held    (padded // world,)   this rank's slice of `full`
    shard   (padded // shards,)  what it steps on, in the dtype of the optimizer (the master copy)
    piece   (0 .. numel,)        what of one parameter lies in the shard: a view, possibly empty
    rows    (world, held + f)    gradients on their way: row r is for rank r, f flags at its end
    partial (held + f,)          gradients that wait for the step, reduced inside and not yet across

`full` is whole (ZeRO-1, ZeRO-2) or is allocated for a while and freed again (ZeRO-3). A piece is an
`nn.Parameter`, so any torch optimizer that works element by element steps on it, with the options
that its group has. Padding belongs to no piece, so it costs no optimizer state.

[Note: two axes] With one axis, or DDP outside, `held` is what the rank steps on. With ZeRO-1
outside, `held` is what replicas have alike, and each steps on its slice of that: gradients are
reduced across once for each step, and the new parameters gathered across.

[Note: flags] A parameter without a gradient on this rank may have one elsewhere, and an optimizer
must skip it only if no rank has one. Each row ends with one number per parameter, 1 where a
gradient was collected; it is reduced with the gradients, so agreement costs f elements and no
collective. A rank reads the flags only if a gradient was missing here: on CUDA reading waits for
the device.

Source: the flat layout is that of Rajbhandari et al. 2020 (section 5) and FSDP (Zhao et al. 2023,
section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm, Handle
from ddpz_lite.strategies.gradient import GradState, LocalGrad, Stepper, unsharded
from ddpz_lite.strategies.mesh import mark
from ddpz_lite.strategies.quantised import all_gather, rounded


def travels_as(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of gradients on their way; complex ones keep theirs, for a cast halves them."""
    return reduce_dtype if reduce_dtype is not None and not dtype.is_complex else dtype


class Owner(Stepper, Protocol):
    """The optimizer that steps on the pieces of a flat buffer."""

    def unscale_(self, gradients: list[Tensor]) -> None: ...


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a buffer of `padded` elements, cut into `world` equal slices."""

    shapes: tuple[torch.Size, ...]
    world: int
    rank: int

    @cached_property
    def offsets(self) -> list[int]:
        """Start of each tensor, then the end of the last: len(shapes) + 1 numbers."""
        return [0, *accumulate(map(prod, self.shapes))]

    @cached_property
    def shard_numel(self) -> int:
        return -(-self.offsets[-1] // self.world)

    @property
    def padded(self) -> int:
        return self.shard_numel * self.world

    def views(self, full: Tensor) -> list[Tensor]:
        """full (padded,) or longer: one view per tensor, in its shape."""
        spans = zip(pairwise(self.offsets), self.shapes, strict=True)
        return [full[start:stop].view(shape) for (start, stop), shape in spans]

    def owned(self, index: int) -> tuple[int, int]:
        """The range of tensor `index`, in its own elements, that this rank's shard holds."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        left = self.rank * self.shard_numel
        first = min(max(left, start), stop)
        return first - start, max(first, min(left + self.shard_numel, stop)) - start

    @cached_property
    def _lengths(self) -> list[int]:
        return [last - first for first, last in map(self.owned, range(len(self.shapes)))]

    def pieces(self, shard: Tensor) -> tuple[Tensor, ...]:
        """shard (shard_numel,) or longer: a 1-D view per tensor, empty if it lies elsewhere."""
        return shard[: sum(self._lengths)].split(self._lengths)

    def segments(self, start: int, stop: int, rows: int, extra: int) -> list[tuple[slice, slice]]:
        """The flat range start:stop of `padded` elements in so many rows, each `extra` longer.

        As (place in the rows end to end, elements counted from start).
        """
        width, cut, found = self.padded // rows, start, []
        while cut < stop:
            row = cut // width
            end, at = min(stop, (row + 1) * width), cut + row * extra
            found.append((slice(at, at + end - cut), slice(cut - start, end - start)))
            cut = end
        return found


class Flat:
    """Parameters of one dtype and device, flat: their storage, and the transitions of it.

    Args:
        params: at least one; all trainable, or all frozen.
        comm: the ranks that share the state.
        dtype: of `full`, in which forward and backward compute. Default: that of the parameters.
        reduce_dtype: in which gradients travel. Default: `dtype`.
        resident: the parameters stay whole, as views of `full`, and `full` is never freed.
        offload: keep the shard, and so the optimizer's state, in the memory of the host.
        gather_dtype: torch.int8 if slices of `full` travel in it; see `quantised`.
        near: ranks among whom `full` is cut when it is freed for a while, so that they alone make
            it whole again: each keeps its `second` slice until then.

    Attributes: `params` are the given parameters if resident, else new ones in their place (a
    sharded parameter must not be read); `pieces` are what an optimizer steps on, in the same order;
    `owner` is that optimizer, where it is ours.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        comm: Comm,
        *,
        dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        resident: bool = True,
        offload: bool = False,
        gather_dtype: torch.dtype | None = None,
        near: Comm | None = None,
    ) -> None:
        self.exposed, self.resident, self.near = False, resident, near
        self.owner: Owner | None = None
        first, self.comm = params[0], comm
        dtype = dtype if dtype is not None and first.is_floating_point() else first.dtype
        self.reduce_dtype = travels_as(dtype, reduce_dtype)
        self.layout = Layout(tuple(p.shape for p in params), comm.shards, comm.place)
        master = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        for view, param in zip(self.layout.views(master), params, strict=True):
            view.copy_(param.detach())
        self.full = master.to(dtype)  # (padded,)
        cut = comm.across.world > 1
        self._quantised = gather_dtype is not None and first.is_floating_point() and comm.world > 1
        self._separate = (resident or cut) and (offload or dtype != first.dtype)
        self.held = comm.shard(self.full if resident or cut else master)  # (padded // world,)
        if not resident:
            self.held = _at_rest(self.held, offload and not cut)
        self.shard = comm.across.shard(self.held)  # (padded // shards,)
        if self._separate:
            self.shard = _at_rest(comm.across.shard(comm.shard(master)), offload)
        self.second: Tensor | None = None  # (padded // near.world,)
        self.params = self._adopt(params)
        views = zip(self.layout.pieces(self.shard), params, strict=True)
        self.pieces = [nn.Parameter(v, requires_grad=p.requires_grad) for v, p in views]
        for piece, param in zip(self.pieces, params, strict=True):
            mark(piece, like=param)
        self._rows: Tensor | None = None  # (world, padded // world + len(params))
        self.partial: Tensor | None = None  # (padded // world + len(params),)
        self._missed = False  # whether a gradient that `partial` should hold was missing here
        self.collected: set[int] = set()
        self._whole = [p._version for p in self.params]
        self._published = self.shard._version
        self._gather: Handle | None = None
        self._reduce: tuple[Handle, bool] | None = None

    def _adopt(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters that are views of `full`.

        [Note: .data] Views of `full.data` have version counters of their own. So a later gather,
        which writes `full`, does not look to autograd like a change of a tensor saved for backward.
        """
        views = self.layout.views(self.full.data)
        if not self.resident:
            return [
                nn.Parameter(v, requires_grad=p.requires_grad)
                for v, p in zip(views, params, strict=True)
            ]
        for index, (view, param) in enumerate(zip(views, params, strict=True)):
            param.data, param.grad = view, None
            param.__class__, param.place = unsharded(type(param)), (self, index)
        return list(params)

    # -- Shard to Replicate

    def publish(self) -> Handle:
        """Start to bring to `held` what the shards have become; moves nothing but across."""
        self.second = None
        if self._separate:
            self.comm.across.shard(self.held).copy_(self.shard, non_blocking=True)
        works = self.comm.across.all_gather(self.held)
        self._published = self.shard._version
        return works

    def gather(self) -> None:
        """Start to make `full` whole from what each rank holds; allocates it if it was freed."""
        self._check()
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
        if self._quantised and self.second is None:
            self._gather = all_gather(self.comm, self.held, self.full)
            return
        comm, mine = (self.comm, self.held) if self.second is None else (self.near, self.second)
        if not self.resident:
            comm.shard(self.full).copy_(mine, non_blocking=True)
        self._gather = comm.all_gather(self.full)

    def _check(self) -> None:
        """Raise RuntimeError if optimizer, model or replicas would not see the same values."""
        shared = self.comm.across.world > 1 and not self.resident
        if shared and self.shard._version != self._published:
            raise RuntimeError(
                "a shard was changed outside of a step, but ranks that compute with the same "
                "parameters each hold a part of it (ZeRO-1 outside), and the others have not "
                "heard. Fix: optimizer.publish() after the change, on every rank."
            )
        for tensors, whole in ((self.params, self.full), (self.pieces, self.shard)):
            at = whole.untyped_storage()._cdata
            if any(tensor.untyped_storage()._cdata != at for tensor in tensors):
                raise RuntimeError(
                    "a parameter was moved or cast, or its .data replaced, after sharding, so the "
                    "optimizer steps on another tensor. Fix: module.to(...) before sharding; "
                    "change values in place."
                )

    def absorb(self) -> None:
        """Where the user may have changed resident parameters, let the master copy have it."""
        versions = [p._version for p in self.params]
        if self.resident and self._separate and (self.exposed or versions != self._whole):
            self.write_back()
            self._whole = versions

    def write_back(self) -> None:
        """`full` to the master copy, but for what only rounding has made different."""
        own = self.comm.across.shard
        mine = own(self.comm.shard(self.full)).to(self.shard.device)
        was = own(rounded(self.held)).to(mine.device) if self._quantised else self.shard
        changed = mine != was.to(mine.dtype)
        self.shard.copy_(torch.where(changed, mine.to(self.shard.dtype), self.shard))

    def gathered(self) -> None:
        """Wait until `full` is whole."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def free(self, again: bool = False) -> None:
        """Free `full`. Its views stay, and are whole again after the next gather.

        again: it will be gathered before the parameters change, so a second slice of it is kept.

        [Note: storage] `param.data = shard` would free nothing: autograd holds views of `full`.
        """
        self.gathered()
        self.second = self.near.shard(self.full).clone() if again and self.near else None
        self.full.untyped_storage().resize_(0)

    def gather_master(self) -> list[Tensor]:
        """All parameters in their shapes, in the dtype of the optimizer; not kept here."""
        self.absorb()
        whole = self.shard.new_empty(self.layout.padded, device=self.full.device)  # (padded,)
        held = self.comm.shard(whole)
        self.comm.across.shard(held).copy_(self.shard)
        self.comm.across.all_gather(held).wait()
        return self.layout.views(self.comm.all_gather(whole).wait())

    # -- Partial to Shard

    def collect(self, index: int, grad: Tensor) -> None:
        """Copy the gradient of parameter `index`, in its shape, into the rows to be sent."""
        if grad.layout is not torch.strided:
            raise TypeError(
                f"a gradient is {grad.layout}; only dense gradients can be laid flat. Fix: build "
                "the embedding with sparse=False."
            )
        laid, end_to_end = grad.reshape(-1), self._open_rows().view(-1)
        for place, elements in self._places[index]:
            end_to_end[place].copy_(laid[elements])
        self.collected.add(index)

    def _open_rows(self) -> Tensor:
        if self._rows is None:
            width = self.held.numel() + len(self.params)
            self._rows = torch.empty(
                self.comm.world, width, dtype=self.reduce_dtype, device=self.full.device
            )
            self._clear(len(self.params))
        return self._rows

    @cached_property
    def _places(self) -> list[list[tuple[slice, slice]]]:
        """Of each parameter, then of the padding: (place in the rows end to end, elements)."""
        spans, flags = pairwise([*self.layout.offsets, self.layout.padded]), len(self.params)
        return [self.layout.segments(*span, self.comm.world, flags) for span in spans]

    def _clear(self, index: int) -> None:
        for place, _ in self._places[index]:
            self._rows.view(-1)[place].zero_()

    def reduce(self) -> None:
        """Start to reduce what was collected; a parameter that was not counts as zero."""
        rows, count = self._open_rows(), len(self.params)
        missing = set(range(count)) - self.collected
        rows[:, -count:] = 1
        for index in sorted(missing):
            self._clear(index)
            rows[:, index - count] = 0
        handle = self.comm.reduce_scatter(rows, self.shard.dtype)
        self._rows, self.collected = None, set()
        self._reduce = handle, bool(missing)

    def reduced(self) -> None:
        """Wait for the reduction; add the mean to the gradients of the pieces, or to `partial`."""
        if self._reduce is None:
            return
        (handle, missing), self._reduce = self._reduce, None
        mean = handle.wait()  # (shard_numel + flags,), or that of `partial`
        if mean.numel() == self.layout.shard_numel + len(self.params):
            self._arrive(mean.to(self.shard.device), missing)
        else:
            self.partial = mean if self.partial is None else self.partial.add_(mean)
            self._missed |= missing
            self._show_partial()

    def _show_partial(self) -> None:
        """Show this rank's part of `partial` on pieces that have no final gradient yet."""
        own = self.comm.across.shard(self.partial[: -len(self.params)])  # (shard_numel,)
        for piece, part in zip(self.pieces, self.layout.pieces(own), strict=True):
            if piece.grad is None:
                grad = part.to(piece.device)
                state = GradState.PARTIAL
                piece.grad = LocalGrad.of(grad, piece, self.comm, self.owner, state)

    def reduce_across(self) -> None:
        """Start to reduce `partial` over the ranks that hold the same parameters."""
        if self.partial is None:
            return
        for index, piece in enumerate(self.pieces):
            if piece.grad is None:  # the user has set it to None
                self.drop(index)
        ranks, flags = self.comm.across.world, self.partial[-len(self.params) :]
        rows = self.partial[: -len(self.params)].view(ranks, -1)  # (ranks, shard_numel)
        rows = torch.cat([rows, flags.expand(ranks, -1)], 1).to(self.reduce_dtype)
        self._reduce = self.comm.across.reduce_scatter(rows, self.shard.dtype), self._missed
        self.partial, self._missed = None, False

    def drop(self, index: int) -> None:
        """Forget what waits of the gradient of parameter `index`."""
        if self.partial is not None:
            before = self.comm.rank * self.partial.numel()  # in the rows end to end
            for place, _ in self._places[index]:
                if before <= place.start < before + self.partial.numel():
                    self.partial[place.start - before : place.stop - before].zero_()
            self.partial[index - len(self.params)], self._missed = 0, True

    def _arrive(self, reduced: Tensor, missing: bool) -> None:
        """Add the final mean (shard_numel + flags,) to the gradients of the pieces."""
        flags = reduced[self.layout.shard_numel :].tolist() if missing else None
        came = [i for i in range(len(self.pieces)) if flags is None or flags[i]]
        means = self.layout.pieces(reduced)
        if self.owner is not None:
            self.owner.unscale_([means[i] for i in came])
            for piece in self.pieces:
                if piece.grad is not None and piece.grad.state is GradState.PARTIAL:
                    piece.grad = None
        for piece, grad in ((self.pieces[i], means[i]) for i in came):
            if piece.grad is None:  # empty ones get theirs too, so that ranks' loops are the same
                piece.grad = LocalGrad.of(grad, piece, self.comm)
            else:
                piece.grad.as_subclass(Tensor).add_(grad)
        for piece in (self.pieces[i] for i in came):
            for hook in (piece._post_accumulate_grad_hooks or {}).values():  # ZeRO-3: the user's
                with torch.no_grad():
                    hook(piece)

    def forget(self) -> None:
        """Drop gradients on their way: after a backward that an exception cut short."""
        self._rows, self.collected, self._reduce = None, set(), None

    def transient(self) -> list[Tensor]:
        """Buffers that hold neither parameters at rest nor gradients at rest, for the meter."""
        full = None if self.resident and not self._separate else self.full
        return [t for t in (full, self.second, self._rows) if t is not None]


def _at_rest(part: Tensor, offload: bool) -> Tensor:
    """A copy to be kept: in the memory of the host, pinned where it goes to a GPU, or here."""
    own = part.to("cpu" if offload else part.device, copy=True)
    return own.pin_memory() if offload and part.is_cuda else own
