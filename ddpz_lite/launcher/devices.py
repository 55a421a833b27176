"""Which backend and which device each rank gets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddpz_lite.launcher import rank as _rank

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class Plan:
    """The backend of a job, each rank's CUDA device (None: CPU), and a note to print."""

    backend: str
    devices: tuple[int | None, ...]
    note: str = ""


def plan(world_size: int, backend: str = "auto") -> Plan:
    """With a GPU per rank: NCCL, and gloo for CPU tensors. With fewer GPUs, ranks share them over
    gloo, since NCCL refuses two ranks on one GPU.

    Raises ValueError for backend="nccl" with fewer GPUs than ranks.
    """
    import torch

    gpus = torch.cuda.device_count()  # counts without touching CUDA, so that a fork stays safe
    if backend == "nccl" and gpus < world_size:
        raise ValueError(
            f"launch: backend='nccl' needs one GPU per rank: {world_size} ranks, {gpus} GPUs here. "
            "Fix: backend='auto' (ranks share the GPUs over gloo) or fewer ranks."
        )
    if gpus == 0:
        return Plan("gloo", (None,) * world_size)
    if gpus >= world_size:
        chosen = "cpu:gloo,cuda:nccl" if backend == "auto" else backend
        return Plan(chosen, tuple(range(world_size)))
    shared = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    note = f"{world_size} ranks share {shared}, over gloo: NCCL wants one GPU per rank."
    return Plan("gloo", tuple(rank % gpus for rank in range(world_size)), note)


def device():
    """The torch.device of this process: its rank's GPU or the CPU, under any launcher."""
    import torch

    if _rank.current is not None:
        index = _rank.current.device
    elif torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    else:
        index = None
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
