"""Run by test_survivors.py: unsupervised ranks, some of which kill themselves.

    python survivors_ranks.py FOLDER    each rank of each case writes FOLDER/<case>-<rank>.pt

A fresh process forks the ranks: `dz.launch` would end them all with the first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.checkpoint.full_state import full_state_dict
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.strategies.reducer import Bucket
from ddpz_lite.trainer.survivors import Survivors

STEPS, HIT = 6, 3  # the step in which ranks are lost
LOST = "Connection closed by peer"


@dataclass
class Case:
    world: int
    place: str = ""  # where in step HIT the victims die
    victims: tuple[int, ...] = ()
    behind: int | None = None  # loses its connections before it steps, though others step
    wait: float = 20.0
    late: int | None = None  # comes when the others have gone on
    options: dict[str, Any] = field(default_factory=dict)


HALF = {"mixed_precision": torch.float16}
CASES = {
    **{
        f"{place}-{world}": Case(world, place, (world - 1,))
        for world, places in {
            2: ("backward", "after the step"),
            3: ("forward", "backward", "before the step", "after the step"),
            4: ("backward", "before the step"),
        }.items()
        for place in places
    },
    "rank 0": Case(3, "backward", (0,)),
    "behind": Case(3, "after the step", (2,), behind=0),
    "behind in fp16": Case(4, "after the step", (3,), behind=1, options=HALF),
    "two at once": Case(4, "backward", (1, 3), wait=10.0),
    "late": Case(3, late=2),
    **{f"stage {stage}": Case(3, "forward", (2,), options={"stage": stage}) for stage in (1, 2, 3)},
    "hybrid": Case(4, "forward", (3,), options={"stage": 3, "mesh": (2, 2)}),
}


def build(stage: int = 0, mesh: tuple[int, int] | None = None, **options: Any) -> tuple:
    """Buckets of a few parameters, dropout, and running statistics."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.Linear(16, 1)
    on = dist.init_device_mesh("cpu", mesh) if mesh else None
    how = {"lr": 0.05, "bucket_mb": 1e-4, **options}
    model, optimizer = parallelize(nn.Sequential(*layers), torch.optim.AdamW, stage, mesh=on, **how)
    return model, optimizer


def update(model: nn.Module, optimizer: Any, step: int, at: Callable[[str], None]) -> None:
    """A step on this rank's rows; `at` is called with each place."""
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    local = rows[dist.get_rank() :: dist.get_world_size()]
    at("forward")
    loss = model(local).float().square().mean()
    loss.backward()
    at("before the step")
    optimizer.step()
    optimizer.zero_grad()
    at("after the step")
    dist.all_reduce(loss.detach())  # as one who logs the mean


def found(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a rank has."""
    state = {"model": full_state_dict(model), "optimizer": optimizer.state_dict()}
    scale = optimizer.loss_scale and vars(optimizer.loss_scale)
    return state | {"random": torch.get_rng_state(), "scale": scale}


def rank_of(case: Case, rank: int, store: dist.Store) -> dict[str, Any]:
    team = Survivors(store, rank, case.world, wait=case.wait)
    model, optimizer = build(**case.options)
    torch.manual_seed(100 + rank)
    done, worlds, reduce = 0, [], Bucket.reduce

    def die_at(place: str) -> Callable[[str], None]:
        def at(here: str) -> None:
            if here == place:
                os.kill(os.getpid(), signal.SIGKILL)

        return at

    def second_bucket(bucket: Bucket, missing: list[int]) -> None:
        reduce(bucket, missing)
        Bucket.reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def lose(here: str) -> None:
        if here == "before the step" and not team.generation:
            if rank == case.late:
                store.wait(["regroup-1/in"])
            raise RuntimeError(LOST)

    while done < STEPS:
        at: Callable[[str], None] = lambda _: None  # noqa: E731
        if done == HIT and rank in case.victims:
            at = die_at(case.place)
            if case.place == "backward":
                Bucket.reduce = second_bucket
        elif done == HIT and (rank == case.behind or case.late is not None):
            at = lose
        worlds.append((done, dist.get_world_size()))
        done = team.attempt(lambda: update(model, optimizer, done, at), model, optimizer, done)  # noqa: B023
    return found(model, optimizer) | {"worlds": worlds, "members": team.members}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        pids = []
        for rank in range(case.world):
            if pid := os.fork():
                pids.append(pid)
                continue
            try:
                left = rank_of(case, rank, dist.FileStore(f"{folder}/{name}.store", case.world))
            except RuntimeError as error:
                left = {"error": str(error)}
            torch.save(left, f"{folder}/{name}-{rank}.pt")
            os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
