"""The reports of a run: lines on rank 0, losses for the caller; optional scalars and a profile."""

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

from ddpz_lite.data import Corpus
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.trainer.recipe import PROFILED, UNPROFILED, Recipe
from ddpz_lite.trainer.saving import TrainingError


@dataclass
class Log:
    """The report of one run on this rank.

    Losses stay on their device, in `pending`, until they are reported, because reading a number
    from a GPU makes the host wait.
    """

    recipe: Recipe
    comm: Comm
    readers: int  # ranks that read different windows
    losses: list[float] = field(default_factory=list)  # nats per token over all ranks, by step
    validation: dict[int, float] = field(default_factory=dict)  # by step
    pending: list[Tensor] = field(default_factory=list)  # (), this rank's part of a step's loss

    def say(self, text: str) -> None:
        """A line from rank 0, above its bar if it has one."""
        if self.comm.rank == 0:
            tqdm.write(text)
            sys.stdout.flush()

    def begin(self, text: Corpus, params: int, device: torch.device) -> None:
        """Print what is trained on what."""
        recipe, world = self.recipe, self.comm.world
        strategy = f"ZeRO-{recipe.stage}" if recipe.stage else "DDP"
        backend = f" over {dist.get_backend()}" if dist.is_initialized() else ""
        strategy += f", mesh {recipe.mesh}" if recipe.mesh else ""
        rest = len(text) - text.train_length
        self.say(f"{text.name}: {text.train_length:,} bytes to train, {rest:,} to validate")
        self.say(
            f"GPT of {params / 1e6:.2f} M parameters, {strategy} on {world} rank{'s' * (world > 1)}"
            f"{backend} ({device.type}), {recipe.precision}, {self.tokens:,} tokens a step"
        )

    @property
    def tokens(self) -> int:
        """Tokens of all ranks in one update."""
        return self.recipe.accumulate * self.recipe.batch * self.recipe.context * self.readers

    def start(self, first: int) -> None:
        """The loop begins after `first` updates."""
        self.first = self.since = first
        self.at, self.writer, self.profiler = time.perf_counter(), None, None
        self._open(first)
        if self.recipe.profile and self.recipe.steps - first > UNPROFILED:
            self.profiler = profiler(self.recipe.profile, self.comm.rank)
            self.profiler.start()

    def _open(self, done: int) -> None:
        """Scalars are written on the rank that is 0 now."""
        if self.recipe.tensorboard and self.comm.rank == 0 and self.writer is None:
            self.writer = summary_writer()(self.recipe.tensorboard, purge_step=done + 1)

    def continue_with(self, comm: Comm, done: int) -> None:
        """Continue after a death with the ranks of `comm` and `done` updates; all of them call it.

        One rank may have a loss that another lacks, and the loss of a step that is repeated.
        """
        self.comm, self.readers = comm, comm.world
        known = comm.gather_objects((self.losses, self.validation))
        self.losses = max((losses for losses, _ in known), key=len)[: done - self.first]
        self.validation = max((validation for _, validation in known), key=len)
        self.pending.clear()
        self._open(done)
        self.say(
            f"step {done}/{self.recipe.steps}  {comm.world} rank{'s' * (comm.world > 1)} left to "
            f"continue, with {self.tokens:,} tokens a step"
        )

    def add(self, step: int, loss: Tensor) -> None:
        """This rank's part of a step's loss, before its update.

        If ranks may die it is summed at once, so that the part of a dead rank is not lost.
        """
        self.pending.append(loss)
        if self.recipe.survive:
            self.collect(step)

    def done(self) -> None:
        """A step is done."""
        if self.profiler:
            self.profiler.step()

    def collect(self, step: int) -> None:
        """Sum the ranks' parts of pending losses, in the order of ranks; all ranks call it.

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
                "Fix: use a lower --lr, a longer --warmup, or --clip 1."
            )

    def report(self, step: int, optimizer: ShardedOptimizer, norm: Tensor | None) -> None:
        """One line, and the same numbers as scalars."""
        if step == self.since:
            return  # printed before a rank was lost
        self.collect(step)
        now, recipe = time.perf_counter(), self.recipe
        numbers: dict[str, Any] = {"loss": self.losses[-1], "lr": optimizer.param_groups[0]["lr"]}
        if norm is not None:
            numbers["norm"] = norm.item()
        if (scale := optimizer.loss_scale) is not None:
            numbers |= {"scale": scale.scale, "skipped": scale.skipped}
        words = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        speed = (step - self.since) * self.tokens / (now - self.at)
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
    """TensorBoard's writer. Raises ModuleNotFoundError with a fix if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            "--tensorboard needs the package tensorboard. Fix: pip install tensorboard"
        ) from error
    return SummaryWriter
