"""Pipeline parallelism: each rank holds some layers, a stage, and micro-batches pass through all.

Stage s sends its output to s + 1, and gets the gradient of it back: nothing else is sent, but for
the gradient of a parameter that two stages share. In which order a rank runs the forwards (F) and
backwards (B, and W where backward is split) of its micro-batches is a schedule, and a schedule is
data: see `schedules`. `messages` derives from it who sends what to whom.

[Note: all ranks first] NCCL opens a group in its first call, which all ranks must make. A message
between two of them would wait for the others.

Sources: Huang et al., "GPipe", 2019, section 2; Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2; Qi et al., "Zero Bubble
Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.strategies.comm import Comm, backend_of
from ddpz_lite.strategies.context.attention import check_reduced
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.mesh import Chunks, cuts_of
from ddpz_lite.strategies.parameters import empty_parameter, show_parts
from ddpz_lite.strategies.pipeline.gpt_stages import GPTStage, gpt_stages
from ddpz_lite.strategies.pipeline.messages import Message, Messages
from ddpz_lite.strategies.pipeline.schedules import (
    Action,
    Schedule,
    chunks_of,
    kinds_of,
    play,
    words,
)
from ddpz_lite.strategies.pipeline.ties import Ties
from ddpz_lite.strategies.pipeline.weight_gradients import Later, accumulate, deferred
from ddpz_lite.strategies.replica import Replica
from ddpz_lite.wire import span

__all__ = ["GPTStage", "Pipeline", "check_axes", "gpt_stages"]

LossFn = Callable[[Any, Any], Tensor]


class Pipeline(nn.Module):
    """One stage of a model on each rank, or several chunks of it, and the step that runs all.

        pipe = Pipeline(gpt_stages(gpt, 2), one_f_one_b(2, 8))
        optimizer = torch.optim.AdamW(pipe.parameters())
        for inputs, targets in batches:
            loss = pipe.step(inputs, targets, next_token_loss)
            optimizer.step()
            optimizer.zero_grad()

    On a mesh with a data axis: `pipe, optimizer = parallelize(pipe, ..., mesh=mesh)`. With both,
    torch's `clip_grad_norm_(pipe.parameters(), ...)` counts all stages, so every rank calls it.

    Args:
        stages: all stages of the model, built alike on every rank; this rank keeps its own, as
            `stage`, and drops the others. Each takes what the one before returns: a tensor, or a
            tuple of up to 6 tensors, given to it as positional arguments. All have the batch as
            their first dimension; those that are not floating-point get no gradient. A parameter
            that is in several stages is tied: it starts with the values of the first, and its
            gradient is the sum over all.
        schedule: for each rank the order of its actions: `gpipe(p, m)`, `one_f_one_b(p, m)`,
            `interleaved(p, m, chunks)`, `zero_bubble(p, m)` of
            `ddpz_lite.strategies.pipeline.schedules`, or your own. With v chunks there are
            p * v stages, and stage s is on rank s % p.
        group: a process group or 1-D mesh. Default: the world.

    Attributes: `module` is this rank's stage as it was given (`Chunks` of several); `most_live` how
    many micro-batches the last step held activations of, at most, each chunk counted;
    `micro_batches` how many the schedule has.

    Raises: ValueError for a schedule that cannot run, or another number of stages than it has;
    RuntimeError if ranks have different schedules.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        group: dist.DeviceMesh | dist.ProcessGroup | Comm | None = None,
    ) -> None:
        super().__init__()
        self.comm = Comm.of(group)
        play(schedule)  # or an error
        chunks, world = chunks_of(schedule), self.comm.world
        self._refuse_nccl(stages, chunks)
        if not len(stages) == len(schedule) * chunks == world * chunks:
            raise ValueError(
                f"{len(stages)} stages and a schedule for {len(schedule) * chunks}, on a group of "
                f"{world} ranks. Fix: one stage for each rank and chunk of the schedule."
            )
        self.comm.check_equal("the schedules", list(map(words, schedule)))
        self.comm.reduce_scalar(torch.zeros(()))  # [Note: all ranks first]
        self.index, self._stages = self.comm.rank, len(stages)
        self._orders = [
            [(kind, i, world * (chunk[0] if chunk else 0) + rank) for kind, i, *chunk in order]
            for rank, order in enumerate(schedule)
        ]
        self.micro_batches = 1 + max(i for _, i, _ in self._orders[0])
        self._splits = kinds_of(schedule) == "FBW"
        own = stages[self.index :: world]
        self.stage = own[0] if chunks == 1 else Chunks(own)
        self.clash = _clash(stages)
        self._ties = Ties(self.comm, stages, self.stage)
        self._messages = Messages(self.comm, len(stages))
        axes = show_parts(self.stage.parameters(), "pipe", self.comm)
        self._empty = [empty_parameter(axes, self._own)]  # in a list: it is not the module's
        self.most_live, self._syncs = 0, True

    def _refuse_nccl(self, stages: Sequence[nn.Module], chunks: int) -> None:
        """Raise ValueError where an interleaved schedule would wait forever."""
        on_gpu = any(param.is_cuda for stage in stages for param in stage.parameters())
        if (
            chunks > 1
            and on_gpu
            and backend_of(dist.get_backend(self.comm.group), "cuda") == "nccl"
        ):
            raise ValueError(
                "an interleaved schedule on NCCL: NCCL ends a rank's messages in their order, and "
                "all ranks would wait for the next one to receive first. Fix: zero_bubble or "
                "one_f_one_b, or torch.distributed.pipelining.ScheduleInterleaved1F1B."
            )

    @property
    def module(self) -> nn.Module:
        return self.stage.module if isinstance(self.stage, Replica) else self.stage

    def attach(self, model: Replica, optimizer: torch.optim.Optimizer, axes: Comm) -> None:
        """Run this model in place of the stage, which it has as its module."""
        self.stage = model
        self._empty = [empty_parameter(Comm.alone(axes.axes), self._own)]
        optimizer.param_groups[0]["params"] += self._empty  # a GradScaler looks there

    def _own(self) -> Iterator[nn.Parameter]:
        return super().parameters()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of this rank, and an empty one.

        So every rank takes part in torch's `clip_grad_norm_(pipe.parameters(), ...)`, whether its
        own ones have gradients or not.
        """
        yield from super().parameters(recurse)
        yield from self._empty

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the stage; where it is sharded, its optimizer knows where."""
        self.stage.zero_grad(set_to_none)

    def batch_weight(self, count: float) -> float:
        """As that of the stage: this rank's share along the data axis, times its ranks."""
        return self.stage.batch_weight(count) if isinstance(self.stage, Replica) else 1.0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside keep this rank's own gradients; the next step outside reduces the sum."""
        before, self._syncs = self._syncs, False
        try:
            with self.stage.no_sync() if isinstance(self.stage, Replica) else nullcontext():
                yield
        finally:
            self._syncs = before

    # -- a step

    def step(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Forward and backward of a whole batch; afterwards every `.grad` is that of its mean loss.

        Every rank passes the same: inputs (B, ...) and targets (B, ...), each a tensor or a tuple
        of tensors, which are cut by rows into micro-batches, the first ones larger by a row where
        they do not divide. (Only the ends read them, the others look at their shapes.)
        loss_fn(output, target) is a mean over its micro-batch; weights, one for each, say how much
        these means count in the loss. Default: rows of the micro-batch / B. Give others where rows
        are not equal parts: tokens that count / all.

        Under `torch.no_grad()` it runs the forwards alone. Returns the loss () on the rank with the
        last stage, None on others. Raises ValueError for a batch that does not fit, TypeError for
        a loss that is not a tensor, RuntimeError if a stage leaves its input without a gradient.

        [Note: summed loss] Gradients of m micro-batches add up. Without weights that sum to 1 they
        are m times too large, and with Adam the loss goes down anyway.
        """
        rows = [self._parts(t, name) for t, name in ((inputs, "inputs"), (targets, "targets"))]
        sizes = [[len(part[0]) for part in parts] for parts in rows]
        total = sum(sizes[0])
        weights = [size / total for size in sizes[0]] if weights is None else list(weights)
        if len(weights) != self.micro_batches or sizes[0] != sizes[1]:
            raise ValueError(
                f"{total} inputs, {sum(sizes[1])} targets, {len(weights)} weights for "
                f"{self.micro_batches} micro-batches. Fix: a target for each input, a weight for "
                "each micro-batch."
            )

        def finish(i: int, output: Any) -> Tensor:
            return _checked(loss_fn(output, _one_or_all(rows[1][i]))) * weights[i]  # ()

        learns = torch.is_grad_enabled()
        with self._ties.summing(self.stage, self._syncs) if learns else nullcontext():
            losses = self._run(rows[0], finish)
            if learns and self._syncs and isinstance(self.stage, DDP):
                self.stage._reducer.flush()  # of a stage whose last backward had no gradient
        return sum(losses.values()).detach() if losses else None

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """For evaluation: the model's output (B, ...) on the rank with the last stage, else None.

        inputs: (B, ...), as for `step`, the same on every rank. Nothing is kept for a backward;
        `eval()` is the caller's.
        """
        outputs = self._run(self._parts(inputs, "inputs"), lambda _, output: output)
        if not outputs:
            return None
        ordered = [outputs[i] for i in range(self.micro_batches)]
        if isinstance(ordered[0], Tensor):
            return torch.cat(ordered)
        return tuple(torch.cat(parts) for parts in zip(*ordered, strict=True))

    def _run(
        self, inputs: Sequence[tuple[Tensor, ...]], finish: Callable[[int, Any], Any]
    ) -> dict[int, Any]:
        """All actions of this rank, in order, and the messages between them.

        Returns what `finish(i, output)` makes of the model's outputs, by micro-batch.
        """
        learns = torch.is_grad_enabled()
        orders = [[a for a in order if a[0] == "F" or learns] for order in self._orders]
        self._live: dict[tuple[int, int], Any] = {}  # (micro-batch, stage): input, output
        self._later: dict[tuple[int, int], Later] = {}
        self.most_live, ends = 0, {}
        kind = [(t.shape[1:], t.dtype, t.device) for t in inputs[0]]
        rows, device = [len(part[0]) for part in inputs], inputs[0][0].device
        self._messages.begin(orders, kind, rows, device)
        actions = orders[self.index]
        self._messages.pass_on([], self._need(actions[0]))
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            with span(self._name(action)):
                made = self._act(action, inputs, finish, ends, is_last=following is None)
            self._messages.pass_on(made, following and self._need(following))
        self._messages.end()
        return ends

    def _name(self, action: Action) -> str:
        kind, i, stage = action
        chunks = self._stages // self.comm.world
        return words([(kind, i) if chunks == 1 else (kind, i, stage // self.comm.world)])

    def _need(self, action: Action) -> Message | None:
        """The message that an action waits for."""
        kind, _, stage = action
        comes = {"F": stage > 0, "B": stage + 1 < self._stages, "W": False}[kind]
        return action if comes else None

    def _parts(self, batch: Any, name: str) -> list[tuple[Tensor, ...]]:
        tensors = batch if isinstance(batch, tuple) and batch else (batch,)
        for tensor in tensors:
            is_tensor = isinstance(tensor, Tensor) and tensor.dim() > 0
            if not is_tensor or len(tensor) < self.micro_batches or len(tensor) != len(tensors[0]):
                what = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor)
                raise ValueError(
                    f"{name} must be a tensor of at least {self.micro_batches} rows, one for each "
                    f"micro-batch, or a tuple of such; got {what}. Fix: a larger batch, or fewer "
                    "micro-batches."
                )
        return list(zip(*(t.tensor_split(self.micro_batches) for t in tensors), strict=True))

    # -- actions

    def _act(
        self, action: Action, inputs: Any, finish: Any, ends: dict[int, Any], is_last: bool
    ) -> list[tuple[Message, list[Tensor]]]:
        """Run one action; returns what it has made for another stage."""
        kind, i, stage = action
        if kind == "F":
            return self._forward(i, stage, inputs[i], finish, ends)
        if kind == "B":
            return self._backward(i, stage, is_last)
        with self._reducing("W", is_last):
            accumulate(self._later.pop((i, stage)))
        del self._live[i, stage]
        return []

    def _forward(
        self, i: int, stage: int, inputs: Any, finish: Any, ends: dict[int, Any]
    ) -> list[tuple[Message, list[Tensor]]]:
        learns = torch.is_grad_enabled()
        received = [] if stage == 0 else self._messages.take(("F", i, stage))
        for tensor in received if learns else ():
            tensor.requires_grad_(tensor.is_floating_point())
        chunk = () if self._stages == self.comm.world else (stage // self.comm.world,)
        with self._deferring(i, stage):
            output = self.stage(*chunk, *(received or inputs))
        if is_end := stage + 1 == self._stages:
            output = ends[i] = finish(i, output)
        outputs = list(output) if isinstance(output, tuple) else [output]
        if not is_end and (wrong := self._messages.find_mismatch(stage, outputs, len(inputs[0]))):
            raise ValueError(
                f"stage {stage} returned {wrong} for {len(inputs[0])} rows. Fix: one tensor, or a "
                "tuple of up to 6, with the batch as their first dimension."
            )
        if learns:
            self._live[i, stage] = received, outputs
            self.most_live = max(self.most_live, len(self._live))
        made = [t.detach().contiguous() for t in outputs if not is_end]
        return [] if is_end else [(("F", i, stage + 1), made)]

    def _backward(self, i: int, stage: int, is_last: bool) -> list[tuple[Message, list[Tensor]]]:
        received, outputs = self._live.pop((i, stage))
        outputs = [t for t in outputs if t.is_floating_point()]
        if self._splits:
            self._live[i, stage] = None  # its weights' gradients are to come
        is_end = stage + 1 == self._stages
        gradients = [None] if is_end else self._messages.take(("B", i, stage))
        roots = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
        if roots:  # a first stage may have nothing to learn
            with self._reducing("B", is_last):
                torch.autograd.backward(*zip(*roots, strict=True))
        if stage == 0:
            return []
        received = [t for t in received if t.is_floating_point()]
        if received and all(t.grad is None for t in received):
            raise RuntimeError(
                f"stage {stage} gave its input no gradient, so no stage before it learns. Fix: no "
                "detach(), .data or no_grad() between input and output."
            )
        made = [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in received]
        return [(("B", i, stage - 1), made)]

    def _deferring(self, i: int, stage: int) -> AbstractContextManager[Any]:
        if not self._splits or not torch.is_grad_enabled():
            return nullcontext()
        return deferred(self._later.setdefault((i, stage), []))

    def _reducing(self, kind: str, is_last: bool) -> AbstractContextManager[Any]:
        """DDP reduces in the last backward alone, with the gradients of all micro-batches in it.

        ZeRO reduces each; of one that is split, with W, when all gradients are there.
        """
        waits = isinstance(self.stage, DDP) and not is_last
        waits |= isinstance(self.stage, Replica) and self._splits and kind == "B"
        return self.stage.no_sync() if waits else nullcontext()


def _one_or_all(tensors: tuple[Tensor, ...]) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def _checked(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise TypeError(
        f"loss_fn returned {what[:80]}, but backward needs one number as a tensor. Fix: return the "
        "mean loss alone, without .item() and without other values."
    )


def _clash(stages: Sequence[nn.Module]) -> str | None:
    """A name that is another parameter in two stages: checkpoints could not tell them apart."""
    first: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            if first.setdefault(name, param) is not param:
                return name
    return None


def check_axes(model: nn.Module, comm: Comm) -> None:
    """Raise ValueError where ranks have other parts of the model and `comm` does not know of it."""
    cuts = {
        "pipe": isinstance(model, Pipeline) and model.comm.world > 1,
        "tensor": any(cut.parts > 1 for cut in cuts_of(model).values()),
    }
    for axis in (axis for axis, is_cut in cuts.items() if is_cut and axis not in comm.axes):
        raise ValueError(
            f"ranks have different parts of the model, and no mesh with an axis {axis!r} tells "
            "which: each would take its part for the whole. Fix: parallelize(model, ..., "
            'mesh=init_device_mesh(device, (d, p, t), mesh_dim_names=("data", "pipe", "tensor"))).'
        )
    check_reduced(model, comm)
