"""The norm of the full gradient when each rank holds a part of it, and clipping by it.

Every element must count once. Sharded gradients are disjoint, so the ranks' sums of powers add up,
in one all-reduce of one number. Replicated gradients are the same on all ranks, so no rank may add
another's. On a mesh with other axes than data, ranks along these hold other parts of the model,
and some parameters several of them do: such a one counts on the rank that `mesh.counted` says.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013, sec. 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import counted


@torch.no_grad()
def total_norm(
    gradients: list[Tensor], norm_type: float, comm: Comm, everywhere: bool = False
) -> Tensor:
    """The p-norm over this rank's gradients and, through `comm`, the other ranks': a scalar on all.

    norm_type: any p > 0, or inf. comm: the ranks over which gradients are sharded; `Comm.alone()`
    where they are replicated. everywhere: over the other axes of its mesh too. Equal on all ranks,
    bit for bit. Raises ValueError for p <= 0.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type!r}")
    # torch's own norm of this rank's part, one fused call per dtype and device; without empty
    # gradients, which have no inf norm
    local = torch.nn.utils.get_total_norm([g for g in gradients if g.numel()], norm_type)  # ()
    if comm.shards == 1 and not (everywhere and comm.axes):
        return local
    dtype = gradients[0].dtype.to_real() if gradients else local.dtype
    norm = local.double()  # the square of an fp32 norm above 1.8e19 is inf in fp32
    if norm_type == inf:
        return comm.reduce_scalar(norm, True, everywhere).to(dtype)
    return (comm.reduce_scalar(norm**norm_type, False, everywhere) ** (1 / norm_type)).to(dtype)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    comm: Comm | None = None,
) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`.

    parameters: DDP's parameters, or the shards of ZeRO-3 (`model.parameters()`), with final
    `.grad`s. comm: the ranks over which they are sharded (`model.comm`); None for replicated
    gradients, which on a mesh is `Comm.alone(model.comm.axes)`. Returns the norm before clipping, a
    scalar equal on all ranks. Every rank must call it. Raises ValueError for a negative max_norm.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm!r}")
    with torch._C.DisableTorchFunctionSubclass():  # a LocalGrad is a plain tensor here
        parameters = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in parameters]
        comm = comm or Comm.alone()
        local = [p.grad for p in parameters if counted(p, comm)]
        norm = total_norm(local, norm_type, comm, everywhere=True)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # (), as torch's clip_grad_norm_
        if gradients:
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm
