"""What a trace, or the flight records of a job, say: which call differed, who was missing or late.

The rank that waits is not the one to look at. A call that differs comes first, for whatever follows
it is its consequence; then the rank that did not make the call in which the others wait; then the
one that came last, again and again; and last of all what communication nothing covered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from ddpz_lite.meter.breakdown import Parts, breakdown, parts
from ddpz_lite.meter.records import Call, Records, read_records
from ddpz_lite.stretches import Stretch, length, minus
from ddpz_lite.wire.trace import Trace

MEETING = ("all_reduce", "allreduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
DISAGREE = 1e-3  # seconds by which clocks contradict cause and effect before it is said
STANDS_OUT = 2.0  # the late rank cost more than this many times what all others cost together
COLUMNS = ("compute", "exposed", "data", "rest", "hidden")

Rows = dict[tuple[str, int], dict[int, Call]]  # (group, number): {rank: its call}


def explain(*paths: str | Path, step: str = "step", data: Collection[str] = ("data",)) -> str:
    """What `ddpz explain` prints of a trace of `Run.trace`, or of torch's flight records.

    paths: one trace; or a flight record of each rank; or folders of them. step, data: the names of
    spans, as in `breakdown`. Raises OSError and ValueError for what cannot be read.
    """
    records = read_records(paths)
    rows = _rows(records)
    told = [_heading(records)]
    told += _differing(rows)
    told += _waiting(records)
    told += _late(records, rows) if len(records.ranks) > 1 else []
    if records.trace is None:
        told += ["flight records do not tell what ranks computed, so not what was exposed"]
    elif records.trace.ledger or records.trace.spans:
        told += _exposed(records.trace, step, data)
    return "\n".join(told)


def _heading(records: Records) -> str:
    calls = sum(map(len, records.calls.values()))
    there = f"{records.source}: {len(records.ranks)} ranks, {calls} calls"
    gone = [rank for rank in records.ranks if rank not in records.calls]
    return f"{there}; no record of {_ranks(gone)}" if gone else there


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
    """The first call of each group in which its ranks did not do the same."""
    told, seen = [], set()
    for (label, number), row in sorted(rows.items(), key=lambda item: item[0][1]):
        kinds = Counter((call.op, call.what) for call in row.values())
        if label in seen or len(kinds) < 2:
            continue
        seen.add(label)
        usual = kinds.most_common(1)[0][0]
        odd = [r for r, call in sorted(row.items()) if (call.op, call.what) != usual]
        alone = kinds[usual] > sum(kinds.values()) / 2
        who = f"on {_ranks(odd)}" if alone else "between its ranks"
        told.append(f"call #{number} of {_group(next(iter(row.values())))} differs {who}:")
        for rank, call in sorted(row.items()):
            told.append(f"  rank {rank} called {call.op} of {call.what or '?'} at {call.where}")
    return told


# -- a call that was not made ----------------------------------------------------------------------


def _waiting(records: Records) -> list[str]:
    """Who waits in which call, and for whom; the rank to look at is one that does not wait."""
    made: dict[tuple[int, str], int] = {}  # (rank, group): the number of its last call
    for calls in records.calls.values():
        for call in calls:
            if call.peer is None:
                made[call.rank, call.label] = call.number
    needs: dict[int, tuple[Call, set[int]]] = {}
    for rank, calls in sorted(records.calls.items()):
        for call in calls:
            if not call.over and rank not in needs:
                missing = _missing(records, call, made)
                if missing:
                    needs[rank] = call, missing
    if not needs:
        return _unfinished(records)
    told = [f"rank {rank} waits in {call}" for rank, (call, _) in needs.items()]
    absent = {rank for _, missing in needs.values() for rank in missing}
    causes = sorted(absent - needs.keys())
    for rank in causes:
        call = next(call for call, missing in needs.values() if rank in missing)
        told.append(_not_called(records, rank, call))
    if not causes:
        told.append("each waits for another of them: they make the same calls in another order")
    first = f"look first at {_ranks(causes)}" if causes else "look at the order of these calls"
    return [f"{first}:", *(f"  {line}" for line in told)]


def _missing(records: Records, call: Call, made: dict[tuple[int, str], int]) -> set[int]:
    """The ranks without which this call cannot end, and which have not made it."""
    if call.peer is None:
        return {r for r in call.group if made.get((r, call.label), -1) < call.number} - {call.rank}
    other = "recv" if call.op == "send" else "send"
    mine = [c for c in records.calls[call.rank] if (c.op, c.peer) == (call.op, call.peer)]
    theirs = [c for c in records.calls.get(call.peer, []) if (c.op, c.peer) == (other, call.rank)]
    place = next(i for i, c in enumerate(mine) if c is call)
    return {call.peer} if place >= len(theirs) else set()


def _not_called(records: Records, rank: int, call: Call) -> str:
    if rank not in records.calls:
        return f"rank {rank} left no record: its process may have ended first"
    what = f"{call.op} #{call.number}" if call.peer is None else f"the other end of that {call.op}"
    if not records.calls[rank]:
        return f"rank {rank} has not called {what}: it has called nothing"
    last = records.calls[rank][-1]
    return f"rank {rank} has not called {what}: its last call was {last}"


def _unfinished(records: Records) -> list[str]:
    """Calls that all have made and that are not over."""
    calls = [c for of_rank in records.calls.values() for c in of_rank if not c.over]
    if not calls:
        return []
    first, ranks = min(calls, key=lambda call: call.at), sorted({call.rank for call in calls})
    return [f"{first} was not over on {_ranks(ranks)}, though all ranks known of it had called it"]


# -- a rank that is late ---------------------------------------------------------------------------


def _late(records: Records, rows: Rows) -> list[str]:
    """Who came last, how often, and how long the others waited for it."""
    rows = {key: row for key, row in rows.items() if row.keys() == set(_first(row).group)}
    rows = {key: row for key, row in rows.items() if len(row) > 1}
    if apart := _clocks_apart(rows.values()):
        return [apart]
    later = {
        key: row for key, row in rows.items() if key[1] > min(n for g, n in rows if g == key[0])
    }
    cost: dict[int, list[Stretch]] = defaultdict(list)  # by rank: while the others stood waiting
    for row in (later or rows).values():  # the first call of a group also waits for the start
        last = max(row.values(), key=lambda call: call.at)
        cost[last.rank].append((mean(c.at for c in row.values() if c is not last), last.at))
    if not cost:
        return []
    sums = {rank: length(stretches) for rank, stretches in cost.items()}
    worst = max(sums, key=sums.__getitem__)
    calls = sum(map(len, cost.values()))
    words = (
        f"last in {len(cost[worst])} of {calls} collectives, the others waited "
        f"{_time(sums[worst])} for it"
    )
    if sums[worst] <= STANDS_OUT * (sum(sums.values()) - sums[worst]):
        return [f"no rank was late more than all others; most of all rank {worst}: {words}"]
    told = [f"rank {worst} was late: {words}"]
    return told + (_why(records.trace, worst, sums[worst]) if records.trace else [])


def _clocks_apart(rows: Iterable[dict[int, Call]]) -> str | None:
    """Whether a rank came out of a collective before another came in, which cannot be."""
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
                f"{out} before rank {into.rank} came in. Who was late cannot be said. Cure: "
                "estimate the offsets, and run.trace(path, offsets=...)"
            )
    return found


def _why(trace: Trace, late: int, cost: float) -> list[str]:
    """The innermost span that took the late rank longer, without its waits, than the others."""
    took: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    waits = defaultdict(list)
    for record in trace.ledger:
        if record.waited:
            waits[record.rank].append(record.waited)
    stretches = defaultdict(list)
    for span in trace.spans:
        stretches[span.name, span.rank].append((span.started, span.finished))
    for (name, rank), some in stretches.items():
        took[name][rank] = length(minus(some, waits[rank]))
    others = [rank for rank in range(trace.world_size) if rank != late]
    more = {name: by[late] - median(by[rank] for rank in others) for name, by in took.items()}
    large = [name for name, seconds in more.items() if seconds >= 0.8 * max(more.values())]
    if not large or max(more.values()) < cost / 2:
        return []
    name = min(large, key=lambda name: took[name][late])
    usual = median(took[name][rank] for rank in others)
    return [f"  its span {name!r} took {_time(took[name][late])}, elsewhere {_time(usual)}"]


# -- what was exposed ------------------------------------------------------------------------------


def _exposed(trace: Trace, step: str, data: Collection[str]) -> Iterator[str]:
    """A table of where the time went: a step's, where there are steps, else the whole job's."""
    if any(span.name == step for span in trace.spans):
        steps = breakdown(trace, step, data)
        steps = steps[1:] or steps
        ranks = [
            Parts(**{name: median(getattr(s.ranks[rank], name) for s in steps) for name in COLUMNS})
            for rank in range(trace.world_size)
        ]
        ruler = Counter(s.slowest for s in steps).most_common(1)[0][0]
        what = f"a {step} (median of {len(steps)}{', the first left out' * (len(steps) > 1)})"
    else:
        ranks = [_whole(trace, rank, data) for rank in range(trace.world_size)]
        ruler = max(range(trace.world_size), key=lambda rank: ranks[rank].own)
        what = "the whole job"
    total = ranks[ruler]
    share = f", {total.exposed / total.seconds:.0%} of it" if total.seconds else ""
    yield f"{what} on rank {ruler}, which rules: {_time(total.exposed)} exposed{share}"
    yield f"  {'ms':8}" + "".join(f"{name:>10}" for name in COLUMNS)
    for rank, one in enumerate(ranks):
        numbers = "".join(f"{1e3 * getattr(one, name):10.1f}" for name in COLUMNS)
        yield f"  {f'rank {rank}':8}{numbers}"


def _whole(trace: Trace, rank: int, data: Collection[str]) -> Parts:
    spans = [span for span in trace.spans if span.rank == rank]
    calls = [record for record in trace.ledger if record.rank == rank]
    loading = [(s.started, s.finished) for s in spans if s.name in data]
    working = [(s.started, s.finished) for s in spans if s.name not in data]
    starts = [one.started for one in (*spans, *calls)]
    ends = [one.finished for one in (*spans, *calls) if one.finished is not None]
    if not ends:
        return Parts(0.0, 0.0, 0.0, 0.0, 0.0)
    return parts(min(starts), max(ends), working, loading, calls)


# -- words -----------------------------------------------------------------------------------------


def _first(row: dict[int, Call]) -> Call:
    return next(iter(row.values()))


def _group(call: Call) -> str:
    return f"group ({', '.join(map(str, call.group))})"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
