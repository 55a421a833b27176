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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .ledger import Record, Span

if TYPE_CHECKING:
    from ..launcher.run import Run

CALL, SPAN, WAIT = "communication", "span", "wait"  # categories of our events
MAKER = "ddpz-lite"
FIELDS = ("seq", "dtype", "elements", "bytes_sent", "where", "group", "peer", "group_seq")
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


def write_trace(
    path: str | os.PathLike[str],
    run: Run,
    offsets: Sequence[float | tuple[float, float]] | None = None,
    profiles: Iterable[str | os.PathLike[str]] = (),
) -> None:
    """See `Run.trace`."""
    clocks = _clocks(run.world_size, offsets)
    events = [
        event for rank in range(run.world_size) for event in _of_rank(run, rank, clocks[rank])
    ]
    for place, profile in enumerate(profiles, 1):
        events += _of_profile(Path(profile), run, clocks, 1000 * place)
    if not any(event["ph"] != "M" for event in events):
        raise ValueError(
            "trace: this run recorded nothing. Cure: launch with record=True, and let the ranks "
            'call a collective or open a span: with dz.span("step"): ...'
        )
    earliest = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:  # from nanoseconds to the format's microseconds; none is negative
            event["ts"] = (event["ts"] - min(earliest, 0)) / 1000
        if "dur" in event:
            event["dur"] /= 1000
    facts = {
        "made_by": f"{MAKER} {__version__}",
        "world_size": run.world_size,
        "backend": run.backend,
        "clock": "seconds of rank 0's clock; from each rank's own the offset was taken away",
        "offset_seconds": [clock.ahead for clock in clocks],
        "offset_gained_per_second": [clock.gains for clock in clocks],
    }
    whole = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
    Path(path).write_text(json.dumps(whole))


def _clocks(world: int, offsets: Sequence[float | tuple[float, float]] | None) -> list[_Clock]:
    if offsets is None:
        return [_Clock()] * world  # the ranks of one machine share a clock
    if len(offsets) != world:
        raise ValueError(
            f"trace: {len(offsets)} offsets for {world} ranks. Cure: one number a rank, or a pair "
            "(seconds ahead of rank 0, seconds gained per second), rank 0's own first."
        )
    return [_Clock(*one) if isinstance(one, Sequence) else _Clock(float(one)) for one in offsets]


# -- a rank's own events ---------------------------------------------------------------------------


def _of_rank(run: Run, rank: int, clock: _Clock) -> Iterator[dict[str, Any]]:
    """All events of one rank, and the names of its process and its tracks."""
    yield from _process(rank, f"rank {rank}")
    spans, calls = [], []
    for span in run.spans:
        if span.rank == rank:
            spans.append(_event(SPAN, span.name, clock, span.started, span.finished, {}))
    for record in run.ledger:
        if record.rank != rank:
            continue
        args = {name: getattr(record, name) for name in FIELDS}
        calls.append(_event(CALL, record.op, clock, record.started, record.finished, args))
        if record.waited:
            spans.append(
                _event(WAIT, f"wait: {record.op}", clock, *record.waited, {"seq": record.seq})
            )
    track = run.world_size  # to Perfetto thread 0 is none, and one numbered as its process the main
    for name, events, nested in (("spans", spans, True), ("communication", calls, False)):
        lanes = _lanes(events, nested)
        for lane in range(max(lanes, default=-1) + 1):
            yield from _track(rank, track + lane, name)
        for event, lane in zip(events, lanes, strict=True):
            yield {**event, "pid": rank, "tid": track + lane}
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


def _event(
    category: str, name: str, clock: _Clock, start: float, end: float | None, args: dict[str, Any]
) -> dict[str, Any]:
    """A stretch, in nanoseconds; one that never ended only begins."""
    event = {"ph": "X", "cat": category, "name": name, "ts": clock.true(start), "args": args}
    if end is None:
        return {**event, "ph": "B"}
    return {**event, "dur": clock.true(end) - event["ts"]}


def _lanes(events: Sequence[dict[str, Any]], nested: bool) -> list[int]:
    """The track of each event, such that on one track all are apart, or one inside the other."""
    lanes = [0] * len(events)
    tracks: list[list[float]] = []  # of each, the ends of what is open, innermost last
    ends = [event["ts"] + event.get("dur", math.inf) for event in events]
    for index in sorted(range(len(events)), key=lambda i: (events[i]["ts"], -ends[i])):
        for track in tracks:
            while track and track[-1] <= events[index]["ts"]:
                track.pop()
        fits = (not t or (nested and ends[index] <= t[-1]) for t in tracks)
        lanes[index] = next((lane for lane, fit in enumerate(fits) if fit), len(tracks))
        if lanes[index] == len(tracks):
            tracks.append([])
        tracks[lanes[index]].append(ends[index])
    return lanes


# -- what torch.profiler recorded ------------------------------------------------------------------


def _of_profile(path: Path, run: Run, clocks: Sequence[_Clock], first: int) -> list[dict[str, Any]]:
    """Its events on our clock: in the rank's process from track `first` on, a GPU's in its own."""
    whole = _load(path)
    rank = whole.get("distributedInfo", {}).get("rank") if isinstance(whole, dict) else None
    if rank is None or "traceEvents" not in whole:
        raise ValueError(
            f"trace: {path} does not say which rank it is of. Cure: let torch.profiler export it "
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
        raise ValueError(f"{path} is no trace of run.trace(). Cure: write it with that.")
    ledger, spans, waits = [], [], {}
    for event in whole["traceEvents"]:
        rank, name = event["pid"], event["name"]
        if event.get("cat") not in (CALL, SPAN, WAIT):
            continue
        start = event["ts"] / 1e6
        end = None if event["ph"] == "B" else (event["ts"] + event["dur"]) / 1e6
        if event["cat"] == SPAN:
            spans.append(Span(rank, name, start, end))
        elif event["cat"] == WAIT:
            waits[rank, event["args"]["seq"]] = start, end
        else:
            args = {**event["args"], "group": tuple(event["args"]["group"])}
            ledger.append(Record(rank=rank, op=name, started=start, finished=end, **args))
    ledger = [replace(r, waited=waits.get((r.rank, r.seq))) for r in ledger]
    return Trace(facts["world_size"], ledger, spans)


def _load(path: Path) -> Any:
    """A JSON file. Raises ValueError where it is none."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, so no trace: {error}") from error
