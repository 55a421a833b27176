"""ZeRO-3: parameters are sharded too. A unit's are gathered just before use and freed just after.

A unit is a module (a transformer block) whose parameters travel together. Its life in one step:

    sharded -> gather -> forward -> free -> gather -> backward -> free, reduce gradients -> sharded

While one unit computes, the next is gathered (prefetch), in the order of `schedule`; backward runs
it in reverse. Modules hold pieces at rest, so
`parameters()` are this rank's shards, for any torch optimizer; they hold whole parameters while a
unit is in use.

[Note: closing] A unit is closed, reduced and freed, when the backward of a unit beside it begins,
or backward ends. Both come in the same order on all ranks, whatever gradients a rank happens to
miss, so no rank's reduction can meet another's gather. All of the unit's own backward has run by
then: autograd runs later nodes first.

Source: Rajbhandari et al. 2020, section 5.3 (P_os+g+p); Zhao et al., "PyTorch FSDP", VLDB 2023,
section 3.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .comm import Comm
from .flat import Flat
from .precision import keeps_dtype
from .reducer import new_backward
from .replica import Replica, check_separate
from .schedule import Schedule
from .units import Backward, Builder, Held, Slot, Unit, Units, split

_models: weakref.WeakSet[ZeRO3] = weakref.WeakSet()


class ZeRO3(Replica):
    """A module whose parameters are sharded over the ranks.

    `ZeRO3(module)`, then any torch optimizer on `model.parameters()`, built afterwards.
    Once `backward()` has returned, every piece has its final `.grad`. Every rank must run the same
    units in the same order; in backward this is not checked, so a loss that leaves out a unit's
    output on some ranks only must add it times 0.

    Args:
        module: equal on all ranks; rank 0's values win. On the meta device: built unit by unit.
        mesh: a process group, a mesh (2-D: replicate, shard), or None for the world.
        units: which modules are units: classes, or `f(name, module) -> bool`. Default: the members
            of every outermost ModuleList or Sequential of equal blocks. The rest is the root unit.
        mixed_precision: torch.bfloat16 or torch.float16, in which units are gathered; shards keep
            their own dtype.
        reduce_dtype: in which gradients travel; default: that of compute. They are summed in fp32.
        reshard_after_forward: False keeps every unit whole until backward: 2Ψ moved in place of 3Ψ.
        prefetch: gather the next unit while one computes. False allows units in any order.
        offload: keep shards, and so gradients and optimizer state, in the memory of the host.
        broadcast_buffers: send rank 0's buffers before each forward in training.
        init_fn: called with each module that has parameters or buffers on the meta device, once;
            default: its `reset_parameters()`.
        device: where to build a module that is on the meta device.

    Raises: RuntimeError if ranks differ, if a rank leaves the schedule, if an optimizer built
    before sharding steps, if requires_grad changed, if the model is copied, if backward is to
    create a graph.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
        units: Units = None,
        mixed_precision: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        offload: bool = False,
        broadcast_buffers: bool = True,
        init_fn: Callable[[nn.Module], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_separate(module.named_parameters())
        super().__init__(module, Comm.of(mesh), broadcast_buffers)
        self.reshard_after_forward = reshard_after_forward
        options = {"dtype": mixed_precision, "reduce_dtype": reduce_dtype, "offload": offload}
        self._given: dict[int, tuple[str, nn.Parameter]] = {}  # parameters that no longer exist
        found = split(module, units)
        builder = Builder(module, found, init_fn, device)
        on_meta = bool(builder.empty)
        self.units = [self._shard(name, slots, options, builder) for name, slots in found.items()]
        builder.fill(builder.empty)  # modules that have buffers only: rotary embeddings
        if on_meta:
            self.comm.broadcast(list(module.buffers()))
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self._schedule = Schedule(self.units, self.comm) if prefetch else None
        self._run: int | None = None
        self._sync = True
        self._in_flight: Unit | None = None
        self._piece_of = {
            param: piece
            for flat in self.flats
            for param, piece in zip(flat.params, flat.pieces, strict=True)
        }
        self._pieces = {id(piece) for piece in self._piece_of.values()}
        self._given |= {id(param): ("a whole parameter", param) for param in self._piece_of}
        self._hook_modules()
        _models.add(self)
        _watch_optimizers()

    # -- construction

    def _shard(
        self,
        name: str,
        slots: dict[nn.Parameter, list[Slot]],
        options: dict[str, Any],
        builder: Builder,
    ) -> Unit:
        """One unit, from whole parameters to pieces in their slots; the whole ones are freed."""
        for param, where in slots.items():
            self._given[id(param)] = (where[0].name, param)
        if any(param.is_meta for param in slots):
            slots = builder.materialize(slots)
            self.comm.broadcast(list(slots))
        kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for param, where in slots.items():
            kept = any(keeps_dtype(slot.module) for slot in where)
            kinds[kept, param.dtype, param.device, param.requires_grad].append(param)
        flats = [
            Flat(params, self.comm, resident=False, **options | ({"dtype": None} if kept else {}))
            for (kept, *_), params in kinds.items()
        ]
        places = [[slots[param] for param in params] for params in kinds.values()]
        unit = Unit(name, flats, places)
        unit.free()
        for flat in unit.trainable:
            for index, param in enumerate(flat.params):
                param.register_post_accumulate_grad_hook(partial(self._collect, flat, index))
        for param in slots:
            param.data = param.data.new_empty(0)
        return unit

    def _hook_modules(self) -> None:
        by_name = dict(self.module.named_modules())
        for unit in self.units:
            module = by_name[unit.name]
            before = _Hook(lambda module, args, unit=unit: self._pre_forward(unit))
            after = _Hook(
                lambda module, args, kwargs, output, unit=unit: self._post_forward(
                    unit, (args, kwargs), output
                )
            )
            module.register_forward_pre_hook(before, prepend=True)
            module.register_forward_hook(after, with_kwargs=True)

    # -- forward

    def _pre_forward(self, unit: Unit) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation inside backward
            unit.use()
            return
        if unit is self.units[0]:
            self._begin_forward()
        following = self._schedule.reach(unit) if self._schedule is not None else None
        unit.use()
        if following is not None:
            following.gather()

    def _begin_forward(self) -> None:
        if self._run is not None:  # the last backward raised
            self._forget()
        for unit in self.units:
            for flat in unit.flats:
                for param, piece in zip(flat.params, flat.pieces, strict=True):
                    if param.requires_grad != piece.requires_grad:
                        raise RuntimeError(
                            f"requires_grad of a parameter of unit {unit.name!r} changed to "
                            f"{piece.requires_grad} after sharding. Cure: set it before "
                            "ZeRO3(module)."
                        )
        if self._schedule is not None:
            self._schedule.begin()

    def _post_forward(self, unit: Unit, given: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        hooked = torch.is_grad_enabled() and self._hook_output(unit, given, output)
        made = tensors_in(output)
        if made and not unit.trainable:  # frozen, and backward may not pass through it
            hooked = hooked or not any(t.requires_grad for t in made + tensors_in(given))
        if not torch.is_grad_enabled() or (hooked and self.reshard_after_forward):
            unit.free()
        if unit is self.units[0]:
            self._end_forward()

    def _hook_output(self, unit: Unit, given: Any, output: Any) -> bool:
        """Ask for a call when backward reaches the unit. False if no tensor of the output needs it.

        A tensor that the unit only passes on is another's: its gradient tells nothing of this one.
        """
        order, position = self._schedule.order if self._schedule else [], unit.position
        passed_on = {id(tensor) for tensor in tensors_in(given)}
        own = [t for t in tensors_in(output) if t.requires_grad and id(t) not in passed_on]
        fired: list[bool] = []

        def reached(_: Tensor) -> None:
            previous = order[position - 1] if order else None  # before the first comes the last
            self._pre_backward(unit, previous, first=not fired)
            fired.append(True)

        for tensor in own:
            tensor.register_hook(reached)
        unit.uses += bool(own)
        return bool(own)

    def _end_forward(self) -> None:
        for unit in self.units:
            if unit.held is Held.GATHERING:  # prefetched, and not used
                unit.free()
        if self._schedule is not None:
            self._schedule.end()

    # -- backward

    def _enter_backward(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True: ZeRO-3 has freed the parameters when the second "
                "derivative needs them. Cure: stage 2."
            )
        if (run := new_backward(self._run, self._end_backward)) is not None:
            self._run = run
            self.units[0].use()  # first on every rank, though its own hook may come second

    def _pre_backward(self, unit: Unit, previous: Unit | None, first: bool) -> None:
        """The gradient of the unit's output is there: close what is done, gather this and the next.

        previous: the unit before this one in forward; None without prefetch.
        """
        self._enter_backward()
        for other in self.units[1:]:
            if other.backward is Backward.OPEN and not other.uses and not unit.nested(other):
                self._close(other)
        if first:
            unit.uses = max(unit.uses - 1, 0)
        unit.backward = Backward.OPEN
        unit.use()
        if previous is not None:
            previous.gather()

    def _collect(self, flat: Flat, index: int, param: nn.Parameter) -> None:
        self._enter_backward()
        if self._sync:
            flat.collect(index, param.grad)
            param.grad = None

    def _close(self, unit: Unit) -> None:
        """Free the unit, then start to reduce its gradients; one unit is in flight at a time."""
        unit.free()
        unit.backward = Backward.CLOSED
        if not self._sync:
            return
        self._finish()
        for flat in unit.trainable:
            for index, param in enumerate(flat.params):
                if param.grad is not None:  # from backwards under no_sync
                    flat.collect(index, param.grad)
                    param.grad = None
            flat.reduce()
        self._in_flight = unit

    def _finish(self) -> None:
        if self._in_flight is not None:
            for flat in self._in_flight.trainable:
                flat.reduced()
            self._in_flight = None

    def _end_backward(self) -> None:
        for unit in reversed(self.units):
            late = any(flat.collected for flat in unit.flats)
            if late or unit.backward is not Backward.CLOSED:
                self._close(unit)
        self._finish()
        self._rest()

    def _rest(self) -> None:
        self._run = None
        for unit in self.units:
            unit.rest()

    def _forget(self) -> None:
        """Drop what a backward that raised has left."""
        self._in_flight = None
        for flat in self.flats:
            flat.forget()
        self._rest()

    # -- for the user

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, also at a moment when a module shows a whole parameter."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name, self._piece_of.get(param, param)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep whole gradients here; the next one outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def summon(self, writeback: bool = False) -> Iterator[nn.Module]:
        """The module with all parameters whole, on every rank, in the dtype of compute.

        writeback: each rank keeps its shard of what was changed inside, the same on every rank.
        """
        for unit in self.units:
            unit.summon()
        try:
            yield self.module
            if writeback:
                for flat in self.flats:
                    flat.write_back()
        finally:
            for unit in self.units:
                unit.dismiss()

    def memory_extra(self) -> dict[str, Iterable[Tensor]]:
        whole = [param.grad for param in self._piece_of if param.grad is not None]
        transient = [tensor for flat in self.flats for tensor in flat.transient()]
        return super().memory_extra() | {"transient": transient, "gradients": whole}


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    inner: Iterable[Any] = ()
    if is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    return [tensor for item in inner for tensor in tensors_in(item)]


class _Hook:
    """A hook on a unit's module. A copy of the module would have it too, so it cannot be copied."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a module in ZeRO3 cannot be copied: the copy's hooks would gather the original. Cure: "
            "load full_state_dict(model) into a new module; for an average, average "
            "model.parameters()."
        )


@cache
def _watch_optimizers() -> None:
    """Call `_before_step` before every step of any optimizer, once a first ZeRO3 exists.

    [Note: every optimizer] One that was built before sharding holds parameters whose values are
    gone, and nothing leads from the model to it: only torch's hook for all optimizers sees it. A
    process without ZeRO3 has no hook.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse an optimizer that was built before sharding; free what its step makes stale."""
    in_order = [id(p) for group in optimizer.param_groups for p in group["params"]]
    stepped = set(in_order)
    for model in list(_models):
        lost = [number for number in in_order if number in model._given]
        if lost:
            name, _ = model._given[lost[0]]
            raise RuntimeError(
                f"this {type(optimizer).__name__} was built before sharding: it holds {name}, "
                "whose values now live in shards. Cure: build it from model.parameters() after "
                "model = ZeRO3(module)."
            )
        if stepped & model._pieces:
            for unit in model.units:
                unit.free()
