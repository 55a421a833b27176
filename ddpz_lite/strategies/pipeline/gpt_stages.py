"""The GPT of this package as the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor, nn

from ddpz_lite.model import GPT, with_places


class GPTStage(nn.Module):
    """Some blocks of a GPT; the first stage has the embeddings too, the last the norm and head.

    Parameters are those of the GPT, under the same names. With tied weights the last stage holds
    the token embedding as well, because its weight is the head's. After `context_parallel` a rank
    has T / N of the tokens of each stage.
    """

    def __init__(self, gpt: GPT, blocks: range) -> None:
        super().__init__()
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(gpt.blocks)
        if self.is_first or (self.is_last and gpt.config.tied):
            self.tokens = gpt.tokens
        if self.is_first:
            self.positions, self.drop, self.order = gpt.positions, gpt.drop, gpt.order
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        if self.is_last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) on the first stage, otherwise (B, T, C); logits (B, T, V) on the last."""
        if self.is_first:
            x, places = with_places(x, self.order)
            x = self.drop(self.tokens(x) + self.positions(places))  # (B, T, C)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def gpt_stages(gpt: GPT, stages: int | Sequence[int]) -> list[GPTStage]:
    """The GPT as a list of stages that share its modules.

    stages: how many, as even as possible, with more blocks on the first ones; or the number of
    blocks of each, because embeddings and head take time too. For an interleaved schedule there
    are ranks * chunks stages. Raises ValueError if a stage has no block.
    """
    count = len(gpt.blocks)
    if isinstance(stages, int):
        sizes = (
            [count // stages + (s < count % stages) for s in range(stages)] if stages > 0 else []
        )
    else:
        sizes = list(stages)
    if sum(sizes) != count or min(sizes, default=0) < 1:
        raise ValueError(
            f"{count} blocks cannot be split into stages of {sizes or stages} blocks. Fix: at "
            f"least one block for each stage, {count} together."
        )
    ends = list(accumulate(sizes, initial=0))
    return [GPTStage(gpt, range(start, stop)) for start, stop in pairwise(ends)]
