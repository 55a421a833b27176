"""The same call again with one argument changed: what keeps an answer from assuming arguments.

A job calls the answer several times on one rank, in a list of calls. An answer that remembers what
it met first, by shape or at all, is found by a later call of the same shapes in which one argument
alone is another. A task states the other values as data next to its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = dict[str, Any]


def one_at_a_time(calls: Sequence[Call], others: Sequence[Mapping[str, Any]]) -> list[list[Call]]:
    """For each rank its call, the call with each argument in turn changed, and the call again.

    calls: of each rank, the arguments by name. others: of each rank, another value for those that
    may change, of the same shapes; the same names on all ranks, which change together.
    """
    return [
        [call, *({**call, name: value} for name, value in other.items()), dict(call)]
        for call, other in zip(calls, others, strict=True)
    ]


def drawn_again(call: Call, rng: torch.Generator, *names: str) -> Call:
    """Other values of the same shapes for the float tensors under these names, in lists too."""

    def again(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value.dtype)
        return [again(part) for part in value] if isinstance(value, list | tuple) else value

    return {name: again(call[name]) for name in names}


def lengthened(
    inputs: Sequence[Call],
    name: str,
    others: Callable[[int, Any], Mapping[str, Any]],
) -> None:
    """Append to each rank's list of calls, `inputs[rank][name]`, its first call varied.

    others: (rank, its first call) -> the other values, see `one_at_a_time`.
    """
    firsts = [rank[name][0] for rank in inputs]
    varied = one_at_a_time(firsts, [others(r, first) for r, first in enumerate(firsts)])
    for rank, calls in zip(inputs, varied, strict=True):
        rank[name] = [*rank[name], *calls[1:]]
