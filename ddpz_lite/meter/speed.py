"""How fast the arithmetic is, against how fast this machine can be: model FLOPs utilization."""

from __future__ import annotations

import time

import torch


def matmul_peak(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    size: int = 1024,
    repeats: int = 7,
) -> float:
    """Floating-point operations per second of a square matmul: the fastest of `repeats`.

    Two operations (multiply, add) for each of size**3 products. It is a peak that was reached: a
    data sheet's is higher; this one needs no data sheet. It is for the threads that torch uses now,
    so a rank that got one core measures one core.
    """
    if size < 1 or repeats < 1:
        raise ValueError(f"matmul_peak: size {size} and repeats {repeats} must be at least 1.")
    a = torch.randn(size, size, device=device).to(dtype)  # (size, size)
    fastest = float("inf")
    for _ in range(repeats + 1):  # the first run warms up and is as fast as any or slower
        _finish(a.device)
        start = time.perf_counter()
        a @ a  # (size, size)
        _finish(a.device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def utilization(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilization: the share of the peak that went into the model.

    flops: operations that the model needs, from `flops_per_token`, not those a trick adds
    (recomputed activations).

    Source: Chowdhery et al. 2022, section 4.1.
    """
    if flops < 0 or seconds <= 0 or peak <= 0:
        raise ValueError(
            f"utilization needs flops {flops} >= 0, seconds {seconds} > 0 and peak {peak} > 0."
        )
    return flops / seconds / peak


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
