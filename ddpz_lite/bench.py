"""Step time of our strategies beside those that PyTorch and DeepSpeed bring, on this machine.

Machines are noisy, so nothing here is a single time. All contestants live in one job, on the same
ranks; each round lets every one of them take one step, in an order drawn anew, and a ratio is taken
within the round. What is quoted is the median of the ratios.

Every contestant trains the same GPT with the same fused AdamW on the same batches. The times are
those of whole steps (forward, backward, update), from a barrier to the end of the slowest rank.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .launcher import device, launch
from .model import GPT, GPTConfig, next_token_loss
from .parallel import parallelize

Step = Callable[[torch.Tensor, torch.Tensor], None]
OURS = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
# Ours, and what it is measured against.
PEERS = {
    "DDP": "torch DDP",
    "ZeRO-1": "ZeroRedundancyOptimizer",
    "ZeRO-2": "FSDP2, kept after forward",
    "ZeRO-3": "FSDP2",
}
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
            return GPT(self.config).num_params()


def about(num_params: float, context: int = 64) -> GPTConfig:
    """A GPT of about so many parameters; 11e6 gives 6 layers of width 384.

    A block has 12 width² parameters, and width is 64 times the number of layers.
    """
    layers = max(1, round((num_params / (12 * 64**2)) ** (1 / 3)))
    width = max(64, 32 * round((num_params / (12 * layers)) ** 0.5 / 32))
    return GPTConfig(context=context, layers=layers, width=width, heads=width // 32)


def measure(
    contestants: Sequence[str], workload: Workload, world_size: int, timeout: float = 600.0
) -> dict[str, list[float]]:
    """Seconds per step of each contestant, by round: {name: [seconds, ...]}."""
    run = launch(
        _race, world_size, args=(tuple(contestants), workload), timeout=timeout, record=False
    )
    by_name = {name: zip(*(times[name] for times in run), strict=True) for name in contestants}
    return {name: [max(ranks) for ranks in rounds] for name, rounds in by_name.items()}


def ratios(seconds: dict[str, list[float]], ours: str, peer: str) -> list[float]:
    """Ours over theirs, round by round; below 1 ours is faster."""
    return [a / b for a, b in zip(seconds[ours], seconds[peer], strict=True)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def deepspeed_here() -> bool:
    """Whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def _race(contestants: tuple[str, ...], workload: Workload) -> dict[str, list[float]]:
    """In a rank: all contestants, round by round."""
    torch.set_num_threads(1)
    steps = {name: _contestant(name, workload.config) for name in contestants}
    generator = torch.Generator().manual_seed(dist.get_rank())
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    shape = (workload.batch, workload.config.context + 1)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(workload.warmup + workload.rounds):
        tokens = torch.randint(0, workload.config.vocab_size, shape, generator=generator)
        tokens = tokens.to(device())
        for place in torch.randperm(len(contestants), generator=order).tolist():
            name = contestants[place]
            dist.barrier()
            began = time.perf_counter()
            steps[name](tokens[:, :-1], tokens[:, 1:])
            if tokens.is_cuda:
                torch.cuda.synchronize()
            if turn >= workload.warmup:
                times[name].append(time.perf_counter() - began)
    return times


def _contestant(name: str, config: GPTConfig) -> Step:
    torch.manual_seed(0)
    module = GPT(config).to(device())
    if name in OURS:
        model, optimizer = parallelize(module, torch.optim.AdamW, stage=OURS[name], **ADAMW)
        return _plain_step(model, optimizer)
    if name in DEEPSPEED:
        return _deepspeed_step(module, DEEPSPEED[name])
    return _plain_step(*_torch_peer(name, module))


def _torch_peer(name: str, module: GPT) -> tuple[nn.Module, torch.optim.Optimizer]:
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

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": ADAMW["lr"], "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=settings
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        engine.backward(next_token_loss(engine(x), y))
        engine.step()

    return step
