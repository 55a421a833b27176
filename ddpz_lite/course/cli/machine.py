"""What this machine is, as far as training is concerned: cores, memory, GPUs, backends, tools.

Every fact here is asked of the system at the moment of the call. Limits of a container count: eight
cores of which a control group grants two are two.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Cores:
    """Cores that this process may use, and the cores of the machine."""

    usable: int
    total: int
    limit: str = ""  # what makes usable smaller than total


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    available: int
    total: int
    limited: bool  # by a control group


def cores(cgroups: Path = CGROUPS) -> Cores:
    """Cores after affinity and after the CPU quota of a control group."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    usable, limit = allowed, "CPU affinity" if allowed < total else ""
    quota = cpu_quota(cgroups)
    if quota is not None and quota < usable:
        usable, limit = max(1, math.ceil(quota)), f"control group: {quota:g} cores"
    return Cores(usable, total, limit)


def cpu_quota(cgroups: Path = CGROUPS) -> float | None:
    """Cores that the control groups of this process grant, or None where nothing limits them."""
    quotas = []
    for text in _read_up(cgroups, "cpu.max"):  # version 2: "200000 100000" or "max 100000"
        quota, period = text.split()
        if quota != "max":
            quotas.append(int(quota) / int(period))
    for quota, period in zip(  # version 1: -1 means no limit
        _read_up(cgroups / "cpu", "cpu.cfs_quota_us"),
        _read_up(cgroups / "cpu", "cpu.cfs_period_us"),
        strict=True,
    ):
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory(cgroups: Path = CGROUPS) -> Memory:
    """Memory after the limit of a control group."""
    machine = psutil.virtual_memory()
    total, available, limited = machine.total, machine.available, False
    limits = _read_up(cgroups, "memory.max"), _read_up(cgroups, "memory.current")
    older = cgroups / "memory"
    limits_v1 = (
        _read_up(older, "memory.limit_in_bytes"),
        _read_up(older, "memory.usage_in_bytes"),
    )
    for bounds, uses in (limits, limits_v1):
        for bound, used in zip(bounds, uses, strict=False):
            if bound != "max" and int(bound) < total:
                total, limited = int(bound), True
                available = min(available, int(bound) - int(used))
    return Memory(max(available, 0), total, limited)


def _read_up(root: Path, name: str) -> list[str]:
    """The file `name` of this process's control group and of every group above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    below = {line.split(":", 2)[2].strip("/") for line in lines if line.count(":") >= 2}
    folders = {root}
    for group in filter(None, below):
        folders |= {root / part for part in (Path(group), *Path(group).parents)}
    found = [folder / name for folder in sorted(folders) if (folder / name).is_file()]
    return [path.read_text().strip() for path in found]


def browser() -> str | None:
    """The Chromium that the browser test would drive: a path, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def has_nvidia_driver() -> bool:
    """Whether the system has an NVIDIA GPU with its driver, whatever torch was built for."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
