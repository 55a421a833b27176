"""What the tests of the training core share: models, batches, and one plain training loop.

A case is a model with its data. `reference` trains it in one process on the whole batch; `train`
runs the same loop on this rank's part. Both return the plain state dict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.model import CNN, GPT, MLP, GPTConfig
from ddpz_lite.strategies.parallelize import parallelize

PER_RANK = 2  # samples of one rank in one micro-batch


class Checkpointed(nn.Module):
    """A GPT whose blocks are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        g = self.gpt
        x = g.tokens(tokens) + g.positions(torch.arange(tokens.size(1)))
        for block in g.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return g.head(g.norm(x))


class Awkward(nn.Module):
    """Frozen, unused, and shared parameters, a list of lists, an output in a dict, inputs without
    gradients.

    `never` is used by no rank, `sometimes` by rank 0 only, `blocks[0].frozen` must not move though
    gradients flow through it, `blocks[1].tied` is `first.weight`, across two units, and each block
    passes on a tensor that the first one made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(_AwkwardBlock() for _ in range(3))
        self.blocks[1].tied = self.first.weight
        self.never = nn.Parameter(torch.randn(3, 3))
        self.sometimes = nn.Parameter(torch.randn(5))
        for block in self.blocks:
            block.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor, use: bool = False) -> dict[str, Tensor]:
        x, made = self.first(x), None
        for block in self.blocks:
            out = block(x, made)
            x, made = out["hidden"], out["made"]
        return {"out": x + self.sometimes if use else x}


class _AwkwardBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7)
        self.free = nn.Linear(7, 5)
        self.tied: nn.Parameter | None = None

    def forward(self, x: Tensor, made: Tensor | None) -> dict[str, Tensor]:
        h = torch.tanh(self.frozen(x))
        if made is None:
            made = self.free(h)
        h = self.free(h) * made
        return {"hidden": x + (h if self.tied is None else F.linear(h, self.tied)), "made": made}


def gpt(tied: bool = True, dropout: float = 0.0, layers: int = 2) -> GPT:
    return GPT(
        GPTConfig(
            vocab_size=19, context=6, layers=layers, heads=2, width=10, tied=tied, dropout=dropout
        )
    )


@dataclass(frozen=True)
class Case:
    """build: a model. inputs: (samples,) -> x, y. loss: what the model returns, y -> scalar."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    whole_batch: bool = True  # False: BatchNorm and dropout see one rank's samples at a time


def _tokens(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 19, (n, 6)), torch.randint(0, 19, (n, 6))


def _next(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


CASES = {
    "mlp": Case(
        lambda: MLP([7, 13, 5, 3]), lambda n: (torch.randn(n, 7), torch.randn(n, 3)), F.mse_loss
    ),
    "gpt": Case(gpt, _tokens, _next),
    "checkpointed": Case(Checkpointed, _tokens, _next),
    "dropout": Case(lambda: gpt(dropout=0.3), _tokens, _next, whole_batch=False),
    "cnn": Case(
        lambda: CNN(width=3, classes=4),
        lambda n: (torch.randn(n, 1, 6, 6), torch.randint(0, 4, (n,))),
        F.cross_entropy,
        whole_batch=False,
    ),
    "awkward": Case(
        Awkward,
        lambda n: (torch.randn(n, 5), torch.randn(n, 5)),
        lambda out, y: F.mse_loss(out["out"], y),
        whole_batch=False,
    ),
}


@dataclass(frozen=True)
class Recipe:
    """How to train: everything that is the same for the reference and for every stage."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    options: tuple[tuple[str, Any], ...] = (("lr", 0.1), ("momentum", 0.9), ("weight_decay", 0.1))
    steps: int = 3
    micro_batches: int = 1
    no_sync: bool = False
    clip: float | None = None
    norm_type: float = 2.0
    # False, or which groups, under a schedule. True: biases without weight decay and slower
    grouped: bool | Callable[[nn.Module], list[dict[str, Any]]] = False
    set_to_none: bool = True


def groups(module: nn.Module) -> list[dict[str, Any]]:
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in module.parameters():
        if param.requires_grad:
            parts[param.ndim > 1].append(param)
    return [
        {"params": parts[True], "weight_decay": 0.2},
        {"params": parts[False], "lr": 0.03, "weight_decay": 0.0},
    ]


def groups_of(recipe: Recipe) -> Callable[[nn.Module], Any]:
    if callable(recipe.grouped):
        return recipe.grouped
    return groups if recipe.grouped else lambda m: [p for p in m.parameters() if p.requires_grad]


def batches(case: Case, recipe: Recipe, world: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    return [case.inputs(PER_RANK * world) for _ in range(recipe.steps * recipe.micro_batches)]


def forward(model: nn.Module, case: Case, x: Tensor, y: Tensor, rank: int) -> Tensor:
    torch.manual_seed(100 + rank)  # dropout differs from rank to rank
    more = {"use": rank == 0} if case is CASES["awkward"] else {}
    return case.loss(model(x, **more), y)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], Any],
    recipe: Recipe,
    losses: Callable[[int], Iterable[Tensor]],
    no_sync: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    """The plain loop; `losses(i)` gives the terms of micro-batch i, each with its own backward."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if recipe.grouped else None
    getattr(optimizer, "train", int)()  # schedule-free ones have two modes
    for step in range(recipe.steps):
        for micro in range(recipe.micro_batches):
            last = micro == recipe.micro_batches - 1
            with no_sync() if recipe.no_sync and not last else contextlib.nullcontext():
                for loss in losses(step * recipe.micro_batches + micro):
                    (loss / recipe.micro_batches).backward()
        if recipe.clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        if scheduler is not None:
            scheduler.step()


def build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.build()


def reference(
    case: Case,
    recipe: Recipe,
    world: int,
    clip_by: Callable[[nn.Module], Any] | None = None,
) -> dict[str, Tensor]:
    """One process. On the whole batch, or rank by rank where a sample's neighbours matter."""
    model, data = build(case), batches(case, recipe, world)
    params = groups_of(recipe)(model)
    optimizer = recipe.optimizer(params, **dict(recipe.options))
    buffers = [b.clone() for b in model.buffers()]

    def losses(index: int) -> Iterator[Tensor]:
        x, y = data[index]
        if case.whole_batch:
            yield forward(model, case, x, y, 0)
            return
        for rank in reversed(range(world)):  # rank 0 last: its buffers stay
            for buffer, start in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(start)
            yield forward(model, case, x[rank::world], y[rank::world], rank) / world
        buffers[:] = [b.clone() for b in model.buffers()]

    def clip() -> None:
        if clip_by is not None:
            clip_by(model)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type)

    loop(model, optimizer, clip, recipe, losses)
    return {name: value.clone() for name, value in model.state_dict().items()}


def rank_losses(model: nn.Module, case: Case, recipe: Recipe) -> Callable[[int], list[Tensor]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    data = batches(case, recipe, world)

    def losses(index: int) -> list[Tensor]:
        x, y = data[index]
        return [forward(model, case, x[rank::world], y[rank::world], rank)]

    return losses


def train(
    case: Case, recipe: Recipe, stage: int, **options: Any
) -> tuple[dict[str, Tensor], Any, Any]:
    """The same loop on this rank; returns the full state, the model and the optimizer."""
    model, optimizer = parallelize(
        build(case),
        recipe.optimizer,
        stage,
        param_groups=groups_of(recipe),
        **{"bucket_mb": 0.001, **options},
        **dict(recipe.options),
    )

    def clip() -> None:
        optimizer.clip_grad_norm_(recipe.clip, recipe.norm_type)

    loop(model, optimizer, clip, recipe, rank_losses(model, case, recipe), model.no_sync)
    return full_state_dict(model), model, optimizer


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference, relative to the tensor's own size; inf where names or shapes differ.

    Batch statistics are compared on rank 0 only: it sends its own before each forward, so the
    others' have seen one batch of theirs since.
    """
    if a.keys() != b.keys() or any(a[n].shape != b[n].shape for n in a):
        return float("inf")
    names = [n for n in a if dist.get_rank() == 0 or "running" not in n]
    gaps = [(a[n].double() - b[n].double()).abs().max() for n in names]
    sizes = [b[n].double().abs().max().clamp(min=1) for n in names]
    return max(gap / size for gap, size in zip(gaps, sizes, strict=True)).item()


def raised(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of what fn raises; empty if nothing."""
    try:
        fn(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""
