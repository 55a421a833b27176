"""Tasks of lesson 20: plans for clusters in which something is always broken."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpz_lite.course.check.compare import number, whole
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vary import one_at_a_time
from ddpz_lite.course.check.vocabulary import unchanged, world_name

Call = dict[str, Any]
LONGEST = 8  # entries of a list that a sentence shows


def _pick(rng: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def _one_of(rng: torch.Generator, values: Sequence[Any]) -> Any:
    return values[_pick(rng, 0, len(values) - 1)]


def _quarters(rng: torch.Generator, low: int, high: int) -> float:
    """A multiple of 1/4 between low and high. Sums of such numbers are exact."""
    return _pick(rng, 4 * low, 4 * high) / 4


def _uniform(rng: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=rng, dtype=torch.float64).item()


def _case(says: str, kind: str, calls: Sequence[Call]) -> Case:
    return Case(says, [{"calls": list(calls)}], kind)


def _varied(call: Call, **others: Any) -> list[Call]:
    """The call, then with each argument in turn changed, and the call again."""
    return one_at_a_time([call], [others])[0]


def _told(call: Call) -> str:
    """The arguments of a call in words."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name}: {shown(v)}" for name, v in value.items()) + "}"
        if not isinstance(value, list):
            return f"{value:.12g}"
        parts = ["(" + ", ".join(map(shown, v)) + ")" if isinstance(v, list | tuple) else shown(v)
                 for v in value[:LONGEST]]  # fmt: skip
        return "[" + ", ".join(parts + ["..."] * (len(value) > LONGEST)) + "]"

    return ", ".join(f"{name} = {shown(value)}" for name, value in call.items())


def _each(judge: Callable[[Call, Any], str | None]) -> Callable[[Observed], str | None]:
    """A judge of (arguments, result), made a judge of all calls of a case."""

    def judge_all(seen: Observed) -> str | None:
        calls = seen.case.inputs[0]["calls"]
        for call, got in zip(calls, seen.data[0]["results"], strict=True):
            if wrong := judge(call, got):
                return f"With {_told(call)}: {wrong}"
        return None

    return judge_all


def _explained(
    judge: Callable[[Call, Any], str | None],
    mistakes: dict[str, str],
    same: Callable[[Call, Any, str], bool],
) -> Callable[[Observed], str | None]:
    """As `_each`, and names the mistake that gives most results, if it gives most wrong ones.

    same: whether a mistake gives this result of a call.
    """

    def judge_all(seen: Observed) -> str | None:
        given = list(zip(seen.case.inputs[0]["calls"], seen.data[0]["results"], strict=True))
        wrong = [(call, got) for call, got in given if judge(call, got)]
        if not wrong:
            return None
        likely = max(mistakes, key=lambda name: sum(same(*one, name) for one in given))
        alike = [call for call, got in wrong if same(call, got, likely)]
        if 2 * len(alike) >= len(wrong):
            return f"With {_told(alike[0])}: this is the result if {mistakes[likely]}"
        return f"With {_told(wrong[0][0])}: {judge(*wrong[0])}"

    return judge_all


# -- 20.goodput ------------------------------------------------------------------------------------

PARTS = ("kept", "lost", "write", "down")
# what an answer may get wrong -> the sentence; see `_spent`
BASIC = {
    "nothing lost": "work after the last complete checkpoint survives a failure. It is lost.",
    "all lost": "a failure loses the work since the start. Complete checkpoints keep theirs.",
    "end kept": "work after the last full checkpoint is kept when the time is over. It is lost.",
    "clock": "the checkpoints follow the clock. `interval` counts seconds of computing.",
    "carry": "the old interval continues after a restart. A full one begins.",
    "unsorted": "failures are taken as they come. They have no order: sort a copy.",
    "free write": "the job computes while it writes. It stops for `write` seconds.",
    "no detection": "detection takes no time.",
    "no restart": "the restart takes no time.",
    "formula": "`lost` is half an interval per failure, an expectation. Use the times.",
}
OUTAGE = {
    "partial": "a checkpoint counts although a failure came while it was written. It is lost.",
    "deaf": "a failure during the restart has no effect. Detection and restart begin again.",
    "quick": "a failure during the restart begins the restart again. It must be detected first.",
    "nervous": "a failure during detection begins the detection again. The job is down already.",
    "later": "a failure during detection is detected when this detection is over. One is enough.",
}
EXACT = {
    "still detecting": "a failure at the end of the detection has no effect. It hits the restart.",
    "failure first": "what ends at the moment of a failure is interrupted. It has ended.",
}


def _spent(call: Call, mistake: str = "") -> dict[str, float]:
    """What to return, from event to event; or what a mistake makes of it."""
    length, interval = call["length"], call["interval"]
    write = 0.0 if mistake == "free write" else call["write"]
    detect = 0.0 if mistake == "no detection" else call["detect"]
    restart = 0.0 if mistake == "no restart" else call["restart"]
    failures = list(call["failures"])
    if mistake != "unsorted":
        failures.sort()
    parts = dict.fromkeys(PARTS, 0.0)
    phase, now, ends, unsaved, carried = "compute", 0.0, interval, 0.0, 0.0
    while True:
        while mistake == "unsorted" and failures and failures[0] < now:
            failures.pop(0)
        failure = failures[0] if failures else math.inf
        until = min(ends, failure, length)
        if phase == "compute":
            unsaved += until - now
        else:
            parts["write" if phase == "write" else "down"] += until - now
        now = until
        tie = failure == now < length and (
            mistake == "failure first" or (mistake == "still detecting" and phase == "detect")
        )
        if ends <= now and not tie:
            if phase == "compute":
                phase, ends = "write", now + write
            elif phase == "detect":
                phase, ends = "restart", now + restart
            else:
                if phase == "write":
                    parts["kept"] += unsaved
                    unsaved = 0.0
                rest = {"clock": now % interval, "carry": carried}.get(mistake, 0.0)
                phase, ends, carried = "compute", now + interval - rest, 0.0
            continue
        if now >= length:
            break
        failures.pop(0)
        if phase in ("compute", "write"):
            survives = mistake == "nothing lost" or (mistake == "partial" and phase == "write")
            saved = unsaved if survives else 0.0
            carried = unsaved if phase == "compute" else 0.0
            parts["kept"] += saved
            parts["lost"] += unsaved - saved
            unsaved = 0.0
            if mistake == "all lost":
                parts["lost"] += parts["kept"]
                parts["kept"] = 0.0
            phase, ends = "detect", now + detect
        elif phase == "detect" and mistake in ("nervous", "later"):
            ends = now + detect if mistake == "nervous" else ends + detect
        elif phase == "restart" and mistake == "quick":
            ends = now + restart
        elif phase == "restart" and mistake != "deaf":
            phase, ends = "detect", now + detect
    parts["kept" if mistake == "end kept" else "lost"] += unsaved
    if mistake == "formula":
        parts["lost"] = len(call["failures"]) * interval / 2
    return parts


def _goodput_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*shows: str, hides: Sequence[str] = ()) -> Call:
        """A call in which the mistakes `shows` give another result, and `hides` do not."""
        while True:
            interval, write = _quarters(rng, 8, 40), _quarters(rng, 1, 8)
            length = _quarters(rng, 150, 400)
            call = {
                "failures": [_quarters(rng, 0, int(length)) for _ in range(_pick(rng, 2, 5))],
                "length": length,
                "interval": interval,
                "write": write,
                "detect": _quarters(rng, 2, 12),
                "restart": _quarters(rng, 3, 20),
            }
            right = _spent(call)
            if all(_spent(call, m) != right for m in shows) and all(
                _spent(call, m) == right for m in hides
            ):
                return call

    def crowded(count: int, hides: Sequence[str], **call: float) -> Call:
        """Many failures."""
        while True:
            length = int(call["length"])
            failures = {"failures": [_quarters(rng, 0, length) for _ in range(count)]}
            if all(_spent(failures | call, m) == _spent(failures | call) for m in hides):
                return failures | call

    def exact(*when: str) -> Call:
        """Failures at the very end of something."""
        interval, write = _quarters(rng, 10, 20), _quarters(rng, 2, 5)
        detect, restart = _quarters(rng, 3, 6), _quarters(rng, 7, 12)
        cycle, first = interval + write, interval + write + 0.5
        ends = {
            "write": [2 * cycle],
            "interval": [cycle + interval],
            "detection": [first, first + detect],
            "restart": [first, first + detect + restart],
            "start": [0.0],
            "both": [first, first],
            "length": [3 * cycle],
        }
        return {
            "failures": [time for name in when for time in ends[name]],
            "length": 3 * cycle if when == ("length",) else _quarters(rng, 120, 160),
            "interval": interval,
            "write": write,
            "detect": detect,
            "restart": restart,
        }

    def in_a_row() -> Call:
        """Four failures, one in the restart after the other."""
        call = drawn()
        first, every = call["interval"] + 1.0, call["detect"] + call["restart"] / 2
        every -= every % 0.25
        return call | {"failures": [first + every * i for i in (3, 0, 2, 1)]}

    plain = drawn(*BASIC, hides=(*OUTAGE, *EXACT))
    other = drawn("unsorted", "all lost", hides=(*OUTAGE, *EXACT))
    while len(other["failures"]) != len(plain["failures"]) or any(
        _spent(plain | {name: other[name]}) == _spent(plain) for name in plain
    ):
        other = drawn("unsorted", "all lost", hides=(*OUTAGE, *EXACT))
    outages = [drawn(name, hides=EXACT) for name in OUTAGE] + [drawn(*OUTAGE, hides=EXACT)]
    week = crowded(60, tuple(EXACT), length=3000.0, interval=20.25, write=2.5, detect=4.0,
                   restart=11.5)  # fmt: skip
    day = crowded(9, (*OUTAGE, *EXACT), length=86400.0, interval=1800.0, write=60.25, detect=120.0,
                  restart=600.75)  # fmt: skip
    quiet = {name: plain[name] for name in plain} | {"failures": []}
    zero = drawn("nothing lost") | {"write": 0.0}
    return [
        _case("one failure after another", "", [*_varied(plain, **other), day]),
        _case("failures during an outage", "outage", [*outages, in_a_row(), week]),
        _case(
            "failures at the end of something",
            "exact",
            [
                exact("write"),
                exact("interval"),
                exact("detection"),
                exact("restart"),
                exact("both"),
                exact("start"),
                exact("length"),
                exact("write", "length", "start"),
            ],
        ),
        _case(
            "no failure, no checkpoint, nothing that takes time",
            "edge",
            [
                quiet,
                quiet | {"length": 3 * (quiet["interval"] + quiet["write"])},
                plain | {"interval": math.inf},
                plain | {"interval": plain["length"] + 5},
                quiet | {"interval": math.inf},
                plain | {"length": plain["interval"] // 2},
                zero,
                zero | {"detect": 0.0},
                zero | {"restart": 0.0},
                plain | {"detect": 0.0, "restart": 0.0, "write": 0.0},
                plain | {"failures": [plain["length"] - 1.0]},
                plain | {"failures": [plain["length"] + 7.0, plain["interval"] // 2]},
            ],
        ),
    ]


def _gives(call: Call, got: Any, mistake: str = "") -> bool:
    """Whether these are the right parts; or those of a mistake."""
    if type(got) is not dict or set(got) != set(PARTS):
        return False
    values, parts = {name: number(got[name]) for name in PARTS}, _spent(call, mistake)
    return None not in values.values() and all(
        math.isclose(values[name], parts[name], rel_tol=1e-9, abs_tol=1e-6)
        for name in (("lost",) if mistake == "formula" else PARTS)
    )


def _parts(call: Call, got: Any) -> str | None:
    if type(got) is not dict or set(got) != set(PARTS):
        return f"return a dict of {', '.join(PARTS)}."
    values = {name: number(got[name]) for name in PARTS}
    if missing := [name for name, value in values.items() if value is None]:
        return f"`{missing[0]}` must be a number, not {type(got[missing[0]]).__name__}."
    if _gives(call, got):
        return None
    wanted = _spent(call)
    total = sum(values.values())
    if not math.isclose(total, call["length"], rel_tol=1e-9):
        return f"the four parts add up to {total:.12g}. Each second belongs to one of them."
    wrong = next(name for name in PARTS if not math.isclose(values[name], wanted[name]))
    return f"`{wrong}` is {values[wrong]:.12g}, and {wanted[wrong]:.12g} is right."


_divided = _explained(_parts, EXACT | OUTAGE | BASIC, _gives)

GOODPUT = Task(
    id="20.goodput",
    title="Where the time goes",
    answer="where_time_goes",
    job="lesson20.goodput",
    minutes=25,
    cases=_goodput_cases,
    criteria=(
        Criterion("kept, lost, write and down", 3, _divided, on=("",)),
        Criterion("failures while the job writes or is down", 3, _divided, on=("outage",)),
        Criterion("failures at the end of something", 2, _divided, on=("exact",)),
        Criterion("no failure, no checkpoint, zero seconds", 1, _divided, on=("edge",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "Between two outages the job repeats one cycle: interval, then write. If it runs for s "
        "seconds, how many complete checkpoints are there, and what is the remainder?",
        "Treat the end of the time as a last failure. A run from `start` to a failure adds to "
        "`kept`, `lost` and `write`. An outage then moves `start`, perhaps several times.",
        "for t in [*sorted(failures), length]: if t < start: if t >= start - restart and t is a "
        "failure, start = t + detect + restart, and continue. Otherwise cycles, rest = divmod(t - "
        "start, interval + write). At last `down` is what the other parts leave of `length`.",
    ),
    debrief="Llama 3's report counts 466 interruptions in 54 days, and more than 90% effective "
    "time. Each part has its own remedy: checkpoints in the memory of other machines for `write` "
    "and `lost`, automatic detection and warm spares for `down`.",
)

# -- 20.spares -------------------------------------------------------------------------------------

# what an answer may get wrong -> the sentence; see `_done` and `_fewest`
SPECIAL = {
    "repair tie": "a repair ends after the failure of the same moment. It ends before.",
    "done tie": "a failure stops the job at the moment when it is done. It comes too late.",
    "bisect": "the search passes over a number that is enough: more spares can be slower.",
    "from most": "the search passes over a number that is enough: more spares can be slower.",
    "before": "a job that is done at `by` itself is too late. It is in time.",
    "any": "the job stops when a spare fails. Only machines of the job stop it.",
    "unbroken": "a spare that has failed can take a place. It is away for `repair` seconds.",
    "again": "a machine that is away fails, and its repair begins again. That changes nothing.",
    "ghosts": "a machine that the cluster does not have fails, and is a spare after its repair.",
    "one swap": "the swap continues when a machine of the job fails during it. It begins again.",
    "two swaps": "a failure during a swap adds a second swap. The first one is given up.",
    "highest": "the spare with the highest number takes the place. The lowest number does.",
    "last back": "of two machines repaired at one moment the higher number takes the place. The "
    "lowest does.",
}
SIMPLE = {
    "gone": "a repaired machine never comes back. It is a spare again after `repair` seconds.",
    "no swap": "the swap takes no time.",
    "no wait": "a place is filled although there is no spare. It is empty until a repair is "
    "complete.",
    "place": "a failure hits a place of the job, whatever machine is there. Follow the machines.",
    "undone": "a failure undoes the work. The job continues where it stopped.",
    "always": "`most` spares are taken. Fewer are enough.",
}
REPAIRED, SWAPPED, DONE, FAILED = range(4)  # events at the same moment come in this order
LATE = {"repair tie": REPAIRED, "done tie": DONE}  # with these mistakes they come after a failure


def _done(call: Call, spares: int, mistake: str = "") -> float:
    """When the job is done with so many spares, event by event; or with a mistake. Inf: never."""
    nodes = call["nodes"]
    repair = math.inf if mistake == "gone" else call["repair"]
    swap = 0.0 if mistake == "no swap" else call["swap"]
    places: list[int | None] = list(range(nodes))  # the machine in each place of the job
    ready = set(range(nodes, nodes + spares))
    away: dict[int, float] = {}  # machine -> when it will have been repaired
    left, since, running = call["work"], 0.0, True
    ends, stamp = 0.0, 0  # of the last swap. What was foreseen under an older stamp does not come
    order = [REPAIRED, SWAPPED, DONE, FAILED]
    if mistake in LATE:
        order[LATE[mistake]] = FAILED + 1
    events: list[tuple[float, int, int, int, int, int]] = []

    def plan(time: float, kind: int, machine: int = 0) -> None:
        first = -machine if mistake == "last back" and kind == REPAIRED else machine
        heapq.heappush(events, (time, order[kind], first, machine, kind, stamp))

    for time, machine in call["failures"]:
        plan(time, FAILED, machine)
    plan(left, DONE)
    while events:
        now, _, _, machine, kind, of = heapq.heappop(events)
        if now == math.inf or (kind in (SWAPPED, DONE) and of != stamp):
            continue
        if kind == DONE:
            return now
        if kind == SWAPPED:
            running, since = True, now
            plan(now + left, DONE)
            continue
        stops = False
        if kind == REPAIRED:
            if away.get(machine) != now:  # its repair has begun again
                continue
            del away[machine]
            ready.add(machine)
            stops = None in places
        else:
            if mistake == "place" and machine < nodes:
                machine = -1 if places[machine] is None else places[machine]
            if machine in places:
                places[places.index(machine)] = None
                stops = True
            elif machine in ready:
                if mistake == "unbroken":
                    continue
                ready.remove(machine)
                stops = mistake == "any"
            elif mistake != ("again" if machine in away else "ghosts"):
                continue
            away[machine] = now + repair
            plan(now + repair, REPAIRED, machine)
        if not stops:
            continue
        rest = swap
        if not running and now < ends < math.inf:
            rest = {"one swap": ends - now, "two swaps": ends - now + swap}.get(mistake, swap)
        if running and mistake != "undone":
            left -= now - since
        running, stamp, ends = False, stamp + 1, math.inf
        for place, there in enumerate(places):
            if there is None and mistake == "no wait" and not ready:
                ready.add(-1 - stamp)
            if there is None and ready:
                places[place] = (max if mistake == "highest" else min)(ready)
                ready.remove(places[place])
        if None not in places:
            ends = now + rest
            plan(ends, SWAPPED)
    return math.inf


def _fewest(call: Call, mistake: str = "") -> list[Any] | None:
    """What to return: the smallest number of spares, and when the job is done."""
    ends = [_done(call, n, mistake) for n in range(call["most"] + 1)]
    enough = [end < call["by"] if mistake == "before" else end <= call["by"] for end in ends]
    found = enough.index(True) if True in enough else None
    if mistake == "bisect":
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if enough[middle] else (middle + 1, high)
        found = low if low < len(ends) else None
    elif mistake == "from most":
        found = None
        for n in reversed(range(len(ends))):
            if not enough[n]:
                break
            found = n
    elif mistake == "always":
        found = len(ends) - 1
    return None if found is None else [found, ends[found]]


def _spares_cases(rng: torch.Generator) -> list[Case]:
    def random(grid: float = 0.25, others: bool = True, slow: bool = False) -> Call:
        """others: spares fail, too, and machines that do not exist. slow: a swap takes longer than
        most waits.
        """

        def time(low: int, high: int) -> float:
            return max(grid, _quarters(rng, low, high) // grid * grid)

        nodes, most = _pick(rng, 2, 5), _pick(rng, 2, 4)
        last = nodes - 1 + (most + 1 if others else 0)
        return {
            "failures": [[time(1, 300), _pick(rng, 0, last)] for _ in range(_pick(rng, 5, 10))],
            "nodes": nodes,
            "most": most,
            "work": time(150, 250),
            "repair": time(10, 40) if slow else time(20, 120),
            "swap": time(15, 40) if slow else time(5, 25),
        }

    def right_for(call: Call, shows: Sequence[str], hides: Sequence[str]) -> bool:
        right = _fewest(call)
        return all(_fewest(call, m) != right for m in shows) and all(
            _fewest(call, m) == right for m in hides
        )

    def drawn(
        *shows: str, hides: Sequence[str] = (), found: bool = True, just: bool = False, **how: Any
    ) -> Call:
        """A call in which the mistakes `shows` give another result, and `hides` do not.

        found: some number of spares is enough. just: it ends at `by` itself.
        """
        while True:
            call = random(**how)
            ends = [_done(call, n) for n in range(call["most"] + 1)]
            call["by"] = (_one_of(rng, ends) if found else min(ends) - 0.5) + 0.25 * (not just)
            if right_for(call, shows, hides):
                return call

    def varied(call: Call) -> list[Call]:
        """The call, and with each argument in turn changed; each gives another result."""
        others = {}
        for name in call:
            for _ in range(100):
                new = random(others=False) | {"most": _pick(rng, 0, 4)}
                new["by"] = call["by"] + _quarters(rng, -60, 60)
                if len(new["failures"]) != len(call["failures"]):
                    new["failures"] = [*new["failures"], *call["failures"]]
                    new["failures"] = new["failures"][: len(call["failures"])]
                other = call | {name: new[name]}
                if _fewest(other) != _fewest(call) and right_for(other, (), tuple(SPECIAL)):
                    others[name] = new[name]
                    break
            else:
                return varied(plain())
        return _varied(call, **others)

    def plain() -> Call:
        simple = ("gone", "no swap", "no wait", "always")
        while True:
            call = drawn(*simple, hides=(*SPECIAL, "place"), others=False)
            if _fewest(call) != _fewest(call | {"most": 0}):
                return call

    def large() -> Call:
        while True:
            failures = [[_quarters(rng, 1, 6000), _pick(rng, 0, 69)] for _ in range(150)]
            call = {"failures": failures, "nodes": 64, "most": 6, "work": 5000.0, "repair": 60.0,
                    "swap": 12.5}  # fmt: skip
            call["by"] = sorted(_done(call, n) for n in range(7))[3]
            if right_for(call, (), ("repair tie", "done tie")):
                return call

    ties, swaps = ("repair tie", "done tie"), ("one swap", "two swaps")
    search = ("bisect", "from most", "before")
    twins = drawn("no wait")
    twins["failures"] += [[time, (m + 1) % twins["nodes"]] for time, m in twins["failures"][:3]]
    lone = {"failures": [[10.0, 0], [90.5, 0]], "nodes": 1, "most": 0, "work": 100.0,
            "repair": 20.0, "swap": 5.0, "by": 150.0}  # fmt: skip
    both = lone | {"failures": [[60.0, 0], [10.0, 1], [10.0, 0]], "most": 1, "repair": 30.0}
    rack = {"failures": [[10.0, m] for m in range(18)], "nodes": 24, "most": 30, "work": 100.0,
            "repair": 100.0, "swap": 5.0, "by": 110.0}  # fmt: skip
    return [
        _case(
            "too few spares to replace each machine at once",
            "",
            [
                *varied(plain()),
                drawn("place", hides=tuple(SPECIAL), others=False),
                drawn("no wait", "always", hides=tuple(SPECIAL), others=False),
            ],
        ),
        _case(
            "spares fail, and machines that are away or do not exist",
            "broken",
            [
                drawn("any", hides=("unbroken", "again", "ghosts", *swaps, *ties, *search)),
                drawn("unbroken", hides=("again", "ghosts", *swaps, *ties, *search)),
                drawn("again", hides=("any", "unbroken", "ghosts", *swaps, *ties, *search)),
                drawn("ghosts", hides=("any", "unbroken", "again", *swaps, *ties, *search)),
                large(),
            ],
        ),
        _case(
            "machines fail during a swap or a wait",
            "again",
            [
                drawn(*swaps, hides=("again", *ties, *search), others=False),
                drawn(*swaps, "no wait", hides=("again", *ties, *search), others=False),
                drawn("highest", hides=(*ties, *search)),
                twins,
                both,
                rack,
            ],
        ),
        _case(
            "just in time, not at all, more spares that are slower",
            "edge",
            [
                drawn("before", hides=ties, just=True),
                drawn("repair tie", hides=search, grid=10.0),
                drawn("done tie", hides=search, grid=10.0),
                drawn("bisect", hides=ties, slow=True),
                drawn("from most", hides=ties, slow=True),
                drawn(found=False),
                drawn() | {"failures": [], "swap": 0.0},
                drawn("no wait") | {"swap": 0.0},
                lone,
                lone | {"by": 149.75},
                lone | {"failures": [[10.0, 0], [30.0, 0], [100.0, 1]], "most": 1, "by": 130.0},
                lone | {"failures": [[100.0, 0], [100.0, 0]], "by": 100.0},
            ],
        ),
    ]


def _finds(call: Call, got: Any, mistake: str = "") -> bool:
    """Whether this is the right number, and when the job is done; or that of a mistake."""
    found = _fewest(call, mistake)
    if got is None or found is None:
        return got is found
    pair = type(got) is list and len(got) == 2
    count, seconds = (whole(got[0]), number(got[1])) if pair else (None, None)
    if count is None or seconds is None:
        return False
    return count == found[0] and math.isclose(seconds, found[1], rel_tol=1e-9)


def _spares(call: Call, got: Any) -> str | None:
    if _finds(call, got):
        return None
    wanted = _fewest(call)
    if got is not None and (type(got) is not list or len(got) != 2):
        return "return (spares, seconds), or None."
    count, seconds = (None, None) if got is None else (whole(got[0]), number(got[1]))
    if got is not None and (count is None or seconds is None):
        return "return a whole number of spares and a number of seconds, or None."
    if wanted is None:
        return "no number of spares from 0 to `most` is enough. Return None."
    if got is None:
        return f"the job with {_spares_named(wanted[0])} is done at {wanted[1]:.12g}, in time."
    if not 0 <= count <= call["most"]:
        return f"{count} spares are not from 0 to {call['most']}."
    ends = _done(call, count)
    if not math.isclose(seconds, ends, rel_tol=1e-9):
        return f"the job with {_spares_named(count)} is done at {ends:.12g}, not at {seconds:.12g}."
    if ends > call["by"]:
        return f"the job with {_spares_named(count)} is done at {ends:.12g}, too late."
    return f"{_spares_named(wanted[0])} would be enough, not {count}."


def _spares_named(count: int) -> str:
    return "1 spare" if count == 1 else f"{count} spares"


_found = _explained(_spares, SPECIAL | SIMPLE, _finds)

FEWEST = Task(
    id="20.spares",
    title="How many spares",
    answer="fewest_spares",
    job="lesson20.spares",
    minutes=30,
    cases=_spares_cases,
    criteria=(
        Criterion("the smallest number that is enough, and its end", 3, _found, on=("",)),
        Criterion("failures of other machines", 2, _found, on=("broken",)),
        Criterion("failures during a swap or a wait", 2, _found, on=("again",)),
        Criterion("just in time, or not at all", 2, _found, on=("edge",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "In what states can a machine be, and which events move it from one to another? What does "
        "a failure do in each of the states?",
        "Write a function for a given number of spares first: a set of machines in the job, a set "
        "that is ready, and a dict of those that are away, with the time of their return. Before "
        "each failure, bring back what has been repaired by then.",
        "Keep `resume`, the time when the job computes again, inf while a place is empty. After a "
        "failure of a machine of the job, and after a repair that fills the last place, it is now "
        "+ swap. The job is done at resume + left, if that is not after the next failure. Then "
        "try 0, 1, 2, ... spares.",
    ),
    debrief="A spare costs as much as a machine that works, so its number is weighed against the "
    "wait for repairs. torchft takes another way: replicas that have failed are left out, and "
    "the others continue.",
)

# -- 20.plan ---------------------------------------------------------------------------------------

Mesh = tuple[int, int, int]  # data, tensor, pipeline
AXES = ("data", "tensor", "pipeline")
MOST = 1.1  # times the best mesh's time


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _meshes(gpus: int) -> Iterator[Mesh]:
    for tensor in _divisors(gpus):
        for pipeline in _divisors(gpus // tensor):
            yield gpus // tensor // pipeline, tensor, pipeline


def _divides(model: Call, mesh: Mesh, mistake: str = "") -> str | None:
    """What the mesh does not divide, as a sentence."""
    for axis, name in (("tensor", "heads"), ("pipeline", "layers"), ("data", "batch")):
        size = mesh[AXES.index(axis)]
        if model[name] % size and mistake != f"{name} ignored":
            return f"{axis} = {size} does not divide {model[name]} {name}."
    return None


def _memory(model: Call, mesh: Mesh, mistake: str = "") -> dict[str, float]:
    """Bytes on the fullest GPU, by kind."""
    data, tensor, pipeline = mesh
    parameters = 12 * model["layers"] * model["hidden"] ** 2 / (tensor * pipeline)
    layer = 34 * model["sequence"] * model["hidden"] / tensor
    micro_batches = model["batch"] // data
    alive = min(micro_batches, pipeline)
    if mistake in ("no activations", "one micro-batch"):
        alive = mistake == "one micro-batch"
    if mistake == "all micro-batches":
        alive = micro_batches
    if mistake == "all stages":
        alive = pipeline
    shards = data if mistake != "optimizer replicated" else 1
    return {
        "weights and gradients": 4 * parameters,
        "optimizer": 12 * parameters / shards,
        "activations": alive * model["layers"] / pipeline * layer,
    }


def _seconds(model: Call, cluster: Call, mesh: Mesh, mistake: str = "") -> dict[str, float]:
    """Seconds of a step, by kind."""
    data, tensor, pipeline = mesh
    layers, hidden, sequence = model["layers"], model["hidden"], model["sequence"]
    parameters = 12 * layers * hidden**2
    micro_batches = model["batch"] // data

    def link(block: int) -> float:
        inside = cluster["per_node"] % block == 0
        if mistake == "small enough":
            inside = block <= cluster["per_node"]
        return cluster["fast" if inside or mistake == "one link" else "slow"]

    flops = 6 * parameters * model["batch"] * sequence
    compute = flops / data / tensor / pipeline / cluster["flops"]
    each = 16 * sequence * hidden * (tensor - 1) / tensor
    tensor_time = micro_batches * layers / pipeline * each / link(tensor)
    shard = 4 * parameters / (tensor * pipeline)
    bubble = (compute + tensor_time) * (pipeline - 1) / micro_batches
    return {
        "compute": compute,
        "tensor parallelism": 0.0 if mistake == "no tensor time" else tensor_time,
        "bubble": 0.0 if mistake == "no bubble" else bubble,
        "data parallelism": shard * (data - 1) / data / link(tensor * data),
    }


def _best(call: Call, mistake: str = "") -> Mesh | None:
    """The fastest mesh that fits; or the one that a mistake takes for it."""
    model, cluster = call["model"], call["cluster"]
    fits = [
        mesh
        for mesh in _meshes(cluster["gpus"])
        if _divides(model, mesh, mistake) is None
        and model["batch"] >= mesh[0]
        and sum(_memory(model, mesh, mistake).values()) <= cluster["memory"]
    ]
    if mistake == "least cut":
        return min(fits, key=lambda mesh: (mesh[1] * mesh[2], mesh[2]), default=None)
    if mistake == "no pipeline":
        fits = [mesh for mesh in fits if mesh[2] == 1]
    if mistake == "tensor to the node":
        fits = [mesh for mesh in fits if mesh[1] == cluster["per_node"]]
    if mistake == "shallow":
        return min(fits, key=lambda mesh: (mesh[2], -mesh[0]), default=None)
    return min(
        fits, key=lambda mesh: sum(_seconds(model, cluster, mesh, mistake).values()), default=None
    )


def _least(call: Call, mistake: str = "") -> int:
    """Bytes that the smallest mesh needs, of those that divide; or by a mistaken formula."""
    model = call["model"]
    meshes = [mesh for mesh in _meshes(call["cluster"]["gpus"]) if _divides(model, mesh) is None]
    return math.ceil(min(sum(_memory(model, mesh, mistake).values()) for mesh in meshes))


def _plan_cases(rng: torch.Generator) -> list[Case]:
    def drawn(*fails: str, fits: bool = True, **fixed: Any) -> Call:
        """A model and a cluster for which the mistakes `fails` choose a mesh that is wrong."""
        while True:
            heads = _one_of(rng, [12, 16, 24, 32, 40, 48, 64, 96, 128])
            gpus = fixed.get("gpus") or _one_of(rng, [16, 24, 32, 48, 64, 96, 128, 256, 512, 1024])
            model = {
                "layers": _one_of(rng, [24, 30, 32, 36, 40, 48, 60, 80, 96, 120]),
                "hidden": 128 * heads,
                "heads": heads,
                "sequence": 1024 * _one_of(rng, [2, 4, 8, 16, 32]),
                "batch": max(1, int(gpus * _one_of(rng, [0.25, 0.5, 1, 1.5, 2, 4]))),
            }
            cluster = {
                "gpus": gpus,
                "per_node": _one_of(rng, [4, 8]),
                "memory": _one_of(rng, [40, 64, 80, 96, 141, 192]) * 10**9,
                "flops": 1e12 * _pick(rng, 150, 800),
                "fast": 1e9 * _pick(rng, 150, 900),
                "slow": 1e9 * _pick(rng, 5, 50),
            }
            for part in (model, cluster):
                part |= {name: value for name, value in fixed.items() if name in part}
            call = {"model": model, "cluster": cluster}
            if all(_divides(model, mesh) is not None for mesh in _meshes(gpus)):
                continue
            if not fits:
                if _best(call) is None and all(_best(call, m) is not None for m in fails):
                    return call
            elif _best(call) is not None and all(_fault(call, _best(call, m)) for m in fails):
                return call

    def deep_is_large() -> Call:
        """Where the mesh with the most stages is not the smallest."""
        while True:
            call = drawn(fits=False)
            meshes = _meshes(call["cluster"]["gpus"])
            divided = [mesh for mesh in meshes if _divides(call["model"], mesh) is None]
            most = max(divided, key=lambda mesh: (mesh[2], mesh[1]))
            if sum(_memory(call["model"], most).values()) > 1.01 * _least(call):
                return call

    def changed_inside(call: Call) -> list[Call]:
        """The call with one number of the model or the cluster changed; each has another answer."""
        made = []
        for part, name in (
            *(("model", name) for name in ("layers", "hidden", "sequence", "batch")),
            *(("cluster", name) for name in ("per_node", "memory", "flops", "fast", "slow")),
        ):
            value = call[part][name]
            news = (call | {part: call[part] | {name: int(value * by)}} for by in (2, 0.5, 4, 0.25))
            made += [new for new in news if int(new[part][name]) and _differs(new, call)][:1]
        return made

    def all_inside() -> tuple[Call, list[Call]]:
        while True:
            call = drawn("no activations", "no bubble", "least cut", per_node=8)
            if len(made := changed_inside(call)) == 9:
                return call, made

    plain, inside = all_inside()
    models, clusters = {}, {}
    while not (models and clusters):  # the same model elsewhere, and another model here
        other = drawn()
        moved = {"model": plain["model"], "cluster": other["cluster"]}
        changed = {"model": other["model"], "cluster": plain["cluster"]}
        if not clusters and _is_other(moved, plain):
            clusters = other["cluster"]
        if not models and _is_other(changed, plain):
            models = other["model"]
    full = drawn("small enough", gpus=96)
    tight = _filled(drawn(gpus=256, batch=256, heads=32, hidden=4096, layers=32))
    while not tight:
        tight = _filled(drawn(gpus=256, batch=256, heads=32, hidden=4096, layers=32))
    lone = drawn(gpus=1, layers=24, hidden=1024, heads=16, batch=4)
    return [
        _case(
            "models that one GPU cannot hold",
            "",
            [
                *_varied(plain, model=models, cluster=clusters),
                drawn("one micro-batch", "one link"),
                drawn("no bubble", "tensor to the node"),
                drawn("no pipeline", "shallow"),
                drawn("heads ignored"),
                drawn("layers ignored"),
                drawn("batch ignored"),
                drawn("optimizer replicated"),
                drawn("all micro-batches"),
                drawn("all stages", batch=4),
                drawn("no tensor time"),
                *inside,
            ],
        ),
        _case(
            "10,000 GPUs, odd nodes, one GPU, memory that is just enough",
            "edge",
            [
                drawn("one link", gpus=10_000, batch=10_000),
                drawn("one link", "no activations", gpus=16_384),
                full,
                drawn("small enough", per_node=6, gpus=96),
                tight,
                lone,
                drawn(gpus=8, per_node=8, heads=8, hidden=2048, batch=1),
                drawn(gpus=96, heads=1, hidden=1024, layers=96, batch=1, sequence=2048),
                drawn(gpus=128, heads=128, layers=1, batch=1, sequence=2048),
                drawn(gpus=7, heads=28, hidden=3584, layers=28, batch=14, sequence=4096),
            ],
        ),
        _case(
            "models that do not fit",
            "refuse",
            [
                drawn("no activations", fits=False),
                drawn("one micro-batch", fits=False),
                drawn(fits=False, gpus=1, batch=8),
                drawn("heads ignored", fits=False),
                deep_is_large(),
            ],
        ),
    ]


def _filled(call: Call) -> Call | None:
    """The call with as much memory as the best mesh needs, if a byte less needs another mesh."""
    model, cluster = call["model"], call["cluster"]
    need = sum(_memory(model, _best(call)).values())
    full = {"model": model, "cluster": cluster | {"memory": int(need)}}
    less = {"model": model, "cluster": cluster | {"memory": int(need) - 1}}
    other = _best(less)
    return full if need == int(need) and other and _fault(full, other) else None


def _is_other(call: Call, first: Call) -> bool:
    """Whether some mesh is right here, and the best mesh of the first call is not."""
    if all(_divides(call["model"], mesh) for mesh in _meshes(call["cluster"]["gpus"])):
        return False
    return _best(call) is not None and _fault(call, _best(first)) is not None


def _differs(call: Call, first: Call) -> bool:
    """Whether some mesh is right here, and what is returned for the first call is not."""
    model = call["model"]
    if all(_divides(model, mesh) for mesh in _meshes(call["cluster"]["gpus"])):
        return False
    if _best(call) is None:
        return False
    mesh = _best(first)
    if _fault(call, mesh):
        return True
    times = [sum(_seconds(one["model"], one["cluster"], mesh).values()) for one in (call, first)]
    return not math.isclose(*times, rel_tol=1e-3)


def _fault(call: Call, mesh: Mesh | None) -> str | None:
    """What is wrong with a mesh."""
    if mesh is None:
        return "no mesh"
    return _no_mesh(call, mesh) or _too_large(call, mesh) or _too_slow(call, mesh)


def _no_mesh(call: Call, mesh: Mesh) -> str | None:
    gpus = call["cluster"]["gpus"]
    if min(mesh) < 1 or math.prod(mesh) != gpus:
        return f"{' x '.join(map(str, mesh))} is not {gpus} GPUs."
    return _divides(call["model"], mesh)


def _too_large(call: Call, mesh: Mesh) -> str | None:
    model, memory = call["model"], call["cluster"]["memory"]
    parts = _memory(model, mesh)
    if sum(parts.values()) <= memory * (1 + 1e-9):
        return None
    words = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts.items())
    over = f"a GPU needs {sum(parts.values()) / 1e9:.1f} of {memory / 1e9:.1f} GB: {words}."
    return " ".join([over, *(why for name, why in TOO_LARGE.items() if _best(call, name) == mesh)])


TOO_LARGE = {
    "no activations": "Without the activations it would fit.",
    "one micro-batch": "With the activations of one micro-batch it would fit. The first stage "
    "keeps those of several.",
}
TOO_SLOW = {
    "no bubble": "It would be the best mesh if no stage were ever idle: count the bubble.",
    "one link": "It would be the best mesh if all links were fast: see which groups cross nodes.",
    "small enough": "A group that is no larger than a node can still lie on two. Its block must "
    "divide the node.",
    "no tensor time": "It would be the best mesh if tensor parallelism sent nothing.",
    "optimizer replicated": "It needs less memory: the optimizer is sharded over data.",
    "all micro-batches": "It needs less memory: a stage keeps the activations of at most "
    "`pipeline` micro-batches.",
    "all stages": "It needs less memory: a replica has only batch / data micro-batches.",
    "no pipeline": "It would be the best mesh without a pipeline.",
    "tensor to the node": "Tensor parallelism over the whole node is not always the best.",
    "shallow": "It has the fewest stages, and other costs are higher.",
    "least cut": "It cuts the model into the fewest parts, and that is not the fastest.",
}


def _too_slow(call: Call, mesh: Mesh) -> str | None:
    model, cluster = call["model"], call["cluster"]
    parts = _seconds(model, cluster, mesh)
    best = sum(_seconds(model, cluster, _best(call)).values())
    if sum(parts.values()) <= MOST * best * (1 + 1e-9):
        return None
    words = ", ".join(f"{name} {value:.3g}" for name, value in parts.items())
    message = f"a step takes {sum(parts.values()):.3g} s ({words}), and {best:.3g} s is possible."
    crosses = mesh[1] > 1 and cluster["per_node"] % mesh[1]
    why = ["Tensor parallelism crosses nodes."] if crosses else []
    why += [words for mistake, words in TOO_SLOW.items() if _best(call, mistake) == mesh]
    return " ".join([message, *why])


# mistakes by which a mesh needs more memory
MORE = ("optimizer replicated", "all micro-batches", "all stages")


def _pair(plan: Any) -> tuple[Mesh, float] | None:
    """A mesh and its seconds, if these are what was returned."""
    if type(plan) is not list or len(plan) != 2 or type(plan[0]) is not list:
        return None
    sizes, seconds = [whole(size) for size in plan[0]], number(plan[1])
    if len(sizes) != 3 or None in sizes or seconds is None:
        return None
    return (sizes[0], sizes[1], sizes[2]), seconds


def _wrong_time(call: Call, mesh: Mesh, got: float) -> str | None:
    model, cluster = call["model"], call["cluster"]
    parts = _seconds(model, cluster, mesh)
    wanted = sum(parts.values())
    if math.isclose(got, wanted, rel_tol=1e-6):
        return None
    words = ", ".join(f"{name} {value:.4g}" for name, value in parts.items())
    message = f"its step takes {wanted:.4g} s ({words}), not {got:.4g}."
    for mistake in ("no bubble", "one link", "small enough", "no tensor time"):
        if math.isclose(got, sum(_seconds(model, cluster, mesh, mistake).values()), rel_tol=1e-6):
            return f"{message} {TIMES[mistake]}"
    return message


TIMES = {
    "no bubble": "The bubble is missing.",
    "one link": "Not all groups have the fast links.",
    "small enough": "A group that is no larger than a node can still lie on two.",
    "no tensor time": "The collectives of tensor parallelism are missing.",
}


def _planned(judge: Callable[..., str | None]) -> Callable[[Call, Any], str | None]:
    def judge_one(call: Call, got: Call) -> str | None:
        if got["refused"] is not None:
            found = _numbers(got["refused"])
            why = [] if _named(found, _least(call)) else [
                words for mistake, words in TOO_SLOW.items()
                if mistake in MORE and _named(found, _least(call, mistake))
            ]  # fmt: skip
            message = f"a mesh fits, and ValueError was raised: {got['refused']!r}"
            return " ".join([message, *why])
        if (pair := _pair(got["plan"])) is None:
            return "return ((data, tensor, pipeline), seconds): three whole numbers, and a number."
        mesh, seconds = pair
        wrong = judge(call, mesh) if judge is not _wrong_time else judge(call, mesh, seconds)
        return wrong and f"({', '.join(map(str, mesh))}) was returned: {wrong}"

    return judge_one


def _numbers(words: str) -> list[float]:
    """The numbers in a text: 1234, 1,234 or 1.2e+3."""
    found = re.findall(r"\d[\d_,]*(?:\.\d+)?(?:e\+?\d+)?", words)
    return [float(n.replace(",", "").replace("_", "")) for n in found]


def _named(numbers: Sequence[float], value: float) -> bool:
    return any(math.isclose(n, value, rel_tol=1e-3) for n in numbers)


def _refused(call: Call, got: Call) -> str | None:
    if got["refused"] is None:
        return f"no mesh fits, and {got['plan']} was returned. Raise ValueError."
    least = _least(call)
    if _named(_numbers(got["refused"]), least):
        return None
    return (
        f"the message of the ValueError, {got['refused']!r}, lacks the bytes that the smallest "
        f"mesh needs: {least}."
    )


PLAN = Task(
    id="20.plan",
    title="Choose a mesh",
    answer="choose_mesh",
    job="lesson20.plan",
    minutes=30,
    cases=_plan_cases,
    criteria=(
        Criterion(
            "as many GPUs as there are, all divided", 2, _each(_planned(_no_mesh)), on=("", "edge")
        ),
        Criterion("it fits the memory", 2, _each(_planned(_too_large)), on=("", "edge")),
        Criterion("within 10% of the fastest mesh", 2, _each(_planned(_too_slow)), on=("",)),
        Criterion("the seconds of its step", 1, _each(_planned(_wrong_time)), on=("", "edge")),
        Criterion("any number of GPUs and any node", 1, _each(_planned(_fault)), on=("edge",)),
        Criterion("a refusal that says what is needed", 1, _each(_refused), on=("refuse",)),
        Criterion("the arguments stay as they are", 1, unchanged),
    ),
    hints=(
        "How many meshes are there for 10,000 GPUs? Is there any need to be clever?",
        "Write two functions of a mesh, its bytes and its seconds. Go through all divisors of the "
        "number of GPUs, and keep the meshes that divide heads, layers and batch.",
        "for tensor in divisors(gpus): for pipeline in divisors(gpus // tensor): data = gpus // "
        "(tensor * pipeline). Among the meshes that divide, the least memory goes into the "
        "message. Among those that fit, best = min(fits, key=seconds).",
    ),
    debrief="Production planners search the same way, with measured instead of computed times, "
    "and over more: micro-batch size, recomputation, context and expert parallelism, interleaved "
    "stages.",
)

# -- 20.diagnose -----------------------------------------------------------------------------------

LEAST = 1.15  # the smallest factor of a fault
NOISE = 0.002  # standard deviation of computing and of a message, relative
KINDS = ("gpu", "link", "checkpoint", "healthy")


@dataclass(frozen=True)
class _LogCase(Case):
    """A case that also knows what it was, which the answer is not told."""

    truths: Sequence[tuple[str, Any]] = ()


def _log(
    rng: torch.Generator,
    world: int,
    kind: str,
    where: Any = None,
    factor: float = 1.0,
    writer: int | None = None,
    steps: int | None = None,
    at: Sequence[int] = (),
) -> Call:
    """A log of a job with this fault. where: the rank, the sender's rank, or the period.

    writer: the only rank that a checkpoint stops; None: it stops all. at: steps that are long by
    chance.
    """
    steps = steps or _pick(rng, 40, 56)
    base = 10 ** _uniform(rng, -2, 1)
    shape = (steps, world)

    def noisy(value: float) -> torch.Tensor:
        noise = torch.randn(shape, generator=rng, dtype=torch.float64).clamp(-3, 3)
        return value * (1 + NOISE * noise)

    compute, hop = noisy(base), noisy(base * _uniform(rng, 0.1, 0.2))
    if kind == "gpu":
        compute[:, where] *= factor
    if kind == "link":
        hop[:, where] *= factor
    usual = _step(compute, hop)[0].median()
    chance = torch.randperm(steps, generator=rng)[: _pick(rng, 1, steps // 20)].tolist()
    chance = [*at, *chance[len(at) :]]
    hit = [_pick(rng, 0, world - 1) for _ in chance]
    for step, rank in zip(chance, hit, strict=True):
        compute[step, rank] += base * _uniform(rng, 0.5, 20)
    if kind == "checkpoint":
        ranks = slice(None) if writer is None else writer
        compute[_pick(rng, 0, where - 1) :: where, ranks] += usual * (factor - 1)
    end, wait, ring = _step(compute, hop)
    longest = list(range(world))  # whose clock makes its steps the longest
    if kind == "gpu":
        innocent = [r for r in longest if r not in (where, (where + 1) % world, *hit)]
        longest = innocent or [(where + 1) % world]
    offset = torch.rand(world, generator=rng, dtype=torch.float64)
    offset[_one_of(rng, longest)] = 1.5
    step = end[:, None] + base * NOISE * (noisy(0.1) + offset)
    return {
        "log": {
            name: [[round(x, 7) for x in row] for row in part.tolist()]
            for name, part in (("step", step), ("wait", wait), ("ring", ring))
        }
    }


def _step(compute: torch.Tensor, hop: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(end of the step, wait for the first message, the remaining all-reduce) of each step.

    compute: (steps, world), until a rank enters the all-reduce. hop: (steps, world), seconds of a
    message from each rank to the next.
    """
    world = compute.shape[1]
    free = compute  # when each rank has sent its last message
    has = compute  # when each rank has what it sends next
    wait = torch.zeros_like(compute)
    for number_of in range(2 * (world - 1)):
        free = torch.maximum(has, free) + hop
        has = torch.maximum(free.roll(1, dims=1), has)
        if number_of == 0:
            wait = has - compute
    end = has.amax(1)
    return end, wait, end[:, None] - compute - wait


def _log_cases(rng: torch.Generator) -> list[Case]:
    def case(says: str, kind: str, *logs: tuple[Any, ...]) -> Case:
        calls = [_log(rng, *log) for log in logs]
        truths = [_truth(*log[:3]) for log in logs]
        return _LogCase(says, [{"calls": calls}], kind, truths=truths)

    def small() -> float:
        return _uniform(rng, LEAST, 1.25)

    def large() -> float:
        return _uniform(rng, 1.5, 4.0)

    last = [_pick(rng, 5, 7), _pick(rng, 9, 14)]
    return [
        case(
            "a slow GPU",
            "",
            (4, "gpu", _pick(rng, 1, 2), large(), None, 44),
            (4, "gpu", 0, small(), None, 44),
            (4, "gpu", 3, small(), None, 44),
            (2, "gpu", 0, small()),
            (2, "gpu", 1, large()),
            (3, "gpu", _pick(rng, 0, 2), LEAST),
            (last[0] + 1, "gpu", last[0], small()),
            (16, "gpu", _pick(rng, 1, 14), small()),
            (2, "gpu", 0, LEAST),
        ),
        case(
            "a slow link",
            "link",
            (4, "link", _pick(rng, 0, 2), large(), None, 44),
            (4, "link", 3, small(), None, 44),
            (2, "link", 0, small()),
            (2, "link", 1, large()),
            (3, "link", _pick(rng, 0, 2), LEAST),
            (last[1] + 1, "link", last[1], small()),
            (16, "link", _pick(rng, 1, 14), small()),
        ),
        case(
            "stalls for checkpoints",
            "checkpoint",
            (4, "checkpoint", 4, large(), None, 44),
            (4, "checkpoint", 2, small(), None, 44),
            (4, "checkpoint", 2, small(), 3, 44),
            (2, "checkpoint", 5, small(), 0),
            (3, "checkpoint", 8, small()),
            (6, "checkpoint", 3, large(), _pick(rng, 1, 4)),
            (8, "checkpoint", 7, LEAST),
            (16, "checkpoint", 6, small(), _pick(rng, 0, 15)),
        ),
        case(
            "nothing but noise",
            "healthy",
            *((world, "healthy") for world in (2, 4, 16)),
            (3, "healthy", None, 1.0, None, None, (0,)),
            (8, "healthy", None, 1.0, None, None, (-1,)),
            (4, "healthy", None, 1.0, None, 60, tuple(range(_pick(rng, 0, 7), 24, 8))),
        ),
    ]


def _truth(world: int, kind: str, where: Any = None) -> tuple[str, Any]:
    return kind, [where, (where + 1) % world] if kind == "link" else where


def _diagnosis(seen: Observed) -> str | None:
    for i, (call, got, truth) in enumerate(
        zip(
            seen.case.inputs[0]["calls"],
            seen.data[0]["results"],
            seen.case.truths,
            strict=True,
        )
    ):
        log = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in call["log"].items()}
        if wrong := _misread(log, got, truth):
            return f"Log {i}, of {world_name(log['step'].shape[1])}: {wrong}"
    return None


def _misread(log: dict[str, torch.Tensor], got: Any, truth: tuple[str, Any]) -> str | None:
    if type(got) is not list or len(got) != 2 or got[0] not in KINDS:
        return f"return a pair, of which the first is one of {', '.join(KINDS)}."
    (kind, where), (said, place) = truth, got
    if said != kind:
        judge = {"gpu": _not_gpu, "link": _not_link, "checkpoint": _not_checkpoint}
        return judge.get(kind, _not_healthy)(log, where, said, place)
    if type(place) is list:
        place = [whole(rank) for rank in place]
    elif kind != "healthy":
        place = whole(place)
    if place == where:
        return None
    if kind == "gpu":
        return f"rank {where} is slow, not rank {place}. {_why(log, place)}"
    if kind == "link":
        words = f"the link from rank {where[0]} to rank {where[1]} is slow"
        if place == where[::-1]:
            return f"{words}, and the pair is the other way round."
        if type(place) is not list:
            return f"{words}: name both ranks, the sender first."
        return f"{words}, not {place}. Rank {where[1]} waits for it."
    if kind == "checkpoint":
        more = ""
        if type(place) is int and place > 0 and place % where == 0:
            more = " Every stall counts, not only some of them."
        return f"it is every {where} steps that all ranks stop, and {place} was given.{more}"
    return "a healthy job has no place: return None there."


def _why(log: dict[str, torch.Tensor], rank: Any) -> str:
    """How one may have come to a rank that is not the slow one."""
    if type(rank) is not int or not 0 <= rank < log["step"].shape[1]:
        return "Ranks count from 0."
    if log["step"].shape[1] == 2:
        return "The rank that waits is not the slow one."
    waits = log["wait"].median(0).values
    if rank == int(waits.argmax()) or rank == int(log["wait"].mean(0).argmax()):
        return "The rank that waits longest is behind the slow one in the ring."
    if rank in (int(log["step"].mean(0).argmax()), int(log["step"].median(0).values.argmax())):
        return "Its steps are not longer than others': all ranks end a step together."
    own = log["step"] - log["wait"] - log["ring"]
    if rank in (int(own.mean(0).argmax()), int(own.amax(0).argmax())):
        return "It had a single long step, which a mean or a maximum takes for a fault."
    return "A slow rank computes longer than others and waits least."


def _not_gpu(log: dict[str, torch.Tensor], rank: int, said: str, place: Any) -> str:
    own = (log["step"] - log["wait"] - log["ring"]).median(0).values
    world = len(own)
    if said == "link":
        return (
            f"rank {(rank + 1) % world} waits because rank {rank} begins to send late, not because "
            "of the link. Compare how long the ranks compute."
        )
    if said == "healthy":
        return (
            f"rank {rank} computes {own[rank] / own.min():.2f} times as long as the fastest, in "
            "each step. That is a slow GPU."
        )
    return f"rank {rank} is slow in each step, not in every {place} steps."


def _not_link(log: dict[str, torch.Tensor], pair: list[int], said: str, place: Any) -> str:
    sender, receiver = pair
    words = f"all ranks compute equally long, and the link from {sender} to {receiver} is slow."
    if said == "gpu":
        return f"rank {place} is not slow: {words}"
    if said == "healthy":
        return f"rank {receiver} waits longer for its first message than others: {words}"
    return f"each step is as long as the others: {words}"


def _not_checkpoint(log: dict[str, torch.Tensor], every: int, said: str, place: Any) -> str:
    if said == "gpu":
        return f"rank {place} is late in every {every} steps, and not in the others."
    if said == "link":
        return f"messages take as long as ever. Every {every} steps one step is long."
    return f"every {every} steps one step is long, on all ranks."


def _not_healthy(log: dict[str, torch.Tensor], _: Any, said: str, place: Any) -> str:
    if said == "checkpoint":
        return "this job is healthy. The long steps do not come at regular distances to its end."
    return (
        f"this job is healthy, and {said} {place} was given. Single steps are long by chance, and "
        "a fifth of a percent is noise."
    )


DIAGNOSE = Task(
    id="20.diagnose",
    title="What is wrong with this job",
    answer="diagnose",
    job="lesson20.diagnose",
    minutes=30,
    cases=_log_cases,
    criteria=(
        Criterion("the slow GPU", 3, _diagnosis, on=("",)),
        Criterion("the slow link", 3, _diagnosis, on=("link",)),
        Criterion("the stalls, and how often", 2, _diagnosis, on=("checkpoint",)),
        Criterion("a healthy job", 1, _diagnosis, on=("healthy",)),
        Criterion("the log stays as it is", 1, unchanged),
    ),
    hints=(
        "All ranks end a step together, so their steps are equally long. Which of them spends the "
        "least of it waiting, and why?",
        "What is left of a step without `wait` and `ring` is a rank's own time. A message arrives "
        "after its sender's own time and the link's time. Medians over steps ignore single long "
        "steps; with a stall in every second step a median does not, but a lower quantile does.",
        "low(values) = sorted(values)[len(values) // 4]. Stalls: the smallest k for which all "
        "steps at some i, i + k, i + 2k, ... are above 1.07 times low(steps). A slow GPU: low of "
        "its own times is above 1.07 times the least of all ranks. A slow link: the same for the "
        "wait, the ranks compared by their low.",
    ),
    debrief="MegaScale found slow machines by comparing the times of the same work on all ranks, "
    "and by drawing who waits for whom. A rank in a healthy place often reports the fault: it "
    "waits longest.",
)

TASKS = [GOODPUT, FEWEST, PLAN, DIAGNOSE]
