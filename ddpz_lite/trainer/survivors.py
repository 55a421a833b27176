"""Survivors: when a rank dies, the others continue in a smaller group, without a restart.

    team = Survivors(store, rank, world_size)  # forms the process group
    model, optimizer = dz.parallelize(module, torch.optim.AdamW, lr=1e-3)
    done = 0
    while done < steps:
        done = team.attempt(update, model, optimizer, done)

`update()` is one step, up to `optimizer.step()`, on the batch for rank `dist.get_rank()` of
`dist.get_world_size()`. Under DDP every rank has the full model, so a death loses nothing of it.
The remaining ranks

    leave      the broken group: their closed connections notify the ranks that still wait
    regroup    in the store: the first rank that has waited long enough decides who is in
    agree      a rank that is a step behind copies the state of one that is ahead; if no rank has
               done the step, it is undone

The store must outlive the ranks: a FileStore, or a TCPStore that none of them serves. And the
launcher must not end the other ranks when one dies, as torchrun does, and `dz.launch` without
survivors=True (which sets rank and world size in the environment: RANK, WORLD_SIZE).
`ddpz train --survive` is such a loop.

Source: a group that is formed again at a step, and replicas that copy from one that is ahead, as in
torchft, manager.py (github.com/meta-pytorch/torchft). There replicas may also come back.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpz_lite.checkpoint.files import pack, restore_rng, rng_state
from ddpz_lite.checkpoint.full_state import full_state_dict, load_full_state_dict
from ddpz_lite.launcher.failure import PEER_LOST
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.ddp import DDP
from ddpz_lite.strategies.optim import ShardedOptimizer


class Survivors:
    """The ranks that train together, and after a death the remaining ones; gloo.

    Args:
        store: where the ranks meet; nothing else may use its keys.
        rank, world_size: of this process at the start. `members` has the original numbers of the
            remaining ranks; after a death `dist.get_rank()` is a rank's index among them.
        wait: seconds to wait for the others after a death. If one rank died, all others come at
            once; if several died, this time passes.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, wait: float = 20.0
    ) -> None:
        self.store, self.rank, self.wait = store, rank, wait
        self.members, self.generation = list(range(world_size)), 0
        self._join()

    def attempt(
        self,
        update: Callable[[], Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        done: int,
    ) -> int:
        """Do step number `done`. Returns how many are done now: `done` if a rank was lost first.

        Then distribute the batch again, over fewer ranks. A step that some ranks have done counts
        for all, with the batch of the lost rank. `update` must itself undo what it changes besides
        the model, the optimizer and the random generators of torch, Python and NumPy.

        Raises RuntimeError if the state was sharded, so that a part is lost, and if this rank came
        too late. A rank that dies while the others regroup ends them, too, after a timeout.
        """
        random, buffers, stepped = rng_state(), [b.clone() for b in model.buffers()], []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            update()
            return done + 1
        except RuntimeError as error:
            if not PEER_LOST.search(str(error)):
                raise
            _check_replicated(model, optimizer, error)
        finally:
            hook.remove()
        # The error is released by now: its frames would keep the old group alive.
        done += len(stepped)
        self._regroup(model)
        steps = Comm().gather_objects(done)
        if min(steps) < max(steps):
            _copy_from(steps.index(max(steps)), model, optimizer, behind=done < max(steps))
        elif not stepped:
            restore_rng(random)
            _restore(model, buffers)
        optimizer.zero_grad()
        return max(steps)

    def _join(self) -> None:
        store = dist.PrefixStore(f"group-{self.generation}", self.store)
        place, world_size = self.members.index(self.rank), len(self.members)
        dist.init_process_group("gloo", store=store, rank=place, world_size=world_size)

    def _regroup(self, model: DDP) -> None:
        """Leave the group, and form one of the ranks that report in time."""
        model.abandon()
        dist.destroy_process_group()
        self.generation += 1
        key, deadline = f"regroup-{self.generation}", time.monotonic() + self.wait
        self.store.set(f"{key}/{self.rank}", "here")
        while True:
            here = [rank for rank in self.members if self.store.check([f"{key}/{rank}"])]
            if len(here) >= len(self.members) - 1 or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        members = json.loads(self.store.compare_set(f"{key}/in", "", json.dumps(here)))
        if self.rank not in members:
            raise RuntimeError(
                f"rank {self.rank} came too late: ranks {members} continued without it. Fix: a "
                f"longer wait= than {self.wait:g} seconds, if ranks may be that far apart."
            )
        self.members = members
        self._join()
        model.join()


def _check_replicated(model: nn.Module, optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """Raise RuntimeError unless every rank of the world holds the full state."""
    cut = isinstance(optimizer, ShardedOptimizer) and optimizer.comm.world > 1
    of_the_world = isinstance(model, DDP) and model.comm.group is None and not model.comm.axes
    if cut or not of_the_world:
        raise RuntimeError(
            "a rank is lost, and its shard of the state with it. Fix: start the remaining ranks "
            "again and load_checkpoint() the last save, which fits any world; or use stage 0 over "
            "the world, where every rank holds everything."
        ) from error


@torch.no_grad()
def _copy_from(source: int, model: DDP, optimizer: torch.optim.Optimizer, behind: bool) -> None:
    """Give the ranks that are behind the state of `source`; every rank calls it."""
    scale = getattr(optimizer, "loss_scale", None)
    sent = [b""]
    if dist.get_rank() == source:
        state = {"model": full_state_dict(model), "optimizer": optimizer.state_dict()}
        sent = [pack(state | {"scale": asdict(scale) if scale else {}})]
    dist.broadcast_object_list(sent, source)
    if behind:
        state = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=True)
        load_full_state_dict(model, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if scale:
            vars(scale).update(state["scale"])


@torch.no_grad()
def _restore(model: nn.Module, buffers: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
