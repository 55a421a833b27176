"""Tasks of lesson 15: seeing and debugging."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpz_lite.course.check.compare import close
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import one_at_a_time
from ddpz_lite.course.check.vocabulary import (
    explain,
    explain_number,
    sent_by_all,
    unchanged,
    world_name,
)
from ddpz_lite.course.tasks.lesson15.path import CRITICAL_PATH

# -- 15.offsets ------------------------------------------------------------------------------------

PAUSE = 600.0  # seconds that rest() takes
SLACK = 5e-4  # seconds that clocks may part while a burst goes on
LATE = 3  # of each 8 messages to rank 0 are late, and 2 of 8 from it


def _uniform(rng: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=rng, dtype=torch.float64).item()


def _pick(rng: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def _offset_cases(rng: torch.Generator) -> list[Case]:
    def delays(to: int, sign: int) -> list[float]:
        fast = (to == 0) == (sign > 0)  # one way is longer, in one world this, in one that
        usual = _uniform(rng, 0.0005, 0.001) if fast else _uniform(rng, 0.006, 0.009)
        travel = [usual * _uniform(rng, 1.0, 1.1) for _ in range(64)]
        for burst in range(8):
            late = torch.randperm(8, generator=rng)[:LATE].tolist()
            if to == 0 and 7 not in late:
                late[0] = 7  # the last exchange is no better than any other
            if to != 0:  # neighbours: rank 0 may answer with two messages
                late = [late[0] // 2 * 2, late[0] // 2 * 2 + 1]
            for i in late:
                travel[8 * burst + i] += _uniform(rng, 0.05, 0.15)
        return travel

    def host(rank: int, world: int, sign: int) -> dict[str, Any]:
        drift = sign * (-1) ** rank * _uniform(rng, 1e-4, 2e-4)
        return {
            "base": _uniform(rng, 100.0, 900.0),
            "rate": 1.0 + drift,
            "delays": [delays(to, sign) for to in range(world)],
            "pause": PAUSE,
        }

    def case(world: int) -> Case:
        inputs = [{"hosts": [host(rank, world, sign) for sign in (1, -1)]} for rank in range(world)]
        return Case(world_name(world), inputs)

    return [case(3), case(1), case(2), case(4)]


def _clock(host: dict[str, Any], time: float) -> float:
    return host["base"] + host["rate"] * time


def _measured(seen: Observed) -> Iterator[tuple[Any, ...]]:
    """(rank, what it gave, its host, all hosts) of each rank in each world of a case."""
    for rank, data in enumerate(seen.data):
        for i, found in enumerate(data["found"]):
            hosts = [inputs["hosts"][i] for inputs in seen.case.inputs]
            yield rank, found, hosts[rank], hosts


def _least(own: dict[str, Any], first: dict[str, Any], rank: int) -> float:
    """Half of the shortest round trip between this rank and rank 0, in seconds."""
    return 0.0 if rank == 0 else (min(own["delays"][0]) + min(first["delays"][rank])) / 2


def _offset(seen: Observed) -> str | None:
    for rank, found, own, hosts in _measured(seen):
        first = hosts[0]
        got = found["got"]
        if len(got) != 3 or not all(map(math.isfinite, got)):
            return f"Rank {rank} gave {got}, and three finite numbers were expected."
        now = found["time"]
        wanted = _clock(first, now) - _clock(own, now)
        limit = 1.15 * _least(own, first, rank) + SLACK
        off = got[0] - wanted
        if abs(off) <= limit:
            continue
        mean = sum(_clock(host, now) for host in hosts) / len(hosts) - _clock(own, now)
        if len(hosts) > 1 and abs(got[0] - mean) <= 0.5:
            return f"Rank {rank}'s offset leads to the mean of all clocks, not to rank 0's."
        if rank == 0:
            return f"Rank 0 is what all compare with: its offset is 0, not {got[0]:.4g}."
        if abs(got[0] + wanted) <= 2 * limit:
            return f"Rank {rank}'s offset has the wrong sign: own clock plus offset is rank 0's."
        before = _clock(first, 0) - _clock(own, 0)
        if abs(got[0] - before) <= 2 * limit:
            return (
                f"Rank {rank}'s offset is that of before the rest. The clocks have drifted "
                f"{1000 * (wanted - before):.0f} ms apart since."
            )
        up, down = own["delays"][0], first["delays"][rank]
        if any(abs(off - d) < SLACK for d in up) or any(abs(off + d) < SLACK for d in down):
            return (
                f"Rank {rank}'s offset is off by {1000 * abs(off):.1f} ms: a message's travel time "
                "counts as if it were the clocks'. One way does not tell them apart."
            )
        return (
            f"Rank {rank}'s offset is off by {1000 * abs(off):.1f} ms, and half of the shortest "
            f"round trip is {1000 * _least(own, first, rank):.1f} ms. Late messages must not count."
        )
    return None


def _bound(seen: Observed) -> str | None:
    for rank, found, own, hosts in _measured(seen):
        first = hosts[0]
        bound, least = found["got"][2], _least(own, first, rank)
        if rank == 0 and bound == 0:
            continue
        if rank == 0:
            return f"Rank 0 knows its own clock: its bound is 0, not {bound:.3g}."
        if bound < 0.99 * least:
            return (
                f"Rank {rank} claims to be right to {1000 * bound:.2f} ms. The error can be as "
                f"large as half of a round trip, and the shortest is {2000 * least:.2f} ms."
            )
        if bound > 1.25 * least + 1e-4:
            twice = abs(bound - 2 * least) <= 0.25 * least + 2e-4
            why = "is the whole round trip" if twice else "is wider than need be"
            return f"Rank {rank}'s bound {why}: half of the shortest one will do."
    return None


def _drift(seen: Observed) -> str | None:
    for rank, found, own, hosts in _measured(seen):
        first = hosts[0]
        wanted = (first["rate"] - own["rate"]) / own["rate"]
        room = 3 * (_least(own, first, rank) + SLACK) / PAUSE
        got = found["got"][1]
        if abs(got - wanted) <= room:
            continue
        if got == 0:
            return f"Rank {rank} says that its clock does not drift. It does, by {wanted:.1e}."
        if abs(got + wanted) <= room:
            return f"Rank {rank}'s drift has the wrong sign: it is what the offset gains a second."
        if abs(got - wanted * PAUSE) <= 2 * room * PAUSE:
            return f"Rank {rank}'s drift is seconds in all, not seconds gained in a second."
        return f"Rank {rank}'s drift is {got:.2e}, and {wanted:.2e} is right."
    return None


def _messages(seen: Observed) -> str | None:
    for rank in range(seen.case.world):
        other = [op for op in seen.ops(rank) if op not in ("send", "recv")]
        if other:
            return f"Rank {rank} called {other[0]}: messages alone were allowed."
        if any(found["rests"] != 1 for found in seen.data[rank]["found"]):
            counts = [found["rests"] for found in seen.data[rank]["found"]]
            return f"Rank {rank} called rest() {counts[0]} times: each rank calls it once."
    return None


OFFSETS = Task(
    id="15.offsets",
    title="Whose clock is right",
    answer="align",
    job="lesson15.offsets",
    minutes=25,
    cases=_offset_cases,
    criteria=(
        Criterion("rank 0's time, to half a round trip", 3, _offset),
        Criterion("a bound that holds and is not wider than need be", 2, _bound),
        Criterion("the drift of the clock", 2, _drift),
        Criterion("by messages alone, and each rank rests once", 1, _messages),
    ),
    hints=(
        "For one exchange you know when it left and returned by your clock, and when it arrived by "
        "rank 0's. Where between your two times does that arrival belong, "
        "if both ways take equally long?",
        "offset = ((t1 - t0) + (t2 - t3)) / 2, of the exchange with the smallest (t3 - t0) - "
        "(t2 - t1). Do it before and after the rest: two points give a line.",
        "Rank 0 serves the others one after another: recv(peer), then send(clock(), peer), eight "
        "times. A peer keeps (round trip, own time, offset) of each and takes min(). drift = "
        "(second - first) / (after - before).",
    ),
    debrief="NTP keeps the exchange of least delay out of eight, too (RFC 5905, section 10). With "
    "PTP, switches add what a message waited in them; then the bound is less than 1 µs.",
)

# -- 15.culprit ------------------------------------------------------------------------------------

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
DTYPES = ("float32", "bfloat16", "int64")
HANGS = 15


FILES = ("train.py", "data.py", "model.py", "run.py")


def _line_of(rng: torch.Generator) -> str:
    """Any line of any file: that of the culprit looks like all others."""
    return f"{FILES[_pick(rng, 0, 3)]}:{_pick(rng, 10, 999)}"


def _program(rng: torch.Generator, world: int) -> list[dict[str, Any]]:
    """The calls of all ranks, in the order in which each makes those of its groups."""
    all_ranks, pairs = list(range(world)), [[0, 1], [world - 2, world - 1], [0, world - 1]]
    program = []
    for i in range(_pick(rng, 9, 13)):
        group = all_ranks if torch.rand((), generator=rng) < 0.6 else pairs[_pick(rng, 0, 2)]
        call = {"op": OPS[_pick(rng, 0, 3)], "dtype": DTYPES[_pick(rng, 0, 2)]}
        call |= {"group": group, "elements": 16 * (i + 1), "line": _line_of(rng)}
        program.append(call)
    return program


def _hang(rng: torch.Generator, world: int, kind: str) -> dict[str, Any]:
    """One hang: the records of all ranks, and who it was."""
    program = _program(rng, world)
    all_ranks = [i for i, call in enumerate(program) if len(call["group"]) == world]
    small = [i for i, call in enumerate(program) if len(call["group"]) < world]
    if kind == "group" and world > 2 and small:
        at = small[_pick(rng, 0, len(small) - 1)]
    elif len(all_ranks) > 2:
        at = all_ranks[_pick(rng, 1, len(all_ranks) - 2)]
    else:
        return _hang(rng, world, kind)
    victim = program[at]["group"][_pick(rng, 0, len(program[at]["group"]) - 1)]
    own = [dict(call) for call in program]  # what the culprit runs
    line = _line_of(rng)
    if kind == "differs":
        swap = next(i for i in all_ranks if i > at)
        how = _pick(rng, 0, 3)
        if how == 0:
            own[at]["elements"] += 8
        elif how == 1:
            own[at]["dtype"] = DTYPES[(DTYPES.index(own[at]["dtype"]) + 1) % 3]
        elif how == 2:
            own[at]["op"] = OPS[(OPS.index(own[at]["op"]) + 1) % 4]
        else:
            own[at], own[swap] = own[swap], own[at]
        line = own[at]["line"] = _line_of(rng)
    ran = _ran(program, own, world, victim, at, kind == "differs")
    waited_in = {tuple(calls[-1][0]["group"]) for calls in ran if calls and not calls[-1][1]}
    if kind == "group" and sum(victim in group for group in waited_in) > 1:
        return _hang(rng, world, kind)  # two calls lack the culprit, and either might be the answer
    skew = [_uniform(rng, -50.0, 50.0) for _ in range(world)]
    records = []
    for rank, calls in enumerate(ran):
        kept = [
            {**call, "started": skew[rank] + 0.5 * i, "done": done}
            for i, (call, done) in enumerate(calls)
        ]
        waits = bool(kept) and not kept[-1]["done"]
        inside = kind == "differs" or not (waits or rank == victim)
        where = _line_of(rng) if inside else kept[-1]["line"] if waits else line
        records.append({"rank": rank, "at": where, "calls": kept, "error": ""})
    waiting = [r for r in records if r["calls"] and not r["calls"][-1]["done"]]
    first = waiting[_pick(rng, 0, len(waiting) - 1)]
    first["error"] = "collective timed out after 600 s"
    group = program[at]["group"]
    number = sum(call["group"] == group for call in program[:at])
    other = [key for key in ("op", "dtype", "elements") if own[at][key] != program[at][key]]
    truth = {"rank": victim, "number": number, "line": line, "group": group}
    truth["differs"] = " and ".join(other)
    return {"records": records, "truth": truth}


def _elsewhere(hang: dict[str, Any]) -> dict[str, Any]:
    """The same hang of a program whose lines are others: records of the same form."""

    def moved(line: str) -> str:
        file, _, number = line.partition(":")
        return f"{file}:{int(number) + 1000}"

    records = [
        {
            **record,
            "at": moved(record["at"]),
            "calls": [call | {"line": moved(call["line"])} for call in record["calls"]],
        }
        for record in hang["records"]
    ]
    return {"records": records, "truth": hang["truth"] | {"line": moved(hang["truth"]["line"])}}


def _ran(
    program: list[dict[str, Any]],
    own: list[dict[str, Any]],
    world: int,
    victim: int,
    at: int,
    differs: bool,
) -> list[list[tuple[dict[str, Any], bool]]]:
    """For each rank the calls that it made, and whether each was complete."""
    todo = [[i for i, call in enumerate(program) if rank in call["group"]] for rank in range(world)]
    ran: list[list[tuple[dict[str, Any], bool]]] = [[] for _ in range(world)]
    moved = True
    while moved:
        moved = False
        for i, call in enumerate(program):
            ready = all(todo[r] and todo[r][0] == i for r in call["group"])
            if ready and not (i == at and victim in call["group"]):
                for rank in call["group"]:
                    ran[rank].append((call, True))
                    todo[rank].pop(0)
                moved = True
    for rank in range(world):
        if todo[rank] and (rank != victim or differs):
            call = (own if rank == victim else program)[todo[rank][0]]
            ran[rank].append((call, False))
    return ran


def _culprit_cases(rng: torch.Generator) -> list[Case]:
    def case(kind: str, says: str, count: int) -> Case:
        hangs = [_hang(rng, (4, 3)[i % 2], kind) for i in range(count)]
        hangs.append(_elsewhere(hangs[0]))
        asked = [hang["records"] for hang in hangs]
        return _CulpritCase(
            f"{count} hangs {says}", [{"hangs": asked}], kind, truths=[h["truth"] for h in hangs]
        )

    return [
        case("absent", "in which a rank leaves out a call", HANGS),
        case("differs", "in which a rank calls something else", HANGS),
        case("group", "in which a rank leaves out a call of a pair", 3 * HANGS),
    ]


@dataclass(frozen=True)
class _CulpritCase(Case):
    """A case that also knows which rank it was, which the answer is not told."""

    truths: Sequence[dict[str, Any]] = ()


def _each(seen: Observed) -> Iterator[tuple[Any, ...]]:
    """(place, answer, truth, records) of each hang."""
    hangs = seen.case.inputs[0]["hangs"]
    found = seen.data[0]["found"]
    yield from zip(range(len(hangs)), found, seen.case.truths, hangs, strict=True)


def _who(seen: Observed) -> str | None:
    hangs = list(_each(seen))
    named = [records[found[0]] if 0 <= found[0] < len(records) else None
             for _, found, _, records in hangs]  # fmt: skip
    for (i, found, truth, records), one in zip(hangs, named, strict=True):
        rank, did_it = found[0], f"Rank {truth['rank']} did it."
        if rank == truth["rank"]:
            continue
        if one is None:
            return f"Hang {i} has ranks 0 to {len(records) - 1}, and rank {rank} was named."
        if all(r and r["error"] for r in named):
            return (
                f"Hang {i}: rank {rank} was the first to report an error, since it waited longest. "
                f"{did_it}"
            )
        if all(r is _last(records) for r, (*_, records) in zip(named, hangs, strict=True)):
            return f"Hang {i}: rank {rank} came last, but by its own clock alone. {did_it}"
        if truth["differs"]:
            return (
                f"Hang {i}: rank {rank} called what most others called. Rank {truth['rank']} is "
                f"alone with another {truth['differs']}."
            )
        if one["calls"] and not one["calls"][-1]["done"]:
            return (
                f"Hang {i}: rank {rank} waits, in {one['calls'][-1]['op']} at {one['at']}. "
                f"Look at the rank that it waits for. {did_it}"
            )
        return f"Hang {i}: no rank waits for rank {rank}. {did_it}"
    return None


def _last(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of the rank whose last call began last, by its own clock."""
    return max(records, key=lambda r: r["calls"][-1]["started"] if r["calls"] else -math.inf)


def _which(seen: Observed) -> str | None:
    judged = [(i, at, truth, records[rank]["calls"]) for i, (rank, at, _), truth, records in
              _each(seen) if rank == truth["rank"]]  # fmt: skip
    for i, at, truth, calls in judged:
        if at == truth["number"]:
            continue
        said = f"Hang {i}: call {at} was named, and it is call {truth['number']}"
        if all(a == t["number"] + 1 for _, a, t, _ in judged):
            return f"{said}: calls count from 0."
        if all(a == t["number"] - 1 for _, a, t, _ in judged):
            return f"{said}: the one before it was complete."
        if at == sum(call["done"] for call in calls):
            return f"{said} of the group {truth['group']}: each group counts its own calls."
        return f"{said} of the group {truth['group']}."
    return None


def _line(seen: Observed) -> str | None:
    for i, (rank, _, line), truth, records in _each(seen):
        if rank != truth["rank"] or line == truth["line"]:
            continue
        if line == records[rank]["at"]:
            return (
                f"Hang {i}: rank {rank} stands at {line}, inside of what it called instead, and "
                f"that call is at {truth['line']}."
            )
        others = [r["at"] for r in records if r["rank"] != rank]
        if line in others:
            return (
                f"Hang {i}: {line} is where another rank waits; rank {rank} is at {truth['line']}."
            )
        return f"Hang {i}: rank {rank} is at {truth['line']}, not at {line}."
    return None


CULPRIT = Task(
    id="15.culprit",
    title="Who did it",
    answer="culprit",
    job="lesson15.culprit",
    minutes=25,
    cases=_culprit_cases,
    criteria=(
        Criterion("the rank that left out a call", 2, _who, on=("absent",)),
        Criterion("the rank that called something else", 2, _who, on=("differs",)),
        Criterion("the rank, where ranks wait for ranks that wait", 2, _who, on=("group",)),
        Criterion("the number of the call in its group", 2, _which),
        Criterion("the line", 1, _line),
        Criterion("records stay as they are", 1, unchanged),
    ),
    hints=(
        "Take one group. Its members' k-th calls of this group belong together. Which k is the "
        "first that not all of them have made, or not all alike?",
        "A rank that has not made it may wait in a call of another group. Then it is not to blame, "
        "so look at that call. A rank that differs from most others has called something else.",
        "For each unfinished call: group its members into those that made it alike, those that "
        "made it otherwise, and those that did not make it. If one rank differs, it is the "
        "culprit. So is a rank that has not made it and has no unfinished call, if all others wait "
        "in this very call.",
    ),
    debrief="This is what `torchfrtrace` and `ddpz explain` do with the ring buffers that ranks of "
    "NCCL or gloo keep: match by group and number, and name what does not match.",
)

# -- 15.breakdown ----------------------------------------------------------------------------------

Spans = list[tuple[float, float]]


def _breakdown_cases(rng: torch.Generator) -> list[Case]:
    def run(
        world: int, scale: int, warm_up: int, offsets: Sequence[float] = (), cross: bool = False
    ) -> dict[str, Any]:
        """cross: events last beyond the end of their step."""
        offsets = offsets or [0.0] + [_uniform(rng, -30.0, 30.0) for _ in range(world - 1)]
        events: list[list[Any]] = []
        now = 5.0
        for step in range(2 * warm_up + 2):
            slow = _pick(rng, 0, world - 1)
            factor = 4.0 if step < warm_up else 1.0  # the first steps take longer
            ends = []
            for rank in range(world):
                at = now + _uniform(rng, 0.0, 0.02)
                work = factor * ((0.5 if rank == slow else 0.25) + _uniform(rng, 0.0, 0.05))
                wait = 0.0 if rank == slow else factor * 0.2
                ends.append(_one_step(rng, events, rank, at, work, wait, offsets[rank]))
            end = max(ends) + 0.01
            for rank in range(world):
                begin = min(e[2] for e in events if e[0] == rank and e[1] != "step"
                            and e[2] >= now - offsets[rank] - 1e-9)  # fmt: skip
                stop = end - _uniform(rng, 0.0, 0.009) - offsets[rank]
                events.append([rank, "step", begin, stop])
                if cross:
                    events.append([rank, "data", stop - 0.004, stop + 0.08])
            now = end + 0.03
        order = torch.randperm(len(events), generator=rng).tolist()
        shuffled = [events[i] for i in order]
        if scale > 1:  # whole microseconds
            shuffled = [[r, k, round(a * scale), round(b * scale)] for r, k, a, b in shuffled]
            offsets = [round(o * scale) for o in offsets]
        alone = _uniform(rng, 0.7, 1.1) * (scale if scale > 1 else 1)
        return {"events": shuffled, "offsets": offsets, "warm_up": warm_up, "alone": alone}

    def case(world: int, scale: int = 1) -> Case:
        unit = ", in microseconds" if scale > 1 else ""
        runs = [run(world, scale, _pick(rng, 1, 2)), run(world % 4 + 1, scale, 0)]
        says = f"runs of {world_name(world)}, and of {world_name(world % 4 + 1)}{unit}"
        if world == 3 and scale == 1:
            other = run(3, 1, runs[0]["warm_up"], runs[0]["offsets"])
            other["offsets"] = [o + 0.01 * rank for rank, o in enumerate(other["offsets"])]
            other["warm_up"] = runs[0]["warm_up"] % 2 + 1
            runs += one_at_a_time(runs[:1], [other])[0][1:]
            runs.append(run(3, 1, 1, cross=True))
        return Case(says, [{"runs": runs}])

    return [case(3), case(1), case(2), case(4), case(3, scale=1_000_000)]


def _one_step(
    rng: torch.Generator,
    events: list[list[Any]],
    rank: int,
    at: float,
    work: float,
    wait: float,
    offset: float,
) -> float:
    """Write the events of one rank's step, by its own clock; returns its end, by rank 0's."""
    data = _uniform(rng, 0.03, 0.06)
    start = at + 0.8 * data  # the last fifth of the data's time is hidden by compute
    first, second = (start, start + 0.6 * work), (start + 0.45 * work, start + work)
    comm = (
        (start + 0.3 * work, start + 0.8 * work),
        (
            start + 0.7 * work,
            start + work + wait + _uniform(rng, 0.02, 0.04),
        ),
    )
    later = (comm[1][1] - 0.01, comm[1][1] + 0.005)  # data that hides the last communication
    spans = {"data": [(at, at + data), later], "compute": [first, second], "comm": list(comm)}
    for kind, found in spans.items():
        events += [[rank, kind, a - offset, b - offset] for a, b in found]
    return comm[1][1] + 0.01


def _union(spans: Spans) -> Spans:
    merged: list[list[float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return [(a, b) for a, b in merged]


def _length(spans: Spans) -> float:
    return sum(b - a for a, b in spans)


def parts_of(
    run: dict[str, Any],
    *,
    hidden: bool = False,
    mean: bool = False,
    warm: bool = False,
    own_clocks: bool = False,
    double: bool = False,
    weak: bool = False,
    first: bool = False,
) -> dict[str, float]:
    """What is asked for; with a flag, the result of that mistake."""
    offsets = [0.0] * len(run["offsets"]) if own_clocks else run["offsets"]
    world = len(offsets)
    by: dict[tuple[int, str], Spans] = {}
    for rank, kind, start, stop in run["events"]:
        spans = by.setdefault((rank, kind), [])
        spans.append((start + offsets[rank], stop + offsets[rank]))
    steps = [sorted(by[rank, "step"]) for rank in range(world)]
    total = dict.fromkeys(("step", "compute", "exposed", "data", "rest"), 0.0)
    count = 0
    for number_of, bounds in enumerate(zip(*steps, strict=True)):
        if number_of < run["warm_up"] and not warm:
            continue
        count += 1
        begin, end = min(a for a, _ in bounds), max(b for _, b in bounds)
        ranks = [_parts_in(by, rank, begin, end, hidden, double) for rank in range(world)]
        if mean:
            chosen = {key: sum(r[key] for r in ranks) / world for key in total}
        else:
            chosen = ranks[0] if first else min(ranks, key=lambda r: r["exposed"])
        for key in total:
            total[key] += chosen[key]
    ratio = run["alone"] / (total["step"] / count)
    return {**total, "efficiency": ratio if weak else ratio / world}


def _parts_in(
    by: dict[tuple[int, str], Spans],
    rank: int,
    begin: float,
    end: float,
    hidden: bool,
    double: bool,
) -> dict[str, float]:
    def inside(kind: str) -> Spans:
        spans = [(max(a, begin), min(b, end)) for a, b in by.get((rank, kind), [])]
        return [(a, b) for a, b in spans if a < b]

    merge = (lambda spans: spans) if double else _union
    compute, data, comm = inside("compute"), inside("data"), inside("comm")
    busy = _length(merge(compute))
    waits = _length(merge(data)) if double else _length(_union(compute + data)) - busy
    every = _length(_union(compute + data + comm))
    exposed = _length(merge(comm)) if hidden or double else every - _length(_union(compute + data))
    step = end - begin
    rest = step - busy - waits - exposed
    return {"step": step, "compute": busy, "exposed": exposed, "data": waits, "rest": rest}


PART_MISTAKES = {
    "counts the warm-up": {"warm": True},
    "compares clocks that were not aligned": {"own_clocks": True},
    "is a mean over ranks; the slowest rules": {"mean": True},
    "is rank 0's; the slowest rules": {"first": True},
    "counts communication that compute hides": {"hidden": True},
    "counts twice where two events overlap": {"double": True},
}


def _part(*keys: str) -> Callable[[Observed], str | None]:
    def judge(seen: Observed) -> str | None:
        runs = seen.case.inputs[0]["runs"]
        for run, got in zip(runs, seen.data[0]["found"], strict=True):
            wanted = parts_of(run)
            for key in keys:
                mistakes = {
                    words: parts_of(run, **flags)[key] for words, flags in PART_MISTAKES.items()
                }
                if key == "efficiency":
                    weak = parts_of(run, weak=True)[key]
                    mistakes["is that of weak scaling; the batch was the same"] = weak
                    mistakes["is the step's over the time alone, upside down"] = 1 / weak
                said = explain_number(got.get(key), wanted[key], f"`{key}`", mistakes, rtol=1e-5)
                if said and key == "rest":  # another part took what is missing
                    parts = ("compute", "data", "exposed")
                    off = [p for p in parts if explain_number(got.get(p), wanted[p], p, {})]
                    names = " and ".join(f"`{part}`" for part in off)
                    said = f"`rest` is what the parts leave of the step: correct {names}."
                if said:
                    return said
        return None

    return judge


def _sum(seen: Observed) -> str | None:
    for got in seen.data[0]["found"]:
        missing = [key for key in ("step", "compute", "exposed", "data", "rest", "efficiency")
                   if key not in got]  # fmt: skip
        if missing:
            return f"`{missing[0]}` is missing."
        parts = got["compute"] + got["exposed"] + got["data"] + got["rest"]
        if not math.isclose(parts, got["step"], rel_tol=1e-6):
            return (
                f"The parts add up to {parts:.6g}, and the step is {got['step']:.6g}: what is in "
                "two of them counts once, and what is in none is the rest."
            )
    return None


BREAKDOWN = Task(
    id="15.breakdown",
    title="Where a step goes",
    answer="breakdown",
    job="lesson15.breakdown",
    minutes=25,
    cases=_breakdown_cases,
    criteria=(
        Criterion("four parts that add up to the step", 1, _sum),
        Criterion("the step, on one clock and after the warm-up", 2, _part("step")),
        Criterion("compute, of the slowest rank", 2, _part("compute")),
        Criterion("data that compute does not hide", 1, _part("data")),
        Criterion("communication that nothing hides, and the rest", 2, _part("exposed", "rest")),
        Criterion("efficiency under strong scaling", 1, _part("efficiency")),
        Criterion("events stay as they are", 1, unchanged),
    ),
    hints=(
        "Put all events on rank 0's clock first. Then draw one step of one rank on paper: which "
        "seconds are in two kinds of events, and to which kind do they count?",
        "length(union(compute)), then length(union(compute and data)) less that, then "
        "length(union(all three)) less that. The remainder of the step is the rest.",
        "Sort the spans; if one begins before the last ends, extend that, else begin a new one. "
        "In each step choose the rank with the least exposed communication.",
    ),
    debrief="HolisticTraceAnalysis does this with the kernels of all GPUs, from the ranks' "
    "traces, and `meter.breakdown` with the spans of a run.",
)

# -- 15.trains -------------------------------------------------------------------------------------

TRAINED = 4  # steps
LARGE = 1e9  # a norm that nothing is clipped to


def _train_cases(rng: torch.Generator) -> list[Case]:
    def case(world: int, kind: str = "", dtype: torch.dtype = torch.float32) -> Case:
        size, hidden = _pick(rng, 3, 6), _pick(rng, 4, 9)
        draw = {"generator": rng, "dtype": dtype}
        weights = [torch.randn(size, hidden, **draw) / 2, torch.randn(hidden, **draw) / 2]

        def batches(rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
            if kind == "empty" and rank == (step + 1) % world:
                return []
            if kind == "clip" and step == TRAINED - 2:  # all zeros: so is the gradient
                return [(torch.zeros(2, size, dtype=dtype), torch.zeros(2, dtype=dtype))]
            like = step % (TRAINED - 1)  # two steps have the same shapes
            sizes = [1 + (3 * rank + 2 * i + like) % 7 for i in range(1 + (rank + like) % 3)]
            pairs = [(torch.randn(n, size, **draw), torch.randn(n, **draw)) for n in sizes]
            return [(x, 3 * (1 + rank) * y) for x, y in pairs]

        inputs = [
            {
                "weights": [w.clone() for w in weights],
                "steps": [batches(rank, step) for step in range(TRAINED)],
                "rates": [0.05, 0.03, 0.08, 0.01],
                "limits": [0.5 if kind == "clip" else LARGE] * TRAINED,
            }
            for rank in range(world)
        ]
        if kind == "clip":
            _between(inputs)
        words = {"clip": ", clipped", "empty": ", one without samples in each step"}.get(kind, "")
        name = "" if dtype is torch.float32 else ", float64"
        return Case(world_name(world) + words + name, inputs, kind)

    return [case(3), case(1), case(2), case(4), case(3, "clip"), case(2, "clip", torch.float64),
            case(1, "clip"), case(3, "empty"), case(2, "empty", torch.float64)]  # fmt: skip


def _between(inputs: list[dict[str, Any]]) -> None:
    """Give the second step a limit that lies between the norm of its gradient and the square."""
    weights = [w.clone().requires_grad_() for w in inputs[0]["weights"]]
    for step in range(2):
        every = [pair for rank in inputs for pair in rank["steps"][step]]
        loss = _loss(weights, every) / sum(len(y) for _, y in every)
        gradients = _gradients(weights, loss)
        if step:
            norm = torch.cat([g.flatten() for g in gradients]).norm().item()
            for rank in inputs:
                rank["limits"][1:] = [norm**1.5, 0.5, 0.25]
        with torch.no_grad():
            clipped = _clipped(gradients, inputs[0]["limits"][0])
            for w, g in zip(weights, clipped, strict=True):
                w -= inputs[0]["rates"][0] * g


def _loss(weights: list[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of squared errors."""
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return ((x @ weights[0]).tanh() @ weights[1] - y).square().sum()


def _gradients(weights: list[Tensor], loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, weights))


def _clipped(gradients: list[Tensor], max_norm: float) -> list[Tensor]:
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    return [g * min(1.0, max_norm / (norm.item() + 1e-6)) for g in gradients]


def trained(seen: Observed, way: str = "right") -> list[tuple[list[Tensor], float]]:
    """After each step the weights and the loss; ways: "means", "micro", "early", "unclipped"."""
    inputs = seen.case.inputs
    weights = [w.clone().requires_grad_() for w in inputs[0]["weights"]]
    out = []
    for step in range(TRAINED):
        ranks = [rank["steps"][step] for rank in inputs]
        count = sum(len(y) for pairs in ranks for _, y in pairs)
        every = [pair for pairs in ranks for pair in pairs]
        loss = _loss(weights, every) / count
        max_norm = inputs[0]["limits"][step]
        if way == "right" or way == "unclipped":
            gradients = _gradients(weights, loss)
        else:
            gradients = [torch.zeros_like(w) for w in weights]
            for pairs in ranks:
                if not pairs:
                    continue
                own = sum(len(y) for _, y in pairs)
                if way == "micro":
                    value = sum(_loss(weights, [p]) / len(p[1]) for p in pairs) / len(pairs)
                elif way == "means":
                    value = _loss(weights, pairs) / own
                else:  # early: clipped before the sum
                    value = _loss(weights, pairs) / count
                part = _gradients(weights, value)
                if way == "early":
                    part = _clipped(part, max_norm)
                share = 1.0 if way == "early" else 1 / len(inputs)
                gradients = [g + share * p for g, p in zip(gradients, part, strict=True)]
        if way not in ("unclipped", "early"):
            gradients = _clipped(gradients, max_norm)
        with torch.no_grad():
            for w, g in zip(weights, gradients, strict=True):
                w -= inputs[0]["rates"][step] * g
        out.append(([w.detach().clone() for w in weights], loss.item()))
    return out


TRAIN_MISTAKES = {
    "comes of a mean of the ranks' means: a sample of a small batch counts more.": "means",
    "comes of a mean of the micro-batches' means: a sample of a small one counts more.": "micro",
    "was clipped on each rank before the sum: the norm is that of the mean gradient.": "early",
    "was not clipped.": "unclipped",
}


def _weights(seen: Observed) -> str | None:
    right = trained(seen)
    for rank, got in enumerate(seen.data):
        for step, (after, (wanted, _)) in enumerate(zip(got["after"], right, strict=True)):
            local, whole = (torch.cat([w.flatten() for w in ws]) for ws in (after, wanted))
            candidates = {
                words: lambda way=way, step=step: torch.cat(
                    [w.flatten() for w in trained(seen, way)[step][0]]
                )
                for words, way in TRAIN_MISTAKES.items()
            }
            said = explain(
                local,
                whole,
                f"What rank {rank} holds after step {step}",
                candidates,
                rtol=1e-5 if seen.case.kind == "clip" else _tolerance(whole),
            )
            if said:
                return said
    return None


def _told(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        for step, (loss, (_, wanted)) in enumerate(zip(got["losses"], trained(seen), strict=True)):
            exact = seen.case.kind == "empty" and _tolerance(got["after"][0][0]) < 1e-6
            pairs = [pair for inputs in seen.case.inputs for pair in inputs["steps"][step]]
            begun = seen.case.inputs[rank]["weights"]
            weights = got["after"][step - 1] if step else begun
            if [w.shape for w in weights] != [w.shape for w in begun]:
                weights = begun
            own = _loss(weights, pairs).item() / sum(len(y) for _, y in pairs)
            # wrong weights, which are another criterion's, have a loss of their own
            if any(math.isclose(loss, x, rel_tol=1e-9 if exact else 1e-4) for x in (wanted, own)):
                continue
            first = seen.data[0]["losses"][step]
            own = "" if math.isclose(loss, first) else ", and rank 0 told another"
            return (
                f"Rank {rank} told a loss of {loss:.4g} in step {step}{own}: the mean over all "
                f"samples of all ranks is {wanted:.4g}."
            )
    return None


def _once(seen: Observed) -> str | None:
    world, weights = seen.case.world, seen.case.inputs[0]["weights"]
    numel = sum(w.numel() for w in weights) + 4  # and a loss, a count
    most = TRAINED * 2 * (world - 1) * numel * weights[0].element_size()
    sent = sent_by_all(seen)
    if sent <= 1.1 * most + 100:
        return None
    return (
        f"In {TRAINED} steps {sent:,} bytes were sent, and to sum each gradient once takes "
        f"{most:,}: "
        "add up the micro-batches first, then reduce."
    )


def _tidy(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["left"]:
            return f"Rank {rank} left a gradient behind, which the next step would add to."
    return unchanged(seen)


TRAINS = Task(
    id="15.trains",
    title="It trains, and is wrong",
    answer="repaired_step",
    job="lesson15.trains",
    minutes=25,
    cases=_train_cases,
    criteria=(
        Criterion("every sample counts once", 3, _weights, on=("",)),
        Criterion("clipped by the norm of the mean gradient", 2, _weights, on=("clip",)),
        Criterion("a rank without samples", 1, _weights, on=("empty",)),
        Criterion("each gradient is sent once a step", 2, _once),
        Criterion("the loss of all samples, on all ranks", 1, _told),
        Criterion("the samples stay as they are, and no gradient is left", 1, _tidy),
    ),
    hints=(
        "How large is the weight of one sample in the update, if its micro-batch has 1, or 7?",
        "Sum the squared errors, count the samples; reduce gradients, loss and count once, at the "
        "end. Where must the clipping be then?",
        "(...).square().sum().backward() for each micro-batch; all_reduce of each w.grad (zeros if "
        "there was no batch) and of [loss, count]; divide by count; clip; step.",
    ),
    debrief="torchtune, transformers and others had the first of these bugs for a "
    "year or more. A test against one process finds it in a second.",
)

# -- 15.stops --------------------------------------------------------------------------------------

EPOCHS = 6


def _stop_cases(rng: torch.Generator) -> list[Case]:
    def problem(
        world: int, kind: str, dtype: torch.dtype, again: int, size: int = 0
    ) -> list[dict[str, Any]]:
        """The arguments of each rank; at kind "stop" the third time, it gets worse only later."""
        size = size or _pick(rng, 3, 5) + again
        draw = {"generator": rng, "dtype": dtype}
        truth, weight = torch.randn(size, **draw), torch.randn(size, **draw)

        def pair(n: int, target: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.randn(n, size, **draw)
            return x, x @ target

        def of(rank: int) -> dict[str, Any]:
            uneven = (2 * rank) % 3 - (rank == 1) * 2 if kind == "uneven" else 0
            count = 3 + uneven + again
            if kind == "uneven" and rank == 1 and not again:
                count = 0  # it takes part anyway
            batches = [pair(2 + (rank + i) % 3, truth) for i in range(count)]
            if kind == "nan" and rank == world - 1:
                batches[1][0][0, 0] = math.inf
            # all ranks together get worse soon; rank 0 alone gets better
            goal = weight if kind == "stop" and rank > 0 else truth
            held = 0 if kind == "uneven" and rank == 1 else 3 + 2 * rank + again
            return {
                "weight": weight.clone(),
                "batches": batches,
                "held_out": pair(held, goal),
                "rate": 0.0 if kind == "stop" and again == 1 else 0.05,  # the loss stays as it is
                "epochs": EPOCHS,
            }

        ranks = [of(rank) for rank in range(world)]
        if again == 2:
            _, passed = _trained(ranks, "no_stop", epochs=2)
            for one in ranks:
                one["held_out"] = (one["held_out"][0], one["held_out"][0] @ passed)
        return ranks

    def case(world: int, kind: str = "", dtype: torch.dtype = torch.float32) -> Case:
        words = {"uneven": ", unequal numbers of batches", "nan": ", one bad sample",
                 "stop": ", held-out samples that disagree"}.get(kind, "")  # fmt: skip
        name = "" if dtype is torch.float32 else ", float64"
        asked = [problem(world, kind, dtype, again) for again in range(3 if kind == "stop" else 2)]
        if kind == "stop":
            first = problem(world, "", dtype, 0)
            others = problem(world, "", dtype, 0, len(first[0]["weight"]))
            others = [other | {"rate": 0.02, "epochs": 3} for other in others]
            varied = one_at_a_time(first, others)
            asked += [list(call) for call in zip(*varied, strict=True)]
            asked.append(problem(world, "", dtype, 3))
            asked[-1][-1]["held_out"][1][0] = math.nan  # a nan is never smaller
        inputs = [{"problems": [one[rank] for one in asked]} for rank in range(world)]
        return Case(world_name(world) + words + name, inputs, kind)

    return [case(3), case(1), case(2), case(2, dtype=torch.float64), case(3, "uneven"),
            case(4, "uneven"), case(2, "nan"), case(3, "nan"), case(2, "stop"),
            case(3, "stop")]  # fmt: skip


def fitted(seen: Observed, i: int, way: str = "right") -> tuple[list[float], Tensor]:
    """History and weights; ways: "means" of unequal batches, "shortest", "drop", "no_stop"."""
    problems = [rank["problems"][i] for rank in seen.case.inputs]
    return _trained(problems, way, problems[0]["epochs"])


def _trained(inputs: list[dict[str, Any]], way: str, epochs: int) -> tuple[list[float], Tensor]:
    weight, history = inputs[0]["weight"].clone(), []
    counts = [len(rank["batches"]) for rank in inputs]
    for _ in range(epochs):
        for step in range(min(counts) if way == "shortest" else max(counts)):
            pairs = [r["batches"][step] for r in inputs if step < len(r["batches"])]
            sums = [x.t() @ (x @ weight - y) for x, y in pairs]
            sizes = [len(y) for _, y in pairs]
            if way == "drop":
                good = [s.isfinite().all() for s in sums]
                sums = [s for s, ok in zip(sums, good, strict=True) if ok] or sums
                sizes = [n for n, ok in zip(sizes, good, strict=True) if ok] or sizes
            gradient = sum(sums) / sum(sizes)
            if way == "means":
                parts = [s / n for s, n in zip(sums, sizes, strict=True)]
                gradient = sum(parts) / len(inputs)
            if gradient.isfinite().all():
                weight = weight - inputs[0]["rate"] * gradient
        errors = [(x @ weight - y).square() for x, y in (r["held_out"] for r in inputs)]
        history.append(torch.cat(errors).mean().item())
        if way != "no_stop" and len(history) > 1 and not history[-1] < history[-2]:
            break
    return history, weight


FIT_MISTAKES = {
    "comes of a mean of the ranks' means: every sample of a step counts the same.": "means",
    "comes of as many steps as the shortest rank has: no batch may be left out.": "shortest",
    "comes of a step without the bad rank: all ranks skip that step.": "drop",
    "comes of epochs after the one in which the loss grew.": "no_stop",
}


def _fits(seen: Observed) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(rank, number of the call, what came of it)."""
    for rank, got in enumerate(seen.data):
        for i, found in enumerate(got["found"]):
            yield rank, i, found


def _fit(seen: Observed) -> str | None:
    for rank, i, got in _fits(seen):
        history, weight = fitted(seen, i)
        mistakes = {
            words: (lambda way=way, i=i: fitted(seen, i, way)[1])
            for words, way in FIT_MISTAKES.items()
        }
        what = f"What rank {rank} holds in the end"
        said = explain(got["weight"], weight, what, mistakes, rtol=_tolerance(weight))
        if said:
            return said
        if len(got["history"]) != len(history):
            return (
                f"Rank {rank} validated {len(got['history'])} times, and {len(history)} is right: "
                "stop when the loss over all ranks has not become smaller."
            )
    return None


def _tolerance(tensor: Tensor) -> float:
    return 1e-9 if tensor.dtype is torch.float64 else 1e-4


def _history(seen: Observed) -> str | None:
    for rank, i, got in _fits(seen):
        history, weight = fitted(seen, i)
        same_form = got["weight"].shape == weight.shape
        if same_form and not close(got["weight"], weight, rtol=_tolerance(weight)):
            # wrong weights, which are another criterion's, have a loss of their own
            pairs = [inputs["problems"][i]["held_out"] for inputs in seen.case.inputs]
            own = torch.cat([(x @ got["weight"] - y).square() for x, y in pairs]).mean().item()
            if any(math.isclose(local, own, rel_tol=1e-3) for local in got["history"]):
                continue
        for local, wanted in zip(got["history"], history, strict=False):
            if math.isnan(local) and math.isnan(wanted):
                continue
            if not math.isclose(local, wanted, rel_tol=1e-3, abs_tol=1e-6):
                return (
                    f"Rank {rank}'s validation loss is {local:.4g}, and over the samples of all "
                    f"ranks it is {wanted:.4g}."
                )
    return None


STOPS = Task(
    id="15.stops",
    title="It stops without a message",
    answer="repaired_fit",
    job="lesson15.stops",
    minutes=25,
    cases=_stop_cases,
    criteria=(
        Criterion("as one process with all samples of a step", 3, _fit, on=("",)),
        Criterion("ranks with more and with fewer batches", 2, _fit, on=("uneven",)),
        Criterion("a bad sample: all ranks skip the step", 2, _fit, on=("nan",)),
        Criterion("all ranks stop together", 2, _fit, on=("stop",)),
        Criterion("the validation loss of all samples", 2, _history),
        Criterion("the samples stay as they are", 1, unchanged),
    ),
    hints=(
        "Mark each `if`, `for`, `continue` and `break` whose outcome "
        "may differ by rank. Which of them does a collective depend on?",
        "Each of them must be decided by a number that all ranks have: a maximum of the numbers of "
        "batches, a sum that is not finite, a loss over all.",
        "for step in range(most): sum of gradients and count, zeros if there is no batch; one "
        "all_reduce of both; if the sum is not finite, skip, on all ranks. Validation: all_reduce "
        "of [sum of squares, count].",
    ),
    debrief="Ranks that decide alone are behind most hangs that people report. FSDP and DDP agree "
    "on overflow for you, and `Join` on uneven batches; for `break` they offer nothing.",
)

TASKS = [OFFSETS, CULPRIT, BREAKDOWN, TRAINS, STOPS, CRITICAL_PATH]
