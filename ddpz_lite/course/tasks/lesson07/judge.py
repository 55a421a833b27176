"""Tasks of lesson 07: without lockstep."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import torch

from ddpz_lite.course.check.chance import apart
from ddpz_lite.course.check.compare import close, differs, number
from ddpz_lite.course.check.task import Case, Criterion, Observed, Task
from ddpz_lite.course.check.vocabulary import (
    all_in_spans,
    explain,
    padded_shards,
    unchanged,
    waited_for,
    world_name,
)

MESSAGES = ("send", "recv")

# -- 07.sharded_server -----------------------------------------------------------------------------

STEPS = 3
RATES = (0.5, 0.1, 0.25)
Model = list[dict[str, Any]]  # of each rank: its shard, gradients and rate


def _server_cases(rng: torch.Generator) -> list[Case]:
    def model(world: int, place: int, length: int, dtype: torch.dtype) -> Model:
        def draw() -> torch.Tensor:
            return torch.randn(length, generator=apart(rng), dtype=dtype)

        rate = RATES[(world + length + place) % len(RATES)]
        return [
            {"shard": shard.clone(), "gradients": [draw() for _ in range(STEPS)], "rate": rate}
            for shard in padded_shards([draw()], world)
        ]

    def case(world: int, *lengths: int, kind: str = "", dtype=torch.float32) -> Case:
        models = [model(world, place, length, dtype) for place, length in enumerate(lengths)]
        inputs = [{"models": [one[rank] for one in models]} for rank in range(world)]
        name = "" if dtype is torch.float32 else ", float64"
        says = f"{world_name(world)}, {' and '.join(map(str, lengths))} weights{name}"
        return Case(says, inputs, kind)

    return [case(3, 600, 12), case(1, 5), case(2, 8, 8), case(4, 16),
            case(3, 10, 11, kind="uneven"), case(4, 1001, 2, kind="uneven"),
            case(2, 7, kind="uneven", dtype=torch.float64)]  # fmt: skip


def _models(seen: Observed) -> list[tuple[int, Model]]:
    """(place, what each rank began with) of each model of a case."""
    return list(enumerate(zip(*(rank["models"] for rank in seen.case.inputs), strict=True)))


def _states(model: Model) -> list[torch.Tensor]:
    """The padded weights before the first step and after each: (padded,)."""
    weights = torch.cat([rank["shard"] for rank in model])
    states = [weights]
    for step in range(STEPS):
        weights = weights - model[0]["rate"] * _pushed(model, step).mean(0)
        states.append(weights)
    return states


def _pushed(model: Model, step: int) -> torch.Tensor:
    """All ranks' gradients of a step with their padding: (world, padded)."""
    gradients = torch.stack([rank["gradients"][step] for rank in model])
    padded = len(model) * len(model[0]["shard"])
    return torch.nn.functional.pad(gradients, (0, padded - gradients.shape[1]))


def _server_values(seen: Observed) -> str | None:
    for place, model in _models(seen):
        states, length = _states(model), len(model[0]["gradients"][0])
        for step in range(STEPS):
            for rank, got in enumerate(seen.data):
                what = f"What rank {rank} returned in step {step + 1}"
                value, after = got["weights"][place][step], states[step + 1]
                if (plain := differs(value, after[:length], what)) is None:
                    continue
                mistakes = _mistakes(model, states, rank, step)
                message = explain(value, after[:length], what, mistakes)
                if message != plain:
                    return message
                if len(after) > length and close(value, after):
                    return f"{what} has the padding, too: cut it to the length of the gradient."
                if type(value) is torch.Tensor and close(value, after[: len(value)]):
                    return f"{what} is one part of the weights: pull the parts of all servers."
                return _partial(model, states[step], value, what, step) or plain
    return None


def _mistakes(
    model: Model, states: list[torch.Tensor], rank: int, step: int
) -> dict[str, torch.Tensor]:
    """The end of a sentence -> the weights that this mistake gives, (length,)."""
    world, rate, every = len(model), model[0]["rate"], _pushed(model, step)
    before = states[step]
    own = torch.cat([row.chunk(world)[peer] for peer, row in enumerate(every)])
    weights = {
        "are the weights before the step: pull after the servers have updated them.": before,
        "used the sum of the gradients; SGD in lockstep uses their mean.": (
            before - rate * every.sum(0)
        ),
        "used on each server only that rank's own gradient: push to the other servers, too.": (
            before - rate * own
        ),
        "used only this rank's own gradient: every server needs the gradients of all ranks.": (
            before - rate * every[rank]
        ),
        "went up the gradient, not down.": before + rate * every.mean(0),
        "used the mean with a rate of 1: multiply by `rate`.": before - every.mean(0),
        "began from the shard before step 1: update `shard` in place in each step.": (
            states[0] - rate * every.mean(0)
        ),
    }
    length = len(model[0]["gradients"][0])
    return {words: whole[:length] for words, whole in weights.items()}


def _partial(model: Model, before: torch.Tensor, value: Any, what: str, step: int) -> str | None:
    """A part of the weights in which the gradients of some ranks are missing."""
    if type(value) is not torch.Tensor or value.shape != model[0]["gradients"][step].shape:
        return None
    world, rate, part = len(model), model[0]["rate"], len(model[0]["shard"])
    every = _pushed(model, step)
    for server in range(world):
        place = slice(server * part, min((server + 1) * part, len(value)))
        for some in chain.from_iterable(combinations(range(world), n) for n in range(1, world)):
            for count in {world, len(some)}:
                found = before[place] - rate * every[list(some), place].sum(0) / count
                if len(found) and close(value[place], found):
                    names = " and ".join(map(str, some))
                    return (
                        f"{what} has part {server} with the gradients of {names} alone: a server "
                        "answers when all ranks have pushed."
                    )
    return None


def _server_shards(seen: Observed) -> str | None:
    for place, model in _models(seen):
        states = _states(model)
        for step in range(STEPS):
            before, after = (padded_shards([states[step + n]], len(model)) for n in (0, 1))
            for rank, got in enumerate(seen.data):
                mistakes = {"has not changed in this step: update it in place.": before[rank]}
                what = f"Rank {rank}'s shard after step {step + 1}"
                if message := explain(got["shards"][place][step], after[rank], what, mistakes):
                    return message
    return None


def _server_messages(seen: Observed) -> str | None:
    if wrong := all_in_spans(seen):
        return wrong
    for rank in range(seen.case.world):
        for op in seen.ops(rank):
            if op not in MESSAGES:
                return f"Rank {rank} called {op}. Build push and pull from send and recv."
    return waited_for(seen)


def _server_bytes(seen: Observed) -> str | None:
    for place, model in _models(seen):
        world, shard = len(model), model[0]["shard"]
        part = len(shard) * shard.element_size()
        most = 2 * (world - 1) * part
        for step in range(STEPS):
            sent = [seen.sent(rank, f"model {place}, step {step}") for rank in range(world)]
            if max(sent) <= most:
                continue
            rank = sent.index(max(sent))
            how = "Push to a server the part that it serves, and pull from it that part."
            if min(sent) < max(sent):
                how = "It sends more than the other ranks: let every rank serve its part."
            return (
                f"Rank {rank} sent {max(sent):,} bytes; 2(N-1)/N of the weights is {most:,}. {how}"
            )
    return None


def _server_stays(seen: Observed) -> str | None:
    for rank, got in enumerate(seen.data):
        if got["later"]:
            return (
                f"Rank {rank}: what step {got['later'][0]} returned was changed by a later step. "
                "Later steps update the shard in place, so return a separate tensor."
            )
    return unchanged(seen)


SHARDED = Task(
    id="07.sharded_server",
    title="A server on every rank",
    answer="sharded_server",
    job="lesson07.sharded_server",
    minutes=20,
    cases=_server_cases,
    criteria=(
        Criterion("the weights of synchronous SGD on every rank", 2, _server_values, on=("",)),
        Criterion("lengths that do not divide by N", 1, _server_values, on=("uneven",)),
        Criterion("each rank's shard is updated in place", 1, _server_shards),
        Criterion("send and recv alone", 1, _server_messages),
        Criterion("at most 2(N-1)/N of the weights from each rank", 2, _server_bytes),
        Criterion("gradients and returned weights stay unchanged", 1, _server_stays),
    ),
    hints=(
        "Which part of your gradient does the server on rank 2 need? Which part of the weights "
        "does it have for you?",
        "Two rounds, each with one message to every other rank and one from it: parts of "
        "gradients, then parts of weights. When may a server answer?",
        "Pad the gradient and split it into N parts. isend part q to rank q, irecv the others' "
        "parts of yours, wait for all. shard -= rate * mean. isend the shard to all, irecv theirs, "
        "wait, put them in order, cut off the padding.",
    ),
    debrief="A server in lockstep on every rank: reduce-scatter, step, all-gather. That is ZeRO-1, "
    "lesson 09. Servers that run next to the workers (BytePS, ps-lite) send the same two messages.",
)

# -- 07.bounded ------------------------------------------------------------------------------------


def _clock_cases(rng: torch.Generator) -> list[Case]:
    def steps(count: int, low: int, high: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=rng).tolist()

    def run(bound: int, *speeds: tuple[int, int], lost: tuple[tuple[int, int], ...] = ()) -> dict:
        """speeds: of each worker the least and the greatest length of a step."""
        seconds = [steps(24, *speed) for speed in speeds]
        return {"bound": bound, "seconds": seconds, "lost": [list(one) for one in lost]}

    def case(says: str, *runs: dict, kind: str = "") -> Case:
        return Case(says, [{"runs": list(runs)}], kind)

    fast, slow, wild = (90, 110), (290, 320), (50, 400)
    return [
        case("3 workers, one slow, bound 2", run(2, fast, fast, slow)),
        case("bounds 0, 1 and 4", run(0, fast, wild, slow), run(1, wild, wild, wild, wild),
             run(4, slow, fast, (400, 450))),
        case("1 and 2 workers", run(0, fast), run(3, slow, fast), run(0, wild, wild)),
        case("the slowest leaves", run(2, fast, fast, slow, lost=((2, 1000),)),
             run(1, fast, wild, slow, slow, lost=((3, 700), (2, 1900))), kind="left"),
        case("a worker leaves while it waits", run(1, fast, fast, fast, slow, lost=((1, 250),)),
             run(1, fast, (130, 140), slow, lost=((0, 500),)),
             run(0, fast, wild, slow, lost=((0, 150), (1, 1700))), kind="left"),
        case("all leave", run(2, fast, slow, lost=((0, 450), (1, 460))), kind="left"),
    ]  # fmt: skip


class _Clock:
    """The clock that is asked for; or one with a mistake.

    slowest: of the steps of the workers that are here. stay: one that has left is still counted.
    silent: left() returns no worker.
    """

    def __init__(
        self,
        workers: int,
        bound: int,
        *,
        slowest: Callable[[list[int]], float] = min,
        more: int = 0,
        stay: bool = False,
        forgets: bool = False,
        one: bool = False,
        ghosts: bool = False,
        silent: bool = False,
    ) -> None:
        self.bound, self.slowest = bound + more, slowest
        self.stay, self.forgets, self.one, self.ghosts = stay, forgets, one, ghosts
        self.silent = silent
        self.done = dict.fromkeys(range(workers), 0)
        self.waiting: list[int] = []
        self.gone: set[int] = set()

    def call(self, what: str, worker: int) -> list[int]:
        if what == "finished":
            self.done[worker] += 1
            self.waiting.append(worker)
        else:
            self.gone.add(worker)
            if not self.ghosts and worker in self.waiting:
                self.waiting.remove(worker)
        here = [n for w, n in self.done.items() if self.stay or w not in self.gone]
        slowest = self.slowest(here) if here else 0
        ready = [w for w in self.waiting if self.done[w] - slowest <= self.bound]
        if self.one:
            ready = ready[:1]
        if self.forgets:
            ready = [w for w in ready if w == worker]
            self.waiting = []
        if self.silent and what == "left":
            return []
        self.waiting = [w for w in self.waiting if w not in ready]
        return ready


CLOCKS: dict[str, dict[str, Any]] = {
    "All workers begin at once: hold back those that are more than `bound` ahead.": {
        "more": 1 << 30
    },
    "It is lockstep, whatever the bound is.": {"more": "lockstep"},
    "It holds a worker that is exactly `bound` steps ahead; that worker may begin.": {"more": -1},
    "It lets a worker begin that is `bound` + 1 steps ahead.": {"more": 1},
    "It counts from the mean of the workers; the bound is against the slowest.": {
        "slowest": lambda done: sum(done) / len(done)
    },
    "It forgets the waiting workers: return them when the slowest one has caught up.": {
        "forgets": True
    },
    "It returns one worker at a time, where several may begin.": {"one": True},
    "left() returned no worker: the worker that left may have been the slowest, so others may "
    "begin now.": {"silent": True},
    "It still counts a worker that has left: remove it.": {"stay": True},
    "It returns a worker that has left.": {"ghosts": True},
}


def _named_clock(run: dict[str, Any], log: list[list[Any]], until: int) -> str | None:
    """The mistake that gives all answers of the log, or those up to the first wrong one."""
    plain = all(type(a) is list and all(type(w) is int for w in a) for _, _, a in log)
    for part in [log, log[: until + 1]] if plain else [log[: until + 1]]:
        for words, options in CLOCKS.items():
            more = options.get("more", 0)
            more = -run["bound"] if more == "lockstep" else more
            clock = _Clock(len(run["seconds"]), run["bound"], **{**options, "more": more})
            if all(sorted(clock.call(what, w)) == sorted(answered) for what, w, answered in part):
                return words
    return None


def _clock_judge(kinds: tuple[str, ...]) -> Callable[[Observed], str | None]:
    """The first thing of these kinds that is wrong in a log: "form", "ahead", "held"."""

    def judge(seen: Observed) -> str | None:
        runs, logs = seen.case.inputs[0]["runs"], seen.data[0]["logs"]
        for run, log in zip(runs, logs, strict=True):
            for place, kind, sentence in _faults(run, log):
                if kind in kinds:
                    named = None if kind == "form" else _named_clock(run, log, place)
                    return f"{sentence} {named or ''}".strip()
        return None

    return judge


def _faults(run: dict[str, Any], log: list[list[Any]]):
    """(place in the log, kind, sentence) of each fault."""
    bound, workers = run["bound"], len(run["seconds"])
    done, waiting = dict.fromkeys(range(workers), 0), set()
    for place, (what, worker, answered) in enumerate(log):
        if what == "finished":
            done[worker] += 1
            waiting.add(worker)
        else:
            del done[worker]
            waiting.discard(worker)
        call = f"{what}({worker})"
        if wrong := _form(answered, call, waiting, workers, done):
            yield place, "form", wrong
            return
        slowest = min(done.values(), default=0)
        for other in answered:
            waiting.discard(other)
            if done[other] - slowest > bound:
                yield (
                    place,
                    "ahead",
                    f"{call} lets worker {other} begin with {_steps(done[other])} finished, and "
                    f"the slowest has {slowest}: more than {bound} ahead.",
                )
        for other in sorted(waiting):
            if done[other] - slowest <= bound:
                yield (
                    place,
                    "held",
                    f"After {call} worker {other} still waits, with {_steps(done[other])} finished "
                    f"where the slowest has {slowest}; {bound} ahead are allowed.",
                )


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _form(
    answered: Any, call: str, waiting: set[int], workers: int, done: dict[int, int]
) -> str | None:
    if type(answered) is not list:
        return f"{call} must return a list of workers, not {answered!r}."
    for other in answered:
        if type(other) is not int or not 0 <= other < workers:
            return f"{call} returned {other!r}; workers are the numbers 0 to {workers - 1}."
        if other not in done:
            return f"{call} returned worker {other}, which has left."
        if other not in waiting or answered.count(other) > 1:
            return f"{call} returned worker {other}, which does not wait: answer each step once."
    return None


BOUNDED = Task(
    id="07.bounded",
    title="A clock with a bound",
    answer="BoundedClock",
    job="lesson07.bounded",
    minutes=20,
    cases=_clock_cases,
    criteria=(
        Criterion("lists of workers that wait", 1, _clock_judge(("form",)), on=("",)),
        Criterion("no worker is more than the bound ahead", 2, _clock_judge(("ahead",)), on=("",)),
        Criterion("no worker waits that may begin", 2, _clock_judge(("held",)), on=("",)),
        Criterion(
            "a worker that has left blocks no other",
            2,
            _clock_judge(("form", "ahead", "held")),
            on=("left",),
        ),
    ),
    hints=(
        "A fast worker finishes a step and must wait. Which later calls can be the one that lets "
        "it begin?",
        "Keep two things: how many steps each worker has finished, and which workers wait. After "
        "each call, check all that wait.",
        "finished: count, put the worker among the waiting. left: remove it from both. Then, in "
        "both: slowest = min of the counts; return the waiting ones with count - slowest <= bound, "
        "and take them out.",
    ),
    debrief="Ho et al. (2013) let a worker read a local copy of the weights that is at most s "
    "clocks old, so it asks the server only when the copy is too old. The bound is the same.",
)

# -- 07.largest_rate -------------------------------------------------------------------------------


def _rate_cases(rng: torch.Generator) -> list[Case]:
    def curvatures(count: int) -> list[float]:
        drawn = torch.rand(count, generator=rng, dtype=torch.float64) * 4 + 0.3
        return [round(value, 3) for value in drawn.tolist()]

    def case(says: str, kind: str, delays: tuple[int, ...], counts: tuple[int, ...]) -> Case:
        asked = [{"curvatures": curvatures(n), "delay": d} for d in delays for n in counts]
        return Case(says, [{"questions": asked}], kind)

    several = case("several curvatures, small and large ones", "several", (0, 0, 0), (2, 3, 5))
    for scale in (1e-4, 1e4):
        for delay in (0, 2):
            drawn = [scale * c for c in curvatures(2)]
            several.inputs[0]["questions"].append({"curvatures": drawn, "delay": delay})
    late = case("delays of 2 to 12, and of 120", "delay", (2, 3, 4, 5, 8, 12), (1, 4))
    late.inputs[0]["questions"].append({"curvatures": curvatures(1), "delay": 120})
    return [
        case("one curvature, no delay", "", (0,), (1, 1)),
        several,
        case("a delay of 1", "one", (1, 1), (1, 3)),
        late,
    ]


def limit(curvatures: list[float], delay: int) -> float:
    """The largest rate at which w[t + 1] = w[t] - rate * curvature * w[t - delay] shrinks."""
    return 2 * math.sin(math.pi / (4 * delay + 2)) / max(curvatures)


def grows(rate: float, curvatures: list[float], delay: int) -> bool:
    """Whether the recursion grows for one of the curvatures: it is run."""
    half = 400 * (delay + 2)
    for curvature in curvatures:
        w = deque([1.0] * (delay + 1), delay + 1)  # the last delay + 1 values
        early = late = 0.0
        for step in range(2 * half):
            new = w[-1] - rate * curvature * w[0]
            w.append(new)
            if abs(new) > 1e12:
                return True
            if half // 2 <= step < half:
                early = max(early, abs(new))
            elif step >= 3 * half // 2:
                late = max(late, abs(new))
        if late > early:
            return True
    return False


STEEPEST = "the steepest direction diverges first, so the largest decides."
SINE = "w swings, and the limit is a sine."
RATE_MISTAKES: dict[str, Callable[[list[float], int], float]] = {
    "That is 2 over the curvature: it forgets the delay.": lambda c, d: 2 / max(c),
    "Without delay w is multiplied by 1 - rate * curvature: 2 over it, not 1.": (
        lambda c, d: limit(c, d) / 2
    ),
    "That takes every delay for a delay of 1.": lambda c, d: limit(c, min(d, 1)),
    f"It is not 2 over (delay + 1): {SINE}": lambda c, d: 2 / (d + 1) / max(c),
    f"It is not 1 over the delay: {SINE}": lambda c, d: (1 / d if d else 2) / max(c),
    f"The smallest curvature does not decide: {STEEPEST}": lambda c, d: limit([min(c)], d),
    f"The mean of the curvatures does not decide: {STEEPEST}": (
        lambda c, d: limit([sum(c) / len(c)], d)
    ),
    f"The sum is not the curvature of any direction: {STEEPEST}": lambda c, d: limit([sum(c)], d),
    "The sine is of an angle in radians.": lambda c, d: 2 * math.sin(180 / (4 * d + 2)) / max(c),
    "That is d^d / (d + 1)^(d + 1), the fastest rate. Above it w begins to swing and still "
    "shrinks; the limit is larger.": (lambda c, d: d**d / (d + 1) ** (d + 1) / max(c)),
    "That is the limit for a delay of one more.": lambda c, d: limit(c, d + 1),
}


def _rates(seen: Observed) -> str | None:
    questions, answers = seen.case.inputs[0]["questions"], seen.data[0]["rates"]
    for question, answer in zip(questions, answers, strict=True):
        value, asked = number(answer), f"Curvatures {question['curvatures']}, delay"
        asked = f"{asked} {question['delay']}:"
        if value is None or not 0 < value < math.inf:
            return f"{asked} the rate must be a positive number, not {answer!r}."
        if grows(0.98 * value, **question):
            wrong = f"{asked} at 0.98 of your rate, {value:.4g}, w grows."
        elif not grows(1.02 * value, **question):
            wrong = f"{asked} at 1.02 of your rate, {value:.4g}, w still shrinks."
        else:
            continue
        return f"{wrong} {_rate_mistake(questions, answers, question, value) or ''}".strip()
    return None


def _rate_mistake(
    questions: list[dict[str, Any]], answers: list[Any], first: dict[str, Any], value: float
) -> str | None:
    """The mistake that gives all of these answers; else one that gives the first wrong one."""
    every = [(q, number(a)) for q, a in zip(questions, answers, strict=True)]
    for asked in (every, [(first, value)]):
        for words, mistake in RATE_MISTAKES.items():
            near = (
                v is not None and math.isclose(v, mistake(*q.values()), rel_tol=1e-6)
                for q, v in asked
            )
            if all(near):
                return words
    return None


LARGEST_RATE = Task(
    id="07.largest_rate",
    title="The rate that staleness allows",
    answer="largest_rate",
    job="lesson07.largest_rate",
    minutes=10,
    cases=_rate_cases,
    criteria=(
        Criterion("one curvature, without delay", 1, _rates, on=("",)),
        Criterion("several curvatures", 1, _rates, on=("several",)),
        Criterion("a delay of 1", 1, _rates, on=("one",)),
        Criterion("any delay", 2, _rates, on=("delay",)),
        Criterion("the curvatures stay unchanged", 1, unchanged),
    ),
    hints=(
        "Without delay w is multiplied by 1 - rate * curvature. When does that shrink, and for "
        "which of several curvatures first not?",
        "At the limit w swings with a constant height: w[t] = exp(i * angle * t). What do the "
        "recursion's lengths and angles then require?",
        "2 * sin(pi / (4 * delay + 2)), over the largest curvature.",
    ),
    debrief="The curvatures of a real model are unknown. People lower the rate with the number of "
    "workers, or divide it by the staleness of each gradient (Zhang et al. 2016).",
)

# -- 07.update_bound -------------------------------------------------------------------------------

Speed = tuple[int, int]  # the least and the greatest length of a step
Lost = tuple[int, int, int | None]  # which worker, when, and when it asks again


def _update_cases(rng: torch.Generator) -> list[Case]:
    def run(bound: int, *speeds: Speed, lost: tuple[Lost, ...] = (), idle: int = 0) -> dict:
        names = torch.randperm(90, generator=rng)[: len(speeds)].tolist()
        workers = [
            {
                "name": name,
                "starts": place,
                "seconds": torch.randint(low, high, (14,), generator=rng).tolist(),
                "idle": idle + int(torch.randint(1, 40, (), generator=rng)),
                "lost": [[leaves, again] for who, leaves, again in lost if who == place],
            }
            for place, (name, (low, high)) in enumerate(zip(names, speeds, strict=True))
        ]
        return {"bound": bound, "workers": workers}

    def case(says: str, *runs: dict, kind: str = "") -> Case:
        return Case(says, [{"runs": list(runs)}], kind)

    fast, slow, wild = (90, 130), (700, 800), (50, 500)
    return [
        case("4 workers, one slow, bounds 5 and 2", run(5, slow, fast, fast, fast),
             run(2, slow, fast, fast, fast)),
        case("bounds 0 to 8", run(0, wild, wild, wild), run(1, wild, wild, wild),
             run(2, *[wild] * 4), run(3, fast, slow, fast, fast), run(8, *[wild] * 6)),
        case("1 and 2 workers", run(0, fast), run(4, fast), run(1, fast, slow), run(3, slow, fast)),
        case("a bound that holds no worker", run(500, wild, slow, fast, fast, fast)),
        case("a slow worker leaves while it computes",
             run(4, slow, fast, fast, fast, lost=((0, 600, None),)),
             run(2, slow, slow, fast, lost=((0, 300, None), (1, 900, None))), kind="left"),
        case("workers leave while they wait",
             run(0, slow, fast, wild, fast, lost=((1, 400, None), (2, 900, None))),
             run(1, slow, fast, fast, fast, lost=((2, 450, None), (3, 500, 1100))), kind="left"),
        case("workers leave and come back",
             run(3, slow, fast, fast, wild, lost=((0, 350, 600), (2, 700, 1000))),
             run(2, slow, fast, wild, lost=((0, 400, 410), (0, 650, 990))), kind="left"),
        case("a worker leaves between two steps",
             run(9, fast, wild, fast, lost=((0, 250, 900),), idle=200), kind="left"),
        case("all leave", run(1, wild, wild, wild, lost=((0, 900, None), (1, 905, None),
                                                         (2, 910, 2000))), kind="left"),
    ]  # fmt: skip


class _Server:
    """The server that is asked for; or one with a mistake.

    stale: what is held against the bound before a worker begins, from the ages of the gradients in
    flight. at_once: it is asked once for all that wait. silent: which calls return no worker.
    """

    def __init__(
        self,
        bound: int,
        *,
        stale: Callable[[list[int]], float] = lambda ages: max(ages, default=0) + len(ages),
        at_once: bool = False,
        most: int = 1 << 30,
        caller: bool = False,
        silent: tuple[str, ...] = (),
        lands: bool = False,
        stays: bool = False,
    ) -> None:
        self.bound, self.stale, self.at_once, self.most = bound, stale, at_once, most
        self.caller, self.silent, self.lands, self.stays = caller, silent, lands, stays
        self.updates = 0
        self.pulled: dict[int, int] = {}
        self.waiting: list[int] = []

    def call(self, what: str, worker: int) -> list[int]:
        if what == "asks":
            self.waiting = [worker] if self.caller else [*self.waiting, worker]
        elif what == "pushed":
            self.updates += self.pulled.pop(worker, None) is not None
        else:
            self.waiting = [other for other in self.waiting if other != worker]
            if worker in self.pulled and not self.stays:
                del self.pulled[worker]
                self.updates += self.lands
        if what in self.silent:
            return []
        begin: list[int] = []
        before = self._measured()
        while self.waiting and len(begin) < self.most:
            if (before if self.at_once else self._measured()) > self.bound:
                break
            begin.append(self.waiting.pop(0))
            self.pulled[begin[-1]] = self.updates
        return begin

    def _measured(self) -> float:
        return self.stale([self.updates - at for at in self.pulled.values()])


class _Steps:
    """The bound of task 2, on the steps that each worker has finished."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.done: dict[int, int] = {}
        self.waiting: list[int] = []

    def call(self, what: str, worker: int) -> list[int]:
        if what == "asks":
            self.done.setdefault(worker, 0)
            self.waiting.append(worker)
        elif what == "pushed":
            self.done[worker] += 1
        else:
            self.done.pop(worker, None)
            self.waiting = [other for other in self.waiting if other != worker]
        slowest = min(self.done.values(), default=0)
        begin = [w for w in self.waiting if self.done[w] - slowest <= self.bound]
        self.waiting = [w for w in self.waiting if w not in begin]
        return begin


def _server(**options: Any) -> Callable[[int], _Server]:
    return lambda bound: _Server(bound, **options)


SERVERS: dict[str, Callable[[int], Any]] = {
    "That is task 2's bound, on finished steps. A gradient grows older with every update, and a "
    "slow worker's step sees many.": _Steps,
    "It counts a lost gradient as an update; it never arrives, and changes no weight.": _server(
        lands=True
    ),
    "It still counts a worker that has left as one in flight.": _server(stays=True),
    "left() returns no worker: with one fewer in flight others may begin.": _server(
        silent=("left",)
    ),
    "Every worker begins at once: hold some back.": _server(stale=lambda ages: -1),
    "It lets one worker compute at a time, whatever the bound is.": _server(
        stale=lambda ages: 0 if not ages else 1 << 30
    ),
    "It counts the updates since a pull, but not the updates that may still come: each other "
    "worker in flight can push before this one.": _server(stale=lambda ages: max(ages, default=0)),
    "It counts the workers in flight, but not the updates since their pulls: a slow worker's "
    "gradient grows older while others push and pull.": _server(stale=len),
    "A worker's own push does not make its gradient older: count only the others.": _server(
        stale=lambda ages: max(ages, default=0) + len(ages) + 1
    ),
    "The worker that begins is in flight too, so it counts for all the others.": _server(
        stale=lambda ages: max(ages, default=0) + len(ages) - 1
    ),
    "The oldest gradient in flight decides, not the newest.": _server(
        stale=lambda ages: min(ages, default=0) + len(ages)
    ),
    "The oldest gradient in flight decides, not the mean.": _server(
        stale=lambda ages: sum(ages) / max(1, len(ages)) + len(ages)
    ),
    "It checks once and lets all begin. Each worker that begins is in flight when you check the "
    "next one.": _server(at_once=True),
    "It returns one worker at a time, where several may begin.": _server(most=1),
    "It forgets the workers that wait: a later call has to return them.": _server(
        caller=True, silent=("pushed", "left")
    ),
    "pushed() returns no worker: the oldest gradient may have arrived, so others may begin.": (
        _server(silent=("pushed",))
    ),
}


def _named_server(runs: list[tuple[int, list[list[Any]]]], place: int, until: int) -> str | None:
    """The mistake that gives all answers of all runs, else those of run `place`, else its first."""
    bound, log = runs[place]
    for some in (runs, [(bound, log)], [(bound, log[: until + 1])]):
        for words, made in SERVERS.items():
            if all(_answers_of(made(limit), part) for limit, part in some):
                return words
    return None


def _answers_of(server: Any, log: list[list[Any]]) -> bool:
    """Whether the log has this server's answers."""
    return all(
        type(answered) is list
        and all(type(w) is int for w in answered)
        and sorted(server.call(what, worker)) == sorted(answered)
        for what, worker, answered in log
    )


def _update_judge(kinds: tuple[str, ...]) -> Callable[[Observed], str | None]:
    """The first thing of these kinds that is wrong in a log: "form", "old", "held", "order"."""

    def judge(seen: Observed) -> str | None:
        bounds = [run["bound"] for run in seen.case.inputs[0]["runs"]]
        runs = list(zip(bounds, seen.data[0]["logs"], strict=True))
        for which, (bound, log) in enumerate(runs):
            for place, kind, sentence in _update_faults(bound, log):
                if kind in kinds:
                    named = kind in ("old", "held") and _named_server(runs, which, place)
                    return f"Bound {bound}: {sentence} {named or ''}".strip()
        return None

    return judge


def _update_faults(bound: int, log: list[list[Any]]):
    """(place in the log, kind, sentence) of each fault."""
    updates, pulled, waiting = 0, {}, []  # pulled: of each in flight, the updates before its pull
    for place, (what, worker, answered) in enumerate(log):
        if what == "asks":
            waiting.append(worker)
        elif what == "pushed":
            pulled.pop(worker, None)
            updates += 1
        else:
            pulled.pop(worker, None)
            waiting = [other for other in waiting if other != worker]
        call = f"{what}({worker})"
        if wrong := _not_waiting(answered, call, waiting):
            yield place, "form", wrong
            return
        for other in answered:
            passed = [w for w in waiting[: waiting.index(other)] if w not in answered]
            if passed:
                yield (
                    place,
                    "order",
                    f"{call} lets worker {other} begin, and worker {passed[0]} asked before it.",
                )
        waiting = [other for other in waiting if other not in answered]
        pulled |= dict.fromkeys(answered, updates)
        oldest = min(pulled, key=pulled.__getitem__, default=None)
        age = 0 if oldest is None else updates - pulled[oldest]
        if answered and age + len(pulled) - 1 > bound:
            yield (
                place,
                "old",
                f"after {call} worker {oldest} is in flight, pulled {_updates(age)} ago, and may "
                f"push after all others in flight, {len(pulled) - 1}: then its gradient is "
                f"{_updates(age + len(pulled) - 1)} old.",
            )
        if waiting and age + len(pulled) <= bound:
            yield (
                place,
                "held",
                f"after {call} worker {waiting[0]} waits, with {len(pulled)} in flight and the "
                f"oldest pull {_updates(age)} ago. If it began, no gradient could get more than "
                f"{_updates(age + len(pulled))} old.",
            )


def _updates(count: int) -> str:
    return f"{count} update{'' if count == 1 else 's'}"


def _not_waiting(answered: Any, call: str, waiting: list[int]) -> str | None:
    if type(answered) is not list:
        return f"{call} must return a list of workers, not {answered!r}."
    for other in answered:
        if type(other) is not int:
            return f"{call} returned {other!r}; a worker is the number that asked."
        if other not in waiting or answered.count(other) > 1:
            return (
                f"{call} returned worker {other}, which does not wait: return a worker once for "
                "each time that it asks, and none that has left since."
            )
    return None


UPDATE_BOUND = Task(
    id="07.update_bound",
    title="A bound in updates",
    answer="UpdateBound",
    job="lesson07.update_bound",
    minutes=15,
    cases=_update_cases,
    criteria=(
        Criterion("lists of workers that wait", 1, _update_judge(("form",)), on=("",)),
        Criterion("no gradient can be older than the bound", 2, _update_judge(("old",)), on=("",)),
        Criterion("no worker waits that could begin", 2, _update_judge(("held",)), on=("",)),
        Criterion("the first that asked begins first", 1, _update_judge(("order",))),
        Criterion(
            "a worker that has left counts no more",
            2,
            _update_judge(("form", "old", "held")),
            on=("left",),
        ),
    ),
    hints=(
        "Four workers have just pulled the same weights. How old can the gradient of the last one "
        "to push be, before a worker pulls again?",
        "For each worker in flight, two numbers add up: the updates since its pull, and the "
        "workers that may push before it. How does a push change this sum, and how does a pull?",
        "Keep updates, {worker: updates at its pull}, and a queue. After each call, while a worker "
        "waits and (updates - oldest pull) + (workers in flight) <= bound: the first in the queue "
        "begins.",
    ),
    debrief="Bounds on clocks (task 2) are cheaper to keep; this one is what proofs about delayed "
    "gradients assume. Note its price: one slow worker holds all others back after `bound` "
    "updates.",
)

TASKS = [SHARDED, BOUNDED, LARGEST_RATE, UPDATE_BOUND]
