"""Two all-reduces that spare the inter-node links, as alternatives to the ring.

n bytes, N ranks on M nodes of L, what one rank sends to other nodes, and how often it waits for
another node (M and L powers of two, for the second):

    ring (gloo, NCCL)    2n (N-1)/N, by the ranks at the ends of a node; none by others    2(N-1)
    hierarchy            2(n/L) (M-1)/M, by every rank                                     2(M-1)
    halving, doubling    2(n/L) (M-1)/M, by every rank, if nodes hold blocks of ranks      2 log2 M

Sources: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 4.1; Thakur, Rabenseifner and
Gropp 2005, "Optimization of Collective Communication Operations in MPICH", section 4.5.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddpz_lite.strategies.comm import _all_gather


def hierarchical_all_reduce(
    tensor: Tensor, near: dist.ProcessGroup, far: dist.ProcessGroup
) -> Tensor:
    """The sum over all ranks, in place: inside the node, between nodes, inside the node.

    tensor: any shape, contiguous, the same on every rank. near: this rank's node. far: the ranks of
    all nodes that have the same place in theirs. Nodes have equally many ranks.

    Raises ValueError for a tensor that is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"hierarchical_all_reduce: expected a contiguous tensor, got strides {tensor.stride()}."
            " Fix: reduce tensor.contiguous() and copy the result back."
        )
    local, flat = dist.get_world_size(near), tensor.view(-1)
    size = -(-flat.numel() // local)
    padded = torch.nn.functional.pad(flat, (0, local * size - flat.numel()))  # (local * size,)
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=near)  # gloo's reduce_scatter sends twice as much
    own = parts.view(local, size).sum(0, dtype=tensor.dtype)  # (size,)
    dist.all_reduce(own, group=far)
    _all_gather(padded, own, group=near)
    return tensor.copy_(padded[: flat.numel()].view_as(tensor))


def halving_doubling_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over the ranks of the group, in place, in 2 log2 N rounds; N of any size.

    tensor: (length,), contiguous, the same on every rank. Ranks beyond the largest power of two
    hand theirs to a partner first and are handed the result at the end: two rounds more.

    Raises ValueError for a tensor that is not 1-D and contiguous.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            "halving_doubling_all_reduce: expected a contiguous 1-D tensor, got shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}. Fix: tensor.view(-1)."
        )
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    power = 1 << (world.bit_length() - 1)

    def swap(outgoing: Tensor | None, incoming: Tensor | None, partner: int) -> None:
        messages = [
            dist.P2POp(call, part, group=group, group_peer=partner)
            for call, part in ((dist.isend, outgoing), (dist.irecv, incoming))
            if part is not None and part.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()

    if rank >= power:
        swap(tensor, None, rank - power)
        swap(None, tensor, rank - power)
        return tensor
    received = torch.empty_like(tensor)
    helped = rank + power < world
    if helped:
        swap(None, received, rank + power)
        tensor += received

    # [Note: nearest first] The largest halves go to the nearest rank, one eighth or less to the
    # farthest: where nodes hold blocks of ranks, the inter-node links carry what a hierarchy sends.
    held, cuts = tensor, []  # the interval that this rank still adds up
    for bit in range(power.bit_length() - 1):
        partner, halves = rank ^ (1 << bit), held.tensor_split(2)
        local, other = halves if not rank & (1 << bit) else halves[::-1]
        into = received[: local.numel()]
        swap(other, into, partner)
        local += into
        cuts.append((partner, local, other))
        held = local
    for partner, local, other in reversed(cuts):
        swap(local, other, partner)
    if helped:
        swap(tensor, None, rank + power)
    return tensor
