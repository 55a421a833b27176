"""A flat buffer: many parameters laid end to end, so that one transition moves them all.

    full    (padded,)            every parameter, then padding up to a multiple of the shards
    local   (padded // world,)   this rank's slice of `full`
    shard   (padded // shards,)  what it steps on, in the dtype of the optimizer (the master copy)
    shards  (0 .. numel,)        this rank's shard of each parameter: views of `shard`, some empty
    rows    (world, local + f)   gradients to be sent: row r is for rank r, f flags at its end

`full` stays (ZeRO-1, ZeRO-2), or is allocated for a while and freed again (ZeRO-3). The shard of a
parameter is an `nn.Parameter`, so any torch optimizer that works element by element steps on it,
with the options that its group has. Padding is no parameter's, so it costs no state.

[Note: two axes] With one axis, or DDP outside, `local` is what the rank steps on. With ZeRO-1
outside (`across`), replicas have `local` alike, and each steps on its slice of that.

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

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.across import WaitingGrads
from ddpz_lite.strategies.comm import Comm, Handle
from ddpz_lite.strategies.gradient import LocalGrad, Stepper, hide_partial, show_partial
from ddpz_lite.strategies.guards.model import check_dense, check_published, check_same_storage
from ddpz_lite.strategies.layout import Layout
from ddpz_lite.strategies.mesh import comm_for, mark
from ddpz_lite.strategies.parameters import UnshardedParameter, subclass
from ddpz_lite.strategies.quantised import all_gather, rounded


def sent_as(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients are sent; complex ones keep theirs, for a cast halves them."""
    return reduce_dtype if reduce_dtype is not None and not dtype.is_complex else dtype


class Flat:
    """Parameters of one dtype and device, flat: their storage, and the transitions of it.

    Args:
        params: at least one; all trainable, or all frozen.
        comm: the ranks that share the state; of experts, see `mesh.comm_for`.
        dtype: of `full`, in which forward and backward compute. Default: that of the parameters.
        reduce_dtype: in which gradients are sent. Default: `dtype`.
        resident: the parameters stay unsharded, as views of `full`, which is never freed.
        offload: keep the shard, and so the optimizer's state, in the memory of the host.
        layout: how parameters lie in it; `ownership.WholeLayout` gives each a single owner.
        gather_dtype: torch.int8 if slices of `full` are sent in it (qwZ); see `quantised`.
        intra_node: hpZ: the ranks that keep `full` between them from forward to backward, each its
            `secondary` slice, so that they alone unshard it for backward. Not for experts.

    Attributes: `params` are the given parameters if resident, otherwise new ones in their place (a
    sharded parameter must not be read); `shards` are what an optimizer steps on, in the same order;
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
        layout: type[Layout] = Layout,
        gather_dtype: torch.dtype | None = None,
        intra_node: Comm | None = None,
    ) -> None:
        first, given, comm = params[0], comm, comm_for(params[0], comm)
        self.comm, self.resident = comm, resident
        self.intra_node = intra_node if comm is given else None
        dtype = dtype if dtype is not None and first.is_floating_point() else first.dtype
        self.reduce_dtype = sent_as(dtype, reduce_dtype)
        self.layout = layout(tuple(p.shape for p in params), comm.shards, comm.place)
        master = torch.zeros(self.layout.padded, dtype=first.dtype, device=first.device)
        for view, param in zip(self.layout.views(master), params, strict=True):
            view.copy_(param.detach())
        self.full = master.to(dtype)  # (padded,)
        cut = comm.across.world > 1
        self._quantised = gather_dtype is not None and first.is_floating_point() and comm.world > 1
        self._separate = (resident or cut) and (offload or dtype != first.dtype)
        self.local = comm.shard(self.full if resident or cut else master)  # (padded // world,)
        if not resident:
            self.local = _kept(self.local, offload and not cut)
        self.shard = comm.across.shard(self.local)  # (padded // shards,)
        if self._separate:
            self.shard = _kept(comm.across.shard(comm.shard(master)), offload)
        self.secondary: Tensor | None = None  # (padded // intra_node.world,)
        self.params = self._make_params(params)
        views = zip(self.layout.split(self.shard), params, strict=True)
        self.shards = [nn.Parameter(v, requires_grad=p.requires_grad) for v, p in views]
        for own, param in zip([*self.params, *self.shards], [*params] * 2, strict=True):
            mark(own, like=param)
        self.owner: Stepper | None = None
        self.exposed = False  # whether the user has read `.data` of a parameter
        self._places = self.layout.places(comm.world, extra=len(params))  # in the rows
        self._rows: Tensor | None = None  # (world, padded // world + len(params))
        self.collected: set[int] = set()
        self._unshard: Handle | None = None
        self._reduce: tuple[Handle, bool] | None = None
        self.waiting = WaitingGrads(comm, len(params))
        self._versions = [p._version for p in self.params]
        self._published = self.shard._version

    def _make_params(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters that are views of `full`.

        [Note: .data] Views of `full.data` have version counters of their own. So a later
        all-gather, which writes `full`, is no change of a tensor saved for backward to autograd.
        """
        pairs = list(zip(self.layout.views(self.full.data), params, strict=True))
        if not self.resident:
            return [nn.Parameter(v, requires_grad=p.requires_grad) for v, p in pairs]
        for index, (view, param) in enumerate(pairs):
            param.data, param.grad = view, None
            param.__class__ = subclass(UnshardedParameter, type(param))
            param.place = self, index
        return list(params)

    # -- Shard to Replicate

    def publish(self) -> Handle:
        """Start to bring to `local` what the shards have become; sends nothing but across."""
        self.secondary = None
        if self._separate:
            self.comm.across.shard(self.local).copy_(self.shard, non_blocking=True)
        self._published = self.shard._version
        return self.comm.across.all_gather(self.local)

    def unshard(self) -> None:
        """Start the all-gather of `full`, which is allocated if it was freed."""
        check_same_storage(self.params, self.full, self.shards, self.shard)
        if self.comm.across.world > 1 and not self.resident:
            check_published(self.shard._version, self._published)
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full.numel() * self.full.element_size())
        if self._quantised and self.secondary is None:
            self._unshard = all_gather(self.comm, self.local, self.full)
            return
        comm, local = self.comm, self.local
        if self.secondary is not None:
            comm, local = self.intra_node, self.secondary
        if not self.resident:
            comm.shard(self.full).copy_(local, non_blocking=True)
        self._unshard = comm.all_gather(self.full)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather of `full`."""
        if self._unshard is not None:
            self._unshard.wait()
            self._unshard = None

    def reshard(self, after_forward: bool = False) -> None:
        """Free `full`. Its views stay, and have their values again after the next all-gather.

        after_forward: parameters stay until backward, so hpZ keeps a slice of `full`.

        [Note: storage] `param.data = shard` would free nothing: autograd holds views of `full`.
        """
        self.wait_for_unshard()
        keep = after_forward and self.intra_node is not None
        self.secondary = self.intra_node.shard(self.full).clone() if keep else None
        self.full.untyped_storage().resize_(0)

    def gather_master(self) -> list[Tensor]:
        """All parameters in their shapes, in the dtype of the optimizer; not kept here."""
        self.copy_edits()
        full = self.shard.new_empty(self.layout.padded, device=self.full.device)  # (padded,)
        local = self.comm.shard(full)  # (padded // world,)
        self.comm.across.shard(local).copy_(self.shard)
        self.comm.across.all_gather(local).wait()
        return self.layout.views(self.comm.all_gather(full).wait())

    def copy_edits(self) -> None:
        """Where the user may have changed resident parameters, copy that to the master copy."""
        versions = [p._version for p in self.params]
        if self.resident and self._separate and (self.exposed or versions != self._versions):
            self.write_back()
            self._versions = versions

    def write_back(self) -> None:
        """`full` to the master copy, but for what only rounding has made different."""
        own = self.comm.across.shard
        now = own(self.comm.shard(self.full)).to(self.shard.device)  # (padded // shards,)
        before = own(rounded(self.local)).to(now.device) if self._quantised else self.shard
        changed = now != before.to(now.dtype)
        self.shard.copy_(torch.where(changed, now.to(self.shard.dtype), self.shard))

    # -- Partial to Shard

    def collect(self, index: int, grad: Tensor) -> None:
        """Copy the gradient of parameter `index`, in its shape, into the rows to be sent."""
        check_dense(grad)
        elements, end_to_end = grad.reshape(-1), self._open_rows().view(-1)
        for place, part in self._places[index]:
            end_to_end[place].copy_(elements[part])
        self.collected.add(index)

    def _open_rows(self) -> Tensor:
        if self._rows is None:
            width = self.local.numel() + len(self.params)
            self._rows = torch.empty(
                self.comm.world, width, dtype=self.reduce_dtype, device=self.full.device
            )
            self._clear(len(self.params))
        return self._rows

    def _clear(self, index: int) -> None:
        for place, _ in self._places[index]:
            self._rows.view(-1)[place].zero_()

    def reduce(self) -> None:
        """Start to reduce-scatter what was collected; a parameter that was not counts as zero."""
        rows, count = self._open_rows(), len(self.params)
        missing = set(range(count)) - self.collected
        rows[:, -count:] = 1
        for index in sorted(missing):
            self._clear(index)
            rows[:, index - count] = 0
        handle = self.comm.reduce_scatter(rows, self.shard.dtype)
        self._rows, self.collected = None, set()
        self._reduce = handle, bool(missing)

    def wait_for_reduce(self) -> None:
        """Wait for the reduction; add the mean to the gradients of the shards."""
        if self._reduce is None:
            return
        (handle, missing), self._reduce = self._reduce, None
        mean = handle.wait()  # (padded // shards + flags,), or across: (padded // world + flags,)
        if mean.numel() == self.layout.shard_numel + len(self.params):
            self._add_grads(mean.to(self.shard.device), missing)
        else:
            self.waiting.add(mean, missing)
            for shard, part in zip(self.shards, self.layout.split(self.waiting.own()), strict=True):
                if shard.grad is None:
                    show_partial(shard, part, self.comm, self.owner)

    def reduce_across(self) -> None:
        """Start to reduce what waits over the ranks that hold the same parameters."""
        if self.partial is None:
            return
        for index, shard in enumerate(self.shards):
            if shard.grad is None:  # the user has set it to None
                self.waiting.drop(index, self._places[index])
        self._reduce = self.waiting.reduce(self.reduce_dtype, self.shard.dtype)
        hide_partial(self.shards)

    @property
    def partial(self) -> Tensor | None:
        """Gradients that wait for the step (padded // world + flags,), see `across`."""
        return self.waiting.partial

    def _add_grads(self, reduced: Tensor, missing: bool) -> None:
        """Add the final mean (padded // shards + flags,) to the gradients of the shards."""
        flags = reduced[self.layout.shard_numel :].tolist() if missing else None
        came = [i for i in range(len(self.shards)) if flags is None or flags[i]]
        grads = self.layout.split(reduced)
        if self.owner is not None:
            self.owner.unscale_([grads[i] for i in came])
        for shard, grad in ((self.shards[i], grads[i]) for i in came):
            if shard.grad is None:  # empty ones get theirs too, so that ranks' loops are the same
                shard.grad = LocalGrad.of(grad, shard, self.comm)
            else:
                shard.grad.as_subclass(Tensor).add_(grad)
        for shard in (self.shards[i] for i in came):
            for hook in (shard._post_accumulate_grad_hooks or {}).values():  # ZeRO-3: the user's
                with torch.no_grad():
                    hook(shard)

    def forget(self) -> None:
        """Drop gradients in flight: after a backward that an exception cut short."""
        self._rows, self.collected, self._reduce = None, set(), None

    def transient(self) -> list[Tensor]:
        """Buffers that are neither parameters nor gradients between steps, for the meter."""
        full = None if self.resident and not self._separate else self.full
        return [t for t in (full, self.secondary, self._rows) if t is not None]


def _kept(part: Tensor, offload: bool) -> Tensor:
    """A copy to be kept: in the memory of the host, pinned where it goes to a GPU, or here."""
    own = part.to("cpu" if offload else part.device, copy=True)
    return own.pin_memory() if offload and part.is_cuda else own
