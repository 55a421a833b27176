"""A job as a trace: the JSON that Perfetto and chrome://tracing open, all ranks on one clock.

A rank is a process of the trace. Its spans, and its main thread's waits inside them, lie on one
track, its collectives and messages on the next; what overlaps without nesting gets a further track.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ddpz_lite import __version__
from ddpz_lite.wire.ledger import Record, Span

if TYPE_CHECKING:
    from ddpz_lite.launcher.run import Run

CALL, SPAN, WAIT = "communication", "span", "wait"  # categories of our events
MAKER = "ddpz-lite"
FIELDS = ("seq", "dtype", "elements", "bytes_sent", "where", "group", "peer", "group_seq")
_FIELDS_OF = attrgetter(*FIELDS)
AT_ONCE = 10_000  # events that are in memory while they are written
APART = 1 << 40  # between the ids of two ranks' profilers


@dataclass(frozen=True)
class Trace:
    """What a trace of ours tells of a job: the ledger and the spans, on one clock, in seconds."""

    world_size: int
    ledger: list[Record]
    spans: list[Span]


@dataclass(frozen=True)
class _Clock:
    """A rank's clock: how far it is ahead of rank 0's at time 0, and what it gains per second."""

    ahead: float = 0.0
    gains: float = 0.0

    def true(self, seconds: float) -> int:
        """Nanoseconds of rank 0's clock. Whole ones, so that what nests still nests in the file."""
        return round((seconds - self.ahead) / (1 + self.gains) * 1e9)


class _Stretch(NamedTuple):
    """Something with two ends, in nanoseconds; `end` is infinite where it never ended."""

    start: int
    end: float
    what: Record | Span

    @classmethod
    def of(cls, clock: _Clock, start: float, end: float | None, what: Record | Span) -> _Stretch:
        return cls(clock.true(start), math.inf if end is None else clock.true(end), what)


def write_trace(
    path: str | os.PathLike[str],
    run: Run,
    offsets: Sequence[float | tuple[float, float]] | None = None,
    profiles: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """See `Run.trace`. A rank's events are made while they are written, so a long run fits."""
    clocks = _clocks(run.world_size, offsets)
    ranks = _by_rank(run)
    foreign = [
        event
        for place, profile in enumerate(profiles, 1)
        for event in _of_profile(Path(profile), run, clocks, 1000 * place)
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
        "world_size": run.world_size,
        "backend": run.backend,
        "clock": "seconds of rank 0's clock; from each rank's own the offset was taken away",
        "offset_seconds": [clock.ahead for clock in clocks],
        "offset_gained_per_second": [clock.gains for clock in clocks],
    }
    first = run.world_size  # to Perfetto thread 0 is none, and one numbered as its process the main
    of_ranks = (_of_rank(rank, *ranks[rank], clocks[rank], first) for rank in range(first))
    events = chain(*of_ranks, foreign)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": []})
    with open(path, "w") as file:
        file.write(head.removesuffix("]}"))
        _write(file, events, min(*begins, 0))
        file.write("]}")


def _by_rank(run: Run) -> list[tuple[list[Span], list[Record]]]:
    """(spans, records) of each rank."""
    ranks: list[tuple[list[Span], list[Record]]] = [([], []) for _ in range(run.world_size)]
    for span in run.spans:
        ranks[span.rank][0].append(span)
    for record in run.ledger:
        ranks[record.rank][1].append(record)
    return ranks


def _write(file: TextIO, events: Iterator[dict[str, Any]], zero: int) -> None:
    """Events with nanoseconds, in the microseconds of the format since `zero`: none is negative."""
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
            f"trace: {len(offsets)} offsets for {world} ranks. Fix: one number a rank, or a pair "
            "(seconds ahead of rank 0, seconds gained per second), rank 0's own first."
        )
    return [_Clock(*one) if isinstance(one, Sequence) else _Clock(float(one)) for one in offsets]


# -- a rank's own events ---------------------------------------------------------------------------


def _of_rank(
    rank: int, named: list[Span], ledger: list[Record], clock: _Clock, track: int
) -> Iterator[dict[str, Any]]:
    """All events of one rank, and the names of its process and its tracks, from `track` on."""
    yield from _process(rank, f"rank {rank}")
    spans = [_Stretch.of(clock, s.started, s.finished, s) for s in named]
    spans += [_Stretch.of(clock, *r.waited, r) for r in ledger if r.waited]
    calls = [_Stretch.of(clock, r.started, r.finished, r) for r in ledger]
    for name, stretches, nested in (("spans", spans, True), ("communication", calls, False)):
        lanes = _lanes(stretches, nested)
        for lane in range(max(lanes, default=-1) + 1):
            yield from _track(rank, track + lane, name)
        for stretch, lane in zip(stretches, lanes, strict=True):
            yield _event(stretch, wait=nested, pid=rank, tid=track + lane)
        track += max(lanes, default=-1) + 1


def _process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    """A name for a process, and its place among the others."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _track(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    """The same for a track; a viewer would sort them by name."""
    here = {"ph": "M", "pid": pid, "tid": tid}
    yield {**here, "name": "thread_name", "args": {"name": name}}
    yield {**here, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _event(stretch: _Stretch, wait: bool, pid: int, tid: int) -> dict[str, Any]:
    """A stretch, in nanoseconds; one that never ended only begins."""
    start, end, what = stretch
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


def _lanes(stretches: Sequence[_Stretch], nested: bool) -> list[int]:
    """The track of each stretch, such that on one track all are apart, or one inside the other."""
    lanes = [0] * len(stretches)
    tracks: list[list[float]] = []  # of each, the ends of what is open, innermost last
    for index in sorted(range(len(lanes)), key=lambda i: (stretches[i].start, -stretches[i].end)):
        here = stretches[index]
        takers = (lane for lane, track in enumerate(tracks) if _takes(track, here, nested))
        lanes[index] = next(takers, len(tracks))
        if lanes[index] == len(tracks):
            tracks.append([])
        tracks[lanes[index]].append(here.end)
    return lanes


def _takes(track: list[float], stretch: _Stretch, nested: bool) -> bool:
    """Whether a track has room, once what ended before has left it."""
    while track and track[-1] <= stretch.start:
        track.pop()
    return not track or (nested and stretch.end <= track[-1])


# -- what torch.profiler recorded ------------------------------------------------------------------


def _of_profile(path: Path, run: Run, clocks: Sequence[_Clock], first: int) -> list[dict[str, Any]]:
    """Its events on our clock: in the rank's process from track `first` on, a GPU's in its own."""
    whole = _load(path)
    rank = whole.get("distributedInfo", {}).get("rank") if isinstance(whole, dict) else None
    if rank is None or "traceEvents" not in whole:
        raise ValueError(
            f"trace: {path} does not say which rank it is of. Fix: let torch.profiler export it "
            "on a rank, before the process group is destroyed."
        )
    if not 0 <= rank < run.world_size:
        raise ValueError(f"trace: {path} is of rank {rank}, and this run had {run.world_size}.")
    # Whole nanoseconds: a float that counts them from 1970 is 200 of them wide.
    base = whole.get("baseTimeNanoseconds", 0) - round(run.began * 1e9)
    clock = clocks[rank]
    gpus, names = {}, {}
    for event in whole["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_labels":
            if event["args"]["labels"].startswith("GPU"):
                gpus[event["pid"]] = event["args"]["labels"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    tracks: dict[tuple[Any, Any], tuple[int, int]] = {}
    found: list[dict[str, Any]] = []
    for event in whole["traceEvents"]:
        if event["ph"] == "M" or not isinstance(event.get("pid"), int):
            continue  # names are given anew; the profiler's own windows are of no process
        key = event["pid"], event["tid"]
        if key not in tracks:
            gpu = event["pid"] in gpus
            pid = run.world_size * (event["pid"] + 1) + rank if gpu else rank
            tracks[key] = pid, first + len(tracks)
            found += _track(*tracks[key], names.get(key, f"thread {event['tid']}"))
            if gpu:
                found += _process(pid, f"rank {rank}, {gpus[event['pid']]}")
        start = base + round(event["ts"] * 1000)
        moved = {**event, "pid": tracks[key][0], "tid": tracks[key][1]}
        moved["ts"] = clock.true(start / 1e9)
        if "dur" in event:
            end = start + round(event["dur"] * 1000)
            moved["dur"] = clock.true(end / 1e9) - moved["ts"]
        if isinstance(event.get("id"), int):  # arrows from one event to another
            moved["id"] = event["id"] + APART * rank
        found.append(moved)
    return found


# -- reading ---------------------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The records and spans that `Run.trace` wrote to a file.

    Raises OSError if there is no such file, ValueError if it is not one of ours.
    """
    whole = _load(Path(path))
    facts = whole.get("otherData") if isinstance(whole, dict) else None
    if not isinstance(facts, dict) or not str(facts.get("made_by")).startswith(MAKER):
        raise ValueError(f"{path} is no trace of run.trace(). Fix: write it with that.")
    ledger, spans = [], []
    events = [e for e in whole["traceEvents"] if e.get("cat") in (CALL, SPAN, WAIT)]
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
    """When it began and ended, in seconds."""
    start = event["ts"] / 1e6
    return start, None if event["ph"] == "B" else (event["ts"] + event["dur"]) / 1e6


def _load(path: Path) -> Any:
    """A JSON file. Raises ValueError where it is none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, so no trace: {error}") from error
