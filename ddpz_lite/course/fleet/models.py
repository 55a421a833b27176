"""Models as a planner sees them: shapes, parameters, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    kv_heads: heads of keys and values, 0 for as many as heads. ffn: width of a feed-forward layer
    or of an expert. gpt: a block as in GPT-3, with GELU between two matrices, biases, dropout and
    learned positions; otherwise as in Llama, with SwiGLU's three matrices. tied: one matrix for
    embedding and output. experts: in a layer, 0 for a dense model; each token uses top_k of them,
    on `spread` nodes at most, and all `shared` ones. dense: the first layers without experts, and
    their ffn. attention: its parameters in a layer, 0 for the usual four matrices. head: elements
    of a head, 0 for width / heads.
    """

    name: str
    layers: int
    width: int
    heads: int
    ffn: int
    vocabulary: int
    seq: int
    kv_heads: int = 0
    gpt: bool = False
    tied: bool = False
    experts: int = 0
    top_k: int = 1
    shared: int = 0
    spread: int = 0
    dense: tuple[int, int] = (0, 0)
    attention: int = 0
    head: float = 0

    @property
    def queries(self) -> float:
        """Elements of the queries of a token, in all heads."""
        return self.heads * self.head or self.width

    @property
    def keys(self) -> float:
        """Elements of the keys of a token, and as many of its values."""
        return self.queries * (self.kv_heads or self.heads) / self.heads

    @property
    def attention_parameters(self) -> float:
        return self.attention or self.width * (2 * self.queries + 2 * self.keys)

    @property
    def expert(self) -> int:
        """Parameters of one expert, or of the only feed-forward layer."""
        return (2 if self.gpt else 3) * self.width * self.ffn

    @property
    def used(self) -> int:
        """Feed-forward layers that a token passes in a block."""
        return self.top_k + self.shared if self.experts else 1

    def _feed_forward(self, number: int) -> float:
        """Parameters of all layers with `number` experts in each."""
        first, ffn = self.dense
        return first * self.expert * ffn / self.ffn + (self.layers - first) * number * self.expert

    @property
    def routed(self) -> float:
        """Parameters of all experts but the shared ones: those that expert parallelism divides."""
        return (self.layers - self.dense[0]) * self.experts * self.expert

    @property
    def parameters(self) -> float:
        """All of them; in a Llama without the weights of norms, which are less than 0.1%."""
        rows = (1 if self.tied else 2) * self.vocabulary
        if self.gpt:  # positions, biases and norms: 13 vectors a layer, and the last norm's two
            rows += self.seq + 13 * self.layers + 2
        held = self.experts + self.shared if self.experts else 1
        blocks = self.layers * self.attention_parameters + self._feed_forward(held)
        return blocks + rows * self.width

    @property
    def active(self) -> float:
        """Parameters that multiply a token: the embedding is only looked up."""
        blocks = self.layers * self.attention_parameters + self._feed_forward(self.used)
        return blocks + self.vocabulary * self.width

    def flops(self, batch: int) -> float:
        """Model FLOPs of a step: 6 a parameter and token, and the full square of attention.

        Chowdhery et al. 2022, appendix B; for a GPT equal to Korthikanti et al. 2022, equation 7.
        """
        return batch * self.seq * (6 * self.active + 12 * self.layers * self.queries * self.seq)


def gpt(name: str, layers: int, width: int, heads: int, vocabulary: int = 51_200) -> Model:
    """A GPT of Megatron-LM's papers: windows of 2,048 tokens, learned positions, tied tables."""
    return Model(name, layers, width, heads, 4 * width, vocabulary, 2048, gpt=True, tied=True)


# Llama Team 2024, table 3.
LLAMA_70B = Model("Llama 3 70B", 80, 8192, 64, 28_672, 128_256, 8192, kv_heads=8)
LLAMA_405B = Model("Llama 3 405B", 126, 16_384, 128, 53_248, 128_256, 8192, kv_heads=8)

# DeepSeek-AI 2024, section 4.2: latent attention with 7,168 x (1,536 + 576) + 1,536 x 24,576 +
# 512 x 32,768 + 16,384 x 7,168 parameters; heads of 192 elements for scores and 128 for values.
DEEPSEEK_V3 = Model(
    "DeepSeek-V3",
    layers=61,
    width=7168,
    heads=128,
    ffn=2048,
    vocabulary=129_280,
    seq=4096,
    experts=256,
    top_k=8,
    shared=1,
    spread=4,
    dense=(3, 18_432),
    attention=7168 * (1536 + 576) + 1536 * 24_576 + 512 * 32_768 + 16_384 * 7168,
    head=160,
)
