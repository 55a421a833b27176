"""One door to all strategies.

    model, optimizer = parallelize(module, torch.optim.AdamW, stage=2, lr=1e-3)

Whatever the stage, the loop that follows is plain PyTorch:

    for x, y in batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.gradient import own_grad
from ddpz_lite.strategies.mesh import Chunks
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.pipeline import Pipeline, check_axes
from ddpz_lite.strategies.placement import Placement, Stage, rows
from ddpz_lite.strategies.precision import HALF, LossScale, cast_ends, keeps_dtype
from ddpz_lite.strategies.replica import Replica, check_hooks
from ddpz_lite.strategies.units import Units
from ddpz_lite.strategies.zero1 import ZeRO1
from ddpz_lite.strategies.zero2 import ZeRO2
from ddpz_lite.strategies.zero3 import ZeRO3

ParamGroups = Callable[[nn.Module], Iterable[Any]]


class ReplicaOf(Replica):
    """The model of ZeRO-1 and ZeRO-2: whole on every rank; the optimizer does the rest."""

    def __init__(self, module: nn.Module, optimizer: ZeRO1, broadcast_buffers: bool) -> None:
        super().__init__(module, optimizer.comm, broadcast_buffers)
        self._no_sync = optimizer.no_sync

    def no_sync(self) -> AbstractContextManager[None]:
        """ZeRO-2: keep whole gradients until the next backward outside. ZeRO-1 always does."""
        return self._no_sync()

    def memory_extra(self) -> dict[str, list[torch.Tensor]]:
        """A reduced gradient lies at the optimizer's piece of a parameter."""
        reduced = [own_grad(piece) for flat in self.flats for piece in flat.pieces]
        gradients = [grad for grad in reduced if grad is not None]
        return super().memory_extra() | {"gradients": gradients}


class ShardsOf(ShardedOptimizer):
    """The optimizer of ZeRO-3: its parameters are the shards of `model`."""

    def __init__(self, model: ZeRO3, *args: Any, **kwargs: Any) -> None:
        self._model = model
        super().__init__(*args, **kwargs)
        for flat in model.flats:
            flat.owner = self

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """The flat buffers of what it steps on: frozen ones do not change."""
        known = {id(param) for group in groups for param in group["params"]}
        for flat in self._model.flats:
            if flat not in self.flats and any(id(piece) in known for piece in flat.pieces):
                self.flats.append(flat)

    def publish(self) -> None:
        """Units that are whole have become stale."""
        for unit in self._model.units:
            unit.free()
        super().publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for param in (param for flat in self._model.flats for param in flat.params):
            param.grad = None  # whole, from backwards under no_sync


def parallelize(
    module: nn.Module | Pipeline,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    stage: Stage = 0,
    *,
    mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
    bucket_mb: float = 8.0,
    mixed_precision: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    loss_scale: LossScale | None = None,
    offload: bool = False,
    broadcast_buffers: bool = True,
    param_groups: ParamGroups | None = None,
    units: Units = None,
    reshard_after_forward: bool | int = True,
    gather_dtype: torch.dtype | None = None,
    prefetch: bool = True,
    init_fn: Callable[[nn.Module], Any] | None = None,
    device: torch.device | str | None = None,
    **optimizer_kwargs: Any,
) -> tuple[DDP | ReplicaOf | ZeRO3 | Pipeline, ShardedOptimizer]:
    """Shard `module` and build its optimizer; every rank calls it with the same arguments.

    Args:
        module: on the device where it is to train, or (stage 3) on the meta device. Of a `Pipeline`
            its stage is sharded, in place, and the Pipeline is returned as the model.
        optimizer_class: any torch optimizer that works element by element; stage 0 takes any that
            steps without a closure.
        stage: 0 is DDP; 1, 2, 3 are ZeRO; on a 2-D mesh (outside, inside), see `placement`: (0, 3)
            is hybrid sharding, as is 3; (1, 3), ZeRO-1 outside, is HFSDP: the ranks that hold the
            same shard cut the optimizer's state among themselves, and exchange gradients only for
            the step.
        mesh: None for the world, a process group, or a mesh: 1-D, or 2-D (replicate, shard); or any
            with an axis named "data", which shards. A model that is cut over other axes, by
            `Pipeline` or `tensor_parallel`, needs the mesh with these too.
        bucket_mb: megabytes (1e6 bytes) per transition; stages 0, 1, 2. Stage 3 has units instead.
        mixed_precision: None, torch.bfloat16 or torch.float16: compute in it, step on fp32 master
            copies. fp16 gets a dynamic loss scale, and `p.grad` is read without it. What is changed
            in parameters, in place or by `.data`, reaches the masters, rounded as compute has it.
        reduce_dtype: in which gradients travel; default: that of compute.
        loss_scale: fp16 only: your own `LossScale` in place of the default one.
        offload: optimizer state and shards in the memory of the host; stages 1, 2, 3.
        param_groups: `f(module)` returns parameters of the module, or groups of them with their
            options, as for any torch optimizer; it is called before sharding, so shapes can be
            asked.
        broadcast_buffers, units, reshard_after_forward: see `DDP` and `ZeRO3`.
        gather_dtype, prefetch, init_fn, device: see `ZeRO3`.
        optimizer_kwargs: for optimizer_class.

    Returns:
        model: call it as the module; has `.module`, `.no_sync()`, `.batch_weight(count)`.
        optimizer: a `torch.optim.Optimizer` with `.clip_grad_norm_(max_norm)`.

    Raises: ValueError, TypeError or RuntimeError for wrong use, with the cure.
    """
    outside, row = rows(stage)
    cut = outside.optimizer is Placement.SHARD
    comm = Comm.of(mesh, cut=cut if isinstance(stage, tuple) else None)
    if gather_dtype is not None and row.parameter is not Placement.SHARD:
        raise ValueError(
            f"gather_dtype={gather_dtype} is for parameters that are gathered to compute with, at "
            f"stage 3, and this is stage={stage}. Fix: leave it out."
        )
    check_axes(module, comm)
    pipe, module = (module, module.stage) if isinstance(module, Pipeline) else (None, module)
    if pipe is not None and pipe.clash is not None:
        raise ValueError(
            f"two stages have a parameter named {pipe.clash}, and checkpoints know them by name. "
            "Fix: stages whose parameters have the names of the whole model, as gpt_stages makes."
        )
    check_hooks(module, sharded=row.parameter is Placement.SHARD)
    groups = _named_groups(module, param_groups, may_be_frozen=pipe is not None)
    if pipe is not None and not any(True for _ in module.parameters()):
        _, row = rows(0)  # a stage without parameters has nothing to shard
    loss_scale = _cast(module, mixed_precision, loss_scale)
    keep = {p for m in module.modules() if keeps_dtype(m) for p in m.parameters(recurse=False)}
    casts = {"mixed_precision": mixed_precision, "reduce_dtype": reduce_dtype, "offload": offload}
    options = {"loss_scale": loss_scale, **optimizer_kwargs}
    if row.parameter is Placement.SHARD:
        model = ZeRO3(
            module,
            mesh=comm,
            units=units,
            reshard_after_forward=reshard_after_forward,
            gather_dtype=gather_dtype,
            prefetch=prefetch and not isinstance(module, Chunks),  # their forwards take turns
            broadcast_buffers=broadcast_buffers,
            init_fn=init_fn,
            device=device,
            **casts,
        )
        optimizer = ShardsOf(model, _found(module, groups), optimizer_class, comm=comm, **options)
    elif row.optimizer is Placement.SHARD:
        zero = ZeRO2 if row.gradient is Placement.SHARD else ZeRO1
        options |= {"mesh": comm, "bucket_mb": bucket_mb, "keep": keep, **casts}
        optimizer = zero(_found(module, groups), optimizer_class, **options)
        model = ReplicaOf(module, optimizer, broadcast_buffers)
    else:
        if mixed_precision is None and not offload:
            options |= {"comm": Comm.alone(comm.axes), "whole": True}
            optimizer = ShardedOptimizer(_found(module, groups), optimizer_class, **options)
        else:  # the masters of ZeRO-1, in a shard that is the whole
            comm.broadcast(list(module.parameters()))
            options |= {"mesh": Comm.alone(comm.axes), "keep": keep, **casts}
            optimizer = ZeRO1(_found(module, groups), optimizer_class, **options)
            for param in module.parameters():
                param.grad_dtype = None  # the mean, in reduce_dtype, is what masters are stepped by
        model = DDP(
            module,
            mesh=comm,
            bucket_mb=bucket_mb,
            reduce_dtype=reduce_dtype,
            broadcast_buffers=broadcast_buffers,
        )
    model.attach(optimizer)
    if row.parameter is Placement.REPLICATE:
        model.cast_frozen(mixed_precision, keep)
    if pipe is None:
        return model, optimizer
    pipe.stage = model
    return pipe, optimizer


def _cast(
    module: nn.Module, dtype: torch.dtype | None, loss_scale: LossScale | None
) -> LossScale | None:
    """Cast the ends of the module; returns the loss scale, which fp16 has and nothing else."""
    if dtype not in (None, *HALF):
        raise ValueError(
            f"mixed_precision must be None, torch.bfloat16 or torch.float16, got {dtype!r}"
        )
    if dtype is torch.float16:
        loss_scale = loss_scale or LossScale()
    elif loss_scale is not None:
        raise ValueError("loss_scale needs mixed_precision=torch.float16; bf16 and fp32 need none")
    if dtype is not None:
        cast_ends(module, dtype, loss_scale)
    return loss_scale


def _found(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with parameters in place of names; at stage 3 they are other ones by now."""
    params = dict(module.named_parameters())
    return [group | {"params": [params[name] for name in group["params"]]} for group in groups]


def _named_groups(
    module: nn.Module, param_groups: ParamGroups | None, may_be_frozen: bool = False
) -> list[dict[str, Any]]:
    """The groups with names in place of parameters; every trainable parameter is in one of them.

    may_be_frozen: the module is a stage of a pipeline, and others have what is trained.
    """
    names = {param: name for name, param in module.named_parameters()}
    if not may_be_frozen and not any(param.requires_grad for param in names):
        raise ValueError(
            f"{type(module).__name__} has no parameter with requires_grad=True to train"
        )
    if param_groups is None:
        return [{"params": [name for param, name in names.items() if param.requires_grad]}]
    given, groups, seen = list(param_groups(module)), [], set()
    if given and isinstance(given[0], torch.Tensor):
        given = [{"params": given}]
    for group in given:
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        params = list(params)
        strangers = [p for p in params if p not in names]
        if strangers:
            raise ValueError(
                f"param_groups returned a tensor of shape {tuple(strangers[0].shape)} that is no "
                "parameter of the module. Fix: take it from module.parameters() inside the "
                "function."
            )
        groups.append(group | {"params": [names[p] for p in params]})
        seen.update(groups[-1]["params"])
    lost = [name for param, name in names.items() if param.requires_grad and name not in seen]
    if lost:
        raise ValueError(
            f"{len(lost)} trainable parameters are in no group, {lost[0]} for one, so they would "
            "never be updated. Fix: put them in a group, or set requires_grad=False."
        )
    return groups or [{"params": []}]
