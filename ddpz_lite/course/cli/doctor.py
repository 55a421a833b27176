"""`ddpz doctor`: what this machine is, what will run how, what to install for more.

The last line is not a promise but a result: ranks were started, and their sum came out right.
"""

from __future__ import annotations

import platform
import shutil
import time
from argparse import Namespace
from dataclasses import dataclass

from ddpz_lite.course.cli import machine
from ddpz_lite.course.cli.shared import UserError
from ddpz_lite.course.grader import probe

ELEMENTS = 1 << 18  # of float32: 1 MiB, large enough that the time is the transport's
REPEATS = 5
TIMEOUT = 60.0  # seconds
COMFORT_BYTES = 4e9  # memory with which every lesson runs without swapping
GB = 1e9


@dataclass(frozen=True)
class RankReport:
    """What one rank of the all-reduce saw."""

    total: float  # the sum, from every element of the result (all are equal)
    equal: bool
    seconds: float  # the median of REPEATS calls
    threads: int  # that torch uses in this rank
    device: str
    backend: str


@dataclass(frozen=True)
class Result:
    """The all-reduce as a job: `error` is the launcher's message when it failed."""

    ranks: int
    seconds: float
    reports: list[RankReport]
    error: str | None = None

    @property
    def right(self) -> bool:
        wanted = sum(range(1, self.ranks + 1))
        return not self.error and all(r.equal and r.total == wanted for r in self.reports)


def run(options: Namespace) -> int:
    """Print the report; return 0 if the all-reduce gave the right sum on every rank, else 1."""
    ranks = options.ranks
    if not 1 <= ranks <= 64:
        raise UserError(f"--ranks takes 1 to 64, not {ranks}.")
    result = all_reduce(ranks)
    _print_rows(machine_rows())
    _print_rows([("4 ranks run" if ranks == 4 else f"{ranks} ranks run", how(result))])
    _print_rows([("for more", line) for line in fixes()])
    print(last_line(result))
    return 0 if result.right else 1


# ---- what this machine is ----


def machine_rows() -> list[tuple[str, str]]:
    """(name, fact) pairs, without the paths of this machine."""
    import torch

    cores, memory, sandbox = machine.cores(), machine.memory(), probe()
    build = torch.version.cuda and f"CUDA {torch.version.cuda}"
    build = build or (torch.version.hip and f"ROCm {torch.version.hip}") or "CPU"
    limit = f" of {cores.total} ({cores.limit})" if cores.limit else ""
    bound = " (limited by a control group)" if memory.limited else ""
    return [
        ("system", f"{platform.system()} {platform.machine()}"),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("torch", f"{torch.__version__.split('+')[0]}, {build} build"),
        ("cores", f"{cores.usable}{limit}"),
        ("memory", f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free{bound}"),
        ("disk", f"{shutil.disk_usage('.').free / GB:.1f} GB free here"),
        ("GPUs", gpus()),
        ("backends", ", ".join(backends()) or "none: this torch was built without them"),
        ("sandbox", "works" if sandbox.ok else f"no: {sandbox.why}"),
        ("Chromium", "found" if machine.browser() else "not found"),
    ]


def gpus() -> str:
    """The GPUs that this torch can use, with their memory."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"{properties.name}, {properties.total_memory / GB:.0f} GB")
    if found:
        return f"{len(found)}: {'; '.join(found)}"
    if torch.backends.mps.is_available():
        return "Apple's, which torch.distributed cannot use: ranks run on the CPU"
    return "none that this torch can use"


def backends() -> list[str]:
    """The backends of torch.distributed in this build."""
    import torch.distributed as dist

    if not dist.is_available():
        return []
    known = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    return [name for name, available in known.items() if available()]


# ---- what will run how, and what would give more ----


def how(result: Result) -> str:
    """One sentence, from what the ranks reported."""
    if result.error:
        return "not yet: see the last line"
    first, devices = result.reports[0], {report.device for report in result.reports}
    if first.device == "cpu":
        cores = machine.cores().usable
        threads = "one thread" if first.threads == 1 else f"{first.threads} threads"
        return f"over {first.backend} on {cores} core{'s' * (cores > 1)}, {threads} each"
    if len(devices) == result.ranks:
        return f"over {first.backend}, one GPU each"
    return f"over {first.backend}, sharing {len(devices)} GPU{'s' * (len(devices) > 1)}"


def fixes() -> list[str]:
    """What is worth installing or changing here; empty when nothing is."""
    import torch

    advice = []
    if machine.has_nvidia_driver() and not torch.cuda.is_available():
        advice.append("an NVIDIA driver is here and torch cannot use it: make lab TORCH=cuda")
    if machine.memory().available < COMFORT_BYTES:
        advice.append(f"close programs: lessons are at ease with {COMFORT_BYTES / GB:.0f} GB free")
    if machine.browser() is None:
        advice.append(
            "Chromium, and make test-rest drives the notebooks in it: sudo apt install chromium"
        )
    sandbox = probe()
    if not sandbox.ok:
        advice.append(f"the sandbox for strangers' code needs user namespaces ({sandbox.why})")
    return advice


# ---- the all-reduce ----


def all_reduce(ranks: int) -> Result:
    """Start `ranks` processes and let them add up their ranks plus one."""
    import ddpz_lite as dz

    started = time.monotonic()
    try:
        job = dz.launch(sum_over_ranks, ranks, timeout=TIMEOUT, record=False)
    except (RuntimeError, OSError) as error:
        return Result(ranks, time.monotonic() - started, [], str(error))
    return Result(ranks, job.seconds, [RankReport(**report) for report in job])


def sum_over_ranks() -> dict[str, object]:
    """What each rank runs. Returns plain data, the fields of RankReport."""
    import statistics

    import torch
    import torch.distributed as dist

    import ddpz_lite as dz

    device = dz.device()
    times = []
    for _ in range(REPEATS + 1):  # the first call also opens the connections
        x = torch.full((ELEMENTS,), dist.get_rank() + 1.0, device=device)  # (ELEMENTS,)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(x)
        total = x[0].item()  # waits for a GPU, too
        times.append(time.perf_counter() - started)
    return {
        "total": total,
        "equal": bool((x == x[0]).all()),
        "seconds": statistics.median(times[1:]),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "backend": dist.get_backend(),
    }


def last_line(result: Result) -> str:
    """The result in one line; when it failed, what was said and what to do."""
    if result.error:
        return (
            f"all-reduce on {result.ranks} ranks FAILED: {result.error}\n"
            "Fix: make clean, then make lab, which installs everything again; if it fails again, "
            "check that nothing forbids connections on the loopback interface."
        )
    terms = " + ".join(map(str, range(1, result.ranks + 1))) if result.ranks <= 8 else "the ranks"
    sums = sorted({report.total for report in result.reports})
    if not result.right:
        return f"all-reduce on {result.ranks} ranks is WRONG: {terms} came out as {sums}"
    slowest = max(report.seconds for report in result.reports)
    return (
        f"all-reduce of 1 MiB on {result.ranks} ranks over {result.reports[0].backend}: "
        f"{terms} = {sums[0]:.0f} on every rank, {slowest * 1e3:.1f} ms; job {result.seconds:.2f} s"
    )


def _print_rows(rows: list[tuple[str, str]]) -> None:
    for name, fact in rows:
        print(f"{name:<12} {fact}")
