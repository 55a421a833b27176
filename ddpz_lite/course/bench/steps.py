"""Step time of our strategies next to those that PyTorch and DeepSpeed bring, on this machine.

Machines are noisy, so nothing here is a single time. All contestants live in one job, on the same
ranks; each round lets every one of them take one step, in a newly drawn order, and a ratio is taken
within the round. What is quoted is the median of the ratios.

Every contestant trains the same GPT with the same fused AdamW on the same batches. The times are
those of whole steps (forward, backward, update), from a barrier to the end of the slowest rank, and
the processor time of all ranks together: where a core has more than it can do, that is what binds.
`ALONE` is the floor: every rank trains alone and no byte moves. What a strategy adds to it is
its own cost, and `added` compares that of ours with theirs: by first quartiles, for it is a
difference of two times, and a neighbour's noise only ever adds to either.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddpz_lite.launcher import device, launch
from ddpz_lite.model import GPT, GPTConfig, next_token_loss, num_params
from ddpz_lite.strategies.parallelize import parallelize

Step = Callable[[torch.Tensor, torch.Tensor], None]
OURS = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
# Ours, and what it is measured against.
PEERS = {
    "DDP": "torch DDP",
    "ZeRO-1": "ZeroRedundancyOptimizer",
    "ZeRO-2": "FSDP2, kept after forward",
    "ZeRO-3": "FSDP2",
}
# Most that ours should add to a step without communication, in what the peer adds.
ADDED_TARGETS = {"DDP": 0.90, "ZeRO-1": 0.65, "ZeRO-2": 0.33, "ZeRO-3": 0.35}
ALONE = "no communication"
DEEPSPEED = {f"DeepSpeed stage {stage}": stage for stage in range(4)}
ADAMW = {"lr": 1e-3, "fused": True}


@dataclass(frozen=True)
class Workload:
    """One model and one batch for all contestants."""

    config: GPTConfig
    batch: int  # sequences per rank and step
    rounds: int
    warmup: int = 3  # rounds that do not count: buckets, gathers and allocators settle

    @property
    def num_params(self) -> int:
        """Ψ, without building the model."""
        with torch.device("meta"):
            return num_params(GPT(self.config))


@dataclass(frozen=True)
class Times:
    """Of the steps of one contestant, by round."""

    seconds: list[float]  # until the slowest rank had ended
    cpu_seconds: list[float]  # of all threads of all ranks


def about(num_params: float, context: int = 64) -> GPTConfig:
    """A GPT of about so many parameters; 11e6 gives 6 layers of width 384.

    A block has 12 width² parameters, and width is 64 times the number of layers.
    """
    layers = max(1, round((num_params / (12 * 64**2)) ** (1 / 3)))
    width = max(64, 32 * round((num_params / (12 * layers)) ** 0.5 / 32))
    return GPTConfig(context=context, layers=layers, width=width, heads=width // 32)


def measure(
    contestants: Sequence[str], workload: Workload, world_size: int, timeout: float = 600.0
) -> dict[str, Times]:
    """How long the steps of each contestant took."""
    run = launch(
        _race, world_size, args=(tuple(contestants), workload), timeout=timeout, record=False
    )
    times = {}
    for name in contestants:
        by_round = [zip(*ranks, strict=True) for ranks in zip(*(r[name] for r in run), strict=True)]
        walls, cpus = zip(*by_round, strict=True)
        times[name] = Times([max(ranks) for ranks in walls], [sum(ranks) for ranks in cpus])
    return times


def ratios(times: dict[str, Times], ours: str, peer: str) -> list[float]:
    """Seconds of ours over theirs, round by round; below 1 ours is faster."""
    return [a / b for a, b in zip(times[ours].seconds, times[peer].seconds, strict=True)]


def added(times: dict[str, Times], ours: str, peer: str) -> float:
    """What ours adds to a step without communication, over what theirs adds; nan if that is 0."""
    floor, own, its = (first_quartile(times[name].seconds) for name in (ALONE, ours, peer))
    return (own - floor) / (its - floor) if its > floor else math.nan


def first_quartile(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.double).quantile(0.25).item()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def deepspeed_here() -> bool:
    """Whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def _race(contestants: tuple[str, ...], workload: Workload) -> dict[str, list[tuple]]:
    """In a rank: all contestants, round by round: (seconds, processor seconds of this rank)."""
    torch.set_num_threads(1)
    steps = {name: _contestant(name, workload) for name in contestants}
    generator = torch.Generator().manual_seed(dist.get_rank())
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    shape = (workload.batch, workload.config.context + 1)
    times: dict[str, list[tuple]] = {name: [] for name in contestants}
    for turn in range(workload.warmup + workload.rounds):
        tokens = torch.randint(0, workload.config.vocab_size, shape, generator=generator)
        tokens = tokens.to(device())
        for place in torch.randperm(len(contestants), generator=order).tolist():
            name = contestants[place]
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            steps[name](tokens[:, :-1], tokens[:, 1:])
            if tokens.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            dist.barrier()  # what a rank still sends to the slower ones counts as processor time
            if turn >= workload.warmup:
                times[name].append((seconds, time.process_time() - used))
    return times


def _contestant(name: str, workload: Workload) -> Step:
    torch.manual_seed(0)
    module = GPT(workload.config).to(device())
    if name in OURS:
        model, optimizer = parallelize(module, torch.optim.AdamW, stage=OURS[name], **ADAMW)
        return _plain_step(model, optimizer)
    if name == ALONE:
        return _plain_step(module, torch.optim.AdamW(module.parameters(), **ADAMW))
    if name in DEEPSPEED:
        return _deepspeed_step(module, DEEPSPEED[name])
    return _plain_step(*_torch_peer(name, module))


def _torch_peer(name: str, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What torch brings, set up as its documentation advises for speed."""
    if name.startswith("FSDP2"):
        from torch.distributed.fsdp import fully_shard

        for block in module.blocks:
            fully_shard(block, reshard_after_forward=name == "FSDP2")
        fully_shard(module, reshard_after_forward=False)
        return module, torch.optim.AdamW(module.parameters(), **ADAMW)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    if name == "torch DDP":
        return model, torch.optim.AdamW(model.parameters(), **ADAMW)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return model, ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        next_token_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed_step(module: GPT, stage: int) -> Step:
    import deepspeed

    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=settings
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        engine.backward(next_token_loss(engine(x), y))
        engine.step()

    return step
