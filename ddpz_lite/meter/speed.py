"""Measure arithmetic against this machine's peak, and the seconds of collectives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddpz_lite.launcher.devices import device as own_device


def matmul_peak(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    size: int = 1024,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Floating-point operations per second of a square matmul: the fastest of `repeats`.

    Two operations (multiply, add) for each of size**3 products. This is a peak that was reached, so
    it needs no data sheet, whose peak is higher. It uses torch's current number of threads: a rank
    with one core measures one core.
    """
    if size < 1 or repeats < 1:
        raise ValueError(f"matmul_peak: size {size} and repeats {repeats} must be at least 1.")
    a = torch.randn(size, size, device=device).to(dtype)  # (size, size)
    fastest = float("inf")
    for _ in range(repeats + 1):  # the first run warms up
        _finish(a.device)
        start = clock()
        a @ a  # (size, size)
        _finish(a.device)
        fastest = min(fastest, clock() - start)
    return 2 * size**3 / fastest


def utilization(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilization: the fraction of the peak that the model used.

    flops: operations that the model needs, from `flops_per_token`, without recomputed activations.

    Source: Chowdhery et al. 2022, section 4.1.
    """
    if flops < 0 or seconds <= 0 or peak <= 0:
        raise ValueError(
            f"utilization needs flops {flops} >= 0, seconds {seconds} > 0 and peak {peak} > 0."
        )
    return flops / seconds / peak


def home() -> torch.device:
    """The device for tensors to send: the rank's GPU if each rank has one, else the CPU.

    gloo sends from CUDA memory only in collectives, and NCCL needs a GPU for each rank.
    """
    own_gpu = torch.cuda.device_count() >= dist.get_world_size()
    return own_device() if own_gpu else torch.device("cpu")


def moments(
    ways: Mapping[str, Callable[[Tensor], object]], lengths: Sequence[int], repeats: int = 3
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Begin and end of `repeats` collectives on this rank: {(way, bytes): [(s, s), ...]}.

    ways: by name, a function of a float32 tensor (length,) that all ranks call. The ranks of a
    machine share one clock, and all begin after a barrier.
    """
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name, way in ways.items():
        for length in lengths:
            x, times = torch.ones(length, device=home()), found.setdefault((name, 4 * length), [])
            for _ in range(repeats):
                dist.barrier()
                began = time.monotonic()
                way(x)
                x.sum().item()  # waits until a GPU has finished
                times.append((began, time.monotonic()))
    return found


def best_seconds(
    by_rank: Sequence[Mapping[tuple[str, int], Sequence[tuple[float, float]]]],
) -> dict[tuple[str, int], float]:
    """{(way, bytes): seconds} of the best repeat, from the first begin to the last end.

    by_rank: what `moments` returned on each rank.
    """
    return {
        key: min(
            max(ended for _, ended in together) - min(began for began, _ in together)
            for together in zip(*(times[key] for times in by_rank), strict=True)
        )
        for key in by_rank[0]
    }


def ping_pong(sizes: Sequence[int], repeats: int = 3) -> list[float]:
    """Seconds of one message between ranks 0 and 1, for each size in bytes: the best of `repeats`.

    Rank 0 sends, rank 1 sends back, and half of the time is one message.
    """
    peer, found = 1 - dist.get_rank(), []
    for size in sizes:
        x, best = torch.zeros(size, dtype=torch.uint8, device=home()), math.inf
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            for sender in (0, 1):
                if peer == sender:
                    dist.recv(x, src=peer)
                else:
                    dist.send(x, dst=peer)
            x[:1].cpu()  # waits until a GPU has finished
            best = min(best, (time.perf_counter() - began) / 2)
        found.append(best)
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
