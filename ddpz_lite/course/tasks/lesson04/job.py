"""Jobs of lesson 04: feeding the ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddpz_lite.course.check.watch import Kept
from ddpz_lite.wire import span

# ---- 04.token_buckets ----


def token_buckets(answer: Callable[..., Any], *, calls: list[list[Any]]) -> dict[str, Any]:
    """calls: the arguments of each: lengths, budget, epoch, seed."""
    torch.manual_seed(7)
    before, changed, batches = _generators(), [], []
    for arguments in calls:
        kept = Kept(lengths=arguments[0])
        batches.append(_lists(answer(*arguments)))
        changed += kept.changed()
    drew = [name for name, now in _generators().items() if now != before[name]]
    return {"batches": batches, "changed": changed, "drew_from": drew}


def _lists(batches: Any) -> Any:
    """Lists of lists as they are; of what is none, the name of its type."""
    if not isinstance(batches, list) or not all(isinstance(batch, Iterable) for batch in batches):
        return type(batches).__name__
    return [list(batch) for batch in batches]


def _generators() -> dict[str, Any]:
    """The state of each global generator, in a form that can be compared."""
    _, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().tolist(),
        "NumPy": (keys.tolist(), rest),
        "Python": random.getstate(),
    }


# ---- 04.work_queue ----

# What a worker sends to the clerk, who keeps the store: the last rank, which runs no answer.
ADD, GET, SET, BEGIN, DONE = range(5)
TEXT = 64  # bytes of a key, and of a value
SILENCE = 3.0  # seconds without a message, after which no rank is waited for any more
PAUSE = 0.0005


def work_queue(answer: Callable[..., Any], *, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """calls: for each, "tokens" of each text, their "gradients", and who is "busy", or None.

    All ranks but the last work. To them they are the world; the last one is the clerk.
    """
    everyone, clerk = dist.group.WORLD, dist.get_world_size() - 1
    workers = dist.new_group(list(range(clerk)))
    if dist.get_rank() == clerk:
        clerk_of_all = _Clerk(everyone, clerk)
        return {"log": [clerk_of_all.keep(call) for call in calls]}
    results, changed = [], []
    c10d._update_default_pg(workers)
    try:
        for number, call in enumerate(calls):
            store = _Store(everyone, clerk)
            kept = Kept(tokens=call["tokens"])
            try:
                zeros = torch.zeros_like(call["gradients"][0])
                gradient = _gradient(store, call["gradients"])
                result = answer(store, call["tokens"], gradient, zeros)
            finally:  # so that no rank waits for one that raised
                store._ask(DONE, "", number + 1 < len(calls))
            results.append(result.clone() if isinstance(result, torch.Tensor) else result)
            changed += kept.changed()
    finally:
        c10d._update_default_pg(everyone)
    return {"results": results, "changed": changed}


class _Store:
    """A store that all workers share, with three of the methods of torch's stores."""

    def __init__(self, everyone: dist.ProcessGroup, clerk: int) -> None:
        self._everyone, self._clerk = everyone, clerk

    def add(self, key: str, amount: int) -> int:
        """Add to the number under `key`, 0 at first, and return the sum, in one go."""
        return int(self._ask(ADD, key, amount))

    def get(self, key: str) -> bytes:
        """What stands under `key`, as bytes; b"0" at first."""
        return self._ask(GET, key)

    def set(self, key: str, value: Any) -> None:
        """Write `value` under `key`."""
        self._ask(SET, key, value.decode() if isinstance(value, bytes) else value)

    def _ask(self, kind: int, key: str, value: Any = "") -> bytes:
        value = int(value) if kind in (ADD, DONE) else value
        body = [_padded(key), _padded(str(value)), bytes([kind, dist.get_rank()])]
        message = torch.frombuffer(bytearray(b"".join(body)), dtype=torch.uint8)  # (2 TEXT + 2,)
        dist.send(message, self._clerk, group=self._everyone)
        if kind == DONE and not value:
            return b""
        reply = torch.empty(TEXT, dtype=torch.uint8)
        dist.recv(reply, self._clerk, group=self._everyone)
        return bytes(reply.tolist()).rstrip(b"\0")


def _padded(text: str) -> bytes:
    raw = str(text).encode()
    if len(raw) > TEXT:
        raise ValueError(f"this store takes keys and values of {TEXT} bytes, and got {len(raw)}")
    return raw.ljust(TEXT, b"\0")


def _gradient(store: _Store, gradients: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """`gradient(i)`: the gradient of text i, when this rank has had the time for it."""

    def gradient(i: int) -> torch.Tensor:
        if not 0 <= int(i) < len(gradients):
            raise IndexError(f"there is no text {int(i)}; the last is {len(gradients) - 1}")
        store._ask(BEGIN, str(int(i)))
        return gradients[int(i)].clone()

    return gradient


class _Clerk:
    """Keeps the store, and lets a rank that begins a text continue when it has had its time.

    Where there are enough texts, each rank has begun one before any continues, so that none comes
    too late to get one. The rank that is busy is done with its long text when all others have been
    begun. Ranks that read get their answers together, when each has asked for something. A rank
    that then writes what it read plus one writes what the others write. SILENCE ends each of these
    waits.
    """

    def __init__(self, everyone: dist.ProcessGroup, clerk: int) -> None:
        self._everyone, self._workers = everyone, clerk

    def keep(self, call: dict[str, Any]) -> dict[str, Any]:
        """Serve until all workers are done: who began which text, in order; and "waiting", the
        texts that were not begun when the busy rank's time had to end, None if it ended alone;
        "unasked", what a rank began without asking the store after the text before.
        """
        self.texts, self.busy, self.values = len(call["tokens"]), call["busy"], {}
        self.later = call["later"]
        self.begun, self.waiting = [], None
        self.unasked, has_asked = [], set()  # texts that were begun by ranks that had not asked
        self.asked: dict[int, tuple[int, str, str]] = {}  # by rank: kind, key, value
        self.silent, continuing = False, []
        working = set(range(self._workers))
        while working:
            rank, kind, key, value = self._hear(working)
            if kind == BEGIN:
                self.begun.append([rank, int(key)])
                self.unasked += [] if rank in has_asked else [[rank, int(key)]]
                has_asked.discard(rank)
            elif kind in (ADD, GET):
                has_asked.add(rank)
            if kind == DONE:
                working.discard(rank)
                continuing += [rank] if value == "1" else []
            else:
                self.asked[rank] = kind, key, value
            self._serve(working)
        for rank in continuing:
            self._reply(rank, "")
        return {"begun": self.begun, "waiting": self.waiting, "unasked": self.unasked}

    def _hear(self, working: set[int]) -> tuple[int, int, str, str]:
        """The next message. After a silence, the ranks that were made to wait continue."""
        message = torch.empty(2 * TEXT + 2, dtype=torch.uint8)
        work, heard = dist.irecv(message, group=self._everyone), time.monotonic()
        while not work.is_completed():
            time.sleep(PAUSE)
            silence = time.monotonic() - heard > (0.05 if self.silent else SILENCE)
            if silence and self.asked and not work.is_completed():  # the clerk slept, not the ranks
                self.silent = True
                self._serve(working)
                heard = time.monotonic()
        work.wait()
        raw = bytes(message.tolist())
        key, value = (raw[at : at + TEXT].rstrip(b"\0").decode() for at in (0, TEXT))
        return raw[-1], raw[-2], key, value

    def _serve(self, working: set[int]) -> None:
        """Reply to all that need not wait any longer."""
        readers = [rank for rank, asked in self.asked.items() if asked[0] == GET]
        if readers and not (self.silent or working <= self.asked.keys()):
            return
        for rank in readers or sorted(self.asked):
            kind, key, value = self.asked[rank]
            if kind == BEGIN and not self.silent and self._has_to_wait(rank, working):
                continue
            if kind == BEGIN and self._is_long(rank) and self.waiting is None:
                left = self.texts - len({text for _, text in self.begun})
                self.waiting = left
            del self.asked[rank]
            self._reply(rank, self._look_up(kind, key, value))

    def _has_to_wait(self, rank: int, working: set[int]) -> bool:
        if self.texts >= self._workers and not working <= {worker for worker, _ in self.begun}:
            return True
        return self._is_long(rank) and len({text for _, text in self.begun}) < self.texts

    def _is_long(self, rank: int) -> bool:
        """Whether the text that this rank has just begun is the one that takes long."""
        return rank == self.busy and sum(worker == rank for worker, _ in self.begun) > self.later

    def _look_up(self, kind: int, key: str, value: str) -> str:
        if kind == ADD:
            self.values[key] = str(int(self.values.get(key, "0")) + int(value))
        if kind == SET:
            self.values[key] = value
        return "" if kind in (BEGIN, SET) else self.values.get(key, "0")

    def _reply(self, rank: int, value: str) -> None:
        reply = torch.frombuffer(bytearray(_padded(value)), dtype=torch.uint8)
        dist.send(reply, rank, group=self._everyone)


# ---- 04.stop_together ----


def stop_together(
    answer: Callable[..., Any], *, calls: list[dict[str, Any]]
) -> dict[str, Sequence[Any]]:
    """calls: for each, at which steps this rank has a "wish" to stop, and the "most" steps."""
    seen = []
    for call in calls:
        training = _Training(call["wish"])
        returned = answer(training.step, training.wants_to_stop, call["most"])
        seen.append({"returned": returned, "events": training.events})
    return {"calls": seen}


class _Training:
    """Steps that need all ranks, and a rank that wishes to stop after some of them.

    events: "step" and "asked", in the order in which they happened.
    """

    def __init__(self, wish: Sequence[int]) -> None:
        self.wish, self.events = wish, []

    def step(self) -> None:
        self.events.append("step")
        with span("step"):
            dist.all_reduce(torch.ones(8))

    def wants_to_stop(self) -> bool:
        self.events.append("asked")
        return self.events.count("step") in self.wish
