"""One function for all strategies.

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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.guards.model import check_hooks, check_stage
from ddpz_lite.strategies.guards.param_groups import ParamGroups, with_names, with_params
from ddpz_lite.strategies.mesh import Chunks, broadcast, replicated
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.pipeline.pipeline import Pipeline, check_axes
from ddpz_lite.strategies.placement import Placement, Stage, rows
from ddpz_lite.strategies.precision import LossScale, cast_module, keeps_dtype
from ddpz_lite.strategies.replica import ReplicaOf
from ddpz_lite.strategies.unit_choice import Units
from ddpz_lite.strategies.zero1 import ZeRO1
from ddpz_lite.strategies.zero2 import ZeRO2
from ddpz_lite.strategies.zero3 import ShardsOf, ZeRO3


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
    ownership: str | None = None,
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
            its stage is sharded, in place, and the Pipeline is returned as the model. Of experts
            (`expert_parallel`) the stage goes along the ranks that have the same ones.
        optimizer_class: any torch optimizer that works element by element; at stages 1 and 2 also
            by whole parameters; stage 0 takes any that steps without a closure. See `per_group`.
        stage: 0 is DDP; 1, 2, 3 are ZeRO; on a 2-D mesh (outside, inside), see `placement`: (0, 3)
            is hybrid sharding, as is 3; (1, 3), ZeRO-1 outside, is HFSDP: the ranks that hold the
            same shard cut the optimizer's state among themselves, and exchange gradients only for
            the step.
        mesh: None for the world, a process group, or a mesh: 1-D, or 2-D (replicate, shard); or any
            with an axis named "data", which shards, with "context" and "expert", if it has them.
            A model that is split over other axes, by `Pipeline` or `tensor_parallel`, needs the
            mesh with these too.
        bucket_mb: megabytes (1e6 bytes) per transition; stages 0, 1, 2. Stage 3 has units instead.
        mixed_precision: None, torch.bfloat16 or torch.float16: compute in it, step on fp32 master
            copies. fp16 gets a dynamic loss scale; `p.grad` is without it at stages 2 and 3, and
            at 0 and 1 after `optimizer.finalize_grads()`. Changes of parameters, in place or by
            `.data`, reach the master copies, rounded as compute has it.
        reduce_dtype: in which gradients are sent; default: that of compute.
        loss_scale: fp16 only: your own `LossScale` in place of the default one.
        offload: optimizer state and shards in the memory of the host; stages 1, 2, 3.
        ownership: "parameter" gives each parameter one owner (stages 1, 2); default: for Muon and
            Adafactor only.
        param_groups: `f(module)` returns parameters of the module, or groups of them with their
            options, as for any torch optimizer; called before sharding, with full shapes.
        broadcast_buffers, units, reshard_after_forward: see `DDP` and `ZeRO3`.
        gather_dtype, prefetch, init_fn, device: see `ZeRO3`.
        optimizer_kwargs: for optimizer_class.

    Returns:
        model: call it as the module; has `.module`, `.no_sync()`, `.batch_weight(count)`.
        optimizer: a `torch.optim.Optimizer` with `.clip_grad_norm_(max_norm)`.

    Raises: ValueError, TypeError or RuntimeError for wrong use, with the fix.
    """
    outside, row = rows(stage)
    cut = outside.optimizer is Placement.SHARD
    comm = Comm.of(mesh, cut=cut if isinstance(stage, tuple) else None)
    check_axes(module, comm)
    pipe, module = (module, module.stage) if isinstance(module, Pipeline) else (None, module)
    check_stage(stage, row, gather_dtype, pipe.clash if pipe is not None else None)
    check_hooks(module, sharded=row.parameter is Placement.SHARD)
    groups = with_names(module, param_groups, may_be_frozen=pipe is not None)
    has_params = any(True for _ in module.parameters())
    row = row if has_params or pipe is None else rows(0)[1]  # a bare stage has nothing to shard
    loss_scale = cast_module(module, mixed_precision, loss_scale)
    keep = {p for m in module.modules() if keeps_dtype(m) for p in m.parameters(recurse=False)}
    casts = {"mixed_precision": mixed_precision, "reduce_dtype": reduce_dtype, "offload": offload}
    options = {"loss_scale": loss_scale, "ownership": ownership, **optimizer_kwargs}
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
        optimizer = ShardsOf(
            model, with_params(module, groups), optimizer_class, comm=comm, **options
        )
    elif row.optimizer is Placement.SHARD:
        zero = ZeRO2 if row.gradient is Placement.SHARD else ZeRO1
        options |= {"mesh": comm, "bucket_mb": bucket_mb, "keep": keep, **casts}
        optimizer = zero(with_params(module, groups), optimizer_class, **options)
        model = ReplicaOf(module, optimizer, broadcast_buffers)
    else:
        alone = replicated(module.parameters(), comm)
        if mixed_precision is None and not offload:
            options |= {"comm": alone, "cuts": False}
            optimizer = ShardedOptimizer(with_params(module, groups), optimizer_class, **options)
        else:  # the master copies of ZeRO-1, in one shard
            broadcast(module.parameters(), comm)
            options |= {"mesh": alone, "keep": keep, **casts}
            optimizer = ZeRO1(with_params(module, groups), optimizer_class, **options)
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
    pipe.attach(model, optimizer, comm)
    return pipe, optimizer
