"""Pipeline parallelism: each rank holds some layers, a stage, and micro-batches pass through all.

Stage s sends its output to s + 1, and gets the gradient of it back: nothing else is sent, but for
the gradient of a parameter that two stages share. In which order a stage runs the forwards (F) and
backwards (B) of its micro-batches is a schedule, and a schedule is data:

    gpipe(2, 3)        [F0 F1 F2 B0 B1 B2], [F0 F1 F2 B0 B1 B2]     holds m micro-batches
    one_f_one_b(2, 3)  [F0 F1 B0 F2 B1 B2], [F0 B0 F1 B1 F2 B2]     holds min(p - stage, m)

Both wait as long: of the time of a step, (p - 1) / (m + p - 1) is spent in waiting.

[Note: two that send first] In the middle of 1F1B, stage s sends an output while s + 1 sends a
gradient. If both sent first and waited, neither would receive. So what an action has made leaves
together with the request for what the next one needs, and no send is waited for before the end.

Sources: Huang et al., "GPipe", 2019, section 2; Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model import GPT
from ..wire import span
from .comm import Comm
from .ddp import DDP
from .gradient import Resident, own_grad, set_own_grad
from .mesh import mark

Action = tuple[str, int]  # ("F" or "B", micro-batch)
Schedule = Sequence[Sequence[Action]]  # of each stage
LossFn = Callable[[Any, Any], Tensor]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NOTE = 10  # numbers in a note: dtype, dimensions, and the size of each


# -- schedules


def gpipe(stages: int, micro_batches: int) -> list[list[Action]]:
    """All forwards, then all backwards. Source: Huang et al. 2019, section 2.3."""
    m = range(micro_batches)
    return [[("F", i) for i in m] + [("B", i) for i in m] for _ in range(stages)]


def one_f_one_b(stages: int, micro_batches: int) -> list[list[Action]]:
    """A backward as soon as one can run. Source: Narayanan et al. 2021, section 2.2.1."""
    schedule = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)  # forwards until the first gradient is near
        order = [("F", i) for i in range(ahead)]
        for i in range(ahead, micro_batches):
            order += [("F", i), ("B", i - ahead)]
        order += [("B", i) for i in range(micro_batches - ahead, micro_batches)]
        schedule.append(order)
    return schedule


def run_times(
    schedule: Schedule, forward: float = 1.0, backward: float = 2.0
) -> list[list[tuple[float, float]]]:
    """(start, end) of every action of every stage, if messages take no time.

    forward, backward: the time of one micro-batch on one stage, in any unit. Raises ValueError for
    a schedule that cannot run: an action is missing, stages take micro-batches in different orders,
    or one waits for ever.
    """
    check_schedule(schedule)
    last, todo = len(schedule) - 1, [list(order) for order in schedule]
    ended: dict[tuple[str, int, int], float] = {}  # by kind, stage, micro-batch
    times: list[list[tuple[float, float]]] = [[] for _ in schedule]
    while any(todo):
        before = len(ended)
        for stage, order in enumerate(todo):
            while order:
                kind, i = order[0]
                needs = [("F", stage, i)] if kind == "B" else []
                if kind == "F" and stage > 0:
                    needs.append(("F", stage - 1, i))
                if kind == "B" and stage < last:
                    needs.append(("B", stage + 1, i))
                if any(need not in ended for need in needs):
                    break
                free = times[stage][-1][1] if times[stage] else 0.0
                start = max([free, *(ended[need] for need in needs)])
                ended[kind, stage, i] = start + (forward if kind == "F" else backward)
                times[stage].append((start, ended[kind, stage, i]))
                order.pop(0)
        if len(ended) == before:
            waits = "; ".join(f"stage {s} for {o[0][0]}{o[0][1]}" for s, o in enumerate(todo) if o)
            raise ValueError(
                f"the schedule cannot run: all stages wait for ever ({waits}). Cure: a backward "
                "comes after its forward, and after the same backward on the next stage."
            )
    return times


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError unless all stages run all micro-batches, in one order of F and one of B."""
    if not schedule or not schedule[0]:
        raise ValueError("the schedule is empty. Cure: one_f_one_b(stages, micro_batches)")
    count = len(schedule[0]) // 2
    for stage, order in enumerate(schedule):
        if sorted(order) != [(kind, i) for kind in "BF" for i in range(count)]:
            raise ValueError(
                f"stage {stage} must run F and B of each micro-batch 0 to {count - 1} once, as "
                f"stage 0 does; it runs {_words(order)}"
            )
        for kind in "FB":
            mine, first = ([a for a in s if a[0] == kind] for s in (order, schedule[0]))
            if mine != first:
                raise ValueError(
                    f"stage {stage} runs {_words(mine)}, stage 0 {_words(first)}: messages have no "
                    "names, so each would take another's. Cure: the same order on all stages."
                )


def _words(order: Sequence[Action]) -> str:
    return " ".join(f"{kind}{i}" for kind, i in order)


# -- stages of our GPT


class GPTStage(nn.Module):
    """Some blocks of a GPT; the first stage has the embeddings too, the last norm and head.

    Parameters are those of the GPT, under the same names. With tied weights the last stage holds
    the token embedding, whose weight is its head's.
    """

    def __init__(self, gpt: GPT, blocks: range) -> None:
        super().__init__()
        self.config = gpt.config
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
            f"{count} blocks cannot be dealt to stages of {sizes or stages} blocks. Cure: at least "
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
        schedule: for each stage the order of its actions, see `gpipe` and `one_f_one_b`.
        group: a process group or 1-D mesh; stage s is its rank s. Default: the world.

    Attributes: `most_live` is how many micro-batches the last step held activations of, at most;
    `micro_batches` how many the schedule has.

    Raises: ValueError for a schedule that cannot run, or for another number of stages than ranks;
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
        run_times(schedule)  # or an error
        if not len(stages) == len(schedule) == self.comm.world:
            raise ValueError(
                f"{len(stages)} stages and a schedule for {len(schedule)}, on a group of "
                f"{self.comm.world} ranks. Cure: one stage on each rank."
            )
        self.comm.check_equal("the schedules", [_words(order) for order in schedule])
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
                    "different values. Cure: build the model on a device."
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
        """Where backward leaves the gradient of a parameter: on it, or in shards on its piece."""
        module = getattr(self.stage, "module", self.stage)
        param = dict(module.named_parameters())[name]
        if isinstance(param, Resident):
            flat, index = param.place
            return param if flat.owner.reduces_later else flat.pieces[index]
        return param

    @torch.no_grad()
    def _sum_tied(self, before: dict[nn.Parameter, Tensor | None]) -> None:
        """Add what the other stages have of each tied gradient, in one order on all stages."""
        for param, where in zip(before, self._tied.values(), strict=True):
            with torch._C.DisableTorchFunctionSubclass():  # shards of ZeRO-3 are plain ones here
                grad = own_grad(param)
                others = [s for s in where if s != self.index]
                parts = self._swap(grad, others, others) | {self.index: grad.clone()}
                grad.copy_(sum(parts[s] for s in where))
                if before[param] is not None:
                    grad.add_(before[param])

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
                f"{self.micro_batches} micro-batches. Cure: a target for each input, a weight for "
                "each micro-batch."
            )
        learns = torch.is_grad_enabled()
        actions = [a for a in self.actions if learns or a[0] == "F"]
        self._forget()
        self.most_live, self._losses = 0, []
        tied = [self._shard_of(name) for name in self._tied] if learns else []
        before = {p: None if own_grad(p) is None else own_grad(p).detach().clone() for p in tied}
        for param in before:
            set_own_grad(param, None)
        kind_of_input = (inputs.shape[1:], inputs.dtype, inputs.device)
        is_new, self._known = kind_of_input != self._known, kind_of_input
        if is_new and not self.is_first:
            self._hear_shape(inputs.device)
        self._pass_on(None, 0, actions[0], len(rows[0][0]))
        for (kind, i), following in zip(actions, [*actions[1:], None], strict=True):
            with span(f"{kind}{i}"):
                if kind == "F":
                    made = self._forward(i, *(part[i] for part in rows), loss_fn, weights[i])
                else:
                    made = self._backward(i, is_last=(kind, i) == actions[-1])
            if is_new and made is not None:  # the first action is a forward
                self._tell_shape(made)
            is_new = False
            size = len(rows[0][following[1]]) if following else 0
            self._pass_on(made, self.index + (1 if kind == "F" else -1), following, size)
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []
        if learns:
            self._sum_tied(before)
        return sum(self._losses) if self.is_last else None

    def _parts(self, batch: Any, name: str) -> Sequence[Tensor]:
        if not isinstance(batch, Tensor) or batch.dim() == 0 or len(batch) < self.micro_batches:
            what = f"of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch)
            raise ValueError(
                f"{name} must be a tensor of at least {self.micro_batches} rows, one for each "
                f"micro-batch; got {what}. Cure: a larger batch, or fewer micro-batches."
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
        elif not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(inputs):
            raise ValueError(
                f"stage {self.index} returned {_told(output)} for {len(inputs)} rows. Cure: one "
                "tensor, with the batch as its first dimension."
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
                "Cure: no detach(), .data or no_grad() on the way from input to output."
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
            room, frm = torch.empty_like(self._live[following[1]][1].detach()), self.index + 1
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


def _told(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
