"""While an answer runs, the strategies that it is to build are not to be had ready-made.

What is imported already gets a constructor that raises; what is not imported yet cannot be. So a
rank does not have to import FSDP to forbid it. Of this library all that stands in strategies/ and
in built/ is refused, also what is added later; of torch, what READY_MADE names.
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
    "torch.distributed.pipelining": (),
    "torch.distributed.pipelining.stage": ("_PipelineStageBase.__init__",),
    "torch.distributed.tensor.parallel": ("parallelize_module",),
    "torch.nn": ("SyncBatchNorm.__init__",),
    "torch.utils.data": ("DistributedSampler.__init__",),
    "ddpz_lite.data.sampler": ("RankSampler.__init__",),
    "ddpz_lite.data.token_budget": ("TokenBudgetSampler.__init__",),
    "ddpz_lite.data.work_queue": ("WorkQueue.__init__",),
}
ROOMS = ("ddpz_lite.strategies.", "ddpz_lite.checkpoint.", "ddpz_lite.course.built.")
FACTS = tuple(f"ddpz_lite.strategies.{name}" for name in ("placement", "costs", "schedules"))


class ReadyMade(RuntimeError):
    """An answer used what it was asked to build."""


class _Refuse:
    """A finder that stands before all others."""

    def __init__(self, patches: contextlib.ExitStack) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> Any:
        if not _is_ready_made(name):
            return None
        if name not in READY_MADE or not _dynamo_is_loading():
            raise refused(name)
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def load(module: Any) -> None:
            execute(module)
            _patch(name, self.patches)

        spec.loader.exec_module = load
        return spec


def _dynamo_is_loading() -> bool:
    """Every torch optimizer imports torch._dynamo, which imports FSDP: no answer asks for that."""
    spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
    return getattr(spec, "_initializing", False)


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Inside, making or importing what is ready-made raises ReadyMade."""
    with contextlib.ExitStack() as stack:
        for module in filter(_is_ready_made, list(sys.modules)):
            _patch(module, stack)
        finder = _Refuse(stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _is_ready_made(module: str) -> bool:
    return module in READY_MADE or (module.startswith(ROOMS) and module not in FACTS)


def _public(module: Any) -> list[str]:
    """What a strategy's module defines for others: its functions, and its classes' constructors."""
    return [
        f"{name}.__init__" if isinstance(value, type) else name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    ]


def _patch(module: str, stack: contextlib.ExitStack) -> None:
    """Let what is ready-made in a loaded module raise until the stack is left."""
    own = module not in READY_MADE
    for path in _public(sys.modules[module]) if own else READY_MADE[module]:
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
