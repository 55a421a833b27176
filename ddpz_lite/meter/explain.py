"""Explain a trace, or the flight records of a job: which call differed, who was missing or late.

The waiting rank is rarely the cause. So a differing call comes first, because what follows it is a
consequence; then the rank that did not make the call in which the others wait; then the rank that
was last repeatedly; and last the exposed communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from ddpz_lite.meter.breakdown import breakdown
from ddpz_lite.meter.calls import Call, Records, read_records
from ddpz_lite.meter.intervals import Interval, length, minus
from ddpz_lite.wire import Span
from ddpz_lite.wire.trace import Trace

MEETING = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier")
DISAGREE = 1e-3  # seconds by which clocks must contradict cause and effect to be reported
NOISE = 1e-3  # seconds per call that a scheduler and a network add occasionally
STANDS_OUT = 2.0  # a late rank must cost more than this many times all others together
JOB = "the whole job"
COLUMNS = ("compute", "exposed", "data", "rest", "hidden")

Rows = dict[tuple[str, int], dict[int, Call]]  # (group, number): {rank: its call}


def explain(*paths: str | Path, step: str = "step", data: Collection[str] = ("data",)) -> str:
    """The text of `ddpz explain` for a trace of `Run.trace`, or for torch's flight records.

    paths: one trace; or a flight record of each rank; or folders of them. step, data: the names of
    spans, as in `breakdown`. Raises OSError and ValueError for unreadable files.
    """
    records = read_records(paths)
    rows = _rows(records)
    lines = [_heading(records)]
    lines += _differing(rows)
    lines += _waiting(records)
    lines += _late(records, rows) if len(records.ranks) > 1 else []
    if records.trace is None:
        lines += ["flight records do not tell what ranks computed, so not what was exposed"]
    elif records.trace.ledger or records.trace.spans:  # otherwise it has only profiles
        lines += _exposed(records.trace, step, data)
    return "\n".join(lines)


def _heading(records: Records) -> str:
    calls = sum(map(len, records.calls.values()))
    heading = f"{records.source}: {len(records.ranks)} ranks, {calls} calls"
    missing = [rank for rank in records.ranks if rank not in records.calls]
    return f"{heading}; no record of {_ranks(missing)}" if missing else heading


def _rows(records: Records) -> Rows:
    """The collectives, by group and number."""
    rows: Rows = defaultdict(dict)
    for calls in records.calls.values():
        for call in calls:
            if call.peer is None:
                rows[call.label, call.number][call.rank] = call
    return rows


# -- a call that differs ---------------------------------------------------------------------------


def _differing(rows: Rows) -> list[str]:
    """The first call of each group in which its ranks differ."""
    lines, seen = [], set()
    for (label, number), row in sorted(rows.items(), key=lambda item: item[0][1]):
        kinds = Counter((call.op, call.what) for call in row.values())
        if label in seen or len(kinds) < 2:
            continue
        seen.add(label)
        usual = kinds.most_common(1)[0][0]
        odd = [r for r, call in sorted(row.items()) if (call.op, call.what) != usual]
        alone = kinds[usual] > sum(kinds.values()) / 2
        who = f"on {_ranks(odd)}" if alone else "between its ranks"
        lines.append(f"call #{number} of the group of {_ranks(_first(row).group)} differs {who}:")
        words = {r: f"{c.op} of {c.what or '?'} at {c.where}" for r, c in sorted(row.items())}
        lines += _by_ranks(words)
    return lines


# -- a call that was not made ----------------------------------------------------------------------


def _waiting(records: Records) -> list[str]:
    """Which ranks wait in which call, and for whom; the cause is a rank that does not wait."""
    made: dict[tuple[int, str], int] = {}  # (rank, group): the number of its last call
    for calls in records.calls.values():
        for call in calls:
            if call.peer is None:
                made[call.rank, call.label] = call.number
    needs: dict[int, tuple[Call, set[int]]] = {}  # per rank, its first call that cannot end
    for rank, calls in sorted(records.calls.items()):
        for call in calls:
            if not call.over and rank not in needs and (missing := _missing(records, call, made)):
                needs[rank] = call, missing
    if not needs:
        return _unfinished(records)
    words = {rank: f"waiting in {call}" for rank, (call, _) in needs.items()}
    absent = {rank for _, missing in needs.values() for rank in missing}
    causes = sorted(absent - needs.keys())
    for rank in causes:
        call = next(call for call, missing in needs.values() if rank in missing)
        words[rank] = _not_called(records, rank, call)
    if causes:
        return [f"look first at {_ranks(causes)}:", *_by_ranks(words)]
    return ["each waits for another of them; look at the order of these calls:", *_by_ranks(words)]


def _missing(records: Records, call: Call, made: dict[tuple[int, str], int]) -> set[int]:
    """The ranks that this call needs and that have not made it."""
    if call.peer is None:
        return {r for r in call.group if made.get((r, call.label), -1) < call.number} - {call.rank}
    other = "recv" if call.op == "send" else "send"
    local = [c for c in records.calls[call.rank] if (c.op, c.peer) == (call.op, call.peer)]
    theirs = [c for c in records.calls.get(call.peer, []) if (c.op, c.peer) == (other, call.rank)]
    place = next(i for i, c in enumerate(local) if c is call)
    return {call.peer} if place >= len(theirs) else set()


def _not_called(records: Records, rank: int, call: Call) -> str:
    if rank not in records.calls:
        return "no record: the process may have ended first"
    what = (
        f"from {call.op} #{call.number}" if call.peer is None else f"at the other end of {call.op}"
    )
    last = records.calls[rank][-1] if records.calls[rank] else "none"
    return f"missing {what}; last call: {last}"


def _unfinished(records: Records) -> list[str]:
    """Calls that all ranks have made and that have not ended."""
    calls = [c for of_rank in records.calls.values() for c in of_rank if not c.over]
    if not calls:
        return []
    first, ranks = min(calls, key=lambda call: call.at), sorted({call.rank for call in calls})
    return [f"{first} was not over on {_ranks(ranks)}, though all ranks known of it had called it"]


# -- a rank that is late ---------------------------------------------------------------------------


def _late(records: Records, rows: Rows) -> list[str]:
    """The rank that was last most, how often, and how long the others waited for it."""
    rows = {key: row for key, row in rows.items() if row.keys() == set(_first(row).group)}
    rows = {key: row for key, row in rows.items() if len(row) > 1}
    if apart := _clocks_apart(rows.values()):
        return [apart]
    start: dict[str, int] = {}
    for group, number in sorted(rows, key=lambda key: key[1]):
        start.setdefault(group, number)
    later = {key: row for key, row in rows.items() if key[1] > start[key[0]]}
    cost: dict[int, list[Interval]] = defaultdict(list)  # by rank: while the others waited
    for row in (later or rows).values():  # the first call of a group includes the start-up
        last = max(row.values(), key=lambda call: call.at)
        cost[last.rank].append((mean(c.at for c in row.values() if c is not last), last.at))
    if not cost:
        return []
    sums = {rank: length(intervals) for rank, intervals in cost.items()}
    worst = max(sums, key=sums.__getitem__)
    calls = sum(map(len, cost.values()))
    words = (
        f"last in {len(cost[worst])} of {calls} collectives, the others waited "
        f"{_time(sums[worst])} for it"
    )
    if sums[worst] <= NOISE * len(cost[worst]):
        return [f"no rank was late; most of all rank {worst}, within the noise: {words}"]
    if sums[worst] <= STANDS_OUT * (sum(sums.values()) - sums[worst]):
        return [f"no rank was late more than all others; most of all rank {worst}: {words}"]
    lines = [f"rank {worst} was late: {words}"]
    return lines + (_why(records.trace, worst, sums[worst]) if records.trace else [])


def _clocks_apart(rows: Iterable[dict[int, Call]]) -> str | None:
    """Report a rank that left a collective before another entered it: the clocks differ."""
    worst, found = DISAGREE, None
    for row in rows:
        ended = [call for call in row.values() if call.ended is not None]
        if not ended or not _first(row).op.lstrip("_").startswith(MEETING):
            continue
        out = min(ended, key=lambda call: call.ended)
        into = max(row.values(), key=lambda call: call.at)
        if into.at - out.ended > worst:
            worst = into.at - out.ended
            found = (
                f"the clocks disagree by {_time(worst)} at least: rank {out.rank} came out of "
                f"{out} before rank {into.rank} came in. It is unknown which rank was late. Fix: "
                "estimate the offsets, and run.trace(path, offsets=...)"
            )
    return found


def _why(trace: Trace, late: int, cost: float) -> list[str]:
    """The innermost span in which the late rank, without waits, was slower than the others."""
    took: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    waits = defaultdict(list)
    for record in trace.ledger:
        if record.waited:
            waits[record.rank].append(record.waited)
    intervals = defaultdict(list)
    for span in trace.spans:
        intervals[span.name, span.rank].append((span.started, span.finished))
    for (name, rank), some in intervals.items():
        took[name][rank] = length(minus(some, waits[rank]))
    others = [rank for rank in range(trace.world_size) if rank != late]
    more = {name: by[late] - median(by[rank] for rank in others) for name, by in took.items()}
    large = [name for name, seconds in more.items() if seconds >= 0.8 * max(more.values())]
    if not large or max(more.values()) < cost / 2:
        return []
    name = min(large, key=lambda name: took[name][late])
    usual = median(took[name][rank] for rank in others)
    return [f"  its span {name!r} took {_time(took[name][late])} in all, elsewhere {_time(usual)}"]


# -- what was exposed ------------------------------------------------------------------------------


def _exposed(trace: Trace, step: str, data: Collection[str]) -> Iterator[str]:
    """A table of where the time went: per step if all ranks have equally many, else of the job."""
    counts = Counter(span.rank for span in trace.spans if span.name == step)
    if len(counts) < trace.world_size or len(set(counts.values())) > 1:
        trace, step = _as_one_step(trace, step), JOB
    steps = breakdown(trace, step, data)
    what = f"{step} (median of {len(steps) - 1}, the first left out)" if steps[1:] else step
    steps = steps[1:] or steps
    ruler = Counter(one.slowest for one in steps).most_common(1)[0][0]
    middle = [
        {name: median(getattr(one.ranks[rank], name) for one in steps) for name in COLUMNS}
        for rank in range(trace.world_size)
    ]
    exposed, total = middle[ruler]["exposed"], sum(middle[ruler].values()) - middle[ruler]["hidden"]
    share = f", {exposed / total:.0%} of it" if total else ""
    yield f"{what} on rank {ruler}, which rules: {_time(exposed)} exposed{share}"
    yield f"  {'ms':8}" + "".join(f"{name:>10}" for name in COLUMNS)
    for rank, parts in enumerate(middle):
        yield f"  {f'rank {rank}':8}" + "".join(f"{1e3 * parts[n]:10.1f}" for n in COLUMNS)


def _as_one_step(trace: Trace, step: str) -> Trace:
    """The same trace with one step per rank, from the first event of all ranks to the last."""
    events = [*trace.spans, *trace.ledger]
    last = max(one.started if one.finished is None else one.finished for one in events)
    first = min(one.started for one in events)
    spans = [span for span in trace.spans if span.name != step]
    as_step = [Span(rank, JOB, first, last) for rank in range(trace.world_size)]
    return replace(trace, spans=[*spans, *as_step])


# -- words -----------------------------------------------------------------------------------------


def _first(row: dict[int, Call]) -> Call:
    return next(iter(row.values()))


def _by_ranks(words: dict[int, str]) -> list[str]:
    """One line per text, with all ranks that have it."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in words.items():
        ranks[text].append(rank)
    return [f"  {_ranks(some)}: {text}" for text, some in ranks.items()]


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 5", "ranks 0 to 6 and 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    last = f" and {parts.pop()}" if len(parts) > 1 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}{last}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
