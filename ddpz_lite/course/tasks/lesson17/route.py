"""The task 17.fastest_route: the calls that lead from a placement to another one in least time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import permutations, product
from typing import Any, NamedTuple

import torch

from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import unchanged

Step = tuple[int, str]  # (axis, call)
Mesh = tuple[Sequence[int], Sequence[float]]  # ranks along each axis, and its rate


class Call(NamedTuple):
    """What a call makes of an axis, and what a rank sends: (n, k) -> a share of the tensor."""

    before: str
    after: str
    sends: Callable[[int, float], float]


CALLS = {
    "all_reduce": Call("P", "R", lambda n, k: 2 * (n - 1) / n * k),
    "reduce_scatter": Call("P", "S", lambda n, k: (n - 1) / n * k),
    "all_gather": Call("S", "R", lambda n, k: (n - 1) * k),
    "cut": Call("R", "S", lambda n, k: 0.0),
}
Cost = Callable[[str, int, float, float], float]  # (call, ranks, k, rate) -> its cost


def seconds(call: str, n: int, k: float, rate: float) -> float:
    return CALLS[call].sends(n, k) / rate


def _after(placement: str, axis: int, call: str) -> str | None:
    """The placement after a call; None where it cannot be made."""
    if placement[axis] != CALLS[call].before:
        return None
    return placement[:axis] + CALLS[call].after + placement[axis + 1 :]


def _held(placement: str, ranks: Sequence[int]) -> float:
    """The share of the tensor that a rank holds."""
    k = 1.0
    for letter, n in zip(placement, ranks, strict=True):
        k /= n if letter == "S" else 1
    return k


def total(start: str, route: Sequence[Step], mesh: Mesh, cost: Cost) -> float | None:
    """The cost of a route from `start`; None where a call cannot be made."""
    now, spent = start, 0.0
    for axis, call in route:
        spent += cost(call, mesh[0][axis], _held(now, mesh[0]), mesh[1][axis])
        now = _after(now, axis, call)
        if now is None:
            return None
    return spent


def least(start: str, goal: str, mesh: Mesh, cost: Cost = seconds) -> float | None:
    """The least cost of a route from `start` to `goal`; None where there is none."""
    heap, done = [(0.0, start)], set()
    while heap:
        spent, now = heappop(heap)
        if now == goal:
            return spent
        if now in done:
            continue
        done.add(now)
        for axis, call in product(range(len(now)), CALLS):
            if (new := _after(now, axis, call)) is not None:
                own = cost(call, mesh[0][axis], _held(now, mesh[0]), mesh[1][axis])
                heappush(heap, (spent + own, new))
    return None


def _bytes(call: str, n: int, k: float, rate: float) -> float:
    return CALLS[call].sends(n, k)


def _instead(call: str, share: Callable[[int], float]) -> Cost:
    """Seconds, but for one call: what it sends of k, by a mistake."""

    def cost(name: str, n: int, k: float, rate: float) -> float:
        return share(n) * k / rate if name == call else seconds(name, n, k, rate)

    return cost


MISTAKES: dict[str, Cost] = {
    "has the fewest calls. But while an axis is S a rank holds less, so calls on other axes send "
    "less.": lambda call, n, k, rate: 1.0,
    "sends the fewest bytes, but some of them over a slow axis.": _bytes,
    "would be the fastest if an all_gather sent (n - 1)k/n. Here k is what a rank holds before the "
    "call.": _instead("all_gather", lambda n: (n - 1) / n),
    "would be the fastest if an all_reduce sent as little as a reduce_scatter.": _instead(
        "all_reduce", lambda n: (n - 1) / n
    ),
    "would be the fastest if a cut sent something. But each rank cuts what it holds.": _instead(
        "cut", lambda n: (n - 1) / n
    ),
    "would be the fastest if a fast axis took longer: divide by its rate.": (
        lambda call, n, k, rate: _bytes(call, n, k, rate) * rate
    ),
}


# ---- cases ----


def _route_cases(rng: torch.Generator) -> list[Case]:
    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=rng))]

    def mesh(axes: int) -> Mesh:
        """One axis between nodes, and others that are up to twenty times as fast."""
        rates = [25e9, 25e9 * pick(3, 8, 20), 25e9 * pick(2, 5, 16)][:axes]
        order = torch.randperm(axes, generator=rng).tolist()
        return [pick(2, 3, 4, 8) for _ in range(axes)], [rates[i] for i in order]

    def asked(starts: Sequence[str], goals: Sequence[str], meshes: int) -> list[dict[str, Any]]:
        """Each start with each goal that can be reached from it, on several meshes."""
        made = []
        for start, goal in product(starts, goals):
            for _ in range(meshes):
                ranks, rates = mesh(len(start))
                if start != goal and least(start, goal, (ranks, rates)) is not None:
                    given = {"start": start, "goal": goal, "ranks": ranks, "rates": rates}
                    made.append(given)
        return made

    def varied() -> list[dict[str, Any]]:
        """One question, and each argument of it changed, with another answer each time."""
        first = {"start": "PP", "goal": "RR", "ranks": [4, 4], "rates": [25e9, 400e9]}
        others = {"start": "PS", "goal": "SR", "rates": [400e9, 25e9]}
        return [first, *(first | {name: value} for name, value in others.items()), dict(first)]

    def sizes() -> list[dict[str, Any]]:
        """Two routes of which the sizes of the axes decide which is faster."""
        found: list[dict[str, Any]] = []
        while len(found) < 4:
            rates = [25e9, 25e9 * pick(2, 3, 4)]
            few, many = ([pick(2, 3), pick(2, 3)], [pick(6, 8), pick(6, 8)])
            start, goal = pick(("RP", "RR"), ("SR", "RR"), ("PR", "RS"), ("PS", "RR"))
            both = [
                {"start": start, "goal": goal, "ranks": ranks, "rates": rates}
                for ranks in (few, many)
            ]
            if not set(_best(both[0])) & set(_best(both[1])):
                found += both
        return found

    def unreachable() -> list[dict[str, Any]]:
        pairs = [("R", "P"), ("S", "P"), ("RS", "PS"), ("PR", "PP"), ("SSR", "SPR"), ("PRS", "RPP")]
        same = ["P", "R", "PS", "RR", "PRS"]
        pairs += [(placement, placement) for placement in same]
        made = []
        for start, goal in pairs:
            ranks, rates = mesh(len(start))
            made.append({"start": start, "goal": goal, "ranks": ranks, "rates": rates})
        return made

    def case(says: str, kind: str, *questions: dict[str, Any]) -> Case:
        return Case(says, [{"questions": list(questions)}], kind)

    two = ["".join(letters) for letters in product("PRS", repeat=2)]
    sums, copies = [p for p in two if "P" in p], [p for p in two if "P" not in p]
    three = ["".join(letters) for letters in product("PRS", repeat=3)]
    six = [  # no fewer calls are as fast
        {"start": "PPR", "goal": "RRR", "ranks": [4, 4, 2], "rates": [500e9, 125e9, 25e9]},
        {"start": "PRR", "goal": "RRR", "ranks": [4, 2, 4], "rates": [50e9, 200e9, 25e9]},
    ]
    drawn = [three[i] for i in torch.randperm(27, generator=rng).tolist()[:6]]
    return [
        case("sums on two axes", "", *varied(), *asked(sums, two, 3)),
        case("copies and parts on two axes", "copies", *asked(copies, copies, 3), *sizes()),
        case(
            "three axes",
            "three",
            *asked(["PPP", "SSS", "PRS", "RPR"], ["RRR", "RSR"], 2),
            *asked(drawn, ["RRR", "SRS", "PRR"], 1),
            *six,
        ),
        case("one axis", "one", *asked("PRS", "PRS", 1)),
        case("nothing to do, or no way", "none", *unreachable()),
    ]


def _best(question: dict[str, Any]) -> Iterator[tuple[Step, ...]]:
    """All routes without a placement twice that take the least time."""
    mesh = question["ranks"], question["rates"]
    limit = least(question["start"], question["goal"], mesh)

    def onward(now: str, route: tuple[Step, ...], seen: frozenset[str]) -> Iterator[tuple]:
        if now == question["goal"]:
            if _alike(total(question["start"], route, mesh, seconds), limit):
                yield route
            return
        for axis, call in product(range(len(now)), CALLS):
            new = _after(now, axis, call)
            if new is not None and new not in seen:
                yield from onward(new, (*route, (axis, call)), seen | {new})

    return onward(question["start"], (), frozenset({question["start"]}))


# ---- judging ----


def _alike(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return abs(value - other) <= 1e-9 * abs(other)


def _asked(seen: Observed) -> list[tuple[dict[str, Any], Any]]:
    return list(zip(seen.case.inputs[0]["questions"], seen.data[0]["answers"], strict=True))


def _told(question: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate / 1e9:g}e9" for rate in question["rates"])
    return f"{question['start']} to {question['goal']}, ranks {question['ranks']}, rates [{rates}]"


def _wrong_route(question: dict[str, Any], route: Any) -> str | None:
    """Why a route does not lead from start to goal."""
    start, goal = question["start"], question["goal"]
    reachable = least(start, goal, (question["ranks"], question["rates"])) is not None
    if route is None:
        if start == goal:
            return "there is nothing to do, so the route is an empty list, not None."
        return "None, and there is a route." if reachable else None
    if not isinstance(route, list):
        return f"{route!r} is not a list of (axis, call), and not None."
    now = start
    for number, step in enumerate(route):
        if not (isinstance(step, list) and len(step) == 2):
            return f"{step!r} is not (axis, call)."
        axis, call = step
        if call not in CALLS:
            return f"{call!r} is not one of {', '.join(CALLS)}."
        if type(axis) is not int or not 0 <= axis < len(start):
            return f"{axis!r} is not an axis of this mesh: they are numbers from 0."
        if (new := _after(now, axis, call)) is None:
            kind = CALLS[call]
            return (
                f"call {number} of your route is {call} on axis {axis}. It makes {kind.after} of "
                f"{kind.before}, and there the placement is {now}."
            )
        now = new
    if not reachable:
        return "no call makes P, so no route leads there: None."
    return None if now == goal else f"your route ends at {now}."


def _arrives(seen: Observed) -> str | None:
    for question, route in _asked(seen):
        if wrong := _wrong_route(question, route):
            return f"{_told(question)}: {wrong}"
    return unchanged(seen)


def _fastest(seen: Observed) -> str | None:
    if wrong := _arrives(seen):
        return wrong
    calls = [(question, [tuple(step) for step in route]) for question, route in _asked(seen)]
    for question, route in calls:
        mesh = question["ranks"], question["rates"]
        start, goal = question["start"], question["goal"]
        took, limit = total(start, route, mesh, seconds), least(start, goal, mesh)
        if _alike(took, limit):
            continue
        # Of a tensor of one byte: nanoseconds, so of a gigabyte seconds.
        message = (
            f"{_told(question)}: with a tensor of 1 GB your route {_in_words(route)} takes "
            f"{1e12 * took:.4g} ms, and {1e12 * limit:.4g} ms are possible."
        )
        return f"{message} {_why(calls, start, route, mesh, goal)}"
    return None


def _in_words(route: Sequence[Step]) -> str:
    return ", ".join(f"{call} on {axis}" for axis, call in route)


def _why(
    calls: Sequence[tuple[dict[str, Any], Sequence[Step]]],
    start: str,
    route: Sequence[Step],
    mesh: Mesh,
    goal: str,
) -> str:
    """What a slow route, and all others of the case, have been chosen by."""
    took = total(start, route, mesh, seconds)
    for other in permutations(route) if len(route) <= 6 else ():
        spent = total(start, other, mesh, seconds)
        if spent is not None and spent < took * (1 - 1e-9):
            return f"The same calls are faster in the order {_in_words(other)}."
    for words, cost in MISTAKES.items():
        if all(
            _alike(
                total(q["start"], own, (q["ranks"], q["rates"]), cost),
                least(q["start"], q["goal"], (q["ranks"], q["rates"]), cost),
            )
            for q, own in calls
        ):
            return f"Yours {words}"
    if len({axis for axis, _ in route}) == len(route):
        return (
            "Each axis has at most one call. While an axis is S a rank holds less, so a way round "
            "can be faster."
        )
    return "Is every placement that can be reached looked at, and the nearest in time first?"


FASTEST_ROUTE = Task(
    id="17.fastest_route",
    title="The fastest way to a placement",
    answer="fastest_route",
    job="lesson17.each",
    minutes=25,
    cases=_route_cases,
    criteria=(
        Criterion("routes of calls that can be made, to the goal", 2, _arrives, on=("", "copies")),
        Criterion("the fastest one for sums", 3, _fastest, on=("",)),
        Criterion("the fastest one for copies and parts", 2, _fastest, on=("copies",)),
        Criterion("one axis, and three", 2, _fastest, on=("one", "three")),
        Criterion("nothing to do, or no way", 1, _arrives, on=("none",)),
    ),
    hints=(
        "Two axes, P on both, and one is slow. Which call on the fast axis makes the tensor of a "
        "rank smaller before the slow axis has to carry it? When must it be undone?",
        "Placements are places on a map, and calls are roads with lengths. Which algorithm finds "
        "the shortest way? It must not stop when it first sees the goal, but when nothing nearer "
        "is left.",
        "A heap of (seconds, placement, route). Pop the least. If it is the goal, return its "
        "route. If this placement was popped before, go to the next. Otherwise push what each "
        "possible call on each axis leads to, with its seconds added. An empty heap: None.",
    ),
    debrief="DTensor's redistribute goes axis by axis. Under use_min_cost_redistribution_plan it "
    "searches for the least cost with Dijkstra's algorithm (read in the source of torch 2.13).",
)
