"""What a run tells: lines on rank 0, losses for the caller; if asked, scalars and a profile."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ..data import Corpus
from ..strategies.comm import Comm
from ..strategies.optim import ShardedOptimizer
from .recipe import PROFILED, UNPROFILED, Recipe
from .saving import TrainingError


@dataclass
class Log:
    """The report of one run on this rank.

    A loss stays where it was computed, in `pending`, until someone wants to know: asking a GPU for
    a number makes the host wait.
    """

    recipe: Recipe
    comm: Comm
    losses: list[float] = field(default_factory=list)  # nats per token over all ranks, by step
    validation: dict[int, float] = field(default_factory=dict)  # by step
    pending: list[Tensor] = field(default_factory=list)  # (), this rank's part of a step's loss

    def say(self, words: str) -> None:
        """A line from rank 0, above its bar if it has one."""
        if self.comm.rank == 0:
            tqdm.write(words)
            sys.stdout.flush()

    def begin(self, text: Corpus, params: int, device: torch.device) -> None:
        """What is trained on what."""
        recipe, world = self.recipe, self.comm.world
        strategy = f"ZeRO-{recipe.stage}" if recipe.stage else "DDP"
        backend = f" over {dist.get_backend()}" if dist.is_initialized() else ""
        tokens = recipe.accumulate * recipe.batch * recipe.context * world
        rest = len(text) - text.train_length
        self.say(f"{text.name}: {text.train_length:,} bytes to train, {rest:,} to validate")
        self.say(
            f"GPT of {params / 1e6:.2f} M parameters, {strategy} on {world} rank{'s' * (world > 1)}"
            f"{backend} ({device.type}), {recipe.precision}, {tokens:,} tokens a step"
        )

    def start(self, first: int) -> None:
        """The loop begins, with `first` updates done before."""
        self.since, self.at = first, time.perf_counter()
        self.writer = None
        if self.recipe.tensorboard and self.comm.rank == 0:
            self.writer = summary_writer()(self.recipe.tensorboard, purge_step=first + 1)
        self.profiler = None
        if self.recipe.profile and self.recipe.steps - first > UNPROFILED:
            self.profiler = profiler(self.recipe.profile, self.comm.rank)
            self.profiler.start()

    def add(self, loss: Tensor) -> None:
        """A step is done."""
        self.pending.append(loss)
        if self.profiler:
            self.profiler.step()

    def collect(self, step: int) -> None:
        """Add up the ranks' parts of pending losses, in the order of ranks; all ranks call it.

        Raises TrainingError if the last loss is not finite.
        """
        if not self.pending:
            return
        parts = self.comm.gather_objects(torch.stack(self.pending).tolist())  # by rank, by step
        self.losses += [sum(of_step) for of_step in zip(*parts, strict=True)]
        self.pending.clear()
        if not math.isfinite(self.losses[-1]):
            raise TrainingError(
                f"the loss at step {step} is {self.losses[-1]}: training has diverged. "
                "Cure: a lower --lr, a longer --warmup, or --clip 1."
            )

    def report(self, step: int, optimizer: ShardedOptimizer, norm: Tensor | None) -> None:
        """One line, and the same numbers as scalars."""
        self.collect(step)
        now, recipe = time.perf_counter(), self.recipe
        windows = (step - self.since) * recipe.accumulate * recipe.batch * self.comm.world
        numbers: dict[str, Any] = {"loss": self.losses[-1], "lr": optimizer.param_groups[0]["lr"]}
        if norm is not None:
            numbers["norm"] = norm.item()
        if (scale := optimizer.loss_scale) is not None:
            numbers |= {"scale": scale.scale, "skipped": scale.skipped}
        words = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        speed = windows * recipe.context / (now - self.at)
        self.say(f"step {step}/{recipe.steps}  {words}  {speed:,.0f} tokens/s")
        self._scalars(step, **numbers, tokens_per_second=speed)
        self.since, self.at = step, now

    def validated(self, step: int, loss: float) -> None:
        self.validation[step] = loss
        self.say(f"step {step}/{self.recipe.steps}  validation {loss:.4f}")
        self._scalars(step, validation=loss)

    def _scalars(self, step: int, **numbers: float) -> None:
        for name, value in numbers.items() if self.writer else ():
            self.writer.add_scalar(name, value, step)

    def end(self, sample: str) -> None:
        if self.profiler:
            self.profiler.stop()
        if sample:
            self.say(f"--- sample\n{sample}")
        if self.writer:
            self.writer.close()


def profiler(folder: str, rank: int) -> torch.profiler.profile:
    """Records a few steps of this rank; the file's name is one that TensorBoard's plugin reads."""
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=UNPROFILED, active=PROFILED, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(folder, f"rank{rank}"),
    )


def summary_writer() -> type:
    """TensorBoard's writer. Raises ModuleNotFoundError with the cure if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            "--tensorboard needs the package tensorboard. Cure: pip install tensorboard"
        ) from error
    return SummaryWriter
