"""A job as a trace: JSON that Perfetto and chrome://tracing open, with all ranks on one clock.

A rank is a process of the trace. Its spans, and its main thread's waits inside them, lie on one
track, its collectives and messages on the next. What overlaps without nesting gets another track.
What torch.profiler recorded on the rank follows, thread by thread.

Source: Google's "Trace Event Format", the form with a JSON object.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ddpz_lite import __version__
from ddpz_lite.wire.ledger import Record, Span

CALL, SPAN, WAIT = "communication", "span", "wait"  # categories of our events
MAKER = "ddpz-lite"
FIELDS = ("seq", "dtype", "elements", "bytes_sent", "where", "group", "peer", "group_seq")
_FIELDS_OF = attrgetter(*FIELDS)
AT_ONCE = 10_000  # events in memory during writing
ID_OFFSET = 1 << 40  # between the ids of two ranks' profilers


@dataclass(frozen=True)
class Trace:
    """What a trace contains of a job. Times are seconds on one clock.

    began: time.time() at time 0, needed only to add profiles of torch.profiler.
    """

    world_size: int
    ledger: list[Record]
    spans: list[Span]
    backend: str = ""
    began: float = 0.0


@dataclass(frozen=True)
class _Clock:
    """A rank's clock: its offset to rank 0's at time 0, and what it gains per second."""

    ahead: float = 0.0  # seconds
    gains: float = 0.0

    def true(self, seconds: float) -> int:
        """Nanoseconds of rank 0's clock, as integers, so that nested events stay nested."""
        return round((seconds - self.ahead) / (1 + self.gains) * 1e9)


class _Interval(NamedTuple):
    """A span, a call or a wait, in nanoseconds; `end` is infinite if it never ended."""

    start: int
    end: float
    what: Record | Span

    @classmethod
    def of(cls, clock: _Clock, start: float, end: float | None, what: Record | Span) -> _Interval:
        return cls(clock.true(start), math.inf if end is None else clock.true(end), what)


def write_trace(
    path: str | os.PathLike[str],
    trace: Trace,
    offsets: Sequence[float | tuple[float, float]] | None = None,
    profiles: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """See `Run.trace`. Events are created during writing, so a long run fits in memory."""
    clocks = _clocks(trace.world_size, offsets)
    ranks = _by_rank(trace)
    foreign = [
        event
        for place, profile in enumerate(profiles, 1)
        for event in _of_profile(Path(profile), trace, clocks, 1000 * place)
    ]
    begins = [
        clocks[rank].true(min(one.started for one in (*spans, *calls)))
        for rank, (spans, calls) in enumerate(ranks)
        if spans or calls
    ]
    begins += [event["ts"] for event in foreign if "ts" in event]
    if not begins:
        raise ValueError(
            "trace: this run recorded nothing. Fix: launch with record=True, and let the ranks "
            'call a collective or open a span: with dz.span("step"): ...'
        )
    facts = {
        "made_by": f"{MAKER} {__version__}",
        "world_size": trace.world_size,
        "backend": trace.backend,
        "clock": "seconds of rank 0's clock; each rank's offset was subtracted",
        "offset_seconds": [clock.ahead for clock in clocks],
        "offset_gained_per_second": [clock.gains for clock in clocks],
    }
    first = trace.world_size  # Perfetto ignores thread 0 and takes a process's number for its main
    of_ranks = (_of_rank(rank, *ranks[rank], clocks[rank], first) for rank in range(first))
    events = chain(*of_ranks, foreign)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": []})
    with open(path, "w") as file:
        file.write(head.removesuffix("]}"))
        _write(file, events, min(*begins, 0))
        file.write("]}")


def _by_rank(trace: Trace) -> list[tuple[list[Span], list[Record]]]:
    """(spans, records) of each rank."""
    ranks: list[tuple[list[Span], list[Record]]] = [([], []) for _ in range(trace.world_size)]
    for span in trace.spans:
        ranks[span.rank][0].append(span)
    for record in trace.ledger:
        ranks[record.rank][1].append(record)
    return ranks


def _write(file: TextIO, events: Iterator[dict[str, Any]], zero: int) -> None:
    """Write events, converting nanoseconds to the format's microseconds since `zero`."""
    separator = ""
    while some := list(islice(events, AT_ONCE)):
        for event in some:
            if "ts" in event:
                event["ts"] = (event["ts"] - zero) / 1000
            if "dur" in event:
                event["dur"] /= 1000
        file.write(separator + json.dumps(some)[1:-1])
        separator = ", "


def _clocks(world: int, offsets: Sequence[float | tuple[float, float]] | None) -> list[_Clock]:
    if offsets is None:
        return [_Clock()] * world  # the ranks of one machine share a clock
    if len(offsets) != world:
        raise ValueError(
            f"trace: {len(offsets)} offsets for {world} ranks. Fix: give one number per rank, or a "
            "pair (seconds ahead of rank 0, seconds gained per second), beginning with rank 0."
        )
    return [_Clock(*one) if isinstance(one, Sequence) else _Clock(float(one)) for one in offsets]


# -- a rank's own events ---------------------------------------------------------------------------


def _of_rank(
    rank: int, named: list[Span], ledger: list[Record], clock: _Clock, track: int
) -> Iterator[dict[str, Any]]:
    """All events of one rank, with the names of its process and of its tracks from `track` on."""
    yield from _process(rank, f"rank {rank}")
    spans = [_Interval.of(clock, s.started, s.finished, s) for s in named]
    spans += [_Interval.of(clock, *r.waited, r) for r in ledger if r.waited]
    calls = [_Interval.of(clock, r.started, r.finished, r) for r in ledger]
    for name, intervals, nested in (("spans", spans, True), ("communication", calls, False)):
        lanes = _lanes(intervals, nested)
        for lane in range(max(lanes, default=-1) + 1):
            yield from _track(rank, track + lane, name)
        for interval, lane in zip(intervals, lanes, strict=True):
            yield _event(interval, wait=nested, pid=rank, tid=track + lane)
        track += max(lanes, default=-1) + 1


def _process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    """A process's name and its position among the others."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _track(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    """The same for a track, because a viewer would sort tracks by name."""
    here = {"ph": "M", "pid": pid, "tid": tid}
    yield {**here, "name": "thread_name", "args": {"name": name}}
    yield {**here, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _event(interval: _Interval, wait: bool, pid: int, tid: int) -> dict[str, Any]:
    """An interval as an event, in nanoseconds; one that never ended has only a begin."""
    start, end, what = interval
    if isinstance(what, Span):
        category, name, args = SPAN, what.name, {}
    elif wait:
        category, name, args = WAIT, f"wait: {what.op}", {"seq": what.seq}
    else:
        category, name = CALL, what.op
        args = dict(zip(FIELDS, _FIELDS_OF(what), strict=True))
    event = {"ph": "X", "cat": category, "name": name, "ts": start, "args": args}
    event |= {"pid": pid, "tid": tid}
    if end == math.inf:
        event["ph"] = "B"
    else:
        event["dur"] = end - start
    return event


def _lanes(intervals: Sequence[_Interval], nested: bool) -> list[int]:
    """The track of each interval, such that on one track all are disjoint or nested."""
    lanes = [0] * len(intervals)
    tracks: list[list[float]] = []  # per track the ends of what is open, innermost last
    for index in sorted(range(len(lanes)), key=lambda i: (intervals[i].start, -intervals[i].end)):
        here = intervals[index]
        fitting = (lane for lane, track in enumerate(tracks) if _fits(track, here, nested))
        lanes[index] = next(fitting, len(tracks))
        if lanes[index] == len(tracks):
            tracks.append([])
        tracks[lanes[index]].append(here.end)
    return lanes


def _fits(track: list[float], interval: _Interval, nested: bool) -> bool:
    """Whether an interval fits on a track, after removing what ended before."""
    while track and track[-1] <= interval.start:
        track.pop()
    return not track or (nested and interval.end <= track[-1])


# -- what torch.profiler recorded ------------------------------------------------------------------


def _of_profile(
    path: Path, trace: Trace, clocks: Sequence[_Clock], first: int
) -> list[dict[str, Any]]:
    """Its events on our clock: in the rank's process from track `first` on, a GPU's in another."""
    content, rank = _profile_and_rank(path, trace.world_size)
    # Integer nanoseconds: a float that counts them from 1970 has steps of 200.
    base = content.get("baseTimeNanoseconds", 0) - round(trace.began * 1e9)
    gpus, names = _names(content["traceEvents"])
    tracks: dict[tuple[Any, Any], tuple[int, int]] = {}
    found: list[dict[str, Any]] = []
    for event in content["traceEvents"]:
        if event["ph"] == "M" or not isinstance(event.get("pid"), int):
            continue  # names are set again; the profiler's windows belong to no process
        key = event["pid"], event["tid"]
        if key not in tracks:
            gpu = event["pid"] in gpus
            pid = trace.world_size * (event["pid"] + 1) + rank if gpu else rank
            tracks[key] = pid, first + len(tracks)
            found += _track(*tracks[key], names.get(key, f"thread {event['tid']}"))
            if gpu:
                found += _process(pid, f"rank {rank}, {gpus[event['pid']]}")
        moved = _on_clock(event, base, clocks[rank]) | {
            "pid": tracks[key][0],
            "tid": tracks[key][1],
        }
        if isinstance(event.get("id"), int):  # arrows from one event to another
            moved["id"] = event["id"] + ID_OFFSET * rank
        found.append(moved)
    return found


def _profile_and_rank(path: Path, world_size: int) -> tuple[dict[str, Any], int]:
    """A profile and the rank that it is of. Raises ValueError if it has none in this world."""
    content = _load(path)
    rank = content.get("distributedInfo", {}).get("rank") if isinstance(content, dict) else None
    if rank is None or "traceEvents" not in content:
        raise ValueError(
            f"trace: {path} does not contain its rank. Fix: let torch.profiler export it on a "
            "rank, before the process group is destroyed."
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"trace: {path} is of rank {rank}, and this run had {world_size} ranks.")
    return content, rank


def _names(events: list[dict[str, Any]]) -> tuple[dict[Any, str], dict[tuple[Any, Any], str]]:
    """({process: name} of GPUs, {(process, thread): name} of threads)."""
    gpus, threads = {}, {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_labels":
            if event["args"]["labels"].startswith("GPU"):
                gpus[event["pid"]] = event["args"]["labels"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    return gpus, threads


def _on_clock(event: dict[str, Any], base: int, clock: _Clock) -> dict[str, Any]:
    """An event of torch.profiler with times in nanoseconds of rank 0's clock."""
    start = base + round(event["ts"] * 1000)
    moved = {**event, "ts": clock.true(start / 1e9)}
    if "dur" in event:
        end = start + round(event["dur"] * 1000)
        moved["dur"] = clock.true(end / 1e9) - moved["ts"]
    return moved


# -- reading ---------------------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The records and spans that `Run.trace` wrote to a file.

    Raises OSError if there is no such file, ValueError if `Run.trace` did not write it.
    """
    content = _load(Path(path))
    facts = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(facts, dict) or not str(facts.get("made_by")).startswith(MAKER):
        raise ValueError(
            f"{path} is not a trace of run.trace(). Fix: write it with run.trace(path)."
        )
    ledger, spans = [], []
    events = [e for e in content["traceEvents"] if e.get("cat") in (CALL, SPAN, WAIT)]
    waits = {(e["pid"], e["args"]["seq"]): _times(e) for e in events if e["cat"] == WAIT}
    for event in events:
        rank, name, (start, end) = event["pid"], event["name"], _times(event)
        if event["cat"] == SPAN:
            spans.append(Span(rank, name, start, end))
        elif event["cat"] == CALL:
            args = {**event["args"], "group": tuple(event["args"]["group"])}
            times = {"started": start, "finished": end, "waited": waits.get((rank, args["seq"]))}
            ledger.append(Record(rank=rank, op=name, **args, **times))
    return Trace(facts["world_size"], ledger, spans)


def _times(event: dict[str, Any]) -> tuple[float, float | None]:
    """Begin and end in seconds."""
    start = event["ts"] / 1e6
    return start, None if event["ph"] == "B" else (event["ts"] + event["dur"]) / 1e6


def _load(path: Path) -> Any:
    """Read a JSON file. Raises ValueError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, so it is not a trace: {error}") from error
