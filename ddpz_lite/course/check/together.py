"""Many answers to one task in one launch: each has its turn on the same ranks.

A turn has its own process group, its own ledger and an answer unpacked for it alone, so what one
does to its ranks is not seen by the next. Ranks leave what they saw in files; when the launch dies,
the turns that were over are kept. A turn that did not end well on every rank has no result here:
the caller then runs that answer alone, and gets the full report.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpz_lite import wire
from ddpz_lite.course.check import data
from ddpz_lite.course.check import job as jobs
from ddpz_lite.course.check.task import Case, Observed, Task
from ddpz_lite.launcher import CannotSend, RankFailed, launch
from ddpz_lite.launcher.serialize import pack_call

MOST = 24  # turns of one launch: the wire follows 256 groups, and a turn may make several
START = 60.0  # seconds until all ranks are there
PAUSE = 0.002  # seconds between two looks for the other ranks' files


def observe_together(
    task: Task, answers: Sequence[Any], case: Case, seconds: float | None = None
) -> list[Observed | None]:
    """What each answer did in one case; None for those that did not come to their end.

    seconds: until a turn is ended; by default the case's own time.
    """
    inputs = [data.pack(given) for given in case.inputs]
    seen: list[Observed | None] = [None] * len(answers)
    calls = {number: call for number, a in enumerate(answers) if (call := _call(a)) is not None}
    left = list(calls)
    while left:
        turns = left[:MOST]
        packed = [calls[number] for number in turns]
        about = (task.job, packed, inputs, task.uses_own, seconds or case.timeout)
        ended = _launch(about, case)
        for number, observed in zip(turns, ended, strict=False):
            seen[number] = observed
        left = left[len(ended) :]
    return seen


def _call(answer: Any) -> bytes | None:
    try:
        return pack_call(answer, (), {})
    except CannotSend:
        return None


def _launch(about: tuple, case: Case) -> list[Observed | None]:
    """What became of each turn, up to and including the one that ended the launch."""
    job, packed, inputs, guarded, seconds = about
    with tempfile.TemporaryDirectory(prefix="ddpz-turns-") as folder:
        args = (folder, job, packed, inputs, guarded, seconds)
        failed = False
        try:
            limit = START + seconds * len(packed)
            launch(_on_rank, case.world, args=args, timeout=limit, network=case.network)
        except RankFailed:
            failed = True
        ended: list[Observed | None] = []
        for number in range(len(packed)):
            files = [_file(folder, number, rank) for rank in range(case.world)]
            if not all(file.exists() for file in files):
                ended.append(None)
                break
            ended.append(_observed(case, [pickle.loads(file.read_bytes()) for file in files]))
    if not failed and len(ended) < len(packed):
        raise RuntimeError("a launch of many answers ended well before all had their turn")
    return ended


def _observed(case: Case, of_ranks: Sequence[tuple]) -> Observed | None:
    if any(body is None for body, _ in of_ranks):
        return None
    results = [data.unpack(body) for body, _ in of_ranks]
    ledger = [record for _, (records, _) in of_ranks for record in records]
    spans = [span for _, (_, spans) in of_ranks for span in spans]
    return Observed(case, "ok", "", results, ledger, spans)


def _file(folder: str, number: int, rank: int) -> Path:
    return Path(folder, f"{number}.{rank}")


# ---- on a rank ----


def _on_rank(
    folder: str,
    job: str,
    calls: Sequence[bytes],
    inputs: Sequence[bytes],
    guarded: bool,
    seconds: float,
) -> None:
    """[Note: the alarm] SIGALRM without a handler ends the process wherever it hangs; a timer
    thread would make the wire unsure about who may still call a collective.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    restore = _shared()
    importlib.import_module("torch._dynamo")  # behind the first optimizer: not in a turn's time
    gc.freeze()  # what is here before the first turn need not be searched after each
    for number, call in enumerate(calls):
        if number:
            _join(dist.PrefixStore(f"turn {number}", store), rank, world)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        body = _turn(job, call, data.unpack(inputs[rank]), guarded)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # a finalizer may hang, too
        result = (body, wire.renew())
        wire.mark("raised" if body is None else "returned")
        if body is None:
            _leave()  # so that no rank waits for this one
        partial = Path(folder, f"{number}.{rank}.part")
        partial.write_bytes(pickle.dumps(result))
        partial.rename(_file(folder, number, rank))
        while not all(_file(folder, number, peer).exists() for peer in range(world)):
            time.sleep(PAUSE)
        _leave()
        restore()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _turn(job: str, call: bytes, inputs: dict[str, Any], guarded: bool) -> bytes | None:
    """The job's data, packed; None for an answer that raised."""
    try:
        answer, _, _ = pickle.loads(call)
        silence = io.StringIO()
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            return jobs.run(job, answer, inputs, guarded)
    except BaseException:  # sys.exit ends a rank too; alone the answer says how
        return None


def _join(store: Any, rank: int, world: int) -> None:
    wire.renew()
    dist.init_process_group("wire", store=store, rank=rank, world_size=world)


def _leave() -> None:
    """Close this turn's sockets."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _shared() -> Callable[[], None]:
    """A function that undoes what an answer did to torch for all of the process."""
    modules = [torch, dist, dist.distributed_c10d, torch.Tensor, torch.optim, torch.nn]
    kept = [(module, dict(vars(module))) for module in modules]
    variables, path = dict(os.environ), list(sys.path)

    def restore() -> None:
        for module, names in kept:
            for name, value in names.items():
                if vars(module).get(name) is not value and callable(value):
                    setattr(module, name, value)
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = path
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.seed()

    return restore
