"""Context parallelism: each rank has some tokens of every sequence, and all parameters.

Embeddings, norms, MLP and loss treat each token alone, so with T / N tokens a rank holds 1 / N of
the activations and does 1 / N of the work. Only attention needs other tokens. It gets them in one
of three ways, here with the elements that a rank sends for a layer of n = B T C elements:

    kind      forward             backward                  holds of keys and values
    ulysses   4 (n/N)(N-1)/N      4 (n/N)(N-1)/N            H / N heads of all tokens
    ring      2 (n/N)(N-1)        2 (n/N)(N-1) + 2 n        2 blocks of T / N tokens
    gather    2 (n/N)(N-1)        4 (n/N)(N-1)              N blocks

The last term of each backward of ring and gather, the gradients of keys and values, is in fp32.
Blocks are sent again in backward, because keeping them would keep N of them for each layer.

The gradient of a parameter is that of this rank's tokens, a part of a sum, as under data
parallelism. So the strategies reduce gradients over the context axis as over the data axis, and
ZeRO shards over both: on a mesh with both, `Comm.of` joins them to one group. Along `data` ranks
have other windows, along `context` other tokens of the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddpz_lite.model import GPT, Attention
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.context.heads import ToHeads, ToTokens
from ddpz_lite.strategies.context.order import Order
from ddpz_lite.strategies.context.partial import attend, attend_backward, merge
from ddpz_lite.strategies.context.rotation import Gather, Ring

ROTATIONS = {"ring": Ring, "gather": Gather}
KINDS = (*ROTATIONS, "ulysses")


class ContextAttention:
    """Attention over sequences of which each rank of a group has a part; called by all of them.

        attention = ContextAttention(mesh["context"], kind="ring")
        y = attention(q, k, v)  # each (B, H, T / N, D), as in torch's scaled_dot_product_attention

    Args:
        group: a process group or 1-D mesh; default: the world.
        kind: "ring", "gather" or "ulysses".
        causal: whether a token sees only itself and those before it.
        zigzag: whether a rank has chunks r and 2N - 1 - r of 2N, or chunk r of N. Default: where it
            balances the work, which it does for the ring and the gather under a causal mask.

    Attributes: `order` says which tokens this rank has; `comm` the ranks. Raises ValueError for
    another kind; when called, for tokens or heads that the ranks do not divide, and for keys and
    values of another shape than queries.
    """

    def __init__(
        self,
        group: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
        kind: str = "ring",
        causal: bool = True,
        zigzag: bool | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.comm, self.kind, self.causal = Comm.of(group), kind, causal
        zigzag = causal and kind in ROTATIONS if zigzag is None else zigzag
        self.order = Order(self.comm.world, self.comm.rank, zigzag)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.shape == k.shape == v.shape:
            raise ValueError(
                f"queries, keys and values need one shape (B, H, T / N, D), got {tuple(q.shape)}, "
                f"{tuple(k.shape)} and {tuple(v.shape)}. Fix: repeat keys and values for the "
                "heads that share them."
            )
        self.order.check(q.shape[2] * self.comm.world)
        if self.kind in ROTATIONS:
            return _Rotated.apply(q, k, v, self)
        check_heads(q.shape[1], self.comm)
        q, k, v = ToHeads.apply(torch.stack([q, k, v]), self.comm, self.order)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H / N, T, D)
        return ToTokens.apply(y[None], self.comm, self.order)[0]


class _Rotated(torch.autograd.Function):
    """Queries stay, keys and values come; q, k, v (B, H, T / N, D) to y (B, H, T / N, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: ContextAttention) -> Tensor:
        wide = _wide(q)
        out, lse = torch.zeros_like(wide), torch.full_like(wide[..., 0], -torch.inf)
        size = q.shape[2] // len(how.order.chunks())  # tokens in a chunk
        for source, block in ROTATIONS[how.kind](how.comm).blocks(torch.stack([k, v])):
            keys, values = _wide(block)
            for i, j, masked in how.order.pairs(source, how.causal):
                here, there = _chunk(i, size), _chunk(j, size)
                some = attend(wide[here], keys[there], values[there], masked)
                merge(out[here], lse[here], *some)
        out = out.to(q.dtype)
        ctx.how = how
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (q, k, v, out, lse), how = ctx.saved_tensors, ctx.how
        wide, grad = _wide(q), _wide(grad)
        delta = (grad * out).sum(-1)  # (B, H, T / N)
        size = q.shape[2] // len(how.order.chunks())
        of_q, rotation = torch.zeros_like(wide), ROTATIONS[how.kind](how.comm)
        for source, block in rotation.blocks(torch.stack([k, v])):
            keys, values = _wide(block)
            of_block = torch.zeros(block.shape, dtype=wide.dtype, device=block.device)
            for i, j, masked in how.order.pairs(source, how.causal):
                here, there = _chunk(i, size), _chunk(j, size)
                of_keys = keys[there], values[there], lse[here], delta[here]
                some = attend_backward(grad[here], wide[here], *of_keys, masked)
                totals = of_q[here], *of_block[:, :, :, there[2]]
                for total, part in zip(totals, some, strict=True):
                    total.add_(part)
            rotation.add(source, of_block)
        of_k, of_v = rotation.own_grad()
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None


def context_parallel(
    gpt: GPT,
    group: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
    kind: str = "ring",
    *,
    zigzag: bool | None = None,
) -> GPT:
    """Let each rank of `group` compute some tokens of every window, in place; returns the GPT.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        gpt = dz.context_parallel(dz.GPT(config), mesh["context"])
        model, optimizer = dz.parallelize(gpt, torch.optim.AdamW, stage=3, mesh=mesh)
        loss = dz.next_token_loss(model(inputs), gpt.order.of(targets))

    The ranks of the group are given the same windows (B, T). The GPT takes this rank's tokens of
    them, with their positions, and returns their logits (B, T / N, V). `gpt.order.of` takes the
    same tokens of the targets, which were shifted before. All ranks have equally many, so the
    mean of their means is the mean over all tokens; where some targets do not count, multiply by
    `model.batch_weight(count)`.

    Args:
        kind, zigzag: see `ContextAttention`.

    Raises ValueError if Ulysses' ranks do not divide the heads, for a GPT with dropout, and for one
    that is cut already; when called, for windows that do not divide.
    """
    attention = ContextAttention(group, kind, zigzag=zigzag)
    if gpt.order is not None and gpt.order.world > 1:
        raise ValueError(
            "this GPT is cut along its context already. Fix: call context_parallel once, on a GPT "
            "as it was built."
        )
    if attention.comm.world == 1:
        gpt.order = Order(1, 0, zigzag=False)  # all tokens: the same script runs on one rank
        return gpt
    if gpt.config.dropout:
        raise ValueError(
            f"context_parallel cannot drop entries of attention, and this GPT has dropout="
            f"{gpt.config.dropout}. Fix: GPTConfig(dropout=0.0)."
        )
    layers = [module for module in gpt.modules() if isinstance(module, Attention)]
    for layer in layers if kind == "ulysses" else ():
        check_heads(layer.heads, attention.comm)
    for layer in layers:
        layer.attend = attention
    gpt.order = attention.order
    return gpt


def check_heads(heads: int, comm: Comm) -> None:
    """Raise ValueError if the ranks do not divide the heads, of which Ulysses gives each some."""
    if heads % comm.world:
        raise ValueError(
            f"kind='ulysses' gives each rank some heads, and {heads} heads do not divide into "
            f"{comm.world} ranks. Fix: a number of ranks that divides {heads}, or kind='ring'."
        )


def check_reduced(model: nn.Module, comm: Comm) -> None:
    """Raise ValueError if `comm` does not sum gradients over the ranks that share a sequence."""
    layers = [getattr(module, "attend", None) for module in model.modules()]
    for context in {layer.comm for layer in layers if isinstance(layer, ContextAttention)}:
        if missing := _ranks(context) - _ranks(comm):
            raise ValueError(
                "context_parallel has given each rank some tokens of a sequence, and gradients "
                f"would be summed without those of rank {min(missing)}. Fix: parallelize(model, "
                '..., mesh=init_device_mesh(device, (d, c), mesh_dim_names=("data", "context"))).'
            )


def _ranks(comm: Comm) -> set[int]:
    """Ranks of the world over which `comm` sums gradients."""
    if comm.size == 1:
        return {dist.get_rank()}
    groups = [comm.group or dist.group.WORLD, comm.replicas]
    return {r for group in groups if group for r in dist.get_process_group_ranks(group)}


def _chunk(index: int, size: int) -> tuple[slice, slice, slice]:
    """Where the tokens of a chunk lie in (B, H, T / N, ...)."""
    return slice(None), slice(None), slice(index * size, (index + 1) * size)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
