"""The memory calculator: does a training run fit, and if not, what is the cheapest change?

    job = Job(MODELS["6.7 B"], world=8, stage=1)
    job.needs()            bytes by kind on one rank, at the moment when most are held
    cheapest(job, 80e9)    the job with the least change that fits, or None
    advice(job, 80e9)      the same in words, for a device of 80 GB of which a tenth stays free
    calculator()           all of it with sliders

The state follows the table of `placement`, in the sizes of this library: 16-bit parameters with an
fp32 master copy among the optimizer's state (stage 3: the shards are the master copy), and fp32
wherever a gradient is sharded. The activations are those of a GPT with fused attention; see the
constants. A tenth of a device stays free, see `usable`.

Source: Rajbhandari et al. 2020, sections 3 and 5; lesson 08 compares with measured runs.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpz_lite.course.show.canvas import figure, house_style, stacked_bars
from ddpz_lite.course.show.sliders import explore, options
from ddpz_lite.course.show.style import TEXT_COLOR, bytes_unit, in_bytes
from ddpz_lite.strategies.costs import elements_moved
from ddpz_lite.strategies.placement import STAGES, Placement, strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddpz_lite.course.show.page import Table

OPTIMIZERS = {"SGD": 0, "SGD with momentum": 4, "AdamW": 8}  # bytes of state per parameter
PRECISIONS = {"fp32": 4, "mixed": 2}  # bytes per number in forward and backward
PER_BLOCK = 16  # numbers that a block keeps per token and unit of width (lesson 01)
PER_SCORE = 3  # fp32 numbers per token and vocabulary entry: score, log-softmax, gradient
UNITS = 4  # units of stage 3 at the peak: two gathered, one's gradients sent, one's received
IN_FLIGHT = 16e6  # bytes of parameters in the two buckets of gradients that may be in flight
LARGEST_WORLD = 1024
FREE = 0.1  # part of a device that stays free, for its runtime and what its allocator cannot use


@dataclass(frozen=True)
class Shape:
    """A GPT as the calculator sees it: all parameters, blocks, width, vocabulary."""

    params: float
    layers: int
    width: int
    vocabulary: int = 50257


# Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1. It prints 5140 for 13 B,
# although its 40 heads of 128 make 5120.
MODELS = {
    "125 M": Shape(125e6, 12, 768),
    "1.3 B": Shape(1.3e9, 24, 2048),
    "6.7 B": Shape(6.7e9, 32, 4096),
    "13 B": Shape(13e9, 40, 5140),
    "175 B": Shape(175e9, 96, 12288),
}


@dataclass(frozen=True)
class Job:
    """A training run: the model, and everything that one can turn.

    windows: sequences of `length` tokens in one micro-batch of one rank. checkpointing: keep only
    the input of each block. Raises ValueError for a setting that does not exist.
    """

    model: Shape
    world: int = 1
    stage: int = 0
    precision: str = "mixed"
    optimizer: str = "AdamW"
    windows: int = 1
    length: int = 2048
    checkpointing: bool = False

    def __post_init__(self) -> None:
        strategy(self.stage)
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Job: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        for name in ("world", "windows", "length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Job: {name} must be an integer of at least 1, got {value!r}")

    def needs(self) -> dict[str, float]:
        """Bytes by kind on one rank at the peak; "transient" is what a step needs for a moment."""
        return self._state() | {
            "activations": self._activations(),
            "transient": self._units() + max(0.0, self._late() - self._activations()),
        }

    def total(self) -> float:
        """Bytes on one rank at the peak."""
        return sum(self.needs().values())

    def _state(self) -> dict[str, float]:
        """Parameters, gradients and optimizer state, by the letters of the stage."""
        row, size = strategy(self.stage), PRECISIONS[self.precision]
        master = 4 if size == 2 and self.stage < 3 else 0
        sharded = Placement.SHARD
        kinds = {
            "parameters": (row.parameter, 4 if row.parameter is sharded else size),
            "gradients": (row.gradient, 4 if row.gradient is sharded else size),
            "optimizer": (row.optimizer, OPTIMIZERS[self.optimizer] + master),
        }
        return {
            kind: self.model.params * each / (self.world if place is sharded else 1)
            for kind, (place, each) in kinds.items()
        }

    def _activations(self) -> float:
        """What waits for backward where forward ends, in the blocks and in the loss."""
        shape, tokens = self.model, self.windows * self.length
        kept = shape.layers + PER_BLOCK if self.checkpointing else PER_BLOCK * shape.layers
        blocks = tokens * shape.width * kept * PRECISIONS[self.precision]
        return blocks + tokens * shape.vocabulary * PER_SCORE * 4

    def _units(self) -> float:
        """Stage 3: the units that are whole at the peak; a unit is a block, 12 width² numbers."""
        if self.stage < 3 or self.world == 1:
            return 0.0
        unit = min(12 * self.model.width**2, self.model.params)
        return UNITS * unit * PRECISIONS[self.precision]

    def _late(self) -> float:
        """What exists only when activations are gone: fp32 gradients, and buckets in flight.

        A bucket that is sent has a copy that is received, as large as itself (`Comm.all_to_all`).
        At stage 1 sending frees the gradient; at stage 2 it was freed when it was collected.
        """
        params, size = self.model.params, PRECISIONS[self.precision]
        bucket = min(params, IN_FLIGHT / 4) * size if self.world > 1 else 0.0
        if self.stage == 1:
            return max(bucket, 4 * params / self.world)
        if self.stage == 2:
            return 2 * bucket
        return 4 * params if self.stage == 0 and self.precision == "mixed" else 0.0


def usable(device: float) -> float:
    """The bytes of a device that a job may take."""
    return (1 - FREE) * device


# What a change costs, to order them; no measure of time. TRAFFIC is for as much as DDP sends.
PRICES = {"windows": 1, "precision": 3, "checkpointing": 4, "stage": 1, "world": 10}
TRAFFIC = 6


def cheapest(job: Job, capacity: float) -> Job | None:
    """The job itself if it fits in `capacity` bytes, else the one that fits with the least change.

    None of the changes alters what is learned, but for rounding: the optimizer stays, and a smaller
    micro-batch means more of them. None if nothing fits with up to LARGEST_WORLD ranks.
    """
    worlds = [job.world * 2**k for k in range(11) if job.world * 2**k <= LARGEST_WORLD]
    choices = itertools.product(
        [job.windows >> k for k in range(job.windows.bit_length())],
        range(job.stage, 4),
        dict.fromkeys((job.precision, "mixed")),
        dict.fromkeys((job.checkpointing, True)),
        worlds or [job.world],
    )
    names = ("windows", "stage", "precision", "checkpointing", "world")
    others = [replace(job, **dict(zip(names, choice, strict=True))) for choice in choices]
    fitting = [other for other in others if other.total() <= capacity]
    return min(fitting, key=lambda other: (_price(job, other), -other.windows), default=None)


def _price(job: Job, other: Job) -> float:
    stages = PRICES["stage"] * (other.stage - job.stage)
    doublings = PRICES["world"] * ((other.world // job.world).bit_length() - 1)
    switches = sum(
        PRICES[name]
        for name in ("windows", "precision", "checkpointing")
        if getattr(other, name) != getattr(job, name)
    )
    more = traffic(other, _micro_batches(job, other)) - traffic(job)
    return stages + doublings + switches + TRAFFIC * more


def _micro_batches(job: Job, other: Job) -> int:
    """How many micro-batches of `other` make one of `job`."""
    return -(-job.windows // other.windows)


def traffic(job: Job, micro_batches: int = 1) -> float:
    """What a step of `micro_batches` sends, as a multiple of what DDP sends; one rank sends none.

    From stage 2 on each micro-batch sends its gradients (lesson 10).
    """
    if job.world == 1:
        return 0.0
    ddp = elements_moved(1, job.world, 0)
    return elements_moved(1, job.world, job.stage, micro_batches) / ddp


def changes(job: Job, other: Job) -> list[str]:
    """What turns `job` into `other`, in words."""
    found = []
    if other.windows != job.windows:
        found.append(f"micro-batches of {other.windows} instead of {job.windows}, accumulated")
    if other.stage != job.stage:
        found.append(STAGES[other.stage].name)
    if other.precision != job.precision:
        found.append("mixed precision (halves the activations, not the state)")
    if other.checkpointing != job.checkpointing:
        found.append("activation checkpointing (up to a third more arithmetic)")
    if other.world != job.world:
        found.append(
            f"{other.world} ranks instead of {job.world} (accumulate less, or the batch grows)"
        )
    return found


def advice(job: Job, device: float) -> str:
    """Does it fit on a device of that many bytes, and if not, what is the cheapest change?"""
    needs, capacity = job.needs(), usable(device)
    total = sum(needs.values())
    limit = f"{in_bytes(capacity)}, which is {in_bytes(device)} less the tenth that stays free"
    if total <= capacity:
        return f"It fits: {in_bytes(total)} of {limit}. {_spare(job, capacity)}"
    kind = max(needs, key=needs.__getitem__)
    text = f"It does not fit: {in_bytes(total)}, and the limit is {limit}. "
    text += f"The largest part by kind: {kind}, {in_bytes(needs[kind])}. "
    other = cheapest(job, capacity)
    if other is not None:
        sends = traffic(other, _micro_batches(job, other))
        text += f"Change: {'; '.join(changes(job, other))}. Then {in_bytes(other.total())}"
        ratio = "as much as" if sends == 1 else f"{sends:.3g} x what"
        return f"{text}, and a step sends {ratio} DDP does." if sends else f"{text}."
    return (
        f"{text}No setting here helps with up to {LARGEST_WORLD} ranks: keep state in the memory "
        "of the host (lesson 12), or split the layers too (lesson 14)."
    )


def _spare(job: Job, capacity: float) -> str:
    """For a job that fits: what it could do without."""
    lower = [replace(job, stage=stage) for stage in range(job.stage)]
    fitting = [other for other in lower if other.total() <= capacity]
    if job.world == 1 and job.stage > 0:
        return "With one rank a stage divides by 1: DDP needs the same."
    if job.stage == 3 and fitting:
        return f"{STAGES[fitting[0].stage].name} fits, too, and sends a third less."
    if job.checkpointing and replace(job, checkpointing=False).total() <= capacity:
        return "It fits without checkpointing, too, and computes less."
    return "Nothing needs to change."


def draw(job: Job, device: float) -> tuple[Figure, str, Table]:
    """One bar by kind, the limit, and the advice in words: figure, alt text, table."""
    needs, words, capacity = job.needs(), advice(job, device), usable(device)
    unit, unit_name = bytes_unit(max(job.total(), device))
    parts = [kind for kind, size in needs.items() if size]
    lines = textwrap.wrap(words, 92)
    fig, axes = figure(height=1.6 + 0.19 * len(lines))
    with house_style():
        stacked_bars(axes, ["one rank"], [needs], parts, (unit, unit_name))
        axes.set_xlim(0, 1.17 * max(job.total(), device) / unit)
        axes.axvline(capacity / unit, color=TEXT_COLOR, linestyle="--", linewidth=1.2)
        axes.set_xlabel(
            f"{unit_name} (dashed: the limit, {1 - FREE:.0%} of a device of {in_bytes(device)})"
        )
        fig.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=10, color=TEXT_COLOR)
    table = [["kind", "bytes"], *([kind, size] for kind, size in needs.items())]
    return fig, words, [*table, ["all", job.total()], ["the limit", capacity]]


def calculator(models: Mapping[str, Shape] | None = None) -> None:
    """The calculator with its sliders. models: your own by name, in place of MODELS."""
    models = dict(models or MODELS)

    def turned(model, world, stage, precision, optimizer, windows, checkpointing, device):
        job = Job(models[model], world, stage, precision, optimizer, windows)
        return draw(replace(job, checkpointing=checkpointing == "on"), device * 1e9)

    names = list(models)
    explore(
        turned,
        model=options("Model", names, default=names[len(names) // 2]),
        world=options("World size", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], default=8),
        stage=options("Stage", [0, 1, 2, 3], default=0),
        precision=options("Precision", list(PRECISIONS), default="mixed"),
        optimizer=options("Optimizer", list(OPTIMIZERS), default="AdamW"),
        windows=options("Micro-batch", [1, 2, 4, 8, 16, 32], default=4, unit="x 2,048 tokens"),
        checkpointing=options("Checkpointing", ["off", "on"], default="off"),
        device=options("Device", [8, 16, 24, 40, 80, 141, 192], default=80, unit="GB"),
    )
