"""`ddpz explain`: verdicts on traces and on torch's own flight records; unsafe pickles refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_trace import a_run, record
from torch._C import _distributed_c10d as c10d

import ddpz_lite as dz
from ddpz_lite.course.cli import main
from ddpz_lite.meter import explain
from ddpz_lite.wire import Span

# ---- traces


def explained(tmp_path, *ledger, spans=(), world=2, **options) -> str:
    a_run(*ledger, spans=spans, world=world).trace(tmp_path / "trace.json")
    return explain(tmp_path / "trace.json", **options)


def late_run(world=3, late=1, delay=0.2, steps=4):
    """Each step: compute 0.1 s, on one rank 0.1 + delay, in a span inside the step; then a call."""
    ledger, spans = [], []
    for step in range(steps):
        start, end = 1.0 * step, 1.0 * step + 0.1 + delay + 0.05
        for rank in range(world):
            done = start + 0.1 + (delay if rank == late else 0.0)
            spans += [Span(rank, "step", start, end), Span(rank, "data", start, start + 0.02)]
            spans += [Span(rank, "forward", start + 0.02, done)]
            call = record(rank, step, done, end, waited=(done, end), group=tuple(range(world)))
            ledger.append(call)
    return ledger, spans


def test_the_late_rank_its_span_and_the_exposed_share(tmp_path):
    ledger, spans = late_run()
    lines = explained(tmp_path, *ledger, spans=spans, world=3).splitlines()
    assert lines == [
        "a trace: 3 ranks, 12 calls",
        "rank 1 was late: last in 3 of 3 collectives, the others waited 600.0 ms for it",
        "  its span 'forward' took 1.12 s in all, elsewhere 320.0 ms",
        "step (median of 3, the first left out) on rank 1, which rules: 50.0 ms exposed, 14% of it",
        "  ms         compute   exposed      data      rest    hidden",
        "  rank 0        80.0     250.0      20.0       0.0       0.0",
        "  rank 1       280.0      50.0      20.0       0.0       0.0",
        "  rank 2        80.0     250.0      20.0       0.0       0.0",
    ]


def test_waiting_in_several_calls_at_once_counts_once(tmp_path):
    """Three calls at a time, as DDP's buckets are: rank 1 comes 0.1 s later to all of them."""
    ledger = [
        record(rank, n, n // 3 + 0.1 * rank, n // 3 + 0.5) for rank in (0, 1) for n in range(6)
    ]
    assert "the others waited 200.0 ms for it" in explained(tmp_path, *ledger)


@pytest.mark.parametrize("late, blamed", [(0.0009, False), (0.0011, True)])
def test_less_than_a_millisecond_a_call_is_noise(late, blamed, tmp_path):
    ledger = [record(r, n, n + late * r, n + 0.5) for r in (0, 1) for n in range(4)]
    text = explained(tmp_path, *ledger)
    assert ("rank 1 was late: last in 3 of 3" in text) is blamed
    assert ("no rank was late; most of all rank 1, within the noise: last in 3" in text) != blamed


def test_no_rank_is_blamed_where_the_ranks_take_turns(tmp_path):
    ledger, spans = [], []
    for step in range(5):
        for rank in range(2):
            at = step + (0.1 if rank == step % 2 else 0.0)
            ledger.append(record(rank, step, at, step + 0.2))
    text = explained(tmp_path, *ledger, spans=spans)
    assert "no rank was late more than all others; most of all rank" in text
    assert "the whole job on rank" in text


def test_steps_that_are_not_on_all_ranks_are_not_compared(tmp_path):
    spans = [Span(0, "step", 0.0, 1.0), Span(0, "work", 0.0, 0.5), Span(1, "work", 0.0, 1.0)]
    lines = explained(tmp_path, record(0, 0, 0.5, 1.0), spans=spans).splitlines()
    assert lines[1] == "the whole job on rank 1, which rules: 0.0 ms exposed, 0% of it"
    assert lines[3].split() == ["rank", "0", "500.0", "500.0", "0.0", "0.0", "0.0"]


def test_skewed_clocks_are_noticed_before_a_rank_is_blamed(tmp_path):
    ledger, spans = late_run()
    skewed = [
        replace(r, started=r.started - 5, finished=r.finished - 5, waited=None)
        if r.rank == 2
        else r
        for r in ledger
    ]
    text = explained(tmp_path, *skewed, spans=spans, world=3)
    assert "the clocks disagree by 4.95 s at least: rank 2 came out of all_reduce #0" in text
    assert "before rank 1 came in" in text and "was late:" not in text
    run = a_run(*skewed, world=3)  # with the offset, it is as before
    run.trace(tmp_path / "corrected.json", offsets=[0, 0, -5])
    assert "rank 1 was late: last in 3 of 3" in explain(tmp_path / "corrected.json")


def test_a_rank_that_makes_no_call(tmp_path):
    ledger = [record(r, n, n + r / 10, n + 0.5, group=(0, 1, 2)) for r in range(3) for n in (0, 1)]
    ledger += [record(r, 2, 2.0, None, group=(0, 1, 2)) for r in (0, 2)]
    text = explained(tmp_path, *ledger, world=3)
    assert "look first at rank 1:\n  ranks 0 and 2: waiting in all_reduce #2 (a.py:3)\n" in text
    assert "  rank 1: missing from all_reduce #2; last call: all_reduce #1 (a.py:3)" in text


def test_a_waiting_rank_is_not_the_cause_and_a_circle_has_none(tmp_path):
    """0 waits for 1 in a group; 1 waits for 2 in a recv; 2 has called nothing: 2 is the cause."""
    zero = record(0, 0, 0.1, None)
    one = record(1, 0, 0.2, None, op="recv", group=(0, 1, 2), peer=2)
    text = explained(tmp_path, zero, one, world=3)
    assert text.splitlines()[1] == "look first at rank 2:"
    assert "  rank 2: missing at the other end of recv; last call: none" in text
    two = record(2, 0, 0.1, None, op="recv", group=(0, 1, 2), peer=0)
    circle = explained(tmp_path, zero, one, two, world=3)
    assert "each waits for another of them; look at the order of these calls:" in circle
    both = (
        record(0, 0, 0.1, None, op="send", peer=1),
        record(1, 0, 0.1, None, op="recv", peer=0),
    )
    assert "was not over on ranks 0 and 1, though all ranks" in explained(tmp_path, *both)


def test_the_command_prints_it_and_bad_files_are_one_line(tmp_path, capsys):
    ledger, spans = late_run()
    a_run(*ledger, spans=spans, world=3).trace(tmp_path / "trace.json")
    assert main(["explain", str(tmp_path / "trace.json"), "--data", "forward"]) == 0
    assert "rank 1 was late" in capsys.readouterr().out
    (tmp_path / "other.json").write_text('{"some": "thing"}')
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nowhere", "No such file"),
        ("other.json", "neither a trace nor a flight record. Fix: name what run.trace()"),
        ("text", "neither a trace nor a flight record: Expecting value"),
        ("empty", "no file to read. Fix: name a trace, or flight records"),
        (".", "is a trace of a full job"),
    ):
        if name == ".":
            (tmp_path / "other.json").unlink()
            (tmp_path / "text").write_text('{"entries": []}')
        assert main(["explain", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("ddpz explain: ") and words in error and error.count("\n") == 1


# ---- torch's flight records


def flown(number, name="nccl:all_reduce", sizes=((4,),), state="completed", at=0.0, **more):
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": ["Float"] * len(sizes),
        "state": state,
        "time_created_ns": int((100 + number + at) * 1e9),
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/d.py", "line": 1},
            {"name": "train", "filename": "/home/train.py", "line": 7},
        ],
    } | more


def write(folder, world, *records, suffix="pickle", protocol=2):
    for rank, entries in enumerate(records):
        dump = {
            "version": "2.10",
            "entries": entries,
            "pg_config": {"0": {"name": "0", "ranks": str(list(range(world)))}},
        }
        if suffix == "json":
            (folder / f"record_{rank}.json").write_text(json.dumps(dump))
        else:
            (folder / f"record_{rank}").write_bytes(pickle.dumps(dump, protocol=protocol))
    return explain(folder)


@pytest.mark.parametrize("suffix", ["pickle", "json"])
def test_a_call_that_differs_is_named_with_the_rank(tmp_path, suffix):
    usual = [flown(1), flown(2, state="scheduled"), flown(3, "nccl:broadcast", state="scheduled")]
    other = [flown(1), flown(2, sizes=[(2, 3)], state="scheduled"), flown(3, state="scheduled")]
    text = write(tmp_path, 3, usual, other, usual, suffix=suffix)
    assert "call #2 of the group of ranks 0 to 2 differs on rank 1:\n" in text
    assert "  ranks 0 and 2: all_reduce of Float, 4 elements at train.py:7\n" in text
    assert "  rank 1: all_reduce of Float, 6 elements at train.py:7\n" in text
    assert "call #3" not in text  # a consequence
    assert text.endswith("so not what was exposed")


def test_two_ranks_cannot_outvote_each_other_and_parts_may_differ(tmp_path):
    text = write(tmp_path, 2, [flown(1, "gloo:broadcast")], [flown(1)])
    assert "call #1 of the group of ranks 0 and 1 differs between its ranks:" in text
    legal = [flown(1, "nccl:all_to_all", sizes=[(rank,)]) for rank in (3, 5)]
    assert "differs" not in write(tmp_path, 2, *([one] for one in legal))


def test_a_missing_rank_and_a_missing_record(tmp_path):
    waits = [flown(1), flown(2, state="started")]
    text = write(tmp_path, 3, waits, [flown(1)], waits)
    assert "look first at rank 1:" in text and "last call: all_reduce #1" in text
    (tmp_path / "record_1").unlink()
    text = explain(tmp_path)
    assert text.startswith("flight records: 3 ranks, 4 calls; no record of rank 1\n")
    assert "  rank 1: no record: the process may have ended first" in text


def test_a_ring_buffer_without_its_first_calls_accuses_no_rank(tmp_path):
    long = [flown(number, at=0.25) for number in range(1, 9)]
    text = write(tmp_path, 2, long, [flown(number) for number in range(5, 9)])
    assert "look first" not in text and "differs" not in text
    assert "rank 0 was late: last in 3 of 3 collectives, the others waited 750.0 ms" in text


def test_sends_name_ranks_of_their_group(tmp_path):
    pair = {"name": "7", "ranks": "[1, 3]"}
    about = {"process_group": ("7", "pair"), "collective_seq_id": 0, "state": "started"}
    for rank in range(4):
        entries = [flown(0, "nccl:send 0->1", **about)] if rank == 1 else []
        dump = {"entries": entries, "pg_config": {"7": pair} if rank % 2 else {}}
        (tmp_path / f"r{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    text = explain(tmp_path)
    assert "look first at rank 3:\n  rank 1: waiting in send to rank 3 (train.py:7)" in text


def hangs_half_way(folder):
    """torch records it itself: rank 2 makes its third call when all records are written."""
    x, rank, folder = torch.ones(4), dist.get_rank(), Path(folder)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    if rank != 2:
        work = dist.all_reduce(x, async_op=True)
    (folder / f"record_{rank}").write_bytes(c10d._dump_fr_trace(True, True, False))
    (folder / f"json_{rank}.json").write_bytes(c10d._dump_fr_trace_json(True, False))
    if rank == 2:
        while len([*folder.glob("json_*")]) < 3:
            time.sleep(0.01)
        work = dist.all_reduce(x, async_op=True)
    work.wait()


@pytest.mark.parametrize("record", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_torchs_own_records_of_a_job_over_gloo(record, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    dz.launch(hangs_half_way, 3, args=(str(tmp_path),), record=record, backend="gloo")
    text = explain(*tmp_path.glob("record_*"))
    assert text.startswith("flight records: 3 ranks, 8 calls\nlook first at rank 2:\n")
    assert "  ranks 0 and 1: waiting in all_reduce #3 (test_explain.py:" in text
    assert "  rank 2: missing from all_reduce #3; last call: broadcast #2 (test_" in text
    assert "look first at rank 2:" in explain(*tmp_path.glob("json_*"))


def test_sixty_four_ranks_take_few_lines(tmp_path):
    waits = [flown(1), flown(2, state="started")]
    dumps = [[flown(1)] if rank in (7, 9) else waits for rank in range(64)]
    assert write(tmp_path, 64, *dumps).splitlines()[1:4] == [
        "look first at ranks 7 and 9:",
        "  ranks 0 to 6, 8 and 10 to 63: waiting in all_reduce #2 (train.py:7)",
        "  ranks 7 and 9: missing from all_reduce #2; last call: all_reduce #1 (train.py:7)",
    ]


def test_the_end_of_a_batch_of_messages_is_not_a_collective(tmp_path):
    batch = {"is_p2p": True, "state": "started"}
    one = [flown(3), flown(3, "nccl:send 0->1", **batch), flown(3, "nccl:coalesced", **batch)]
    two = [flown(3), flown(3, "nccl:recv 1<-0", **batch)]
    text = write(tmp_path, 2, one, two)
    assert text.startswith("flight records: 2 ranks, 4 calls\nsend to rank 1 (train.py:7) was not")
    assert "differs" not in text
    lacking = [{"profiling_name": "nccl:all_reduce"}]
    with pytest.raises(ValueError, match=r"unknown format of flight records: KeyError"):
        write(tmp_path, 2, lacking, lacking)


class Evil:
    def __reduce__(self):
        return os.system, ("touch was_run",)


def test_a_pickle_that_asks_for_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "record_0").write_bytes(pickle.dumps({"entries": [Evil()]}, protocol=2))
    with pytest.raises(ValueError, match=r"flight record: it refers to posix\.system"):
        explain(tmp_path / "record_0")
    assert not (tmp_path / "was_run").exists()
    (tmp_path / "cut_0").write_bytes(pickle.dumps({"entries": [1, 2]}, protocol=2)[:-3])
    with pytest.raises(ValueError, match="neither a trace nor a flight record"):
        explain(tmp_path / "cut_0")
    (tmp_path / "noname").write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(ValueError, match=r"does not end in a rank, .* Fix: rename it"):
        explain(tmp_path / "noname")
    shutil.copy(tmp_path / "noname", tmp_path / "a_1")
    shutil.copy(tmp_path / "noname", tmp_path / "b_1")
    with pytest.raises(ValueError, match="two files are of one rank"):
        explain(tmp_path / "a_1", tmp_path / "b_1")
