"""What only a machine with NVIDIA GPUs can show, and the report of it: `ddpz gpu`, `make gpu`.

Four measurements, each a line of a table beside what it should be at most:

plain    a step on one rank, in steps of plain torch: what a strategy costs where nothing moves
peers    a step beside torch's own: one rank for each GPU over NCCL, two for each over gloo
memory   the most that CUDA's allocator gave out while the optimizer stepped, beside `zero_memory`
bf16     how much of a GPU's arithmetic a GPT in bfloat16 uses

The steps are those of `bench`. Without a GPU the same lines run on the CPU, so that tests reach
them, and what only a GPU has is None: the report says "not measured without a GPU".
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpz_lite.course.bench import steps
from ddpz_lite.launcher import device, launch
from ddpz_lite.launcher.devices import plan
from ddpz_lite.meter import matmul_peak, utilization
from ddpz_lite.model import GPT, GPTConfig, next_token_loss
from ddpz_lite.strategies.costs import MIXED, zero_memory
from ddpz_lite.strategies.parallelize import parallelize

PLAIN_TARGET = 1.01  # steps of plain torch, on one rank
PEER_TARGETS = {"ZeRO-2": 1.0, "ZeRO-3": 1.0}  # steps of FSDP2
MEMORY_TARGET = 2.0  # per cent between the allocator and the formula
FP32 = (4, 4, 8)  # bytes per parameter of parameters, gradients and Adam's state
TIMEOUT = 1800.0  # seconds for one job: gloo takes a GPU's tensors through the host


@dataclass(frozen=True)
class Sizes:
    """What is trained. steps: for plain and peers. gpt, batch, turns: for memory and bf16."""

    steps: steps.Workload
    gpt: GPTConfig
    batch: int  # sequences per rank and step
    turns: int  # steps of bf16 that count
    matmul: int  # rows of the matrices whose product is the peak


# 16 GB of GPU memory are enough: five models of 100 M at once, or one of 355 M (GPT-2 medium's).
REAL = Sizes(
    steps.Workload(steps.about(100e6, context=512), batch=8, rounds=40),
    GPTConfig(vocab_size=50_304, context=1024, layers=24, heads=16, width=1024, tied=True),
    batch=4,
    turns=20,
    matmul=8192,
)
TINY = Sizes(
    steps.Workload(steps.about(5e4, context=8), batch=2, rounds=1, warmup=1),
    GPTConfig(context=8, layers=1, heads=1, width=32),
    batch=1,
    turns=1,
    matmul=64,
)


@dataclass(frozen=True)
class Figure:
    """A line of a table. Of its values, by column, the last is the one that `target` limits."""

    table: str
    what: str
    values: dict[str, float | None]  # None: not measured without a GPU
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the last value is at most the target; None where either is missing."""
        measured = list(self.values.values())[-1]
        return None if None in (measured, self.target) else measured <= self.target


def measurements(sizes: Sizes, gpus: int) -> Iterator[tuple[str, str, Callable[[], list[Figure]]]]:
    """(kind, name, how to measure it), each apart: where one fails the others still run.

    Ranks: one for each GPU, and two for each. Without a GPU, 1 and 2.
    """
    yield "plain", "steps on one rank", lambda: plain(sizes.steps)
    worlds = [(max(1, gpus) * each, _over(max(1, gpus) * each)) for each in (1, 2)]
    for ranks, over in worlds:
        for name, peer in steps.PEERS.items():
            yield (
                "peers",
                f"{name} beside {peer}, {over}",
                lambda ranks=ranks, name=name: peers(sizes.steps, name, ranks),
            )
    for ranks, over in worlds:
        for half in (None, torch.bfloat16):
            yield (
                "memory",
                f"memory in {_name(half)}, {over}",
                lambda ranks=ranks, half=half: memory(sizes.gpt, half, ranks),
            )
    yield "bf16", f"GPT in bf16, {worlds[0][1]}", lambda: bf16(sizes, worlds[0][0])


def plain(workload: steps.Workload) -> list[Figure]:
    """A step of each strategy on one rank, in steps of plain torch."""
    times = steps.measure([*steps.OURS, steps.ALONE], workload, 1, timeout=TIMEOUT)
    return [
        Figure(
            f"A step on 1 rank, {_size(workload.num_params)}, beside plain torch",
            name,
            {
                "ms": _ms(times[name]),
                "plain torch, ms": _ms(times[steps.ALONE]),
                "ratio": steps.median(steps.ratios(times, name, steps.ALONE)),
            },
            PLAIN_TARGET,
        )
        for name in steps.OURS
    ]


def peers(workload: steps.Workload, name: str, ranks: int) -> list[Figure]:
    """A step of one strategy of ours beside that of its peer, and beside no communication."""
    peer = steps.PEERS[name]
    times = steps.measure([name, peer, steps.ALONE], workload, ranks, timeout=TIMEOUT)
    values = {
        "ms": _ms(times[name]),
        "theirs, ms": _ms(times[peer]),
        "no communication, ms": _ms(times[steps.ALONE]),
        "ratio": steps.median(steps.ratios(times, name, peer)),
    }
    table = f"A step on {_over(ranks)}, {_size(workload.num_params)}, beside torch's own"
    return [Figure(table, f"{name} / {peer}", values, PEER_TARGETS.get(name))]


def memory(config: GPTConfig, half: torch.dtype | None, ranks: int) -> list[Figure]:
    """The most bytes of model state in a step beside the formula, by stage: the rank farthest off.

    half: None, or the dtype of mixed precision.
    """
    figures, psi = [], _num_params(config)
    run = launch(_train_all, ranks, args=(config, 1, half, 0), timeout=TIMEOUT, record=False)
    for name, stage in steps.OURS.items():
        formula = zero_memory(psi, ranks, stage, *(MIXED[stage] if half else FP32))
        held = [trained[name].held for trained in run]
        worst = None if None in held else max(held, key=lambda each: abs(each - formula))
        values = {
            "max_memory_allocated, MB": None if worst is None else worst / 1e6,
            "formula, MB": formula / 1e6,
            "off by, %": None if worst is None else 100 * abs(worst / formula - 1),
        }
        table = f"Memory of a rank, {_over(ranks)}, {_size(psi)}, {_name(half)}, AdamW"
        figures.append(Figure(table, name, values, MEMORY_TARGET))
    return figures


def bf16(sizes: Sizes, ranks: int) -> list[Figure]:
    """Arithmetic of the GPT per second and GPU, and its share of a matmul's peak (MFU)."""
    with torch.device("meta"):
        gpt = GPT(sizes.gpt)
    flops = sizes.batch * sizes.gpt.context * gpt.flops_per_token()  # of a rank in a step
    (peak,) = launch(_peak, 1, args=(sizes.matmul,), timeout=TIMEOUT, record=False)
    args = (sizes.gpt, sizes.batch, torch.bfloat16, sizes.turns)
    run = launch(_train_all, ranks, args=args, timeout=TIMEOUT, record=False)
    figures = []
    for name in steps.OURS:
        of_ranks = zip(*(trained[name].seconds for trained in run), strict=True)
        seconds = steps.median([max(step) for step in of_ranks])
        values = {
            "ms": 1e3 * seconds,
            "TFLOP/s": None if peak is None else flops / seconds / 1e12,
            "peak here, TFLOP/s": None if peak is None else peak / 1e12,
            "MFU, %": None if peak is None else 100 * utilization(flops, seconds, peak),
        }
        table = f"GPT of {_size(gpt.num_params())} in bf16, {_over(ranks)}"
        figures.append(Figure(table, name, values))
    return figures


@dataclass(frozen=True)
class _Trained:
    """What a rank saw of one strategy."""

    seconds: list[float]  # of each step that counts
    held: int | None  # bytes; None without a GPU


def _train_all(
    config: GPTConfig, batch: int, half: torch.dtype | None, turns: int
) -> dict[str, _Trained]:
    """In a rank: each strategy in turn, on the same batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(config.vocab_size, (batch, config.context + 1), generator=generator)
    x = x.to(device())  # (B, T + 1)
    # cuBLAS takes its workspace from the allocator at its first product: before anything is counted
    small = GPT(dataclasses.replace(config, layers=1)).to(x.device)
    next_token_loss(small(x[:, :-1]), x[:, 1:]).backward()
    del small
    return {name: _train(config, stage, half, x, turns) for name, stage in steps.OURS.items()}


def _train(
    config: GPTConfig, stage: int, half: torch.dtype | None, x: torch.Tensor, turns: int
) -> _Trained:
    """Two steps in which memory is looked at, then `turns` that are timed.

    The window opens after backward, when activations have gone, and closes after the step: held in
    it are parameters, gradients, the optimizer's state, and what the step itself takes.
    """
    gc.collect()  # the strategy before this one
    gpu, seconds, held = x.is_cuda, [], None
    before = torch.cuda.memory_allocated() if gpu else 0
    model, optimizer = parallelize(
        GPT(config).to(x.device), torch.optim.AdamW, stage, mixed_precision=half, **steps.ADAMW
    )
    for turn in range(2 + turns):
        looks = gpu and turn < 2
        dist.barrier()
        began = time.perf_counter()
        next_token_loss(model(x[:, :-1]), x[:, 1:]).backward()
        if looks:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if looks:
            held = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad()
    return _Trained(seconds[2:], held)


def _peak(rows: int) -> float | None:
    """In a rank: the operations per second of a product in bfloat16; None without a GPU."""
    gpu = device().type == "cuda"
    return matmul_peak(torch.bfloat16, device(), size=rows, repeats=20) if gpu else None


def _num_params(config: GPTConfig) -> int:
    with torch.device("meta"):
        return GPT(config).num_params()


def _ms(times: steps.Times) -> float:
    return 1e3 * steps.median(times.seconds)


def _size(num_params: int) -> str:
    return f"{num_params / 1e6:.3g} M parameters"


def _name(half: torch.dtype | None) -> str:
    return "fp32" if half is None else "bf16"


def _over(ranks: int) -> str:
    """ "2 ranks over gloo": what a launch of so many will use."""
    backend = "NCCL" if "nccl" in plan(ranks).backend else "gloo"
    return f"{ranks} rank{'s' * (ranks > 1)} over {backend}"
