"""The models the course trains: a small GPT, an MLP and a CNN with BatchNorm.

Every lesson measures the same models. The GPT is a list of equal blocks, `model.blocks`, because
ZeRO-3 gathers and frees one block at a time. All three draw their weights from torch's global
generator, so `torch.manual_seed(0)` before building fixes them.

Dimensions in shape comments: B batch, T tokens in a window, C width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The size of a GPT. The default has 0.88 M parameters and reads bytes.

    vocab_size: number of tokens (256: one per byte). context: longest window, in tokens. layers,
    heads, width: the stack. dropout: probability, after attention, after the MLP and after the
    embedding. tied: the output layer uses the token embedding's weight (Press and Wolf 2017).
    Raises ValueError for an impossible size.
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width"):
            _positive(f"GPTConfig: {name}", getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig: width {self.width} does not divide into {self.heads} heads. "
                f"Fix: use a multiple of heads, for example {self._next_width()}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig: dropout must lie in [0, 1), got {self.dropout}.")

    def _next_width(self) -> int:
        return self.heads * (self.width // self.heads + 1)


class Attention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # each (B, T, C)
        # three times (B, H, T, C // H)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v)  # (B, H, T, C // H)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, T, C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All tokens are here. `context_parallel` replaces this: there a rank has some of them."""
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Block(nn.Module):
    """Attention, then an MLP four times as wide; each adds to the residual stream (pre-norm)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))  # (B, T, C)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))  # (B, T, C)


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al. 2019): tokens (B, T) in, logits (B, T, V) out.

    Works on the meta device: build it under `torch.device("meta")`, call `to_empty(device=...)`,
    then `reset_parameters()`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.order: Any = None  # of `context_parallel`: which tokens of a window this rank has
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights again from torch's global generator.

        Normal with deviation 0.02; biases 0, norms 1. The two layers of each block that write to
        the residual stream start smaller, by 1/sqrt(2 * layers), so that its variance does not
        grow with depth (Radford et al. 2019, section 2.3).

        [Note: tied] `to_empty` gives each module its own tensor, so tied weights become untied and
        are tied again here.
        """
        if self.config.tied:
            self.head.weight = self.tokens.weight
        small = 0.02 / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                if self.config.tied and module is self.head:
                    continue
                writes_to_stream = name.endswith((".attention.out", ".down"))
                module.weight.normal_(0.0, small if writes_to_stream else 0.02)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T) integers below vocab_size, T <= context. Returns logits (B, T, V).

        After `context_parallel` they are those of this rank's tokens, (B, T / N, V).
        """
        self._check(tokens)
        tokens, places = with_places(tokens, self.order)
        x = self.drop(self.tokens(tokens) + self.positions(places))  # (B, T, C)
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        return self.head(self.norm(x))  # (B, T, V)

    def _check(self, tokens: Tensor) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"GPT expects integer tokens of shape (batch, time), got {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}. Fix: for one sequence, add a dimension: tokens[None]."
            )
        if tokens.size(1) > self.config.context:
            raise ValueError(
                f"GPT: a window of {tokens.size(1)} tokens does not fit the context of "
                f"{self.config.context}. Fix: cut the window, or build the model with "
                f"GPTConfig(context={tokens.size(1)})."
            )

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue tokens (B, T >= 1) by `count` sampled tokens; returns (B, T + count).

        temperature divides the logits; 0 takes the most likely token each time. top_k samples among
        the k most likely. The model sees at most the last `context` tokens. Dropout is off.
        """
        _check_generate(tokens, count, temperature, top_k, self.config.vocab_size)
        with _evaluating(self):
            for _ in range(count):
                window = tokens[:, -self.config.context :]
                logits = _of_all(self(window), window)[:, -1]  # (B, V)
                following = _sample(logits, temperature, top_k, generator)  # (B, 1)
                tokens = torch.cat([tokens, following], dim=1)  # (B, T + 1)
        return tokens

    def num_params(self) -> int:
        """Elements in all parameters; a tied weight counts once."""
        return num_params(self)

    def flops_per_token(self) -> int:
        """Floating-point operations per token of a training step with windows of full context.

        6 for each weight that a token is multiplied with (2 forward, 4 backward), plus attention's
        12 * layers * width * context: Chowdhery et al. 2022 (PaLM), appendix B. Embedding look-ups
        multiply nothing and count as 0, as do recomputed activations. The half that a causal mask
        could save is counted, as in the paper.
        """
        c = self.config
        # of a block 12 width²: qkv 3, out 1, up 4, down 4; then the head
        weights = 12 * c.layers * c.width**2 + c.vocab_size * c.width
        return 6 * weights + 12 * c.layers * c.width * c.context


def with_places(tokens: Tensor, order: Any) -> tuple[Tensor, Tensor]:
    """Tokens (B, T) and their positions (T,); with the `order` of a rank, its own (T / N) of both.

    A rank that counted its tokens from 0 would give those of every rank the same positions.
    """
    places = torch.arange(tokens.size(1), device=tokens.device)  # (T,)
    return (tokens, places) if order is None else (order.of(tokens), order.of(places, dim=0))


def next_token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits (B, T, V) against targets (B, T), in nats per token.

    reduction: "mean", or "sum" for total nats. Ranks with unequal token counts need the sum: the
    mean of their means weighs tokens unequally. A function and not a method, so that it works
    on the output of a wrapped model. Raises ValueError if the shapes do not match.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"next_token_loss: logits {tuple(logits.shape)} need targets "
            f"{tuple(logits.shape[:-1])}, got {tuple(targets.shape)}. Fix: pass the two tensors of "
            "one corpus.batch()."
        )
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


class MLP(nn.Module):
    """Linear layers with ReLU between them: x (..., sizes[0]) to (..., sizes[-1]).

    Any sizes, odd ones too. The layers are in `model.blocks`, one unit per Linear and its ReLU.
    """

    def __init__(self, sizes: Sequence[int], bias: bool = True) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(
                f"MLP: sizes needs an input and an output width, got {list(sizes)}. "
                "Fix: for example [64, 32, 10]."
            )
        for size in sizes:
            _positive("MLP: each size", size)
        units = [nn.Sequential(nn.Linear(a, b, bias=bias), nn.ReLU()) for a, b in pairwise(sizes)]
        units[-1] = nn.Sequential(units[-1][0])
        self.blocks = nn.ModuleList(units)

    def reset_parameters(self) -> None:
        """Draw all weights again, layer by layer, as a new model would."""
        _reset_children(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)  # (..., sizes[i + 1])
        return x

    def num_params(self) -> int:
        """Elements in all parameters."""
        return num_params(self)


class CNN(nn.Module):
    """Two convolutions with BatchNorm and a linear layer: (B, channels, S, S) to (B, classes).

    The mean over the image comes between, so any S >= 4 fits, 8x8 and 28x28 digits alike. BatchNorm
    makes it the model for lessons about buffers and batch statistics, which ranks do not share by
    default.
    """

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("classes", classes), ("width", width)):
            _positive(f"CNN: {name}", value)
        self.channels = channels
        self.blocks = nn.ModuleList([_conv_unit(channels, width), _conv_unit(width, 2 * width)])
        self.head = nn.Linear(2 * width, classes)

    def reset_parameters(self) -> None:
        """Draw all weights again and set the batch statistics back to their start."""
        _reset_children(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.size(1) != self.channels or min(x.shape[2:]) < 4:
            raise ValueError(
                f"CNN expects images of shape (batch, {self.channels}, height, width), both at "
                f"least 4, got {tuple(x.shape)}. Fix: for a batch of grey images, x[:, None]."
            )
        for block in self.blocks:
            x = block(x)  # (B, width, S / 2, S / 2), then (B, 2 * width, S / 4, S / 4)
        return self.head(x.mean(dim=(2, 3)))  # (B, classes)

    def num_params(self) -> int:
        """Elements in all parameters."""
        return num_params(self)


def num_params(model: nn.Module) -> int:
    """Elements in all parameters of a model; a parameter that appears twice counts once."""
    return sum(p.numel() for p in model.parameters())


def _conv_unit(channels: int, width: int) -> nn.Sequential:
    # no bias: BatchNorm has one
    convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))


def _reset_children(model: nn.Module) -> None:
    for module in model.modules():
        if module is not model and hasattr(module, "reset_parameters"):
            module.reset_parameters()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode, and afterwards each of its modules back to the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)  # (B, 1)
    if top_k is not None:
        least = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, float("-inf"))  # (B, V)
    probabilities = torch.softmax(logits / temperature, dim=-1)  # (B, V)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)  # (B, 1)


def _of_all(logits: Tensor, tokens: Tensor) -> Tensor:
    if logits.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"generate: the model returned logits of {logits.shape[1]} of {tokens.shape[1]} tokens,"
            " since it is cut along its context. Fix: generate with a plain GPT that has loaded "
            "full_state_dict(model)."
        )
    return logits


def _check_generate(
    tokens: Tensor, count: int, temperature: float, top_k: int | None, vocab: int
) -> None:
    if tokens.dim() != 2 or tokens.size(1) == 0:
        raise ValueError(
            f"generate: the prompt must be (batch, time >= 1), got shape {tuple(tokens.shape)}."
        )
    if count < 0 or temperature < 0:
        raise ValueError(
            f"generate: count {count} and temperature {temperature} must not be negative."
        )
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ValueError(f"generate: top_k must lie in 1..{vocab}, got {top_k}.")


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
