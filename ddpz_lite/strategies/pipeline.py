"""Pipeline parallelism: each rank holds some layers, a stage, and micro-batches pass through all.

Stage s sends its output to s + 1, and gets the gradient of it back: nothing else is sent, but for
the gradient of a parameter that two stages share. In which order a stage runs the forwards (F) and
backwards (B) of its micro-batches is a schedule, and a schedule is data: see `schedules`.

[Note: two that send first] In the middle of 1F1B, stage s sends an output while s + 1 sends a
gradient. If both sent first and waited, neither would receive. So what an action has made leaves
together with the request for what the next one needs, and no send is waited for before the end.

[Note: all ranks first] NCCL opens a group in its first call, which all ranks must make. A message
between two of them would wait for the others.

[Note: one after the other] NCCL ends the messages of a rank in their order. `gpipe` and
`one_f_one_b` bear that; a schedule in which a stage runs further ahead may wait for ever there.

Sources: Huang et al., "GPipe", 2019, section 2; Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.model import GPT
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.gradient import UnshardedParameter, own_grad, set_own_grad
from ddpz_lite.strategies.mesh import cuts_of, mark
from ddpz_lite.strategies.replica import Replica
from ddpz_lite.strategies.schedules import Action, Schedule, play, words
from ddpz_lite.wire import span

LossFn = Callable[[Any, Any], Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NOTE = 10  # numbers in a note: dtype, dimensions, and the size of each


# -- stages of our GPT


class GPTStage(nn.Module):
    """Some blocks of a GPT; the first stage has the embeddings too, the last norm and head.

    Parameters are those of the GPT, under the same names. With tied weights the last stage holds
    the token embedding, whose weight is its head's.
    """

    def __init__(self, gpt: GPT, blocks: range) -> None:
        super().__init__()
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == len(gpt.blocks)
        if self.is_first or (self.is_last and gpt.config.tied):
            self.tokens = gpt.tokens
        if self.is_first:
            self.positions, self.drop = gpt.positions, gpt.drop
        self.blocks = nn.ModuleDict({str(i): gpt.blocks[i] for i in blocks})
        if self.is_last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) on the first stage, else (B, T, C); logits (B, T, V) on the last."""
        if self.is_first:
            places = torch.arange(x.size(1), device=x.device)  # (T,)
            x = self.drop(self.tokens(x) + self.positions(places))  # (B, T, C)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def gpt_stages(gpt: GPT, stages: int | Sequence[int]) -> list[GPTStage]:
    """The GPT as a list of stages that share its modules.

    stages: how many, as even as can be, with more blocks on the first ones; or the number of blocks
    of each, for embeddings and head take time too. Raises ValueError if a stage has no block.
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
            f"{count} blocks cannot be dealt to stages of {sizes or stages} blocks. Fix: at least "
            f"one block for each stage, {count} together."
        )
    ends = list(accumulate(sizes, initial=0))
    return [GPTStage(gpt, range(start, stop)) for start, stop in pairwise(ends)]


# -- the pipeline


class Pipeline(nn.Module):
    """One stage of a model on each rank, and the step that runs all of them.

        pipe = Pipeline(gpt_stages(gpt, 2), one_f_one_b(2, 8))
        optimizer = torch.optim.AdamW(pipe.parameters())
        for inputs, targets in batches:
            loss = pipe.step(inputs, targets, next_token_loss)
            optimizer.step()
            optimizer.zero_grad()

    On a mesh with a data axis: `pipe, optimizer = parallelize(pipe, ..., mesh=mesh)`.

    Args:
        stages: all stages, a module for each rank of the group, built alike on every rank; this
            rank keeps its own, as `stage`, and drops the others. Each takes one tensor and returns
            one, with the batch as its first dimension. A parameter that is in several stages is
            tied: it starts with the values of the first, and its gradient is the sum over all.
        schedule: for each stage the order of its actions: `gpipe(p, m)`, `one_f_one_b(p, m)` of
            `ddpz_lite.strategies.schedules`, or your own.
        group: a process group or 1-D mesh; stage s is its rank s. Default: the world.

    Attributes: `most_live` is how many micro-batches the last step held activations of, at most;
    `micro_batches` how many the schedule has.

    Raises: ValueError for a schedule that cannot run or is interleaved, or for another number of
    stages than ranks; RuntimeError if ranks have different schedules.
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
        if len(schedule[0][0]) > 2:
            raise ValueError(
                "the schedule is interleaved: ranks have several chunks of the model, and a "
                "Pipeline has one stage on each. Fix: one_f_one_b(stages, micro_batches), or "
                "torch.distributed.pipelining.ScheduleInterleaved1F1B."
            )
        if not len(stages) == len(schedule) == self.comm.world:
            raise ValueError(
                f"{len(stages)} stages and a schedule for {len(schedule)}, on a group of "
                f"{self.comm.world} ranks. Fix: one stage on each rank."
            )
        self.comm.check_equal("the schedules", list(map(words, schedule)))
        self.comm.reduce_scalar(torch.zeros(()))  # [Note: all ranks first]
        self.index, self.actions = self.comm.rank, list(schedule[self.comm.rank])
        self.is_first, self.is_last = self.index == 0, self.index == self.comm.world - 1
        self.stage, self.micro_batches = stages[self.index], len(self.actions) // 2
        self.clash = _clash(stages)
        self._tied = self._tie(stages)
        self.most_live = 0
        self._known: tuple[Any, ...] | None = None  # the kind of inputs that `_coming` belongs to
        self._coming: tuple[torch.dtype, torch.device, list[int]] | None = None  # of one row
        self._forget()

    def _forget(self) -> None:
        self._live: dict[int, tuple[Tensor | None, Tensor]] = {}  # micro-batch: input, output
        self._arrived: dict[Action, Tensor] = {}
        self._under_way: list[tuple[Any, Tensor]] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the stage's: of one that is sharded, its optimizer knows where gradients lie."""
        self.stage.zero_grad(set_to_none)

    # -- tied parameters

    def _tie(self, stages: Sequence[nn.Module]) -> dict[str, list[int]]:
        """{name: stages} of the parameters of this stage that are in others too."""
        holders: dict[nn.Parameter, list[int]] = {}
        for index, stage in enumerate(stages):
            for param in stage.parameters():
                holders.setdefault(param, []).append(index)
        names = {param: name for name, param in self.stage.named_parameters()}
        tied = {}
        for param, where in holders.items():
            if len(where) == 1 or self.index not in where:
                continue
            if param.is_meta:
                raise ValueError(
                    f"{names[param]} is on the meta device and in several stages, which would draw "
                    "different values. Fix: build the model on a device."
                )
            tied[names[param]] = where
            mark(param, apart=True, elsewhere=self.index != where[0])
            to = where[1:] if self.index == where[0] else []
            for first in self._swap(param.detach(), to, [] if to else where[:1]).values():
                param.data.copy_(first)
        return tied

    def _swap(self, tensor: Tensor, to: Sequence[int], come: Sequence[int]) -> dict[int, Tensor]:
        """Send the tensor to some stages and get theirs from others; waits for all."""
        tensor = tensor.contiguous()
        got = {s: torch.empty_like(tensor) for s in come}
        sent, received = self.comm.exchange(
            [(tensor, s) for s in to], [(t, s) for s, t in got.items()]
        )
        for work in (*sent, *received):
            work.wait()
        return got

    def _shard_of(self, name: str) -> nn.Parameter:
        """Where backward leaves the gradient of a parameter: on it, or in shards on its shard."""
        module = self.stage.module if isinstance(self.stage, Replica) else self.stage
        param = dict(module.named_parameters())[name]
        if isinstance(param, UnshardedParameter):
            flat, index = param.place
            return param if flat.owner.reduces_later else flat.shards[index]
        return param

    @contextmanager
    def _summing_tied(self) -> Iterator[None]:
        """Add what the other stages have of each tied gradient to what the block leaves.

        In the order of stages, so that all come to the same bits. What was there before the block,
        from an earlier step, is a sum already.
        """
        tied = [(self._shard_of(name), where) for name, where in self._tied.items()]
        tied = [(param, where) for param, where in tied if param.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():  # shards of ZeRO-3 are plain ones here
            before = [None if (g := own_grad(p)) is None else g.clone() for p, _ in tied]
            for param, _ in tied:
                set_own_grad(param, None)
        yield
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for (param, where), earlier in zip(tied, before, strict=True):
                if own_grad(param) is None:  # not used here
                    set_own_grad(param, torch.zeros_like(param))
                grad, others = own_grad(param), [s for s in where if s != self.index]
                parts = self._swap(grad, others, others) | {self.index: grad.clone()}
                grad.copy_(sum(parts[s] for s in where))
                if earlier is not None:
                    grad.add_(earlier)

    # -- a step

    def step(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Forward and backward of a whole batch; afterwards every `.grad` is that of its mean loss.

        Every rank passes the same: inputs (B, ...) and targets (B, ...), which are cut by rows into
        micro-batches, the first ones larger by a row where it does not divide. (Only the ends read
        them, the others look at their shapes.) loss_fn(output, target) is a mean over its
        micro-batch; weights, one for each, are what these means count in the loss. Default: rows of
        the micro-batch / B. Give others where a row is no equal part: tokens that count / all.

        Under `torch.no_grad()` it runs the forwards alone. Returns the loss () on the last stage,
        None on others. Raises ValueError for a batch that does not fit, RuntimeError if a stage
        leaves its input without a gradient.

        [Note: summed loss] Gradients of m micro-batches add up. Without weights that sum to 1 they
        are m times too large, and with Adam the loss goes down all the same.
        """
        rows = [self._parts(t, name) for t, name in ((inputs, "inputs"), (targets, "targets"))]
        weights = [len(x) / len(inputs) for x in rows[0]] if weights is None else list(weights)
        if len(weights) != self.micro_batches or len(inputs) != len(targets):
            raise ValueError(
                f"{len(inputs)} inputs, {len(targets)} targets, {len(weights)} weights for "
                f"{self.micro_batches} micro-batches. Fix: a target for each input, a weight for "
                "each micro-batch."
            )
        self._forget()
        self.most_live, self._losses = 0, []
        with self._summing_tied() if torch.is_grad_enabled() else nullcontext():
            self._run(*rows, loss_fn, weights)
        return sum(self._losses) if self.is_last else None

    def _run(
        self,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss_fn: LossFn,
        weights: Sequence[float],
    ) -> None:
        """All actions of this stage, in order, and the messages between them."""
        actions = [a for a in self.actions if a[0] == "F" or torch.is_grad_enabled()]
        like = inputs[0]
        kind_of_input = (like.shape[1:], like.dtype, like.device)
        is_new = kind_of_input != self._known
        if is_new and not self.is_first:
            self._hear_shape(like.device)
        self._pass_on(None, 0, actions[0], len(inputs[actions[0][1]]))
        for (kind, i), following in zip(actions, [*actions[1:], None], strict=True):
            with span(f"{kind}{i}"):
                if kind == "F":
                    made = self._forward(i, inputs[i], targets[i], loss_fn, weights[i])
                else:
                    made = self._backward(i, is_last=(kind, i) == actions[-1])
            if is_new and made is not None:  # the first action is a forward
                self._tell_shape(made)
            is_new, self._known = False, kind_of_input
            size = len(inputs[following[1]]) if following else 0
            self._pass_on(made, self.index + (1 if kind == "F" else -1), following, size)
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []

    def _parts(self, batch: Any, name: str) -> Sequence[Tensor]:
        if not isinstance(batch, Tensor) or batch.dim() == 0 or len(batch) < self.micro_batches:
            what = f"of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch)
            raise ValueError(
                f"{name} must be a tensor of at least {self.micro_batches} rows, one for each "
                f"micro-batch; got {what}. Fix: a larger batch, or fewer micro-batches."
            )
        return batch.tensor_split(self.micro_batches)

    def _forward(
        self, i: int, inputs: Tensor, targets: Tensor, loss_fn: LossFn, weight: float
    ) -> Tensor | None:
        """Returns what the next stage gets."""
        received = None if self.is_first else self._arrived.pop(("F", i))
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        output = self.stage(inputs if received is None else received)
        if self.is_last:
            output = loss_fn(output, targets) * weight  # ()
            self._losses.append(output.detach())
        elif _told(output)[0] != len(inputs):
            raise ValueError(
                f"stage {self.index} returned {_told(output)[1]} for {len(inputs)} rows. Fix: one "
                "floating-point tensor, with the batch as its first dimension."
            )
        if torch.is_grad_enabled():
            self._live[i] = received, output
            self.most_live = max(self.most_live, len(self._live))
        return None if self.is_last else output.detach().contiguous()

    def _backward(self, i: int, is_last: bool) -> Tensor | None:
        """Returns what the stage before gets. DDP reduces in the last backward, with all in it."""
        received, output = self._live.pop(i)
        waits = isinstance(self.stage, DDP) and not is_last
        context: AbstractContextManager[Any] = self.stage.no_sync() if waits else nullcontext()
        gradient = None if self.is_last else self._arrived.pop(("B", i))
        if output.requires_grad:  # a first stage may have nothing to learn
            with context:
                torch.autograd.backward(output, gradient)
        if received is None:
            return None
        if received.grad is None:
            raise RuntimeError(
                f"stage {self.index} gave its input no gradient, so no stage before it learns. "
                "Fix: no detach(), .data or no_grad() on the way from input to output."
            )
        return received.grad.contiguous()

    # -- messages

    def _pass_on(self, made: Tensor | None, to: int, following: Action | None, rows: int) -> None:
        """Send what an action has made, and wait for what the following one, of `rows`, needs."""
        room = frm = None
        if following is not None and following[0] == "F" and not self.is_first:
            (dtype, device, shape), frm = self._coming, self.index - 1
            room = torch.empty((rows, *shape), dtype=dtype, device=device)
        elif following is not None and following[0] == "B" and not self.is_last:
            output, frm = self._live[following[1]][1], self.index + 1
            room = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        sends = [] if made is None else [(made, to)]
        sent, received = self.comm.exchange(sends, [] if room is None else [(room, frm)])
        self._under_way = [(w, t) for w, t in self._under_way if not w.is_completed()]
        self._under_way += [(work, made) for work in sent]
        for work in received:
            work.wait()
        if room is not None:
            self._arrived[following] = room

    def _hear_shape(self, device: torch.device) -> None:
        """Once for each shape of inputs, a stage tells the next in a note what it will send."""
        note = torch.zeros(NOTE, dtype=torch.int64, device=device)  # (NOTE,)
        self.comm.exchange([], [(note, self.index - 1)])[1][0].wait()
        dtype, dims, *shape = note.tolist()
        self._coming = DTYPES[dtype], device, shape[:dims]

    def _tell_shape(self, made: Tensor) -> None:
        told = [DTYPES.index(made.dtype), made.dim() - 1, *made.shape[1:]]
        note = torch.tensor(told + [0] * (NOTE - len(told)), device=made.device)  # (NOTE,)
        self.comm.exchange([(note, self.index + 1)], [])[0][0].wait()


def _clash(stages: Sequence[nn.Module]) -> str | None:
    """A name that is another parameter in two stages: checkpoints could not tell them apart."""
    first: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            if first.setdefault(name, param) is not param:
                return name
    return None


def _told(output: Any) -> tuple[int | None, str]:
    """The rows of what a stage returned, None if it cannot be sent; and what it is."""
    if not isinstance(output, Tensor):
        return None, f"a {type(output).__name__}"
    fits = output.dtype in DTYPES and 0 < output.dim() < NOTE - 1
    return len(output) if fits else None, f"{output.dtype} of shape {tuple(output.shape)}"


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
