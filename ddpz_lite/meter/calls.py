"""The calls of the ranks, read from a trace of `Run.trace` or from torch's flight records.

torch keeps the last calls of each rank in a ring buffer (TORCH_FR_BUFFER_SIZE) and writes them when
NCCL's watchdog gives up (TORCH_FR_DUMP_TEMP_FILE), or on request: `_dump_fr_trace`, the debug
server. A file has one rank's calls, as a pickle or as JSON, and its name ends in the rank's number.

[Note: not torch's reader] torch.distributed.flight_recorder reads only pickles, with `pickle.load`,
which runs any code that a file names. It matches the calls of NCCL groups and prints a report; it
does not return the times from which `explain` finds a late rank.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ddpz_lite.wire import callsite
from ddpz_lite.wire.trace import Trace, read_trace

FREE = re.compile(r"gather|scatter|reduce_scatter_v|all_?to_?all.*|.*coalesced|send|recv|barrier")
MESSAGE = re.compile(r"(?P<op>send|recv) (?P<here>\d+)(->|<-)(?P<there>\d+)")


@dataclass(frozen=True)
class Call:
    """One call of one rank. number: its index among the calls of its group."""

    rank: int
    group: tuple[int, ...]  # global ranks
    label: str  # the group's name; two groups may have the same ranks
    number: int
    op: str
    what: str  # must be equal on all ranks of the group: "float32, 12 elements"; "" if nothing
    where: str
    at: float  # seconds: when the rank called
    over: bool  # when the record was written
    ended: float | None  # seconds; None if it was not recorded
    peer: int | None  # of a send or recv: the other end

    def __str__(self) -> str:
        if self.peer is not None:
            way = "to" if self.op == "send" else "from"
            return f"{self.op} {way} rank {self.peer} ({self.where})"
        return f"{self.op} #{self.number} ({self.where})"


@dataclass(frozen=True)
class Records:
    """The calls of a job, of each rank in order, from `source` ("a trace", "flight records")."""

    source: str
    calls: dict[int, list[Call]]
    ranks: tuple[int, ...]  # all ranks of the job, also those without a record
    trace: Trace | None = None


def read_records(paths: Iterable[str | Path]) -> Records:
    """The calls in these files, or in all files of these folders.

    Raises OSError for a missing file, ValueError for one of neither kind, and for several traces.
    """
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise ValueError("explain: there is no file to read. Fix: name a trace, or flight records.")
    loaded = {file: _load(file) for file in files}
    traces = [file for file, content in loaded.items() if "traceEvents" in content]
    if not traces:
        try:
            return _from_flight_records(loaded)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"explain: unknown format of flight records: {error!r}") from error
    if len(files) > 1:
        raise ValueError(
            f"explain: {traces[0]} is a trace of a full job, and {len(files)} files were named. "
            "Fix: explain one trace at a time."
        )
    return _from_trace(read_trace(traces[0]))


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]


class _PlainData(pickle.Unpickler):
    """A pickle may run code, so one that contains anything but plain data is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not plain data")


def _load(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    try:
        content = _PlainData(io.BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)
    except (ValueError, EOFError, IndexError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"explain: {file} is neither a trace nor a flight record: {error}"
        ) from error
    if not isinstance(content, dict) or not {"traceEvents", "entries"} & content.keys():
        raise ValueError(
            f"explain: {file} is neither a trace nor a flight record. Fix: name what run.trace() "
            "or torch's flight recorder wrote."
        )
    return content


# -- a trace ---------------------------------------------------------------------------------------


def _from_trace(trace: Trace) -> Records:
    calls: dict[int, list[Call]] = {rank: [] for rank in range(trace.world_size)}
    for r in trace.ledger:
        message = r.op in ("send", "recv")
        calls[r.rank].append(
            Call(
                rank=r.rank,
                group=r.group,
                label=str(r.group),
                number=-1 if message else r.group_seq,
                op=r.op,
                what="" if FREE.fullmatch(r.op) else r.dtype,  # the wire has compared the sizes
                where=r.where,
                at=r.started,
                over=r.finished is not None,
                ended=r.finished,
                peer=r.peer if message else None,
            )
        )
    return Records("a trace", calls, tuple(range(trace.world_size)), trace)


# -- flight records --------------------------------------------------------------------------------


def _from_flight_records(loaded: dict[Path, dict[str, Any]]) -> Records:
    by_rank = {_rank_of(file): content for file, content in loaded.items()}
    if len(by_rank) < len(loaded):
        raise ValueError("explain: two files are of one rank. Fix: name one dump per rank.")
    members: dict[str, set[int]] = defaultdict(
        set
    )  # NCCL records them; with gloo, the ranks that called
    for rank, content in by_rank.items():
        for name, about in content.get("pg_config", {}).items():
            members[name] |= {int(number) for number in re.findall(r"\d+", str(about["ranks"]))}
        for entry in content["entries"]:
            members[entry["process_group"][0]].add(rank)
    all_ranks = {rank for ranks in (by_rank, *members.values()) for rank in ranks}
    groups = {name: tuple(sorted(ranks)) for name, ranks in members.items()}
    groups |= {
        entry["process_group"][0]: tuple(sorted(all_ranks))
        for content in by_rank.values()
        for entry in content["entries"]
        if entry["process_group"][1] == "default_pg"
    }
    calls = {
        rank: [
            _call_of(rank, entry, groups[entry["process_group"][0]])
            for entry in content["entries"]
            if not entry.get("is_p2p")
            or MESSAGE.search(entry["profiling_name"])  # not the end of a batch
        ]
        for rank, content in sorted(by_rank.items())
    }
    return Records("flight records", calls, tuple(sorted(all_ranks)))


def _rank_of(file: Path) -> int:
    number = re.search(r"(\d+)(\.json|\.pickle|\.pkl)?$", file.name)
    if number is None:
        raise ValueError(
            f"explain: the name {file.name} does not end in a rank, as torch's dumps do. "
            "Fix: rename it, for example to record_3 for rank 3."
        )
    return int(number[1])


def _call_of(rank: int, entry: dict[str, Any], members: tuple[int, ...]) -> Call:
    """One entry. gloo records only its begin, and "retired" instead of NCCL's "completed"."""
    op, peer = entry["profiling_name"].partition(":")[2], None
    if message := MESSAGE.fullmatch(op):
        op, peer = message["op"], members[int(message["there"])]
    frames = [f for f in entry.get("frames", []) if not callsite.is_library(f["filename"])]
    ended = entry.get("time_discovered_completed_ns")
    elements = sum(map(prod, entry["input_sizes"]))
    kinds = " and ".join(dict.fromkeys(entry["input_dtypes"]))
    return Call(
        rank=rank,
        group=members,
        label=entry["process_group"][0],
        number=-1 if message else entry["collective_seq_id"],
        op=op,
        what="" if FREE.fullmatch(op) else f"{kinds}, {elements:,} elements",
        where=callsite.label(frames[0]["filename"], frames[0]["line"]) if frames else "?",
        at=entry["time_created_ns"] / 1e9,
        over=bool(entry["state"] == "completed" or entry.get("retired")),
        ended=ended / 1e9 if ended else None,
        peer=peer,
    )
