"""`--mesh`: the run on a mesh of data (DDP or ZeRO) x pipeline x expert x context x tensor.

Ranks that differ along data or expert read other windows, all others the same; along context each
computes its tokens of them. The micro-batches of an update (--accumulate) are those of the
pipeline, in the order of --schedule; one stage is plain accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ddpz_lite.checkpoint.parts import comm_of
from ddpz_lite.model import GPT, next_token_loss
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.context.attention import context_parallel
from ddpz_lite.strategies.experts import expert_parallel
from ddpz_lite.strategies.groups import group_along
from ddpz_lite.strategies.pipeline.gpt_stages import gpt_stages
from ddpz_lite.strategies.pipeline.pipeline import Pipeline
from ddpz_lite.strategies.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from ddpz_lite.strategies.tensor.layers import tensor_parallel
from ddpz_lite.trainer.batches import Batch
from ddpz_lite.trainer.recipe import Recipe
from ddpz_lite.trainer.saving import TrainingError

SCHEDULES = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": partial(interleaved, chunks=2),  # Recipe.chunks
    "zb": zero_bubble,
}
IGNORED = -100  # a target that cross-entropy leaves out


def mesh_of(recipe: Recipe, device: torch.device) -> dist.DeviceMesh | None:
    """The mesh of the recipe, None if it has none. Raises TrainingError unless it has all ranks."""
    if recipe.axes is None:
        return None
    ranks, world = prod(recipe.axes.values()), Comm().world
    if ranks != world:
        raise TrainingError(f"--mesh {recipe.mesh} needs {ranks} ranks, and there are {world}.")
    names, shape = zip(*recipe.axes.items(), strict=True)
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def readers_of(mesh: dist.DeviceMesh) -> Comm:
    """The ranks that read different windows."""
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return Comm(group_along(mesh, [n for n in ("data", "expert") if sizes[n] > 1] or ["data"]))


def pipeline_of(recipe: Recipe, gpt: GPT, mesh: dist.DeviceMesh) -> Pipeline:
    """The GPT, cut over `expert`, `tensor` and `context`, and distributed to stages over `pipe`."""
    ranks, chunks = mesh["pipe"].size(), recipe.chunks
    schedule = SCHEDULES[recipe.schedule](ranks, recipe.accumulate)
    gpt = expert_parallel(gpt, mesh) if recipe.experts else gpt
    gpt = context_parallel(tensor_parallel(gpt, mesh["tensor"]), mesh["context"])
    pipe = Pipeline(gpt_stages(gpt, ranks * chunks), schedule, mesh["pipe"])
    pipe.order = gpt.order
    return pipe


def nats_through(pipe: Pipeline, batches: Sequence[Batch], factor: float) -> Tensor:
    """The nats () of these batches times `factor`: a step of the pipeline.

    Returned on the last stage, there on one rank of the tensor axis; 0 on all other ranks, so that
    the sum over ranks counts each token once. A batch with `count` 0 adds nothing.
    """
    inputs = torch.cat([batch.inputs for batch in batches])  # (B, T)
    targets = torch.cat(
        [b.targets if b.count else torch.full_like(b.targets, IGNORED) for b in batches]
    )
    if (missing := pipe.micro_batches - len(inputs)) > 0:  # a row for each micro-batch
        inputs = torch.cat([inputs, inputs[:1].expand(missing, -1)])
        targets = torch.cat([targets, torch.full_like(targets[:1], IGNORED).expand(missing, -1)])

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        local = targets if pipe.order is None else pipe.order.of(targets)
        return next_token_loss(logits, local, reduction="sum") * factor

    loss = pipe.step(inputs, targets, loss_fn, weights=[1.0] * pipe.micro_batches)
    axes = comm_of(pipe).axes
    counts = "tensor" not in axes or dist.get_rank(axes["tensor"]) == 0
    return loss if loss is not None and counts else torch.zeros((), device=inputs.device)
