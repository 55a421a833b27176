"""While an answer runs, the strategies that it is to build are not to be had ready-made.

What is imported already gets a constructor that raises; what is not imported yet cannot be. So a
rank does not have to import FSDP to forbid it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import Any, NoReturn
from unittest import mock

# module -> what to refuse in it
READY_MADE = {
    "torch.distributed": ("Reducer",),  # what every DistributedDataParallel makes
    "torch.distributed.optim.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer.__init__",),
    "torch.distributed.fsdp": (),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("FSDPParamGroup.__init__",),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel.__init__",),
    "torch.nn": ("SyncBatchNorm.__init__",),
    "torch.utils.data": ("DistributedSampler.__init__",),
    "ddpz_lite.strategies.parallelize": ("parallelize",),
    "ddpz_lite.strategies.replica": ("Replica.__init__",),
    "ddpz_lite.strategies.reducer": ("Reducer.__init__", "Bucket.__init__", "buckets_of"),
    "ddpz_lite.strategies.ddp": ("DDP.__init__",),
    "ddpz_lite.strategies.zero1": ("ZeRO1.__init__",),
    "ddpz_lite.strategies.zero2": ("ZeRO2.__init__",),
    "ddpz_lite.strategies.zero3": ("ZeRO3.__init__",),
    "ddpz_lite.strategies.optim": ("ShardedOptimizer.__init__",),
    "ddpz_lite.strategies.comm": ("Comm.__init__",),
    "ddpz_lite.strategies.flat": ("Flat.__init__",),
    "ddpz_lite.strategies.clip": ("total_norm", "clip_grad_norm_"),
    "ddpz_lite.data.sampler": ("RankSampler.__init__",),
}


class ReadyMade(RuntimeError):
    """An answer used what it was asked to build."""


class _Refuse:
    """A finder that stands before all others."""

    def __init__(self, patches: contextlib.ExitStack) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> Any:
        if name not in READY_MADE:
            return None
        if not _dynamo_is_loading():
            raise refused(name)
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def load(module: Any) -> None:
            execute(module)
            _patch(name, self.patches)

        spec.loader.exec_module = load
        return spec


def _dynamo_is_loading() -> bool:
    """Every torch optimizer imports torch._dynamo, which imports FSDP: that is nobody's answer."""
    spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
    return getattr(spec, "_initializing", False)


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Inside, making or importing any of READY_MADE raises ReadyMade."""
    with contextlib.ExitStack() as stack:
        for module in READY_MADE.keys() & sys.modules.keys():
            _patch(module, stack)
        finder = _Refuse(stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _patch(module: str, stack: contextlib.ExitStack) -> None:
    """Let what READY_MADE names in a loaded module raise until the stack is left."""
    for path in READY_MADE[module]:
        owner: Any = sys.modules[module]
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        shown = f"{module}.{parents[0] if parents else name}"
        stack.enter_context(mock.patch.object(owner, name, _refusal(shown)))


def _refusal(shown: str):
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise refused(shown)

    return refuse


def refused(shown: str) -> ReadyMade:
    return ReadyMade(f"{shown} is ready-made; this task asks you to build what it does")
