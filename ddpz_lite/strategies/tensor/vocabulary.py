"""The vocabulary cut over ranks: embedding, and cross-entropy without gathering the logits.

Each rank has V / t rows of the embedding (V, C), and of the head. It looks up the tokens of its
rows and takes zeros for the others; the sum over ranks is the embedding. Of the logits it has
(B, T, V / t). The loss of a token, log(sum of exp) minus its target's logit, is put together from
three numbers of each rank, so B T numbers are sent three times in place of B T V.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, "input embedding" and "output embedding".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.mesh import Cut
from ddpz_lite.strategies.tensor.functions import Add

IGNORED = -100  # a target that counts nothing, as in torch's cross_entropy


class VocabularyEmbedding(nn.Embedding):
    """Rows V / t of an embedding on each rank: tokens (...) to their vectors (..., C) on all.

    `cuts` says how the weight is cut. The ranks must divide V.
    """

    def __init__(self, embedding: nn.Embedding, comm: Comm) -> None:
        nn.Module.__init__(self)
        cut = Cut(tuple(embedding.weight.shape), 1, comm.world, comm.rank)
        self.comm, self.cuts = comm, {"weight": cut}
        self.num_embeddings, self.embedding_dim = cut.shape[0] // comm.world, cut.shape[1]
        local = cut.of(embedding.weight.detach(), (self.num_embeddings, self.embedding_dim))
        self.weight = nn.Parameter(local, embedding.weight.requires_grad)
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False

    def forward(self, tokens: Tensor) -> Tensor:
        local, here = _local(tokens, self.num_embeddings, self.comm)
        vectors = F.embedding(local, self.weight) * here[..., None]  # (..., C), zero elsewhere
        return Add.apply(vectors, self.comm)


def vocabulary_loss(
    logits: Tensor,
    targets: Tensor,
    group: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of logits (..., V / t), of this rank's tokens, against targets (...): () nats.

    targets are tokens below V, the same on all ranks; -100 counts nothing. reduction: "mean" over
    the targets that count, or "sum". Every rank of `group`, a process group or 1-D mesh, must call
    it, and gets the same. Raises ValueError for shapes that do not belong together.
    """
    if logits.shape[:-1] != targets.shape or reduction not in ("mean", "sum"):
        raise ValueError(
            f"vocabulary_loss: logits {tuple(logits.shape)} need targets "
            f"{tuple(logits.shape[:-1])}, got {tuple(targets.shape)}; reduction is mean or sum, "
            f"got {reduction!r}."
        )
    total = _CrossEntropy.apply(logits, targets, Comm.of(group)).sum()
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


class _CrossEntropy(torch.autograd.Function):
    """logits (..., V / t), targets (...) to the loss of each token (...)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: Comm) -> Tensor:
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        local, here = _local(targets, logits.shape[-1], comm)
        largest = comm.reduce_scalar(logits.amax(-1), maximum=True)  # (...)
        logits = logits - largest[..., None]
        chances = logits.exp()  # (..., V / t), before they are divided
        own = torch.stack(
            [
                chances.sum(-1),
                logits.gather(-1, local[..., None]).squeeze(-1) * here,
            ]
        )  # (2, ...)
        total, chosen = comm.all_reduce(own).wait()
        counts = targets != IGNORED
        ctx.save_for_backward(chances.div_(total[..., None]), local, here, counts)
        return (total.log() - chosen) * counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        chances, local, here, counts = ctx.saved_tensors
        hot = here.to(chances.dtype)[..., None]
        of_logits = chances.scatter_add(-1, local[..., None], -hot)  # softmax minus one-hot
        return of_logits * (grad * counts)[..., None], None, None


def _local(tokens: Tensor, rows: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """Tokens as rows of this rank, 0 where they are not its; and where they are."""
    local = tokens - comm.rank * rows
    here = (local >= 0) & (local < rows)
    return local * here, here
