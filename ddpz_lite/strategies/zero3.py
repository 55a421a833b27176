"""ZeRO-3: parameters are sharded too. A unit is unsharded just before use and resharded just after.

A unit is a module (a transformer block) whose parameters are gathered together. One step:

    sharded -> unshard -> forward -> reshard -> unshard -> backward -> reshard, reduce -> sharded

While one unit computes, the next is prefetched, in the order of the first forward (`prefetch`);
backward prefetches in reverse. Between steps modules hold shards, so `parameters()` are this rank's
shards, for any torch optimizer; they hold full parameters while a unit is unsharded.

[Note: post_backward] A unit is resharded and reduced when the backward of a unit that does not
contain it begins, or backward ends. Both come in the same order on all ranks, whatever gradients a
rank happens to miss, so no rank's reduction can meet another's gather. All of the unit's own
backward has run by then: autograd runs later nodes first. A unit whose forward had no gradients,
as in a reentrant checkpoint, is unsharded from its second forward to the end of backward.

Source: Rajbhandari et al. 2020, section 5.3 (P_os+g+p); Zhao et al., "PyTorch FSDP", VLDB 2023,
section 3. The verbs are those of torch's FSDP2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.forwards import tensors_in, wrap_forward
from ddpz_lite.strategies.gradient import in_backward
from ddpz_lite.strategies.guards.model import (
    check_hooks,
    check_separate,
    check_shard_hooks,
    check_zero3_options,
    refuse_create_graph,
    refuse_gradient,
)
from ddpz_lite.strategies.guards.modules import KnownModules
from ddpz_lite.strategies.guards.optimizers import watch_optimizers
from ddpz_lite.strategies.guards.parameters import watch_parameters
from ddpz_lite.strategies.meta_device import Builder
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.precision import keeps_dtype
from ddpz_lite.strategies.prefetch import ForwardOrder
from ddpz_lite.strategies.reducer import Backward, kind_of
from ddpz_lite.strategies.replica import Replica
from ddpz_lite.strategies.unit_choice import Slot, Units, is_called, split
from ddpz_lite.strategies.units import BackwardState, ShardedState, Unit


class ZeRO3(Replica):
    """A module whose parameters are sharded over the ranks.

    `ZeRO3(module)`, then any torch optimizer that works element by element on `model.parameters()`,
    built afterwards. These are this rank's shards, and so are their gradients: `p.grad.norm()` is
    that of the shard, torch's `clip_grad_norm_` counts all ranks (see `gradient`). Once
    `backward()` has returned, every shard has its final `.grad`. Every rank must run the same units
    in the same order; in backward this is not checked, so a loss that leaves out a unit's output on
    some ranks only must add it times 0.

    Args:
        module: equal on all ranks; rank 0's values win. On the meta device: built unit by unit.
        mesh: a process group, a mesh (2-D: replicate, shard; this is HSDP), or None for the world.
        units: which modules are units: classes, or `f(name, module) -> bool`. Default: the blocks,
            see `unit_choice.split`. The rest is the root unit. A unit whose parameters are read
            outside of its own forward is unsharded there, and to the end of the model's forward.
        mixed_precision: torch.bfloat16 or torch.float16, in which units are gathered; shards keep
            their own dtype.
        reduce_dtype: in which gradients are sent; default: that of compute. Sums are in fp32.
        reshard_after_forward: False keeps every unit unsharded until backward: 2Ψ moved in place of
            3Ψ. A number n: each n neighbours keep a second copy between them, Ψ/n each, and gather
            that for backward, inside their node if they share one (hpZ of ZeRO++). 1 is False.
        gather_dtype: torch.int8: units are sent in 8 bits, blocks of them with a scale each, in
            place of the dtype of compute (qwZ of ZeRO++). Shards stay as they are.
        prefetch: gather the next unit while one computes. False allows units in any order.
        offload: keep shards, and so gradients and optimizer state, in the memory of the host.
        broadcast_buffers: send rank 0's buffers before each forward in training.
        init_fn: called with each module that has parameters or buffers on the meta device, once;
            default: its `reset_parameters()`.
        device: where to build a module that is on the meta device.

    Any part may be called alone, by all ranks together; parameters may be frozen and unfrozen,
    before a forward; hooks after accumulation get a shard with its final gradient. torch's
    MemTracker hooks parameters before it, so it cannot follow shards; `MemoryTimeline` does.

    Raises: RuntimeError if ranks differ, if a rank runs units in another order, if an optimizer
    built before sharding steps, if a loss was computed with shards, if a parameter is replaced or
    the model copied, if backward is to create a graph.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
        units: Units = None,
        mixed_precision: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool | int = True,
        gather_dtype: torch.dtype | None = None,
        prefetch: bool = True,
        offload: bool = False,
        broadcast_buffers: bool = True,
        init_fn: Callable[[nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_zero3_options(Comm.of(mesh).world, reshard_after_forward, gather_dtype)
        check_hooks(module, sharded=True)
        check_separate(module.named_parameters())
        super().__init__(module, Comm.of(mesh), broadcast_buffers)
        self._flat_options = {
            "dtype": mixed_precision,
            "reduce_dtype": reduce_dtype,
            "offload": offload,
            "gather_dtype": gather_dtype,
            "intra_node": None,
        }
        if 1 < reshard_after_forward < self.comm.world:  # hpZ: these ranks keep a second copy
            self._flat_options["intra_node"] = self.comm.part(reshard_after_forward)
        self.reshard_after_forward = reshard_after_forward is True or reshard_after_forward > 1
        self.names_before_sharding: dict[nn.Parameter, str] = {}  # these parameters are gone
        found = split(module, units)
        builder = Builder(module, found, init_fn, device)
        on_meta = bool(builder.empty)
        self.units = [self._shard(name, slots, builder) for name, slots in found.items()]
        builder.fill(builder.empty)  # modules that have buffers only: rotary embeddings
        if on_meta:
            self.comm.broadcast(list(module.buffers()))
        self.flats = [flat for unit in self.units for flat in unit.flats]
        pairs = [zip(flat.params, flat.shards, strict=True) for flat in self.flats]
        self._shard_of = {param: shard for some in pairs for param, shard in some}
        self.shards = set(self._shard_of.values())
        self.names_before_sharding |= dict.fromkeys(self._shard_of, "a full parameter")
        # of forward
        self._forward_order = ForwardOrder(self.units, self.comm) if prefetch else None
        self._plan: ForwardOrder | None = None  # of the forward that runs
        self._within: list[Unit] = []  # whose forwards run, the outermost first
        self._read_outside: list[Unit] = []  # in the forward that runs
        self.awaits_backward = False  # a forward with gradients has had no backward yet
        # of backward
        self.own_backward = Backward(self._end_backward)
        self._sync = True
        self._open: dict[Unit, None] = {}  # units between pre_backward and post_backward
        self._in_flight: Unit | None = None  # whose gradients are being reduced
        self._known = KnownModules(module, self._shard_of)
        self._wrap_forwards()
        watch_parameters(self.units, self._read)
        watch_optimizers(self)

    # -- construction

    def _shard(self, name: str, slots: dict[nn.Parameter, list[Slot]], builder: Builder) -> Unit:
        """One unit, from full parameters to shards in their slots; the full ones are freed."""
        self.names_before_sharding |= {param: where[0].name for param, where in slots.items()}
        if any(param.is_meta for param in slots):
            slots = builder.materialize(slots)
            self.comm.broadcast(list(slots))
        kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for param, where in slots.items():
            kept = any(keeps_dtype(slot.module) for slot in where)
            kinds[kept, param.requires_grad, *kind_of(param)].append(param)
        as_they_are = self._flat_options | {"dtype": None, "gather_dtype": None}
        flats = [
            Flat(params, self.comm, resident=False, **(as_they_are if kept else self._flat_options))
            for (kept, *_), params in kinds.items()
        ]
        places = [[slots[param] for param in params] for params in kinds.values()]
        unit = Unit(name, flats, places)
        unit.reshard()
        for flat, where in zip(flats, places, strict=True):
            for index, [slot, *_] in enumerate(where):
                self._hook_gradient(flat, index, slot.name)
        for param in slots:
            param.data = param.data.new_empty(0)
        return unit

    def _hook_gradient(self, flat: Flat, index: int, name: str) -> None:
        """Notice the gradient of the full parameter; refuse one of its shard.

        Also of one that is frozen now, for it may be unfrozen.
        """
        param, shard = flat.params[index], flat.shards[index]
        if not (param.is_floating_point() or param.is_complex()):
            return
        trained = shard.requires_grad
        for tensor in (param, shard):
            tensor.requires_grad_(True)  # without it torch takes no hook
        param.register_post_accumulate_grad_hook(lambda _: self._begin_backward())
        shard.register_hook(partial(refuse_gradient, name))
        for tensor in (param, shard):
            tensor.requires_grad_(trained)

    def _wrap_forwards(self) -> None:
        """Call pre_forward and post_forward around units, and around modules outside of all."""
        units, root = {unit.name: unit for unit in self.units}, self.units[0]
        inner = tuple(f"{name}." for name in units if name)
        for path, module in self.module.named_modules():
            unit = units.get(path) or (None if f"{path}.".startswith(inner) else root)
            if unit is not None and is_called(module) and any(True for _ in module.parameters()):
                wrap_forward(
                    module,
                    partial(self._pre_forward, unit, module),
                    partial(self._post_forward, unit),
                    partial(self._exit_forward, unit),
                    skipped=lambda is_root=unit is root: is_root and bool(self._within),
                )

    # -- forward

    @torch.compiler.disable
    def _pre_forward(self, unit: Unit, module: nn.Module) -> bool | None:
        """Unshard. Returns whether this call is to reshard afterwards; None for a recomputation."""
        if in_backward():
            unit.wait_for_unshard()
            return None
        if not self._within:
            self._begin_forward(module)
        reshards = not unit.is_unsharded
        self._unshard_and_prefetch(unit)
        self._within.append(unit)
        return reshards

    def _begin_forward(self, module: nn.Module) -> None:
        """The outermost forward begins: the model's, or that of a part called alone."""
        if self.own_backward:  # the last one raised
            self._forget()
        check_shard_hooks(self.shards, self.module)
        self._plan = self._forward_order if module is self.module else None
        if module is self.module:
            for unit in self.units:
                if unit.uses or unit.read_outside:  # kept for a backward that has not come
                    unit.reshard()
        if self._plan is not None:
            self._plan.begin()

    def _unshard_and_prefetch(self, unit: Unit) -> None:
        following = self._plan.next_after(unit) if self._plan is not None else None
        unit.wait_for_unshard()
        if following is not None:
            following.unshard()

    @torch.compiler.disable
    def _read(self, unit: Unit) -> None:
        """A parameter of a unit that is not unsharded is read: outside of a forward, a shard.

        Inside one, the unit stays unsharded to its end, and all through backward.
        """
        if in_backward():
            unit.wait_for_unshard()
        elif self._within:
            self._unshard_and_prefetch(unit)
            self._read_outside.append(unit)

    @torch.compiler.disable
    def _post_forward(self, unit: Unit, reshards: bool, given: Any, output: Any) -> None:
        made, grad = tensors_in(output), torch.is_grad_enabled()
        hooked = grad and self._hook_output(unit, given, made)
        self.awaits_backward |= hooked
        if made and not unit.trainable:  # frozen, and backward may not pass through it
            hooked = hooked or not any(t.requires_grad for t in made + tensors_in(given))
        if reshards and unit.owns_any(made):  # code outside continues with a parameter
            reshards = False
            if len(self._within) > 1:
                self._read_outside.append(unit)
        reshard = not grad or (hooked and self.reshard_after_forward)
        self._exit_forward(unit, reshards, grad, reshard)
        if not self._within and self._plan is not None:
            for other in self.units:
                if other.state is ShardedState.UNSHARDING:  # prefetched, and not used
                    other.reshard()
            self._plan.end()

    @torch.compiler.disable
    def _exit_forward(
        self, unit: Unit, reshards: bool, grad: bool = False, reshard: bool = True
    ) -> None:
        """The forward of `unit` is over, or raised; with the outermost, reads from outside too."""
        self._within.pop()
        if reshard and reshards:
            unit.reshard(after_forward=grad)
        if self._within:
            return
        for other in self._read_outside:
            other.read_outside |= grad
            if reshard:
                other.reshard(after_forward=grad)
        self._read_outside = []

    def _hook_output(self, unit: Unit, given: Any, made: list[Tensor]) -> bool:
        """Call pre_backward when backward reaches the unit. False if no output needs a gradient.

        A tensor that the unit only passes on is another unit's: its gradient says nothing here.
        """
        order, position = self._plan.order if self._plan is not None else [], unit.position
        passed_on = {id(tensor) for tensor in tensors_in(given)}
        own = [t for t in made if t.requires_grad and id(t) not in passed_on]
        fired: list[bool] = []

        def pre_backward(_: Tensor) -> None:
            previous = order[position - 1] if order else None  # before the first comes the last
            self._pre_backward(unit, previous, first=not fired)
            fired.append(True)

        for tensor in own:
            tensor.register_hook(pre_backward)
        unit.uses += bool(own)
        return bool(own)

    # -- backward

    def _begin_backward(self) -> None:
        if self.own_backward.enter():
            if torch.is_grad_enabled():
                refuse_create_graph()
            self.awaits_backward = False
            for unit in self.units:  # the root first, though its own hook may come second
                if unit.read_outside or (unit.uses and not self.reshard_after_forward):
                    unit.wait_for_unshard()

    def _pre_backward(self, unit: Unit, previous: Unit | None, first: bool) -> None:
        """The gradient of the unit's output is there: end what is done, unshard this, prefetch.

        previous: the unit before this one in forward; None without prefetch.
        """
        self._begin_backward()
        for other in [u for u in self._open if u.is_done and not unit.is_nested(u)]:
            self._post_backward(other)
        unit.pre_backward(first)
        self._open[unit] = None
        if previous is not None:
            previous.unshard()

    def _post_backward(self, unit: Unit) -> None:
        """Reshard the unit, then start to reduce its gradients; one unit is in flight at a time.

        [Note: gradients] They stay in `.grad` of full parameters until here, and rows to be sent
        are filled only after those of the last unit are gone: less memory than to fill them early.
        """
        unit.post_backward()
        self._open.pop(unit, None)
        if not self._sync:
            return
        self._wait_for_reduce()
        for flat in unit.trainable:
            for index, param in enumerate(flat.params):
                if param.grad is not None:  # also from backwards under no_sync
                    flat.collect(index, param.grad)
                    param.grad = None
            flat.reduce()
        self._in_flight = unit

    def _wait_for_reduce(self) -> None:
        if self._in_flight is not None:
            for flat in self._in_flight.trainable:
                flat.wait_for_reduce()
            self._in_flight = None

    def _end_backward(self) -> None:
        for unit in reversed(self.units):
            late = self._sync and any(p.grad is not None for f in unit.flats for p in f.params)
            if late or unit.backward is not BackwardState.POST_BACKWARD:
                self._post_backward(unit)
        self._wait_for_reduce()
        self._reset()

    def _reset(self) -> None:
        self._open = {}
        for unit in self.units:
            unit.reset()

    def _forget(self) -> None:
        """Drop what a backward that raised has left."""
        self._in_flight = None
        self.own_backward.forget()
        for flat in self.flats:
            flat.forget()
        for param in self._shard_of:
            param.grad = None
        self._reset()

    # -- for the user

    def reshard(self) -> None:
        """Free the full parameters that are here: a change of the shards makes them stale."""
        for unit in self.units:
            unit.reshard()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, also at a moment when a module holds a full parameter."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name, self._shard_of.get(param, param)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep full gradients here; the next one outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def summon(self, writeback: bool = False) -> Iterator[nn.Module]:
        """The module with all parameters unsharded, on every rank, in the dtype of compute.

        writeback: each rank keeps its shard of what was changed inside, the same on every rank.
        """
        units = [u for u in self.units if u.state is not ShardedState.SUMMONED]  # by one outside
        for unit in units:
            unit.summon()
        try:
            yield self.module
            if writeback:
                for flat in self.flats:
                    flat.write_back()
                    flat.publish().wait()
        finally:
            for unit in units:
                unit.dismiss()

    def memory_extra(self) -> dict[str, Iterable[Tensor]]:
        gradients = [param.grad for param in self._shard_of] + [flat.partial for flat in self.flats]
        return super().memory_extra() | {
            "parameters": [flat.local for flat in self.flats],
            "gradients": [grad for grad in gradients if grad is not None],
            "transient": [tensor for flat in self.flats for tensor in flat.transient()],
        }


class ShardsOf(ShardedOptimizer):
    """The optimizer of ZeRO-3: its parameters are the shards of `model`."""

    def __init__(self, model: ZeRO3, *args: Any, **kwargs: Any) -> None:
        self._model = model
        super().__init__(*args, **kwargs)
        for flat in model.flats:
            flat.owner = self

    def flatten(self, groups: list[dict[str, Any]]) -> None:
        """The flat buffers of what it steps on: frozen ones do not change."""
        known = {id(param) for group in groups for param in group["params"]}
        for flat in self._model.flats:
            if flat not in self.flats and any(id(shard) in known for shard in flat.shards):
                self.flats.append(flat)

    def publish(self) -> None:
        self._model.reshard()
        super().publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for param in (param for flat in self._model.flats for param in flat.params):
            param.grad = None  # full ones, from backwards under no_sync
