"""Save while training continues: the state is copied, and a thread writes the copy.

Training continues once the copy is made. The copy takes the bytes of this rank's part of the state
in host memory until it is written: in mixed precision 12 bytes for each of its parameters.

[Note: separate groups] Collectives match by their order within a group, so the thread's must not
mix with those of training. Each save in flight uses its own gloo groups of the same ranks; `wait()`
returns them for the next save.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.checkpoint.parts import comm_of
from ddpz_lite.checkpoint.save_load import Content, content_of, save_content
from ddpz_lite.strategies.comm import Comm

_idle: dict[tuple[int, ...], list[dist.ProcessGroup]] = defaultdict(list)  # by their ranks


class Saving:
    """A save in flight. Every rank calls `wait()`, in the order of the saves."""

    def __init__(self, path: str | os.PathLike[str], content: Content, comm: Comm) -> None:
        self._error: Exception | None = None
        self._comm = comm
        self._thread = threading.Thread(target=self._run, args=(path, content))
        self._thread.start()

    def _run(self, path: str | os.PathLike[str], content: Content) -> None:
        try:
            save_content(path, content, self._comm)
        except Exception as error:  # wait() raises it in the training thread
            self._error = error

    def done(self) -> bool:
        """Whether the thread has ended on this rank; other ranks may still write."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint counts; raises what `save_checkpoint` would have raised."""
        self._thread.join()
        for group in {self._comm.group, self._comm.replicas, self._comm.holders} - {None}:
            _idle[tuple(dist.get_process_group_ranks(group))].append(group)
        self._comm = Comm.alone()
        if self._error is not None:
            raise self._error


def save_in_background(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> Saving:
    """As `save_checkpoint`, but returns as soon as the state is copied.

    Every rank of the model must call it, and `wait()` before the next save to the same folder.
    Raises TypeError at once for an `extra` that cannot be saved; `wait()` raises later errors.
    """
    comm = comm_of(model, optimizer).everyone
    with torch.no_grad():
        content = content_of(model, optimizer, extra, comm).copy()
    return Saving(path, content, _separate_groups(comm))


def _separate_groups(comm: Comm) -> Comm:
    """The same ranks in groups that nothing else uses."""
    own = copy(comm)
    own.group = _idle_or_new(comm.group) if comm.world > 1 else None
    if comm.replicas is not None:
        own.replicas = _idle_or_new(comm.replicas)
    own.holders = own.group if comm.shards == comm.world else _idle_or_new(comm.holders)
    return own


def _idle_or_new(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the ranks of another; None is the world."""
    ranks = dist.get_process_group_ranks(group)
    idle = _idle[tuple(ranks)]
    while idle:
        found = idle.pop()
        if found in dist.distributed_c10d._world.pg_map:  # not of a world that has ended
            return found
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
