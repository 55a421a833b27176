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
from functools import cache, partial, wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.decorators import skip
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.flat import Flat
from ddpz_lite.strategies.gradient import in_backward
from ddpz_lite.strategies.mesh import apart
from ddpz_lite.strategies.precision import keeps_dtype
from ddpz_lite.strategies.prefetch import Schedule
from ddpz_lite.strategies.reducer import new_backward
from ddpz_lite.strategies.replica import Replica, check_hooks, check_separate
from ddpz_lite.strategies.units import (
    Backward,
    Builder,
    Held,
    Slot,
    Unit,
    Units,
    Watched,
    is_called,
    split,
)

AS_THEY_ARE = {"dtype": None, "gather_dtype": None}  # of modules that keep their dtype
_models: weakref.WeakSet[ZeRO3] = weakref.WeakSet()


class ZeRO3(Replica):
    """A module whose parameters are sharded over the ranks.

    `ZeRO3(module)`, then any torch optimizer that works element by element on `model.parameters()`,
    built afterwards. These are shards: `p.norm()` is that of this rank's part, `p.grad.norm()` that
    of the whole. Once `backward()` has returned, every piece has its final `.grad`. Every rank must
    run the same units in the same order; in backward this is not checked, so a loss that leaves out
    a unit's output on some ranks only must add it times 0.

    Args:
        module: equal on all ranks; rank 0's values win. On the meta device: built unit by unit.
        mesh: a process group, a mesh (2-D: replicate, shard), or None for the world.
        units: which modules are units: classes, or `f(name, module) -> bool`. Default: the blocks,
            see `units.split`. The rest is the root unit. A unit whose parameters are read elsewhere
            than in its own forward is whole there, and to the end of the model's forward.
        mixed_precision: torch.bfloat16 or torch.float16, in which units are gathered; shards keep
            their own dtype.
        reduce_dtype: in which gradients travel; default: that of compute. They are summed in fp32.
        reshard_after_forward: False keeps every unit whole until backward: 2Ψ moved in place of 3Ψ.
            A number n: each n neighbours keep a second copy between them, Ψ/n each, and gather that
            for backward; if they share a node, backward gathers nothing from afar. 1 is False.
        gather_dtype: torch.int8: units travel in 8 bits, blocks of them with a scale each, in place
            of the dtype of compute. Shards stay as they are; compute has them rounded.
        prefetch: gather the next unit while one computes. False allows units in any order.
        offload: keep shards, and so gradients and optimizer state, in the memory of the host.
        broadcast_buffers: send rank 0's buffers before each forward in training.
        init_fn: called with each module that has parameters or buffers on the meta device, once;
            default: its `reset_parameters()`.
        device: where to build a module that is on the meta device.

    Any part may be called by itself, by all ranks together; parameters may be frozen and unfrozen,
    before a forward; hooks after accumulation get a shard with its final gradient.

    Raises: RuntimeError if ranks differ, if a rank leaves the schedule, if an optimizer built
    before sharding steps, if a loss was computed with shards, if a parameter is replaced or the
    model copied, if backward is to create a graph.
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
        check_hooks(module, sharded=True)
        check_separate(module.named_parameters())
        super().__init__(module, Comm.of(mesh), broadcast_buffers)
        near = _neighbours(self.comm, reshard_after_forward)
        self.reshard_after_forward = reshard_after_forward is True or reshard_after_forward > 1
        if gather_dtype not in (None, torch.int8):
            raise ValueError(f"gather_dtype must be None or torch.int8, got {gather_dtype!r}")
        options = {"dtype": mixed_precision, "reduce_dtype": reduce_dtype, "offload": offload}
        options |= {"gather_dtype": gather_dtype, "near": near}
        self._given: dict[nn.Parameter, str] = {}  # names of parameters that no longer exist
        found = split(module, units)
        builder = Builder(module, found, init_fn, device)
        on_meta = bool(builder.empty)
        self.units = [self._shard(name, slots, options, builder) for name, slots in found.items()]
        builder.fill(builder.empty)  # modules that have buffers only: rotary embeddings
        if on_meta:
            self.comm.broadcast(list(module.buffers()))
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self._schedule = Schedule(self.units, self.comm) if prefetch else None
        self._plan: Schedule | None = None  # of the forward that runs
        self._within: list[Unit] = []  # whose forwards run, the outermost first
        self._lent: list[Unit] = []  # in the forward that runs
        self._awaited = False  # whether a forward with gradients has had no backward yet
        self._run: int | None = None
        self._sync = True
        self._in_flight: Unit | None = None
        self._piece_of = {
            param: piece
            for flat in self.flats
            for param, piece in zip(flat.params, flat.pieces, strict=True)
        }
        self._pieces = set(self._piece_of.values())
        self._given |= dict.fromkeys(self._piece_of, "a whole parameter")
        self._watch()
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
            self._given[param] = where[0].name
        if any(param.is_meta for param in slots):
            slots = builder.materialize(slots)
            self.comm.broadcast(list(slots))
        kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for param, where in slots.items():
            kept = any(keeps_dtype(slot.module) for slot in where)
            alone = id(param) if apart(param) else None
            kinds[kept, param.dtype, param.device, param.requires_grad, alone].append(param)
        flats = [
            Flat(params, self.comm, resident=False, **options | (AS_THEY_ARE if kept else {}))
            for (kept, *_), params in kinds.items()
        ]
        places = [[slots[param] for param in params] for params in kinds.values()]
        unit = Unit(name, flats, places)
        unit.free()
        for flat, where in zip(flats, places, strict=True):
            for index, [slot, *_] in enumerate(where):
                self._hook_gradient(flat, index, slot.name)
        for param in slots:
            param.data = param.data.new_empty(0)
        return unit

    def _hook_gradient(self, flat: Flat, index: int, name: str) -> None:
        """Take the gradient of the whole parameter, and let none come to its piece.

        Also of one that is frozen now, for it may be unfrozen.
        """
        param, piece = flat.params[index], flat.pieces[index]
        if not (param.is_floating_point() or param.is_complex()):
            return
        trained = piece.requires_grad
        for tensor in (param, piece):
            tensor.requires_grad_(True)  # else torch takes no hook
        param.register_post_accumulate_grad_hook(partial(self._collect, flat, index))
        piece.register_hook(partial(_refuse_gradient, name))
        for tensor in (param, piece):
            tensor.requires_grad_(trained)

    def _watch(self) -> None:
        """See every forward of a unit, and every parameter that is read outside of it."""
        units, root = {unit.name: unit for unit in self.units}, self.units[0]
        inner = tuple(f"{name}." for name in units if name)
        for path, module in self.module.named_modules():
            unit = units.get(path) or (None if f"{path}.".startswith(inner) else root)
            if unit is not None and is_called(module) and any(True for _ in module.parameters()):
                module.__dict__["forward"] = self._around(unit, module)
        for unit in self.units:
            for slot in (s for of_flat in unit.slots for slots in of_flat for s in slots):
                if not isinstance(slot.module._parameters, Watched):
                    watched = Watched(slot.module._parameters, self._read)
                    slot.module.__dict__["_parameters"] = watched
                slot.module._parameters.units[slot.attribute] = unit

    def _around(self, unit: Unit, module: nn.Module) -> Callable[..., Any]:
        """The forward of a unit, or of a module outside of all, which gathers the unit it needs.

        `module(x)` and `module.forward(x)` both come here.
        """
        forward = module.forward

        @skip  # torch.compile: compile `forward`, not this
        def run(*args: Any, **kwargs: Any) -> Any:
            mine = self._pre_forward(unit, module)
            if mine is None:
                return forward(*args, **kwargs)
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                self._leave(unit, mine)
                raise
            self._post_forward(unit, mine, (args, kwargs), output)
            return output

        def run_alone(*args: Any, **kwargs: Any) -> Any:
            return (forward if self._within else run)(*args, **kwargs)

        return wraps(forward)(run_alone if unit is self.units[0] else run)

    # -- forward

    @torch.compiler.disable
    def _pre_forward(self, unit: Unit, module: nn.Module) -> bool | None:
        """Make the unit whole. Returns whether to free it afterwards; None for a recomputation."""
        if in_backward():
            unit.use()
            return None
        if not self._within:
            self._begin_forward(module)
        mine = not unit.is_whole
        self._reach(unit)
        self._within.append(unit)
        return mine

    def _begin_forward(self, module: nn.Module) -> None:
        """The outermost forward begins: the model's, or that of a part called by itself."""
        if self._run is not None:  # the last backward raised
            self._forget()
        for piece in self._piece_of.values():
            if len(piece._backward_hooks or ()) > 1:  # the first is ours
                name = next(n for n, p in self.module.named_parameters() if p is piece)
                raise RuntimeError(
                    f"register_hook was called on a shard of {name}: autograd does not come to "
                    "shards, so the hook would never run. Fix: remove it; hooks of "
                    "register_post_accumulate_grad_hook get the shard with its final gradient."
                )
        self._plan = self._schedule if module is self.module else None
        if module is self.module:
            for unit in self.units:
                if unit.uses or unit.lent:  # kept for a backward that has not come
                    unit.free()
        if self._plan is not None:
            self._plan.begin()

    def _reach(self, unit: Unit) -> None:
        """Make the unit whole, and start to gather the one that comes after it."""
        following = self._plan.reach(unit) if self._plan is not None else None
        unit.use()
        if following is not None:
            following.gather()

    @torch.compiler.disable
    def _read(self, unit: Unit) -> None:
        """A parameter of a unit that is not whole is read: during a forward the unit is lent.

        It stays whole until the outermost forward is over, and all through backward. Outside of a
        forward one sees shards.
        """
        if in_backward():
            unit.use()
        elif self._within:
            self._reach(unit)
            self._lent.append(unit)

    @torch.compiler.disable
    def _post_forward(self, unit: Unit, mine: bool, given: Any, output: Any) -> None:
        made, grad = tensors_in(output), torch.is_grad_enabled()
        hooked = grad and self._hook_output(unit, given, made)
        self._awaited |= hooked
        if made and not unit.trainable:  # frozen, and backward may not pass through it
            hooked = hooked or not any(t.requires_grad for t in made + tensors_in(given))
        if mine and unit.shows(made):  # others go on with a parameter, or a view of one
            mine = False
            if len(self._within) > 1:
                self._lent.append(unit)
        self._leave(unit, mine, lent=grad, free=not grad or (hooked and self.reshard_after_forward))
        if not self._within and self._plan is not None:
            for other in self.units:
                if other.held is Held.GATHERING:  # prefetched, and not used
                    other.free()
            self._plan.end()

    @torch.compiler.disable
    def _leave(self, unit: Unit, mine: bool, lent: bool = False, free: bool = True) -> None:
        """The forward of `unit` is over, or raised; with the outermost, all that it was lent."""
        self._within.pop()
        if free and mine:
            unit.free(again=lent)
        if self._within:
            return
        for other in self._lent:
            other.lent |= lent
            if free:
                other.free(again=lent)
        self._lent = []

    def _hook_output(self, unit: Unit, given: Any, made: list[Tensor]) -> bool:
        """Ask for a call when backward reaches the unit. False if no tensor of the output needs it.

        A tensor that the unit only passes on is another's: its gradient tells nothing of this one.
        """
        order, position = self._plan.order if self._plan is not None else [], unit.position
        passed_on = {id(tensor) for tensor in tensors_in(given)}
        own = [t for t in made if t.requires_grad and id(t) not in passed_on]
        fired: list[bool] = []

        def reached(_: Tensor) -> None:
            previous = order[position - 1] if order else None  # before the first comes the last
            self._pre_backward(unit, previous, first=not fired)
            fired.append(True)

        for tensor in own:
            tensor.register_hook(reached)
        unit.uses += bool(own)
        return bool(own)

    # -- backward

    def _enter_backward(self) -> None:
        if (run := new_backward(self._run, self._end_backward)) is not None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "backward with create_graph=True: ZeRO-3 has freed the parameters when the "
                    "second derivative needs them. Fix: stage 2."
                )
            self._run, self._awaited = run, False
            for unit in self.units:  # the root first, though its own hook may come second
                if unit.lent or (unit.uses and not self.reshard_after_forward):
                    unit.use()

    def _pre_backward(self, unit: Unit, previous: Unit | None, first: bool) -> None:
        """The gradient of the unit's output is there: close what is done, gather this and the next.

        previous: the unit before this one in forward; None without prefetch.
        """
        self._enter_backward()
        for other in self.units:
            if other.is_done and not unit.nested(other):
                self._close(other)
        unit.open(first)
        if previous is not None:
            previous.gather()

    def _collect(self, flat: Flat, index: int, param: nn.Parameter) -> None:
        self._enter_backward()
        if self._sync and (grad := param.grad) is not None:  # None: frozen since forward
            flat.collect(index, grad)
            param.grad = None

    def _close(self, unit: Unit) -> None:
        """Free the unit, then start to reduce its gradients; one unit is in flight at a time."""
        unit.close()
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
        units = [unit for unit in self.units if unit.held is not Held.SUMMONED]  # by one outside
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
        gradients = [param.grad for param in self._piece_of] + [flat.partial for flat in self.flats]
        return super().memory_extra() | {
            "parameters": [flat.held for flat in self.flats],
            "gradients": [grad for grad in gradients if grad is not None],
            "transient": [tensor for flat in self.flats for tensor in flat.transient()],
        }


def _neighbours(comm: Comm, reshard_after_forward: bool | int) -> Comm | None:
    """The ranks that keep a second copy together from forward to backward, if it is not all."""
    n = reshard_after_forward
    if not isinstance(n, int) or n > comm.world or (n is not False and (n < 1 or comm.world % n)):
        raise ValueError(
            "reshard_after_forward must be True, False, or a number of ranks that divides the "
            f"{comm.world} of the sharding group, got {n!r}"
        )
    return comm.part(n) if 1 < n < comm.world else None


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    inner: Iterable[Any] = ()
    if is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    return [tensor for item in inner for tensor in tensors_in(item)]


def _refuse_gradient(name: str, _: Tensor) -> NoReturn:
    raise RuntimeError(
        f"backward has come to a shard of {name}: outside of a forward a parameter is this rank's "
        "part of it, as it is in parameters() at any time, and the loss was computed with that "
        "part. Fix: compute the term inside forward, with parameters by name, as in "
        "self.layer.weight; or stage 2."
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
    """Refuse what would step on nothing: built before sharding, or never reached by backward.

    A step makes whole parameters stale, so they are freed.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    name = type(optimizer).__name__
    for model in list(_models):
        if lost := [p for p in params if p in model._given]:
            raise RuntimeError(
                f"this {name} was built before sharding: it holds {model._given[lost[0]]}, "
                "whose values now live in shards. Fix: build it from model.parameters() after "
                "model = ZeRO3(module)."
            )
        mine = [p for p in params if p in model._pieces]
        if not mine or model._run is not None:  # a hook steps inside backward
            continue
        if model._awaited and all(p.grad is None for p in mine):
            raise RuntimeError(
                f"{name} steps after a forward of the model, but no backward has come to it: none "
                "was called, it raised, or it was backward(inputs=...), which does not know "
                "shards. Fix: loss.backward(); a forward without backward under torch.no_grad()."
            )
        for unit in model.units:
            unit.free()
