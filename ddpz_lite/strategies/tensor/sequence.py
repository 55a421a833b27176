"""Sequence parallelism: the layers between those that are cut, with 1 / t of the tokens each.

A norm or a dropout treats each token alone, so a rank may have some of them. But the parameters of
a norm see all tokens, so their gradients are summed over ranks.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4.2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.tensor.functions import Copy, Join, Split


class SequenceNorm(nn.LayerNorm):
    """A LayerNorm that sees some tokens, (..., T / t, C), whose gradients are those of all.

    joins: its output is all tokens, (..., T, C), for a layer that is the same on all ranks.
    """

    def __init__(self, norm: nn.LayerNorm, comm: Comm, joins: bool = False) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps = norm.normalized_shape, norm.eps
        self.elementwise_affine = norm.elementwise_affine
        self.weight, self.bias = norm.weight, norm.bias
        self.comm, self.joins = comm, joins

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = Copy.apply(torch.stack([self.weight, self.bias]), self.comm)  # one message
        x = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return Join.apply(x, self.comm) if self.joins else x


class SequenceDropout(nn.Dropout):
    """Where the sequence is cut, after the embedding: (..., T, C) to (..., T / t, C), dropped."""

    def __init__(self, p: float, comm: Comm) -> None:
        super().__init__(p)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Split.apply(x, self.comm))
