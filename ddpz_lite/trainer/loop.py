"""The training loop. `train(recipe)` runs on every rank: under `dz.launch`, `torchrun`, or alone.

    text -> windows -> this rank's micro-batches -> loss -> backward -> clip -> step

It is deterministic: on CPU, the same recipe on the same number of ranks gives the same losses bit
for bit, and so does a run that was killed anywhere and resumed. Everything that the next step needs
is in the checkpoint (weights, optimizer, loss scale, random generators, position in the text) or
follows from the step's number (learning rate).

With `--survive` a rank may die, and the others continue. Each half of a step, the update and what
is due after it, is then repeated by the remaining ranks, unless it counts already. So each window
of an epoch counts once: those of an update that no rank has done are distributed again; those of an
update that one rank has done count, also the dead rank's. From then on an update has fewer windows,
without the dead rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.checkpoint.parts import plain
from ddpz_lite.data import Corpus, corpus
from ddpz_lite.launcher import device as this_device
from ddpz_lite.launcher import progress
from ddpz_lite.launcher import rank as launched
from ddpz_lite.model import GPT, GPTConfig, next_token_loss
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.experts import MoE, expert_parallel, with_experts
from ddpz_lite.strategies.optim import ShardedOptimizer
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.pipeline.pipeline import Pipeline
from ddpz_lite.trainer.batches import Batch, Batches
from ddpz_lite.trainer.log import Log
from ddpz_lite.trainer.mesh import mesh_of, nats_through, pipeline_of, readers_of
from ddpz_lite.trainer.recipe import Recipe
from ddpz_lite.trainer.saving import Saver, TrainingError
from ddpz_lite.trainer.survivors import Survivors

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BETAS = (0.9, 0.95)
FLOOR = 0.1  # the learning rate ends at this share of its highest
VALIDATION_BATCHES = 8  # micro-batches of each rank


def train(recipe: Recipe, team: Survivors | None = None) -> dict[str, Any]:
    """Train as `recipe` says; every rank calls it. Returns plain data, the same on all ranks:

        first        updates done before: above 0 after a resume
        losses       of each step since: nats per token over all ranks, before the update
        validation   {step: nats per token}
        sample       text that the model wrote at the end

    team: the ranks that continue when one dies, for a recipe with `survive`.

    Raises ValueError or OSError for a recipe that cannot run here, TrainingError for checkpoints
    of another run and for a loss that is not finite.
    """
    text, comm, device = corpus(recipe.text), Comm(), this_device()
    torch.manual_seed(recipe.seed)  # the same weights on every rank
    gpt = build(recipe, text).to(device)
    mesh = mesh_of(recipe, device)
    readers = comm if mesh is None else readers_of(mesh)
    log = Log(recipe, comm, readers.world)
    log.begin(text, gpt.num_params(), device)
    model, optimizer = shard(recipe, gpt, mesh)
    torch.manual_seed(recipe.seed + 1_000_003 * (comm.rank + 1))  # different dropout per rank
    batches = Batches(text, "train", recipe, device, readers)
    saver = Saver(recipe, text, model, optimizer, batches)
    first = saver.resume(log.say)
    log.start(first)

    run = Run(recipe, text, device, model, optimizer, batches, readers, saver, log, team, 2 * first)
    with saver:
        for step in steps_with_bar(first, recipe.steps, comm.rank):  # updates, this one included
            run.do(2 * step - 1, run.update, step)
            run.do(2 * step, run.after, step)

    sample = write(recipe, model, text, device)
    log.end(sample)
    return {"first": first, "losses": log.losses, "validation": log.validation, "sample": sample}


@dataclass
class Run:
    """The state of a training run. `done` counts finished halves of steps."""

    recipe: Recipe
    text: Corpus
    device: torch.device
    model: nn.Module
    optimizer: ShardedOptimizer
    batches: Batches
    readers: Comm  # ranks that read different windows
    saver: Saver
    log: Log
    team: Survivors | None
    done: int

    def __post_init__(self) -> None:
        self.stream, self.norm = iter(self.batches), None

    def do(self, number: int, part: Callable[[int], None], step: int) -> None:
        """Do this half of a step, and repeat it while it does not count because a rank was lost."""
        if self.team is None:
            return part(step)
        while self.done < number:
            size, before, begun = len(self.team.members), self.batches.state_dict(), self.done
            work = partial(part, step)
            self.done = self.team.attempt(work, self.model, self.optimizer, begun)
            if len(self.team.members) < size:
                self._redistribute(before if self.done == begun else self.batches.state_dict())

    def _redistribute(self, place: dict[str, int | bool]) -> None:
        """Distribute the text over the remaining ranks, from this position."""
        self.readers, updates = Comm(), (self.done + 1) // 2
        self.batches = Batches(self.text, "train", self.recipe, self.device, self.readers)
        self.batches.load_state_dict(place)
        self.stream, self.saver.batches = iter(self.batches), self.batches
        self.saver.measure_from(updates)
        self.log.continue_with(self.readers, updates)

    def update(self, step: int) -> None:
        recipe, self.norm = self.recipe, None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step - 1)
        report_loss = partial(self.log.add, step)
        ranks = self.readers.world * recipe.sharers
        self.norm = update(recipe, self.model, self.optimizer, self.stream, ranks, report_loss)
        self.log.done()

    def after(self, step: int) -> None:
        """What is due after an update: a line, a validation, a checkpoint."""
        recipe, log = self.recipe, self.log
        if step == recipe.steps or step % recipe.report == 0:
            log.report(step, self.optimizer, self.norm)
        if recipe.validate and (step == recipe.steps or step % recipe.validate == 0):
            parts = self.text, self.device, log.comm, self.readers
            log.validated(step, validation_loss(recipe, self.model, *parts))
        if recipe.checkpoint and (step == recipe.steps or self.saver.due(step)):
            log.collect(
                step
            )  # raises for a loss that is not finite, so that such a run is not saved
            self.saver.save(step, log.say)


def update(
    recipe: Recipe,
    model: nn.Module,
    optimizer: ShardedOptimizer,
    stream: Iterator[Batch],
    world: int,
    report_loss: Callable[[Tensor], None],
) -> Tensor | None:
    """One step. Returns the norm () of the gradient, if it is clipped.

    report_loss: receives this rank's part () of the loss; the sum over ranks is the mean over all
    tokens.

    [Note: unequal batches] The loss is the sum over this rank's tokens, divided by the tokens of
    all ranks and micro-batches, which each rank can count alone. The strategies then take the
    mean over ranks; hence the factor `world`.
    """
    micro_batches = list(islice(stream, recipe.accumulate))
    tokens = recipe.context * sum(batch.total for batch in micro_batches)
    if isinstance(model, Pipeline):
        loss = nats_through(model, micro_batches, world / tokens) / world  # ()
    else:
        loss = accumulate(recipe, model, micro_batches, tokens, world)  # ()
    report_loss(loss)
    norm = optimizer.clip_grad_norm_(recipe.clip) if recipe.clip else None
    optimizer.step()
    optimizer.zero_grad()
    for layer in (module for module in model.modules() if isinstance(module, MoE)):
        layer.update_bias(recipe.balance)  # by the tokens of the last micro-batch
    return norm


def accumulate(
    recipe: Recipe, model: nn.Module, micro_batches: list[Batch], tokens: int, world: int
) -> Tensor:
    """Forward and backward of each; returns their nats () / tokens."""
    loss = torch.zeros((), device=micro_batches[0].inputs.device)  # ()
    for index, batch in enumerate(micro_batches, 1):
        # Stages 2 and 3 reduce every time, because full gradients may not fit in memory.
        waits = recipe.stage < 2 and index < len(micro_batches)
        with model.no_sync() if waits else nullcontext():
            part = nats(model, batch) / tokens  # ()
            (part * world).backward()
        loss += part.detach()
    return loss


def learning_rate(recipe: Recipe, done: int) -> float:
    """For the next update when `done` are: linear warm-up, then half a cosine down to a tenth.

    It has no state to save. Source: Loshchilov and Hutter, "SGDR", 2017, section 3.
    """
    if done < recipe.warmup:
        return recipe.lr * (done + 1) / recipe.warmup
    share = (done - recipe.warmup) / max(1, recipe.steps - recipe.warmup)  # 0 to 1
    return recipe.lr * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * share)) / 2)


def nats(model: nn.Module, batch: Batch) -> Tensor:
    """The loss () summed over this rank's tokens; 0 for a batch that does not count."""
    if isinstance(model, Pipeline):
        return nats_through(model, [batch], 1.0)
    total = next_token_loss(model(batch.inputs), batch.targets, reduction="sum")  # ()
    return total if batch.count else total * 0


def build(recipe: Recipe, text: Corpus) -> GPT:
    """The unsharded model."""
    sizes = {name: getattr(recipe, name) for name in ("context", "layers", "heads", "width")}
    gpt = GPT(GPTConfig(text.vocab_size, dropout=recipe.dropout, **sizes))
    return with_experts(gpt, recipe.experts, recipe.top_k) if recipe.experts else gpt


def shard(
    recipe: Recipe, gpt: GPT, mesh: dist.DeviceMesh | None = None
) -> tuple[nn.Module, ShardedOptimizer]:
    """The model and its AdamW, at the stage and precision of the recipe."""
    if recipe.experts and mesh is None and (world := Comm().world) > 1:
        # all experts are on each rank, and all ranks' tokens balance them
        expert_parallel(gpt, init_device_mesh(this_device().type, (world, 1)))
    return parallelize(
        gpt if mesh is None else pipeline_of(recipe, gpt, mesh),
        torch.optim.AdamW,
        recipe.stage,
        mesh=_replicas(recipe) if mesh is None else mesh,
        mixed_precision=DTYPES[recipe.precision],
        param_groups=partial(groups, weight_decay=recipe.weight_decay),
        lr=recipe.lr,
        betas=BETAS,
        fused=True,
    )


def _replicas(recipe: Recipe) -> dist.DeviceMesh | None:
    """The mesh (replicate, shard) of --shard-size; None for shards over all ranks."""
    world = Comm().world
    size = recipe.shard_size or world
    if world % size:
        raise TrainingError(
            f"--shard-size {size} does not divide the {world} ranks. Fix: use a divisor, best the "
            "number of ranks on a machine."
        )
    return init_device_mesh(this_device().type, (world // size, size)) if size < world else None


def groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def steps_with_bar(first: int, steps: int, rank: int) -> Iterator[int]:
    """Steps first + 1 to `steps`, with one bar: the parent's under `launch`, else rank 0's."""
    todo = range(first + 1, steps + 1)
    return progress(todo) if launched.current is not None or rank == 0 else iter(todo)


@torch.no_grad()
def validation_loss(
    recipe: Recipe,
    model: nn.Module,
    text: Corpus,
    device: torch.device,
    comm: Comm,
    readers: Comm,
) -> float:
    """Nats per token over the start of the validation split, the same windows each time."""
    model.eval()
    batches = Batches(text, "validation", recipe, device, readers)
    some = list(islice(batches.epoch(), VALIDATION_BATCHES))
    local = sum(nats(model, batch).item() for batch in some)
    model.train()
    tokens = recipe.context * sum(batch.total for batch in some)
    return sum(comm.gather_objects(local)) / tokens


def write(recipe: Recipe, model: nn.Module, text: Corpus, device: torch.device) -> str:
    """Text that the model writes after a line break; stage 3 needs all ranks for it.

    A model on a mesh is joined first.
    """
    if not recipe.sample:
        return ""
    gpt = plain(model)
    if isinstance(model, Pipeline):
        gpt = build(recipe, text).to(device)
        gpt.load_state_dict(full_state_dict(model))
    generator = torch.Generator(device).manual_seed(recipe.seed)
    prompt = text.encode("\n")[None].to(device)  # (1, 1)
    tokens = gpt.generate(prompt, recipe.sample, generator=generator)  # (1, 1 + sample)
    return text.decode(tokens[0, 1:].cpu())
