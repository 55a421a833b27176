"""The messages of a pipeline: activations to the next stage, their gradients to the one before.

A message has no name on the wire: of two ranks, the n-th that one receives is the n-th that the
other sent. With chunks, messages for several stages go between the same two ranks. But a schedule
is data and every rank knows all of it, so a rank knows the order in which each other one sends to
it, and receives in that order, ahead of what it needs if something else comes first.

[Note: two that send first] In the middle of 1F1B, stage s sends an output while s + 1 sends a
gradient. If both sent first and waited, neither would receive. So what an action has made leaves
together with the request for what the next one needs, and no send is waited for before the end.

[Note: one after the other] NCCL ends the messages of a rank in their order. `gpipe`, `one_f_one_b`
and `zero_bubble` bear that; a schedule in which a stage runs further ahead may wait forever there,
and an interleaved one does, since all ranks of the ring send before they receive.

[Note: shapes] A note tells the next stage what it will get: once for each kind of input, before the
first activation. Both sides then know the shapes of activations and of their gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.pipeline.schedules import Action

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
TENSORS, DIMS = 6, 8  # the most of a note
NOTE = 1 + TENSORS * (2 + DIMS)  # numbers: how many tensors; of each dtype, dims, and sizes

Message = tuple[str, int, int]  # "F", "B" or "note"; micro-batch; the stage that receives it
Spec = list[tuple[torch.dtype, tuple[int, ...]]]  # of each tensor: dtype, and shape of one row


class Messages:
    """What this rank sends and receives in a step.

    Args:
        comm: the ranks of the pipeline; stage s of the model is on rank s % world.
        stages: how many the model has.
    """

    def __init__(self, comm: Comm, stages: int) -> None:
        self.comm, self.stages = comm, stages
        self._kind: Any = None  # the kind of inputs that `_specs` belongs to
        self._specs: dict[int, Spec] = {}  # by stage: its input
        self._arrived: dict[Message, list[Tensor]] = {}

    def begin(
        self, orders: Sequence[Sequence[Action]], kind: Any, rows: list[int], device: torch.device
    ) -> None:
        """A step begins. orders: what each rank will run, as (kind, micro-batch, stage).

        kind: whatever decides the shapes of activations; rows: of each micro-batch.
        """
        self._rows, self._device = rows, device
        if kind != self._kind:
            self._kind, self._specs = kind, {}
        learns = not self._specs
        self._arrived, self._in_flight = {}, []
        self._queues: dict[int, deque[Message]] = {}
        for rank, order in enumerate(orders):
            sent = self._sent_by(order, learns) if rank != self.comm.rank else ()
            self._queues[rank] = deque(m for m in sent if self._rank_of(m) == self.comm.rank)

    def _rank_of(self, message: Message) -> int:
        return message[2] % self.comm.world

    def _sent_by(self, order: Sequence[Action], learns: bool) -> Iterator[Message]:
        announced = set() if learns else set(range(self.stages))  # stages that know their shapes
        for kind, micro, stage in order:
            if kind == "F" and stage + 1 < self.stages:
                if stage + 1 not in announced:
                    announced.add(stage + 1)
                    yield "note", 0, stage + 1
                yield "F", micro, stage + 1
            elif kind == "B" and stage > 0:
                yield "B", micro, stage - 1

    def pass_on(self, made: list[tuple[Message, list[Tensor]]], need: Message | None) -> None:
        """Send what an action has made, and wait for what the following one needs."""
        sends: list[tuple[Tensor, int]] = []
        for message, tensors in made:
            peer = self._rank_of(message)
            if peer == self.comm.rank:
                self._arrived[message] = [t.detach() for t in tensors]
                continue
            if message[0] == "F" and message[2] not in self._specs:
                sends.append((self._write_note(message[2], tensors), peer))
            sends += [(t, peer) for t in tensors]
        receives: list[tuple[Tensor, int]] = []
        for message, peer in self._ahead_of(need):
            if message[0] == "note":
                self._exchange(sends, receives)
                sends, receives = [], []
                self._read_note(message[2], peer)
                continue
            self._arrived[message] = self._empty(message)
            receives += [(t, peer) for t in self._arrived[message]]
        self._exchange(sends, receives)

    def _ahead_of(self, need: Message | None) -> Iterator[tuple[Message, int]]:
        """The messages to receive up to `need`, in the order of their sender."""
        if need is None or need in self._arrived:
            return
        stage = need[2] + (-1 if need[0] == "F" else 1)
        peer, message = stage % self.comm.world, None
        while message != need:
            message = self._queues[peer].popleft()
            yield message, peer

    def _exchange(self, sends: Any, receives: Any) -> None:
        sent, received = self.comm.exchange(sends, receives)
        self._in_flight = [(w, t) for w, t in self._in_flight if not w.is_completed()]
        self._in_flight += [(work, sends) for work in sent]  # tensors must live until they are sent
        for work in received:
            work.wait()

    def take(self, message: Message) -> list[Tensor]:
        """What has arrived as this message."""
        return self._arrived.pop(message)

    def end(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight = []

    # -- shapes

    def _empty(self, message: Message) -> list[Tensor]:
        kind, micro, stage = message
        spec = self._specs[stage if kind == "F" else stage + 1]
        if kind == "B":
            spec = [(dtype, shape) for dtype, shape in spec if dtype.is_floating_point]
        rows = self._rows[micro]
        return [torch.empty((rows, *s), dtype=d, device=self._device) for d, s in spec]

    def _write_note(self, stage: int, tensors: Sequence[Tensor]) -> Tensor:
        self._specs[stage] = [(t.dtype, tuple(t.shape[1:])) for t in tensors]
        note = [len(tensors)]
        for dtype, shape in self._specs[stage]:
            sizes = [*shape, *[0] * (DIMS - len(shape))]
            note += [DTYPES.index(dtype), len(shape), *sizes]
        note += [0] * (NOTE - len(note))
        return torch.tensor(note, device=self._device)  # (NOTE,)

    def _read_note(self, stage: int, peer: int) -> None:
        note = torch.empty(NOTE, dtype=torch.int64, device=self._device)  # (NOTE,)
        self._exchange([], [(note, peer)])
        count, *numbers = note.tolist()
        self._specs[stage] = []
        for start in range(0, count * (2 + DIMS), 2 + DIMS):
            dtype, dims, *sizes = numbers[start : start + 2 + DIMS]
            self._specs[stage].append((DTYPES[dtype], tuple(sizes[:dims])))

    def find_mismatch(self, stage: int, output: Sequence[Any], rows: int) -> str | None:
        """What is wrong with the output of a stage, as a phrase; None if it can be sent."""
        bad = [t for t in output if not isinstance(t, Tensor)]
        if bad:
            return f"a {type(bad[0]).__name__}"
        for tensor in output:
            fits = tensor.dtype in DTYPES and 0 < tensor.dim() <= DIMS and len(tensor) == rows
            if not fits:
                return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        announced = self._specs.get(stage + 1)
        spec = [(t.dtype, tuple(t.shape[1:])) for t in output]
        if announced not in (None, spec):
            return f"{spec} (dtype, shape of a row), and before {announced},"
        return None if 0 < len(output) <= TENSORS else f"{len(output)} tensors"
