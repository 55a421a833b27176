"""A run's checkpoints: the last two saves are kept, and a resume takes the newest good one.

folder/step-00000100/    what `save_checkpoint` writes; complete once it has a file CURRENT
folder/step-00000200/
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ddpz_lite.checkpoint.background import Saving, save_in_background
from ddpz_lite.checkpoint.save_load import load_checkpoint, save_checkpoint
from ddpz_lite.data import Corpus
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.trainer.batches import Batches
from ddpz_lite.trainer.recipe import AUTO, Recipe
from ddpz_lite.trainer.save_interval import best_interval

HOUR = 3600.0  # seconds
FIRST = 10  # steps until the first save of `--save-every auto`, which measures step and save
KEPT = 2  # the newest, and one more in case the newest is damaged


class TrainingError(RuntimeError):
    """An error that stops a run on all ranks, and that its user can fix."""


def complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in a folder, newest first."""
    found = (mark.parent for mark in Path(folder).glob("step-[0-9]*/CURRENT"))
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)


@dataclass
class Saver:
    """Writes and reads the checkpoints of a run; every rank calls the same methods.

    At most one checkpoint is written in the background, so there is at most one copy of the state;
    the next save waits for it, and so does the end of a `with` block.
    """

    recipe: Recipe
    text: Corpus
    model: nn.Module
    optimizer: ShardedOptimizer
    batches: Batches

    def __post_init__(self) -> None:
        self.fingerprint = hashlib.sha256(self.text.tokens.numpy()).hexdigest()
        self._writing: tuple[Saving, Path] | None = None  # in the background, and its folder
        self.measure_from(0)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, TrainingError):  # otherwise this rank may be alone
            self._finish()

    def due(self, step: int) -> bool:
        """Whether to save after this step; the same on all ranks."""
        every = self.recipe.save_every
        return step >= self._next if every == AUTO else step % every == 0

    def measure_from(self, step: int) -> None:
        """Measure steps from here on, for `--save-every auto`; all ranks call it."""
        self._since, self._next = (step, time.perf_counter()), step + FIRST

    def save(self, step: int, say: Callable[[str], None] = print) -> None:
        """Save after a step; with `--save-every auto` print when the next save is due."""
        begun = time.perf_counter()
        self._write(step)
        if self.recipe.save_every == AUTO:
            cost = time.perf_counter() - begun
            done, since = self._since
            each = (begun - since) / max(1, step - done)  # seconds
            wanted = best_interval(cost, HOUR * self.recipe.failure_hours)
            steps = Comm().gather_objects(max(1, round(wanted / each)))[0]
            self.measure_from(step)
            self._next = step + steps
            say(f"saved step {step} in {cost:.2g} s; the next save is due in {steps} steps")

    def _write(self, step: int) -> None:
        """Write folder/step-<step>, or begin to, if it is written in the background."""
        extra = {"step": step, "text": self.fingerprint, "sampler": self.batches.state_dict()}
        this = Path(self.recipe.checkpoint, f"step-{step:08d}")
        if self.recipe.save_in_background:
            self._finish()
            self._writing = save_in_background(this, self.model, self.optimizer, **extra), this
        else:
            save_checkpoint(this, self.model, self.optimizer, **extra)
            self._remove_old(this)

    def _finish(self) -> None:
        """Wait for the save in the background; raises its error."""
        if self._writing is not None:
            (writing, this), self._writing = self._writing, None
            writing.wait()
            self._remove_old(this)

    def _remove_old(self, this: Path) -> None:
        """Remove what is older than this complete checkpoint and the one before it, and what a kill
        left. Newer ones, which this run could not load, stay.
        """
        if Comm().rank == 0:
            done = complete(this.parent)
            for old in set(this.parent.glob("step-[0-9]*/")) - set(done[: done.index(this) + KEPT]):
                shutil.rmtree(old)

    def resume(self, say: Callable[[str], None]) -> int:
        """Load the newest good checkpoint, and return its step.

        0 if the recipe does not resume, or nothing has been saved yet. Raises TrainingError if
        there are checkpoints and none fits.
        """
        problems: list[str] = []
        for folder in complete(self.recipe.checkpoint) if self.recipe.resume else ():
            try:
                extra = load_checkpoint(folder, self.model, self.optimizer)
            except (FileNotFoundError, ValueError) as error:  # damaged, or of another model
                problems.append(f"{folder.name}: {error}")
                continue
            for problem in problems:
                say(f"skipped {problem}")
            self._set_position(extra)
            self.measure_from(extra["step"])
            say(f"resumed at step {extra['step']} of {self.recipe.steps}")
            return extra["step"]
        if problems:
            raise TrainingError(
                f"no checkpoint in {self.recipe.checkpoint} can be loaded. {problems[0]}"
            )
        return 0

    def _set_position(self, extra: dict[str, Any]) -> None:
        """Set the position in the text, if it is the same text."""
        if extra["text"] != self.fingerprint:
            raise TrainingError(
                f"the checkpoints in {self.recipe.checkpoint} come from another text than "
                f"{self.text.name}. Fix: use the same --text, or another --checkpoint folder."
            )
        try:
            self.batches.load_state_dict(extra["sampler"])
        except ValueError as error:
            raise TrainingError(f"{error} Fix: use the same --seed and --context.") from error
