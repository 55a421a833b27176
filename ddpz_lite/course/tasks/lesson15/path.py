"""The task 15.critical_path: the chain of events that determines how long a step lasts.

The judge knows how long each event works once all that it needs is there, and computes all times
from that. So it can replay a step in which one event takes half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import unchanged, world_name

Event = dict[str, Any]  # "kind", "start", "stop", "peer"
Trace = list[list[Event]]  # of each rank its events
Place = tuple[int, int]  # (rank, index of an event)
Work = dict[Place, float]  # how long an event takes once all that it needs is there
Program = list[list[tuple[str, int | None]]]  # of each rank (kind, peer)
ROUNDS = 3  # between all-reduces


def _matched(trace: Trace) -> tuple[dict[Place, Place], dict[Place, list[Place]]]:
    """({a recv: its send}, {a rank's call of an all-reduce: the calls of all ranks})."""
    queues: dict[tuple[int, int], tuple[list[Place], list[Place]]] = {}
    reduces: list[list[Place]] = []
    for rank, events in enumerate(trace):
        number = 0
        for i, event in enumerate(events):
            if event["kind"] == "all_reduce":
                reduces += [[]] if number == len(reduces) else []
                reduces[number].append((rank, i))
                number += 1
            elif event["kind"] != "compute":
                sends = event["kind"] == "send"
                ends = (rank, event["peer"]) if sends else (event["peer"], rank)
                queues.setdefault(ends, ([], []))[not sends].append((rank, i))
    pairs = (zip(recvs, sends, strict=True) for sends, recvs in queues.values())
    sender = {recv: send for pair in pairs for recv, send in pair}
    return sender, {place: call for call in reduces for place in call}


def _recorded(trace: Trace) -> Work:
    return {
        (rank, i): event["stop"] - event["start"]
        for rank, events in enumerate(trace)
        for i, event in enumerate(events)
    }


def _work(trace: Trace) -> Work:
    sender, calls = _matched(trace)
    recorded = _recorded(trace)
    least = {place: min(recorded[other] for other in call) for place, call in calls.items()}
    return recorded | dict.fromkeys(sender, 0) | least


def replayed(trace: Trace, work: Work, how: str = "") -> Trace | None:
    """The trace with the times that follow from `work`; None if it never ends.

    how: "alone", where no event waits, or "rendezvous", where a send waits for its receiver.
    """
    sender, calls = ({}, {}) if how == "alone" else _matched(trace)
    receiver = {send: recv for recv, send in sender.items()} if how == "rendezvous" else {}
    made: Trace = [[] for _ in trace]

    def came(place: Place) -> float | None:
        """When the rank comes to this event; None while that is not known."""
        rank, i = place
        if i > len(made[rank]):
            return None
        return made[rank][i - 1]["stop"] if i else trace[rank][0]["start"]

    def ready(place: Place) -> float | None:
        """When all that this event needs is there; None while that is not known."""
        needs = [came(other) for other in calls.get(place, [place])]
        if place in sender:
            rank, i = sender[place]
            needs.append(made[rank][i]["stop"] if i < len(made[rank]) else None)
        if place in receiver:
            needs.append(came(receiver[place]))
        return None if None in needs else max(needs)

    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(trace):
            place = (rank, len(made[rank]))
            if place in work and (at := ready(place)) is not None:
                times = {"start": came(place), "stop": at + work[place]}
                made[rank].append(events[place[1]] | times)
                moved = True
    return made if sum(map(len, made)) == len(work) else None


def _end(trace: Trace) -> float:
    return max(events[-1]["stop"] for events in trace)


def lasts(
    trace: Trace, half: Place | None = None, how: str = "", work: Work | None = None
) -> float:
    """Microseconds of the step if an event takes half; nan if it never ends. how: as above."""
    work = work or _work(trace)
    made = replayed(trace, work | ({half: work[half] / 2} if half else {}), how)
    return _end(made) - trace[0][0]["start"] if made else math.nan


def _saved(trace: Trace, half: Place) -> float:
    return lasts(trace) - lasts(trace, half)


def _by_number(trace: Trace) -> dict[Place, Place]:
    """{a recv: the send of the same number, counting all sends of its peer}."""
    found: dict[Place, Place] = {}
    for rank, events in enumerate(trace):
        received: dict[int, int] = {}
        for i, event in enumerate(events):
            if event["kind"] == "recv":
                peer = event["peer"]
                sends = [j for j, e in enumerate(trace[peer]) if e["kind"] == "send"]
                found[rank, i] = (peer, sends[received.get(peer, 0)])
                received[peer] = received.get(peer, 0) + 1
    return found


def chains(trace: Trace, how: str = "") -> list[list[Place]]:
    """The compute events of each chain without a gap to the end of the step; how: by a mistake."""
    sender, calls = _matched(trace)
    if how == "all sends":
        sender = _by_number(trace)

    def before(place: Place) -> list[Place]:
        """The events that this one waited for last."""
        rank, i = place
        event = trace[rank][i]
        if place in calls:
            came = {(r, j): trace[r][j]["start"] for r, j in calls[place]}
            last = (min if how == "the first to call" else max)(came.values())
            return [(r, j - 1) for (r, j), at in came.items() if at == last]
        ends = {(rank, i - 1): event["start"]}
        if place in sender and how != "own rank":
            other, j = sender[place]
            ends |= {(other, j): trace[other][j]["stop"]}
            if how == "always the sender":
                return [(other, j)]
        return [end for end, at in ends.items() if at == max(ends.values())]

    def back(place: Place) -> list[list[Place]]:
        if place[1] < 0:
            return [[]]
        own = [place] if trace[place[0]][place[1]]["kind"] == "compute" else []
        return [path + own for end in before(place) for path in back(end)]

    ends = [(r, len(es) - 1) for r, es in enumerate(trace) if es[-1]["stop"] == _end(trace)]
    if how == "rank 0":
        ends = [(0, len(trace[0]) - 1)]
    found: list[list[Place]] = []
    for path in (path for end in ends for path in back(end)):
        found += [] if path in found else [path]
    return found


def _computes(trace: Trace, rank: int) -> list[Place]:
    return [(rank, i) for i, e in enumerate(trace[rank]) if e["kind"] == "compute"]


def _busiest(trace: Trace) -> list[Place]:
    """All compute events of the rank that computes longest."""
    recorded = _recorded(trace)
    own = [_computes(trace, rank) for rank in range(len(trace))]
    return max(own, key=lambda places: sum(recorded[place] for place in places))


def _busiest_of_each(trace: Trace) -> list[Place]:
    """Between two all-reduces, the compute events of the rank that computes longest there."""
    recorded, path = _recorded(trace), []
    cuts = [
        [-1, *(i for i, e in enumerate(events) if e["kind"] == "all_reduce"), len(events)]
        for events in trace
    ]
    for number in range(len(cuts[0]) - 1):
        own = [
            [place for place in _computes(trace, r) if cut[number] < place[1] < cut[number + 1]]
            for r, cut in enumerate(cuts)
        ]
        path += max(own, key=lambda places: sum(recorded[place] for place in places))
    return path


Mistakes = dict[str, Callable[[Trace], list[list[Place]]]]
PATHS: Mistakes = {
    "yours holds all compute of the rank that computes longest. The chain changes ranks where a "
    "rank has waited.": lambda trace: [_busiest(trace)],
    "at an all-reduce yours follows the rank that was longest in the call. That rank waited. The "
    "rank that called last was there the shortest time.": lambda t: chains(t, "the first to call"),
}
OPEN_PATHS: Mistakes = {
    "yours leads to the end of rank 0. The step ends with the last event of all ranks.": lambda t: (
        chains(t, "rank 0")
    ),
}
MESSAGE_PATHS: Mistakes = {
    "between two all-reduces yours holds the rank that computes longest there. A rank can also be "
    "late because it waited for a message.": lambda trace: [_busiest_of_each(trace)],
    "at a recv yours always follows the sender. If the message was there already, the recv took no "
    "time and the rank itself was late.": lambda trace: chains(trace, "always the sender"),
    "at a recv yours stays on its rank. A recv that took time waited for the sender.": lambda t: (
        chains(t, "own rank")
    ),
}
MANY_PATHS: Mistakes = {
    "yours counts the sends to all ranks together. The k-th send to one rank belongs to its k-th "
    "recv from there.": lambda trace: chains(trace, "all sends"),
}
LENGTHS: dict[str, Callable[[Trace, Place], float]] = {
    "Yours is shorter by half of every event, whatever the step waits for.": lambda trace, half: (
        lasts(trace) - _work(trace)[half] / 2
    ),
    "Yours is shorter by half of every event on the path. But the step may then wait for others.": (
        lambda trace, half: lasts(trace) - _work(trace)[half] / 2 * (half in chains(trace)[0])
    ),
    "Yours takes waiting for work. An event that waits less stops earlier.": lambda trace, half: (
        lasts(trace, half, work=_recorded(trace))
    ),
    "Yours shortens one rank alone. Those that wait for it then wait less.": lambda trace, half: (
        lasts(trace, half, "alone", _recorded(trace))
    ),
    "Yours is right if no rank ever waits. An all-reduce waits for the last rank, and a recv for "
    "its message.": lambda trace, half: lasts(trace, half, "alone"),
    "Yours makes a send wait for its receiver.": lambda t, half: lasts(t, half, "rendezvous"),
    "Yours is what the step saves.": _saved,
    "Yours is rounded. Half of an odd number is not whole.": lambda trace, half: math.floor(
        lasts(trace, half)
    ),
    "Yours is rounded: half of an odd number is not whole.": lambda trace, half: lasts(
        trace, work=_work(trace) | {half: round(_work(trace)[half] / 2)}
    ),
    "Yours is the end by the clock. The step began later than 0.": lambda trace, half: (
        lasts(trace, half) + trace[0][0]["start"]
    ),
    "Yours is a share of the step.": lambda t, half: lasts(t, half) / lasts(t),
}


# ---- cases ----


def _pick(rng: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def _program(rng: torch.Generator, world: int, messages: int, closed: bool) -> Program:
    """One that cannot hang: each operation is written down after what it needs.

    messages: so many in each round. closed: an all-reduce is at the end.
    """
    program: Program = [[] for _ in range(world)]
    late: list[tuple[int, int]] = []  # messages that were sent, and are received later

    def receive() -> None:
        for sender, receiver in late:
            program[receiver].append(("recv", sender))
        late.clear()

    for number in range(ROUNDS):
        for own in program:
            own += [("compute", None)] * _pick(rng, int(number > 0 or world == 1), 2)
        for _ in range(messages):
            sender, receiver = torch.randperm(world, generator=rng)[:2].tolist()
            program[sender].append(("send", receiver))
            late.append((sender, receiver))
            if _pick(rng, 0, 1):
                receive()
            program[_pick(rng, 0, world - 1)].append(("compute", None))
        receive()
        for own in program:
            last = number == ROUNDS - 1 and not closed
            own.append(("compute" if last else "all_reduce", None))
    return program


def _timed(rng: torch.Generator, program: Program) -> Trace:
    """A run of a program, with times that are drawn."""
    begin = _pick(rng, 10_000, 90_000)
    trace = [
        [{"kind": kind, "start": begin, "stop": begin, "peer": peer} for kind, peer in own]
        for own in program
    ]
    work: Work = {}
    for rank, own in enumerate(program):
        for i, (kind, _) in enumerate(own):
            lasts = {"compute": _pick(rng, 200, 4000), "send": _pick(rng, 20, 400)}
            work[rank, i] = lasts.get(kind, 0)
    for place, call in _matched(trace)[1].items():
        if place == call[0]:
            work |= dict.fromkeys(call, _pick(rng, 50, 500))
    return replayed(trace, work)


def _tells(trace: Trace, mistakes: Mistakes) -> bool:
    """Whether it has one critical path, which no mistake gives, and not all halves save a half."""
    if len(paths := chains(trace)) != 1 or len({rank for rank, _ in paths[0]}) == 1:
        return False
    halves = [(_saved(trace, place), _work(trace)[place] / 2) for place in paths[0]]
    limited = any(0 < gain < half for gain, half in halves)
    return limited and all(mistake(trace) != paths for mistake in mistakes.values())


def _path_cases(rng: torch.Generator) -> list[Case]:
    def drawn(world: int, messages: int, closed: bool) -> list[Trace]:
        """Two runs of one program."""
        mistakes = PATHS | ({} if closed else OPEN_PATHS) | (MESSAGE_PATHS if messages else {})
        mistakes |= MANY_PATHS if messages and world > 2 else {}
        while True:
            program, traces = _program(rng, world, messages, closed), []
            for _ in range(20):
                trace = _timed(rng, program)
                if world == 1 or _tells(trace, mistakes):
                    traces.append(trace)
                if len(traces) == 2:
                    return traces

    def case(*worlds: int, messages: int = 0, kind: str = "") -> Case:
        traces = [
            trace
            for world in worlds
            for closed in (False, True)
            for trace in drawn(world, messages, closed)
        ]
        asked = [
            (number, *place)
            for number, trace in enumerate(traces)
            for rank in range(len(trace))
            for place in _computes(trace, rank)
        ]
        names = " and of ".join(map(world_name, worlds))
        says = f"steps of {names}{', with messages' * bool(messages)}"
        return Case(says, [{"traces": traces, "asked": asked}], kind)

    return [
        case(3),
        case(2, 4),
        case(3, messages=2, kind="messages"),
        case(2, messages=2, kind="messages"),
        case(4, messages=3, kind="messages"),
        case(1, kind="alone"),
    ]


# ---- judging ----


def _asked(seen: Observed) -> Iterator[tuple[Trace, Place, Any]]:
    """(trace, the event that takes half, what was returned) of each call."""
    inputs = seen.case.inputs[0]
    for (number, rank, index), got in zip(inputs["asked"], seen.data[0]["found"], strict=True):
        yield inputs["traces"][number], (rank, index), got


def _both(got: Any) -> bool:
    return isinstance(got, list) and len(got) == 2 and isinstance(got[0], list)


def _as_places(path: list[Any]) -> list[Any]:
    return [tuple(place) if isinstance(place, list) else place for place in path]


def _path(seen: Observed) -> str | None:
    calls = list(_asked(seen))
    for trace, _, got in calls:
        if not _both(got):
            return f"Return a list of places, and a number of microseconds, not {got}."
        path, (right,) = _as_places(got[0]), chains(trace)
        if path != right:
            every = [(one, _as_places(given[0])) for one, _, given in calls if _both(given)]
            return _misled(trace, path, right, every)
    return None


def _misled(
    trace: Trace, path: list[Any], right: list[Place], every: list[tuple[Trace, list[Any]]]
) -> str:
    """What is wrong with a path. every: the traces of a case, and the paths that were returned."""
    for place in path:
        if place not in _work(trace):
            return f"{place} on the path is not the (rank, index) of an event."
        if (kind := trace[place[0]][place[1]]["kind"]) != "compute":
            return f"{place} on the path is of kind {kind}: list the compute events alone."
    message = f"The critical path is {_listed(right)}, and yours is {_listed(path)}"
    if path == right[::-1]:
        return f"{message}: it runs from its end to its beginning."
    for words, mistake in (PATHS | OPEN_PATHS | MESSAGE_PATHS | MANY_PATHS).items():
        if all(given in mistake(one) for one, given in every):
            return f"{message}: {words}"
    if sorted(path) == sorted(right):
        return f"{message}: the same events, not in the order of time."
    return f"{message}. Go back from the end: what did each event wait for last?"


def _listed(path: list[Place]) -> str:
    return f"[{', '.join(map(str, path))}]"


def _lasts(seen: Observed) -> str | None:
    calls = [(*asked, got[1] if _both(got) else None) for *asked, got in _asked(seen)]
    for trace, place, value in calls:
        if type(value) not in (int, float):
            return f"The second value must be a number, not {type(value).__name__}."
        wanted = lasts(trace, place)
        if _alike(value, wanted):
            continue
        on = "" if place in chains(trace)[0] else "not "
        message = (
            f"If {place}, which is {on}on the critical path, takes half, the step lasts {wanted:g} "
            f"µs instead of {lasts(trace):g}, and not {value:g}."
        )
        for words, mistake in LENGTHS.items():
            if all(_alike(given, mistake(one, at)) for one, at, given in calls):
                return f"{message} {words}"
        return f"{message} What does each event wait for, once this one is shorter?"
    return None


def _alike(value: Any, other: float) -> bool:
    number = type(value) in (int, float)
    return number and math.isclose(value, other, rel_tol=1e-9, abs_tol=1e-6)


def _alone(seen: Observed) -> str | None:
    return _path(seen) or _lasts(seen)


CRITICAL_PATH = Task(
    id="15.critical_path",
    title="What half of it would save",
    answer="critical_path",
    job="lesson15.critical_path",
    minutes=25,
    cases=_path_cases,
    criteria=(
        Criterion("the critical path through all-reduces", 3, _path, on=("",)),
        Criterion("the critical path through messages", 2, _path, on=("messages",)),
        Criterion("how long the step then lasts", 3, _lasts, on=("", "messages")),
        Criterion("one rank alone", 1, _alone, on=("alone",)),
        Criterion("the trace stays as it is", 1, unchanged),
    ),
    hints=(
        "Begin at the end of the step and go back. What did the last event wait for, and what did "
        "that event wait for?",
        "An all-reduce waited for the rank that called it last, and a recv that took time for its "
        "send. Any other event waited for the one before it on its rank. For the new length you "
        "need how long each event works without its waiting. Then compute all times again.",
        "Work: stop - start of a compute or a send, 0 of a recv, and of an all-reduce the smallest "
        "stop - start of all ranks. Go through all events by their `stop`, a recv last among "
        "equals. An event stops at its work + the latest stop of what it waits for. The first of a "
        "rank begins at 0, so the step lasts until the latest of these stops.",
    ),
    debrief="HolisticTraceAnalysis has a critical path, too, through the operators and kernels of "
    "one rank. Through all ranks it takes one clock, and to know which calls belong together.",
)
