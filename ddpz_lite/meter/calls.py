"""What ranks called, read from a trace of `Run.trace` or from torch's own flight records.

torch keeps the last calls of each rank in a ring (TORCH_FR_BUFFER_SIZE) and writes them when NCCL's
watchdog gives up (TORCH_FR_DUMP_TEMP_FILE), or when asked: `_dump_fr_trace`, the debug server. A
file holds one rank's calls, as a pickle or as JSON, and its name ends in the rank's number.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, and torch.distributed.flight_recorder.
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
    """One call of one rank. number: its place among the calls of its group (of its channel)."""

    rank: int
    group: tuple[int, ...]  # global ranks
    label: str  # the group's name; two groups may have the same ranks
    number: int
    op: str
    what: str  # what the ranks of the group must agree on: "float32, 12 elements"; "" if nothing
    where: str
    at: float  # seconds: when the rank called
    over: bool  # when the record was written
    ended: float | None  # seconds; None where nobody noted it
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
    ranks: tuple[int, ...]  # all that the job had, also those of which there is no record
    trace: Trace | None = None


def read_records(paths: Iterable[str | Path]) -> Records:
    """The calls in these files, or in all files of these folders.

    Raises OSError for a file that is not there, ValueError for one that is neither kind, and for a
    trace that is not alone.
    """
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise ValueError("explain: there is no file to read. Fix: name a trace, or flight records.")
    loaded = {file: _load(file) for file in files}
    traces = [file for file, whole in loaded.items() if "traceEvents" in whole]
    if not traces:
        try:
            return _flights(loaded)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"explain: flight records are not as torch 2.5 and later write them: {error!r}"
            ) from error
    if len(files) > 1:
        raise ValueError(
            f"explain: {traces[0]} is a trace of a whole job, and {len(files)} files were named. "
            "Fix: explain one trace at a time."
        )
    return _traced(read_trace(traces[0]))


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]


class _PlainData(pickle.Unpickler):
    """A pickle is a program; one that asks for anything but plain data is not run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, and plain data asks for nothing"
        )


def _load(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    try:
        whole = _PlainData(io.BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)
    except (ValueError, EOFError, IndexError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"explain: {file} is neither a trace nor a flight record: {error}"
        ) from error
    if not isinstance(whole, dict) or not {"traceEvents", "entries"} & whole.keys():
        raise ValueError(
            f"explain: {file} is neither a trace nor a flight record. Fix: name what run.trace() "
            "or torch's flight recorder wrote."
        )
    return whole


# -- a trace ---------------------------------------------------------------------------------------


def _traced(trace: Trace) -> Records:
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
                what="" if FREE.fullmatch(r.op) else r.dtype,  # sizes: the wire has compared them
                where=r.where,
                at=r.started,
                over=r.finished is not None,
                ended=r.finished,
                peer=r.peer if message else None,
            )
        )
    return Records("a trace", calls, tuple(range(trace.world_size)), trace)


# -- flight records --------------------------------------------------------------------------------


def _flights(loaded: dict[Path, dict[str, Any]]) -> Records:
    by_rank = {_rank_of(file): whole for file, whole in loaded.items()}
    if len(by_rank) < len(loaded):
        raise ValueError("explain: two files are of one rank. Fix: name one dump of each rank.")
    members: dict[str, set[int]] = defaultdict(set)  # NCCL notes them; of gloo, who has called
    for rank, whole in by_rank.items():
        for name, about in whole.get("pg_config", {}).items():
            members[name] |= {int(number) for number in re.findall(r"\d+", str(about["ranks"]))}
        for entry in whole["entries"]:
            members[entry["process_group"][0]].add(rank)
    everyone = {rank for ranks in (by_rank, *members.values()) for rank in ranks}
    groups = {name: tuple(sorted(ranks)) for name, ranks in members.items()}
    groups |= {
        entry["process_group"][0]: tuple(sorted(everyone))
        for whole in by_rank.values()
        for entry in whole["entries"]
        if entry["process_group"][1] == "default_pg"
    }
    calls = {
        rank: [
            _flown(rank, entry, groups[entry["process_group"][0]])
            for entry in whole["entries"]
            if not entry.get("is_p2p") or MESSAGE.search(entry["profiling_name"])  # no batch's end
        ]
        for rank, whole in sorted(by_rank.items())
    }
    return Records("flight records", calls, tuple(sorted(everyone)))


def _rank_of(file: Path) -> int:
    number = re.search(r"(\d+)(\.json|\.pickle|\.pkl)?$", file.name)
    if number is None:
        raise ValueError(
            f"explain: the name {file.name} does not end in a rank, as torch's dumps do. "
            "Fix: name it, say, record_3 for rank 3."
        )
    return int(number[1])


def _flown(rank: int, entry: dict[str, Any], members: tuple[int, ...]) -> Call:
    """An entry. gloo notes only when it began, and "retired" where NCCL says "completed"."""
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
