"""ZeRO-3: parameters are sharded too. A unit's are gathered just before use and freed just after.

A unit is a module (a transformer block) whose parameters travel together. Its life in one step:

    sharded -> gather -> forward -> free -> gather -> backward -> free, reduce gradients -> sharded

While one unit computes, the next is gathered (prefetch): the order of the first forward is the
schedule of all later ones, and backward runs it in reverse. Modules hold pieces at rest, so
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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .comm import Comm
from .flat import Flat
from .precision import keeps_dtype
from .reducer import new_backward
from .replica import Replica
from .units import Builder, Slot, Units, split

_models: weakref.WeakSet[ZeRO3] = weakref.WeakSet()

EVERY_RANK = (
    "units are gathered by all ranks together, so every rank must run the same units in the same "
    "order. Cure: run the unit on every rank and multiply its output by 0 where it is not wanted; "
    "if all ranks skip it together, ZeRO3(prefetch=False)."
)


class Unit:
    """Parameters that are gathered and freed together; `slots` are the places in modules that show
    them.
    """

    def __init__(self, name: str, flats: list[Flat], slots: list[list[list[Slot]]]) -> None:
        self.name, self.flats, self.slots = name, flats, slots
        self.gathering = self.full = self.summoned = False
        self.position = 0  # in the order of the forward that runs
        self.uses = 0  # forwards whose backward has not begun
        self.open = self.closed = False  # in the backward that runs

    def gather(self) -> None:
        """Start to make the unit whole, if it is not."""
        if not self.gathering and not self.full:
            for flat in self.flats:
                flat.gather()
            self.gathering = True

    def use(self) -> None:
        """Make the unit whole, and show whole parameters to its modules."""
        self.gather()
        if self.gathering:
            for flat in self.flats:
                flat.gathered()
            self.gathering, self.full = False, True
            self._show([flat.params for flat in self.flats])

    def free(self) -> None:
        """Back to shards, unless the user asked for whole parameters."""
        if self.summoned:
            return
        if self.full:
            self._show([flat.pieces for flat in self.flats])
        if self.gathering or self.full:
            for flat in self.flats:
                flat.free()
        self.gathering = self.full = False

    def _show(self, params: list[list[nn.Parameter]]) -> None:
        for of_flat, slots_of_flat in zip(params, self.slots, strict=True):
            for param, slots in zip(of_flat, slots_of_flat, strict=True):
                for slot in slots:
                    slot.put(param)

    def nested(self, other: Unit) -> bool:
        """Whether one is inside the other, or both are the same; everything is inside the root."""
        mine, its = f".{self.name}".rstrip(".") + ".", f".{other.name}".rstrip(".") + "."
        return mine.startswith(its) or its.startswith(mine)

    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.params[0].requires_grad]


class ZeRO3(Replica):
    """A module whose parameters are sharded over the ranks: `ZeRO3(module)`, then any torch
    optimizer on `model.parameters()`, built afterwards.

    Once `backward()` has returned, every piece has its final `.grad`. Every rank must run the same
    units in the same order; in backward this is not checked, so a loss that leaves out a unit's
    output on some ranks only must add it times 0.

    Args:
        module: equal on all ranks; rank 0's values win. On the meta device it is built unit by
            unit.
        mesh: a process group, a mesh (2-D: replicate, shard), or None for the world.
        units: which modules are units: classes, or `f(name, module) -> bool`. Default: the members
            of every outermost ModuleList or Sequential of equal blocks. What is left is the root
            unit.
        mixed_precision: torch.bfloat16 or torch.float16, in which units are gathered; shards keep
            theirs.
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
        super().__init__(module, Comm.of(mesh), broadcast_buffers)
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        options = {"dtype": mixed_precision, "reduce_dtype": reduce_dtype, "offload": offload}
        self._given: dict[int, tuple[str, nn.Parameter]] = {}  # parameters that no longer exist
        found = split(module, units)
        builder = Builder(module, found, init_fn, device)
        on_meta = bool(builder.empty)
        self.units = [self._shard(name, slots, options, builder) for name, slots in found.items()]
        builder.fill(builder.empty)  # modules that have buffers only: rotary embeddings
        if on_meta:
            self.comm.broadcast(list(module.buffers()))
        self._run: int | None = None
        self._sync = True
        self._in_flight: Unit | None = None
        self._order: list[Unit] = []  # units of the forward that runs, as they came
        self._schedule: list[Unit] = []  # of the first forward
        self._pieces = {id(piece) for flat in self.flats for piece in flat.pieces}
        self._piece_of = {
            param: piece
            for flat in self.flats
            for param, piece in zip(flat.params, flat.pieces, strict=True)
        }
        self._given |= {id(param): ("a whole parameter", param) for param in self._piece_of}
        self._hook_modules()
        module.__deepcopy__ = _refuse_copy
        _models.add(self)

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
        unit.full = True
        unit.free()
        for flat in unit.trainable():
            for index, param in enumerate(flat.params):
                param.register_post_accumulate_grad_hook(partial(self._collect, flat, index))
        for param in slots:
            param.data = param.data.new_empty(0)
        return unit

    def _hook_modules(self) -> None:
        by_name = dict(self.module.named_modules())
        for unit in self.units:
            module = by_name[unit.name]
            module.register_forward_pre_hook(
                lambda module, args, unit=unit: self._pre_forward(unit), prepend=True
            )
            module.register_forward_hook(
                lambda module, args, kwargs, output, unit=unit: self._post_forward(
                    unit, (args, kwargs), output
                ),
                with_kwargs=True,
            )

    # -- forward

    def _pre_forward(self, unit: Unit) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation inside backward
            unit.use()
            return
        if unit is self.units[0]:
            self._begin_forward()
        position = unit.position = len(self._order)
        self._order.append(unit)
        expected = self._schedule[position : position + 2]
        if self.prefetch and torch.is_grad_enabled():
            if self._schedule:
                self._check_schedule(unit, expected[:1])
            else:
                self._agree(unit)
        unit.use()
        if self.prefetch and expected[:1] == [unit] and len(expected) == 2:
            expected[1].gather()

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
        self._order = []

    def _agree(self, unit: Unit | None) -> None:
        """In the forward that becomes the schedule: raise on all ranks unless all are at this unit,
        or, for None, at the end. One small all-reduce.
        """
        names = [*(repr(unit.name) for unit in self.units), "the end of forward"]
        mine = -1 if unit is None else self.units.index(unit)
        device = self.units[-1].flats[0].full.device
        votes = torch.zeros(len(names), device=device)  # how many ranks are where
        votes[mine] = 1
        counts = self.comm.all_reduce(votes).wait().tolist()
        found = {name: int(n) for name, n in zip(names, counts, strict=True) if n}
        if len(found) > 1:
            where = ", ".join(f"{n} at {name}" for name, n in found.items())
            raise RuntimeError(
                f"rank {self.comm.rank} is at {names[mine]} in the first forward, but the ranks "
                f"differ: {where}; {EVERY_RANK}"
            )

    def _check_schedule(self, unit: Unit, expected: list[Unit]) -> None:
        if expected != [unit]:
            due = repr(expected[0].name) if expected else "the end of forward"
            raise RuntimeError(
                f"rank {self.comm.rank} runs unit {unit.name!r} where the first forward had {due}: "
                f"{EVERY_RANK}"
            )

    def _post_forward(self, unit: Unit, given: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        hooked = torch.is_grad_enabled() and self._hook_output(unit, given, output)
        made = tensors_in(output)
        if made and not unit.trainable():  # frozen, and backward may not pass through it
            hooked = hooked or not any(t.requires_grad for t in made + tensors_in(given))
        if not torch.is_grad_enabled() or (hooked and self.reshard_after_forward):
            unit.free()
        if unit is self.units[0]:
            self._end_forward()

    def _hook_output(self, unit: Unit, given: Any, output: Any) -> bool:
        """Ask for a call when backward reaches the unit. False if no tensor of the output needs
        one.

        A tensor that the unit only passes on is another's: its gradient says nothing about this
        unit.
        """
        order, position = self._order, unit.position
        passed_on = {id(tensor) for tensor in tensors_in(given)}
        own = [t for t in tensors_in(output) if t.requires_grad and id(t) not in passed_on]
        fired: list[bool] = []

        def reached(_: Tensor) -> None:
            self._pre_backward(unit, order[position - 1], first=not fired)
            fired.append(True)

        for tensor in own:
            tensor.register_hook(reached)
        unit.uses += bool(own)
        return bool(own)

    def _end_forward(self) -> None:
        for unit in self.units:
            if unit.gathering:  # prefetched, and not used
                unit.free()
        if torch.is_grad_enabled():
            if self.prefetch and len(self._order) < len(self._schedule):
                skipped = self._schedule[len(self._order)]
                raise RuntimeError(
                    f"rank {self.comm.rank} ended forward without unit {skipped.name!r}, which "
                    f"the first forward had: {EVERY_RANK}"
                )
            if self.prefetch and not self._schedule:
                self._agree(None)
            self._schedule = self._order

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

    def _pre_backward(self, unit: Unit, previous: Unit, first: bool) -> None:
        """The gradient of the unit's output is there: close what is done, gather this unit and the
        next.
        """
        self._enter_backward()
        for other in self.units[1:]:
            if other.open and not other.uses and not unit.nested(other):
                self._close(other)
        if first:
            unit.uses = max(unit.uses - 1, 0)
        unit.open, unit.closed = True, False
        unit.use()
        if self.prefetch:
            previous.gather()

    def _collect(self, flat: Flat, index: int, param: nn.Parameter) -> None:
        self._enter_backward()
        if self._sync:
            flat.collect(index, param.grad)
            param.grad = None

    def _close(self, unit: Unit) -> None:
        """Free the unit's parameters, then start to reduce its gradients; one unit is in flight at
        a time.
        """
        unit.free()
        unit.open, unit.closed = False, True
        if not self._sync:
            return
        self._finish()
        for flat in unit.trainable():
            for index, param in enumerate(flat.params):
                if param.grad is not None:  # from backwards under no_sync
                    flat.collect(index, param.grad)
                    param.grad = None
            flat.reduce()
        self._in_flight = unit

    def _finish(self) -> None:
        if self._in_flight is not None:
            for flat in self._in_flight.trainable():
                flat.reduced()
            self._in_flight = None

    def _end_backward(self) -> None:
        for unit in reversed(self.units):
            late = any(flat.collected for flat in unit.flats)
            if unit.open or late or not unit.closed:
                self._close(unit)
        self._finish()
        self._rest()

    def _rest(self) -> None:
        self._run = None
        for unit in self.units:
            unit.free()
            unit.open = unit.closed = False
            unit.uses = 0

    def _forget(self) -> None:
        """Drop what a backward that raised has left."""
        self._in_flight = None
        for unit in self.units:
            for flat in unit.flats:
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

        writeback: each rank keeps its shard of what was changed inside; change the same on every
        rank.
        """
        for unit in self.units:
            unit.use()
            unit.summoned = True
        try:
            yield self.module
            if writeback:
                for flat in self.flats:
                    flat.shard.copy_(self.comm.shard(flat.full))
        finally:
            for unit in self.units:
                unit.summoned = False
                unit.free()

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def memory_extra(self) -> dict[str, Iterable[Tensor]]:
        flats = self.flats
        whole = [p.grad for flat in flats for p in flat.params if p.grad is not None]
        return {"transient": [t for flat in flats for t in flat.transient()], "gradients": whole}


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


def _refuse_copy(memo: Any) -> None:
    raise RuntimeError(
        "a module in ZeRO3 cannot be copied: the copy's hooks would gather the original. Cure: "
        "load full_state_dict(model) into a new module; for an average, average model.parameters()."
    )


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before any optimizer's step: refuse one built before sharding; free what its step makes
    stale.
    """
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


register_optimizer_step_pre_hook(_before_step)
