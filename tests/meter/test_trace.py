"""Traces: valid by schema, all ranks on one clock, read back as they were."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.launcher import Run
from ddpz_lite.meter import read_trace
from ddpz_lite.wire import Record, Span

# Google's "Trace Event Format": the phases that occur here, and what each must have.
MOMENT = {"type": "number", "minimum": 0}
WHOLE = {"type": "integer", "minimum": 0}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/event"}},
    },
    "$defs": {
        "event": {
            "type": "object",
            "required": ["ph", "name", "pid"],
            "properties": {
                "name": {"type": "string"},
                "cat": {"type": "string"},
                "ph": {"enum": ["X", "B", "M", "i", "s", "t", "f", "C", "b", "e", "n"]},
                "pid": WHOLE,
                "tid": WHOLE | {"minimum": 1},  # a thread 0 is, to Perfetto, none
                "ts": MOMENT,
                "dur": MOMENT,
                "args": {"type": "object"},
                "id": {"type": ["integer", "string"]},
                "s": {"enum": ["g", "p", "t"]},
            },
            "allOf": [
                {
                    "if": {"properties": {"ph": {"const": "M"}}},
                    "then": {
                        "required": ["args"],
                        "properties": {"name": {"pattern": "^(process|thread)_(name|sort_index)$"}},
                    },
                    "else": {"required": ["ts", "tid"]},
                },
                {"if": {"properties": {"ph": {"const": "X"}}}, "then": {"required": ["dur"]}},
                {
                    "if": {"properties": {"ph": {"enum": ["s", "t", "f", "b", "e", "n"]}}},
                    "then": {"required": ["id", "cat"]},
                },
            ],
        }
    },
}


def record(rank, seq, started, finished, op="all_reduce", waited=None, group=(0, 1), peer=None):
    number = None if op in ("send", "recv") else seq
    return Record(
        rank, seq, op, "float32", 4, 16, started, finished, "a.py:3", group, peer, number, waited
    )


def a_run(*ledger: Record, spans=(), world=2) -> Run:
    return Run([None] * world, 1.0, "gloo", list(ledger), list(spans), began=1000.0)


def events_of(path) -> list[dict]:
    """The events of a file that is valid, and in which tracks hold only what nests."""
    import jsonschema  # slow, and of no use to ranks

    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    tracks = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("span", "wait", "communication"):
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        for one, other in pairwise(sorted(track, key=lambda e: (e["ts"], -e["dur"]))):
            end, start = one["ts"] + one["dur"], other["ts"]
            inside = other["cat"] != "communication" and start + other["dur"] <= end + 1e-6
            assert start >= end - 1e-6 or inside, (one, other)
    return document["traceEvents"]


def steps():
    x = torch.ones(1000)
    for _ in range(2):
        with dz.span("step"):
            with dz.span("forward"):
                time.sleep(0.002)
            works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
            with dz.span("backward"):
                dist.broadcast(x, 0)
            for work in works:
                work.wait()
    if dist.get_rank() < 2:
        (dist.send if dist.get_rank() else dist.recv)(x, 1 - dist.get_rank())


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_is_written_and_read_back(world, tmp_path):
    run = dz.launch(steps, world)
    run.trace(tmp_path / "trace.json")
    events = events_of(tmp_path / "trace.json")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(world)}
    read = read_trace(tmp_path / "trace.json")
    assert read.world_size == world
    for before, after in ((run.ledger, read.ledger), (run.spans, read.spans)):
        assert [nanoseconds(one) for one in before] == [nanoseconds(one) for one in after]
    for r in run.ledger:  # each caller waited, and not before it had called
        assert r.started <= r.waited[0] + 1e-3 and r.waited[0] <= r.waited[1] <= run.seconds


def nanoseconds(one):
    """A record or a span with whole nanoseconds for its times."""
    times = {name: round(1e9 * getattr(one, name)) for name in ("started", "finished")}
    if isinstance(one, Record):
        times["waited"] = tuple(round(1e9 * moment) for moment in one.waited)
    return replace(one, **times)


def test_a_call_that_never_ended_only_begins(tmp_path):
    a_run(record(0, 0, 0.1, None), record(1, 0, 0.2, 0.3)).trace(tmp_path / "t.json")
    assert [e["ph"] for e in events_of(tmp_path / "t.json") if e["ph"] in "XB"] == ["B", "X"]
    assert [r.finished for r in read_trace(tmp_path / "t.json").ledger] == [None, 0.3]


def test_a_trace_is_the_same_however_many_events_are_written_at_once(tmp_path, monkeypatch):
    run = a_run(*(record(0, seq, seq, seq + 0.5) for seq in range(7)))
    run.trace(tmp_path / "whole.json")
    for at_once in (1, 2, 3):
        monkeypatch.setattr("ddpz_lite.wire.trace.AT_ONCE", at_once)
        run.trace(tmp_path / "parts.json")
        assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


def test_what_overlaps_gets_its_own_track(tmp_path):
    calls = [record(0, 0, 0.0, 0.5), record(0, 1, 0.1, 0.3), record(0, 2, 0.3, 0.4)]
    spans = [Span(0, "step", 0.0, 0.5), Span(0, "forward", 0.1, 0.2), Span(0, "other", 0.4, 0.6)]
    a_run(*calls, spans=spans).trace(tmp_path / "t.json")
    events = [e for e in events_of(tmp_path / "t.json") if e["ph"] == "X"]
    tracks = {e["name"] if e["cat"] == "span" else e["args"]["seq"]: e["tid"] for e in events}
    assert tracks == {"step": 2, "forward": 2, "other": 3, 0: 4, 1: 5, 2: 5}


def test_offsets_and_drift_are_taken_away(tmp_path):
    """Rank 1's clock is an hour ahead and gains a second in a thousand; rank 2's is behind."""
    straight = a_run(*(record(rank, 0, 2.0, 3.0, waited=(2.5, 3.0)) for rank in range(3)), world=3)
    clocks = [0.0, (3600.0, 1e-3), -7.25]

    def skew(moment, rank):
        ahead, gains = clocks[rank] if rank == 1 else (clocks[rank], 0.0)
        return moment * (1 + gains) + ahead

    skewed = replace(
        straight,
        ledger=[
            replace(r, started=skew(2.0, r.rank), finished=skew(3.0, r.rank), waited=None)
            for r in straight.ledger
        ],
    )
    skewed.trace(tmp_path / "after.json", offsets=clocks)
    for after in read_trace(tmp_path / "after.json").ledger:
        assert (after.started, after.finished) == pytest.approx((2.0, 3.0), abs=1e-8)
    facts = json.loads((tmp_path / "after.json").read_text())["otherData"]
    assert facts["offset_seconds"] == [0.0, 3600.0, -7.25]
    assert facts["offset_gained_per_second"] == [0.0, 1e-3, 0.0]
    skewed.trace(tmp_path / "before.json")  # rank 2 began before 0: the file has no negative time
    assert min(e["ts"] for e in events_of(tmp_path / "before.json") if "ts" in e) == 0


def profiled(folder):
    dist.barrier()
    with dz.span("around"):
        time.sleep(0.05)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with dz.span("before"):
                time.sleep(0.02)
            with torch.profiler.record_function("marked"):
                dist.all_reduce(torch.ones(4))
            with dz.span("after"):
                time.sleep(0.02)
        time.sleep(0.05)
    profile.export_chrome_trace(f"{folder}/profile{dist.get_rank()}.json")


def test_the_profilers_events_lie_beside_the_ranks_own(tmp_path):
    run = dz.launch(profiled, 2, args=(str(tmp_path),))
    profiles = sorted(tmp_path.glob("profile*.json"))
    run.trace(tmp_path / "t.json", profiles=profiles)
    events = events_of(tmp_path / "t.json")
    for rank in (0, 1):
        local = {e["name"]: e for e in events if e["pid"] == rank and e["ph"] == "X"}
        before, marked, after = local["before"], local["marked"], local["after"]
        assert before["ts"] + before["dur"] / 2 < marked["ts"]  # by 10 ms: the clocks agree
        assert marked["ts"] + marked["dur"] < after["ts"] + after["dur"] / 2
        assert local["all_reduce"]["tid"] < 1000 <= marked["tid"]
    assert len(read_trace(tmp_path / "t.json").ledger) == len(run.ledger)
    ids = {e["id"] for e in events if e["ph"] == "s"}
    assert all(e["id"] in ids for e in events if e["ph"] == "f")


@pytest.mark.parametrize("offset", [0.0, (3600.0, 1e-3)])
def test_what_the_profiler_nested_to_the_nanosecond_still_nests(offset, tmp_path):
    """Fifty operators without a gap, the last of which ends as their parent does."""
    operators = [(f"op {k}", 100 + 0.137 * k, 0.137) for k in range(50)]
    document = {
        "distributedInfo": {"rank": 1},
        "baseTimeNanoseconds": 1_795_000_000_123_456_789,  # a float of such seconds is coarse
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur}
            for name, ts, dur in [("parent", 100.0, 6.85), *operators]
        ],
    }
    (tmp_path / "p.json").write_text(json.dumps(document))
    run = replace(a_run(record(0, 0, 0.1, 0.2)), began=1_795_000_000.0)
    run.trace(tmp_path / "t.json", offsets=[0.0, offset], profiles=[tmp_path / "p.json"])
    events = [e for e in events_of(tmp_path / "t.json") if e["pid"] == 1 and e["ph"] == "X"]
    ends = [(round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in events]
    (start, end), *inside = ends
    assert start == inside[0][0] and inside[-1][1] == end
    assert all(one[1] == other[0] for one, other in pairwise(inside))


def test_a_gpu_is_a_process_and_two_ranks_never_share_one(tmp_path):
    """Profiles as torch writes them on two ranks that each have the GPU 0."""
    for rank in (0, 1):
        events = [
            {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
            {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5.0, "dur": 2.5},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 90, "tid": 90, "ts": 4.0, "id": 3},
            {
                "ph": "i",
                "name": "Iteration Start",
                "pid": "Traces",
                "tid": "T",
                "ts": 0.0,
                "s": "g",
            },
        ]
        document = {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": 1_000_500_000_000}
        (tmp_path / f"p{rank}.json").write_text(json.dumps(document | {"traceEvents": events}))
    run = a_run(record(0, 0, 0.1, 0.2), record(1, 0, 0.1, 0.2))
    run.trace(tmp_path / "t.json", profiles=[tmp_path / "p0.json", tmp_path / "p1.json"])
    events = events_of(tmp_path / "t.json")
    kernels = [e for e in events if e["name"] == "k"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[e["pid"]] for e in kernels] == ["rank 0, GPU 0", "rank 1, GPU 0"]
    assert all((e["ts"], e["dur"]) == (500_005.0, 2.5) for e in kernels)  # the run began at 1000 s
    arrows = [e for e in events if e["ph"] == "s"]
    assert [e["pid"] for e in arrows] == [0, 1] and arrows[0]["id"] != arrows[1]["id"]
    assert not any(e["name"] == "Iteration Start" for e in events)


def test_what_cannot_be_written_or_read(tmp_path):
    path, run = tmp_path / "t.json", a_run(record(0, 0, 0.1, 0.2))
    with pytest.raises(ValueError, match=r"recorded nothing. Fix: launch with record=True"):
        a_run().trace(path)
    with pytest.raises(ValueError, match=r"3 offsets for 2 ranks. Fix: give one number"):
        run.trace(path, offsets=[0, 1, 2])
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match=r"does not contain its rank. Fix: let"):
        run.trace(path, profiles=[path])
    with pytest.raises(ValueError, match=r"is not a trace of run.trace\(\)"):
        read_trace(path)
    path.write_text(json.dumps({"traceEvents": [], "distributedInfo": {"rank": 2}}))
    with pytest.raises(ValueError, match="is of rank 2, and this run had 2"):
        run.trace(path, profiles=[path])
    path.write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        read_trace(path)
