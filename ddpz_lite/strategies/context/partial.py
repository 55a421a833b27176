"""Attention to some of the keys, and how two such results become one.

A query's output is sum_j e^s_j v_j / sum_j e^s_j over all keys j, with scores s. Over a part of the
keys it is the same with a smaller sum, whose logarithm is kept next to it: `lse`. Two parts then
are one, without their scores:

    lse = log(e^lse1 + e^lse2)      out = out1 e^(lse1 - lse) + out2 e^(lse2 - lse)

No exponent is above 0, whatever the size of the scores. Backward needs no more: the probability of
a key is e^(s - lse), with the lse over *all* keys, so each part computes its own.

Everything is in fp32 or wider, in plain torch: it runs on any device. On the CPU it takes about
twice the time of torch's fused attention, which does not give lse away. Queries go in tiles, so
that no score matrix of a whole part is held.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Rabe and Staats,
"Self-attention Does Not Need O(n²) Memory", 2021; Dao et al., "FlashAttention", 2022, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 256  # queries at a time


def attend(q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
    """Queries (B, H, Tq, D) over keys and values (B, H, Tk, D): out (B, H, Tq, D), lse (B, H, Tq).

    masked: query i sees keys 0 to i; then Tq = Tk.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for rows, seen, scores in _tiles(q, k, masked):
        lse[:, :, rows] = torch.logsumexp(scores, -1)
        out[:, :, rows] = scores.sub_(lse[:, :, rows, None]).exp_() @ v[:, :, seen]
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, masked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that come of these keys.

    grad: of the final output; lse (B, H, Tq): over all keys; delta (B, H, Tq): grad times output,
    summed over D.
    """
    of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen, scores in _tiles(q, k, masked):
        chances = scores.sub_(lse[:, :, rows, None]).exp_()  # (B, H, rows, seen)
        of_v[:, :, seen] += chances.transpose(-1, -2) @ grad[:, :, rows]
        of_scores = grad[:, :, rows] @ v[:, :, seen].transpose(-1, -2)
        of_scores.sub_(delta[:, :, rows, None]).mul_(chances).mul_(q.shape[-1] ** -0.5)
        of_q[:, :, rows] = of_scores @ k[:, :, seen]
        of_k[:, :, seen] += of_scores.transpose(-1, -2) @ q[:, :, rows]
    return of_q, of_k, of_v


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make (out, lse) the result over its own keys and the other's, in place.

    A row that has seen no key yet has out 0 and lse -inf; at least one of the two has seen one.
    """
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_()[..., None])
    out.add_(other * (other_lse - both).exp_()[..., None])
    lse.copy_(both)


def _tiles(q: Tensor, k: Tensor, masked: bool) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows of q, keys they see, their scores (B, H, rows, seen)), the scores to be overwritten."""
    scale = q.shape[-1] ** -0.5
    for start in range(0, q.shape[2], TILE):
        rows = slice(start, min(start + TILE, q.shape[2]))
        seen = slice(0, rows.stop if masked else k.shape[2])
        scores = (q[:, :, rows] * scale) @ k[:, :, seen].transpose(-1, -2)
        if masked:  # the keys of the tile itself; those before it are all seen
            size = rows.stop - rows.start
            later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
            scores[..., rows].masked_fill_(later, -torch.inf)
        yield rows, seen, scores
