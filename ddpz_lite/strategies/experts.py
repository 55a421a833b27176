"""Mixtures of experts: E feed-forward layers in one place of a model, of which a token uses k.

Expert parallelism gives each rank E / N of the experts, and all ranks other tokens. A token's row
travels to the ranks of its experts and the results travel back, in two uneven all-to-alls, and in
backward the gradients go the same ways. For T tokens of C elements, with even routing, a rank sends

    counts      E (N-1)/N integers, first, so that the receiver knows its splits
    dispatch    k T C (N-1)/N elements, and again in backward
    combine     k T C (N-1)/N elements, and again in backward

An expert's gradient is the sum over the tokens of its whole group when backward is over. It lacks
those of its replicas, and no other rank's. Each rank's loss is a mean over its own tokens, so it is
divided by the number of all ranks, like the gradient of a dense parameter. The strategies do this,
and share the state of an expert between its replicas: at stages 1 to 3 each holds a part of it.

Sources: Lepikhin et al., "GShard", 2020 (capacity); Fedus et al., "Switch Transformers", 2021
(router in fp32, balance loss); DeepSeek-AI, "DeepSeek-V3", 2024, section 2.1.2 (bias).
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddpz_lite.model import GPT
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import mark


class Expert(nn.Module):
    """One feed-forward layer: x (n, C) to (n, C), with `hidden` elements between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.to(self.up.weight.dtype)))).to(x.dtype)


class MoE(nn.Module):
    """A feed-forward layer of several experts: x (..., C) to (..., C).

    Args:
        width: C. hidden: of an expert; default: 4 C.
        experts: E. top_k: experts of a token; their weights are the router's probabilities, for
            k > 1 divided by their sum.
        capacity_factor: an expert takes at most ceil(k T / E * factor) of this rank's T tokens,
            first choices first, then in their order; the layer's output for others is 0, and the
            residual carries them on. None drops no token.

    Attributes, of the last forward: `counts` (E,), how often this rank's tokens chose each expert;
    `dropped`, choices beyond capacity. `bias` (E,) is added to the probabilities where experts are
    chosen, and not where they are weighted; see `update_bias`.
    """

    # fmt: off
    def __init__(self, width: int, experts: int = 8, top_k: int = 1, *,
                 hidden: int | None = None, capacity_factor: float | None = None) -> None:
        # fmt: on
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must lie in 1 to {experts}, the experts; got {top_k}")
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden or 4 * width) for _ in range(experts))
        self.register_buffer("bias", torch.zeros(experts))
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.comm = Comm.alone()  # see expert_parallel
        self.counts, self.dropped, self._mean_probability = torch.zeros(experts), 0, None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (T, C)
        chosen, weights = self.route(rows)  # both (T, k)
        tokens, experts = self._kept(chosen)
        order = experts.argsort(stable=True)
        tokens, choice = tokens[order] % len(rows), tokens[order] // len(rows)
        counts = experts.bincount(minlength=len(self.bias))  # (E,)
        results = self._compute(rows[tokens], counts)
        weighted = results * weights[tokens, choice, None].to(x.dtype)
        return torch.zeros_like(rows).index_add(0, tokens, weighted).view(x.shape)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each row of (T, C), and their weights, both (T, k), in fp32."""
        logits = F.linear(rows.float(), self.router.weight.float())
        probabilities = logits.softmax(-1)  # (T, E)
        chosen = (probabilities.detach() + self.bias).topk(self.top_k).indices
        weights = probabilities.gather(1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(1, keepdim=True)
        self.counts = chosen.flatten().bincount(minlength=len(self.bias))
        self._mean_probability = probabilities.sum(0) / max(len(rows), 1)
        return chosen, weights

    def balance_loss(self) -> Tensor:
        """E sum f P of the last forward: 1 if even, E if one expert gets all. Called by all ranks.

        f are shares of the global batch, from one all-reduce of E numbers. P are this rank's mean
        probabilities, so with equally many tokens on all ranks, the mean of their losses is that
        of the global batch.
        """
        counts = self.comm.all_reduce(self.counts.float()).wait()
        return len(counts) * (counts / counts.sum() * self._mean_probability).sum()

    @torch.no_grad()
    def update_bias(self, step: float = 0.001) -> None:
        """Raise the bias of experts with less than the mean of the global batch, lower others'."""
        counts = self.comm.all_reduce(self.counts.float()).wait()
        self.bias += step * (counts.mean() - counts).sign()

    def _kept(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Choices within capacity: their numbers (choice * T + token) and experts."""
        experts = chosen.T.flatten()  # (k T,)
        if self.capacity_factor is None:
            self.dropped = 0
            return torch.arange(len(experts), device=experts.device), experts
        capacity = ceil(len(experts) / len(self.bias) * self.capacity_factor)
        asked = F.one_hot(experts, len(self.bias)).cumsum(0)  # (k T, E)
        kept = asked.gather(1, experts[:, None])[:, 0] <= capacity
        self.dropped = int((~kept).sum())
        return kept.nonzero()[:, 0], experts[kept]

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (n, C), sorted by expert, through their experts, wherever these are."""
        here = list(self.experts.children())
        by_rank = counts.view(self.comm.world, len(here))
        arriving = self.comm.all_to_all(by_rank).wait()  # (N, E / N): rows from each rank
        sends, receives = by_rank.sum(1).tolist(), arriving.sum(1).tolist()
        received = _Exchange.apply(rows, self.comm, sends, receives)  # by rank, then by expert
        experts = torch.arange(len(here), device=rows.device).repeat(self.comm.world)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        parts = received[order].split(arriving.sum(0).tolist())
        # an expert without rows runs too, so that its gradient is 0 and not None
        results = torch.cat([e(part) for e, part in zip(here, parts, strict=True)])
        return _Exchange.apply(results[order.argsort()], self.comm, receives, sends)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks, sends[r] of them to rank r; the gradients return by the same ways."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, sends: list, receives: list) -> Tensor:
        ctx.how = comm, receives, sends
        return comm.exchange_rows(rows.contiguous(), sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        comm, sends, receives = ctx.how
        return comm.exchange_rows(grad.contiguous(), sends, receives), None, None, None


class ExpertBlock(nn.Module):
    """A GPT's block with a mixture of experts in place of its MLP."""

    def __init__(self, block: nn.Module, moe: MoE) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = block.norm1, block.attention, block.norm2
        self.moe, self.drop = moe, block.drop

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))  # (B, T, C)
        return x + self.drop(self.moe(self.norm2(x)))  # (B, T, C)


def with_experts(gpt: GPT, experts: int = 8, top_k: int = 1, **options: Any) -> GPT:
    """Put a mixture of experts into each block, in place, and draw weights; returns the GPT."""
    for i, block in enumerate(gpt.blocks):
        gpt.blocks[i] = ExpertBlock(block, MoE(gpt.config.width, experts, top_k, **options))
    gpt.reset_parameters()
    return gpt


def expert_parallel(
    module: nn.Module, mesh: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None
) -> nn.Module:
    """Keep E / N of the experts of each `MoE` in `module`, in place, and return it.

        gpt = dz.expert_parallel(dz.with_experts(dz.GPT(config), experts=8), mesh)
        model, optimizer = dz.parallelize(gpt, torch.optim.AdamW, stage=3)

    All ranks call it, with the same weights. Experts keep the names that they have in the whole
    layer, so a checkpoint loads at any number of ranks. At every stage of `parallelize`, dense
    parameters are reduced and sharded over all ranks, and experts over those that have the same;
    fp16 skips a step if any rank has an inf; a norm counts each expert once. `dz.DDP` and the ZeRO
    classes do the same; torch's own wrappers do not know of experts.

    Args:
        module: on the device where it is to train, not on the meta device.
        mesh: None for one group of all ranks; a 2-D mesh (replicas, ranks of a group) of all ranks,
            or one with an axis named "expert", next to "data", "context" or "pipe".

    Raises ValueError for wrong use, RuntimeError if ranks have built different experts.
    """
    comm, same = Comm.of_experts(mesh)
    layers = [m for m in module.modules() if isinstance(m, MoE)]
    if not layers:
        raise ValueError("no MoE in this module. Fix: dz.with_experts(gpt) first.")
    held = mesh.size() if isinstance(mesh, dist.DeviceMesh) else comm.size
    if held != Comm.of(None).size or "tensor" in same.axes:
        raise ValueError(
            f"a mesh of {held} ranks, with other axes {list(same.axes)}: experts need all ranks, "
            'and cannot be cut over "tensor". Fix: a mesh (replicas, experts) of all ranks.'
        )
    for layer in layers:
        each, left = divmod(len(layer.bias), comm.world)
        if left or len(layer.experts) != len(layer.bias) or layer.router.weight.is_meta:
            raise ValueError(
                f"{len(layer.bias)} experts do not divide into {comm.world} parts, are cut "
                "already, or on the meta device. Fix: a number of ranks that divides the experts, "
                "and one call, on a module with values."
            )
    sums = [(n, p.double().sum().item()) for n, p in module.named_parameters() if ".experts." in n]
    comm.check_equal("the experts", [f"{name} of sum {total!r}" for name, total in sums])
    for layer in layers:
        each = len(layer.bias) // comm.world
        here = range(comm.rank * each, (comm.rank + 1) * each)
        layer.comm = comm
        if comm.world > 1:
            layer.experts = nn.ModuleDict({str(i): layer.experts[i] for i in here})
            for param in layer.experts.parameters():
                mark(param, experts=same)
    return module
