"""FSDP2 watched at work, and where its parts stand in the torch that is installed.

Both look into `torch.distributed.fsdp._fully_shard`, which is private: read with torch 2.13. In a
torch where a name has gone they raise AttributeError or ImportError with that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

METHODS = (
    "pre_forward",
    "unshard",
    "wait_for_unshard",
    "post_forward",
    "reshard",
    "pre_backward",
    "post_backward",
    "finalize_backward",
)
FUNCTIONS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


@contextmanager
def watched() -> Iterator[list[tuple[str, str]]]:
    """Note what FSDP2 calls inside the `with`, in order: (unit, name of the method).

    A name is indented by four blanks for each call around it. A function that knows no unit counts
    to the one that called it. Clear the list to begin anew.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as source

    log: list[tuple[str, str]] = []
    around = [""]
    group = source.FSDPParamGroup
    places = [(group, name) for name in METHODS] + [(source, name) for name in FUNCTIONS]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, original in originals:
        setattr(owner, name, _noting(original, name, around, log))
    try:
        yield log
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _noting(original: Any, name: str, around: list[str], log: list[tuple[str, str]]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        unit = getattr(args[0], "_module_fqn", "") if args else ""
        around.append(unit or around[-1])
        log.append((around[-1], "    " * (len(around) - 2) + name))
        try:
            return original(*args, **kwargs)
        finally:
            around.pop()

    return noting


def places() -> list[tuple[str, str, int, str]]:
    """(step of lesson 11, file, line, name) for each part of FSDP2 that does the step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param as param
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
    from torch.distributed.fsdp._fully_shard import _fsdp_state as state

    group, root = param_group.FSDPParamGroup, state.FSDPState
    steps = {
        "Unit": [group, param.FSDPParam],
        "before_forward": [root._pre_forward, group.pre_forward],
        "start": [group.unshard, collectives.foreach_all_gather],
        "use": [group.wait_for_unshard, collectives.foreach_all_gather_copy_out],
        "after_forward": [group.post_forward, root._register_pre_backward_hook],
        "free": [group.reshard, param.free_storage],
        "before_backward": [group.pre_backward],
        "start_block, in backward": [group._backward_prefetch],
        "collect": [param_group.RegisterPostBackwardFunction, group.post_backward],
        "reduce, rows_of": [
            collectives.foreach_reduce,
            collectives.foreach_reduce_scatter_copy_in,
        ],
        "finish": [group.finalize_backward, root._root_post_backward_final_callback],
    }
    return [(step, *_where(part)) for step, parts in steps.items() for part in parts]


def _where(part: Any) -> tuple[str, int, str]:
    inner = inspect.unwrap(part)
    file = (inspect.getsourcefile(inner) or "").rsplit("/", 1)[-1]
    return file, inspect.getsourcelines(inner)[1], part.__qualname__
