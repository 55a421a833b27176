"""The vocabulary of judges: what the judges of several lessons say or compute alike.

A judge looks at one property and returns a sentence, or None where the property holds.

values    explain, explain_number, same_on_all_ranks, unchanged
traffic   nbytes, moved, sent_by_all, ops_of_all, silent, same_calls, calls_until, waited_for,
          all_in_spans
memory    holds_at_most
words     world_name, padded_shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ddpz_lite.course.check.compare import close, differs, number
from ddpz_lite.course.check.task import Observed
from ddpz_lite.wire import Record

Candidate = torch.Tensor | Callable[[], torch.Tensor]


def world_name(world: int) -> str:
    """The size of a world in words: "1 rank", "3 ranks"."""
    return "1 rank" if world == 1 else f"{world} ranks"


def padded_shards(tensors: Sequence[torch.Tensor], world: int) -> list[torch.Tensor]:
    """All tensors end to end, padded with zeros and cut: (ceil(numel / world),) for each rank."""
    flat = torch.cat([t.flatten() for t in tensors])
    size = -(-len(flat) // world)
    return list(torch.nn.functional.pad(flat, (0, size * world - len(flat))).split(size))


# ---- values ----


def explain(
    got: Any,
    wanted: torch.Tensor,
    what: str,
    mistakes: Mapping[str, Candidate],
    *,
    rtol: float | None = None,
    bitwise: bool = False,
) -> str | None:
    """None if `got` is `wanted`; else how it came about, by the first mistake that gives it.

    mistakes: the end of a sentence that begins with `what` -> the value that this mistake gives, or
    a function of no arguments that computes it. Where none fits, the plain difference.
    """
    plain = differs(got, wanted, what, rtol=rtol, bitwise=bitwise)
    if plain is None:
        return None
    for words, candidate in mistakes.items():
        if close(got, candidate() if callable(candidate) else candidate, rtol=rtol):
            return f"{what} {words}"
    return plain


def explain_number(
    got: Any, wanted: float, what: str, mistakes: Mapping[str, float], *, rtol: float = 1e-6
) -> str | None:
    """The same for a number: a Python number, or a tensor of one element."""
    value = number(got)
    if value is None:
        return f"{what} must be a number, not {type(got).__name__}."

    def is_close(other: float) -> bool:
        return value == other or abs(value - other) <= rtol * abs(other)

    if is_close(wanted):
        return None
    for words, candidate in mistakes.items():
        if is_close(candidate):
            return f"{what} {words}"
    return f"{what} is {value:.6g}, which is wrong."


def same_on_all_ranks(seen: Observed, values: Callable[[Any], Sequence[Any]]) -> str | None:
    """values: what a rank returned -> the tensors that must have the same bits on all ranks."""
    first = list(values(seen.data[0]))
    for rank, got in enumerate(seen.data):
        ours = list(values(got))
        if len(ours) != len(first) or not all(map(_same_bits, ours, first)):
            return f"Ranks 0 and {rank} do not hold the same bits."
    return None


def _same_bits(local: Any, first: Any) -> bool:
    """Of plain tensors; a nan is like another nan."""
    if type(first) is not torch.Tensor or not first.is_floating_point():
        return close(local, first, bitwise=True)
    if type(local) is not torch.Tensor or local.dtype != first.dtype or local.shape != first.shape:
        return False
    nans = torch.equal(local.isnan(), first.isnan())
    return nans and torch.equal(local.nan_to_num(0.0), first.nan_to_num(0.0))


def unchanged(seen: Observed) -> str | None:
    """What the job's `watch.Kept` found: every rank returns the names under "changed"."""
    for rank, got in enumerate(seen.data):
        if got["changed"]:
            return f"Rank {rank} changed {got['changed'][0]}, which was handed in to be read."
    return None


# ---- traffic ----


def nbytes(call: Record) -> int:
    """Bytes of the full tensor of a call: of all that an all_gather brings, say."""
    return call.elements * getattr(torch, call.dtype).itemsize


def moved(call: Record) -> int:
    """Bytes that this rank sent. A reduce counts its tensor once: gloo's ring sends up to half as
    much again, which an answer cannot change.
    """
    if call.op != "reduce":
        return call.bytes_sent
    return 0 if call.rank == call.peer else nbytes(call)


def sent_by_all(seen: Observed, during: str | None = None) -> int:
    """Bytes that all ranks sent together."""
    world = range(seen.case.world)
    return sum(moved(call) for rank in world for call in seen.calls(rank, during))


def ops_of_all(seen: Observed) -> str:
    """The operations that any rank called, in words: "all_gather and reduce"."""
    ops = {op for rank in range(seen.case.world) for op in seen.ops(rank)}
    return " and ".join(sorted(ops)) or "nothing"


def silent(seen: Observed, why: str) -> str | None:
    """Nothing may be sent. why: a sentence."""
    for rank in range(seen.case.world):
        if ops := seen.ops(rank):
            return f"Rank {rank} called {ops[0]}. {why}"
    return None


def same_calls(seen: Observed, wanted: Iterable[str], during: str | None = None) -> str | None:
    """Whether every rank makes these calls in this order. One rank alone may leave them all out.

    Functional and coalesced collectives have the same names here as the plain ones.
    """
    wanted = list(wanted)
    for rank in range(seen.case.world):
        ops = seen.ops(rank, during)
        if ops == wanted or (seen.case.world == 1 and not ops):
            continue
        called = ", ".join(ops) or "nothing"
        return f"Rank {rank} called {called}; expected is {', '.join(wanted) or 'nothing'}."
    return None


def calls_until(seen: Observed, rank: int, layer: int) -> list[list[Record]]:
    """For each backward: the calls that the rank had made when it came to this layer; see
    `watch.tell_when_reached`.
    """
    begun, reached = (
        [s.started for s in seen.spans if (s.rank, s.name) == (rank, name)]
        for name in ("backward", f"layer {layer}")
    )
    calls = seen.calls(rank)
    return [
        [call for call in calls if start <= call.started <= end]
        for start, end in zip(begun, reached, strict=True)
    ]


def all_in_spans(seen: Observed) -> str | None:
    """Whether all that was sent lies in the spans of the job, where bounds are counted."""
    for rank in range(seen.case.world):
        names = {span.name for span in seen.spans if span.rank == rank}
        inside = {id(call) for name in names for call in seen.calls(rank, name)}
        outside = [c for c in seen.calls(rank) if c.bytes_sent and id(c) not in inside]
        if outside:
            return (
                f"Rank {rank} called {outside[0].op} where nothing is measured: outside of the "
                "calls of your function."
            )
    return None


def waited_for(seen: Observed) -> str | None:
    """Whether every send was waited for. Only this machine's wire records that; a ledger in which
    nothing was waited for does not say.
    """
    for rank in range(seen.case.world):
        calls = seen.calls(rank)
        if all(call.waited is None for call in calls):
            continue
        left = [call for call in calls if call.op == "send" and call.waited is None]
        if left:
            return (
                f"Rank {rank} never waited for {len(left)} of its sends: until a send is complete "
                "its tensor must not be written to."
            )
    return None


# ---- memory ----


def holds_at_most(
    seen: Observed, held: Callable[[Any], Iterable[int]], most: int, why: str
) -> str | None:
    """held: what a rank returned -> bytes that `watch.Holding` counted, at several times.

    why: what the bytes are for, "its part of the states and a copy of its part".
    """
    for rank, got in enumerate(seen.data):
        worst = max(held(got))
        if worst > most:
            return f"Rank {rank} holds {worst:,} bytes; {why} take at most {most:,}."
    return None


def each_call(judge: Callable[[Observed, int], str | None]) -> Callable[[Observed], str | None]:
    """A judge of one call of the answer, made a judge of all `calls` of a case."""

    def judge_all(seen: Observed) -> str | None:
        calls = seen.case.inputs[0]["calls"]
        for index in range(len(calls)):
            if wrong := judge(seen, index):
                return wrong if len(calls) == 1 else f"In call {index + 1}: {wrong}"
        return None

    return judge_all
