"""Simulates a job on many nodes through failures, saves, spares and restarts; times in seconds.

    fleet = Fleet(
        nodes=2048,
        faults=[Fault("node", mtbf=6000 * HOUR, detect=MINUTE, repair=DAY)],
        saves=[Save("store", every=20 * MINUTE, cost=MINUTE)],
        spares=16,
        restart=5 * MINUTE,
    )
    report = simulate(fleet, days=54)
    report.goodput, report.lost, report.failures

A fault comes to the fleet `nodes` times as often as to one node. For exponential times this is
exact, so one process draws the next fault of the whole fleet, and the number of nodes costs
nothing. Training and saving between two faults are computed at once, without an event each.

After a fault, the job passes through four states: **detect**, **wait** for nodes (no time if there
are spares), **restart**, which includes reading a save, and **train** again from the newest save
that survived. A fault that strikes meanwhile begins these again. In an elastic job (`group`) only
the replica group of the lost node passes through them; the others continue after `regroup`.

Left out: spares do not fail, a network that slows down, and steps that differ in time.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import ceil, gamma, inf
from typing import Any

import simpy

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True, eq=False)
class Fault:
    """One kind of failure.

    mtbf: mean time between such failures of *one* node. nodes: how many nodes one failure takes
    away until they are repaired; 0 if the job restarts on the same nodes. detect: until the job
    knows. shape: of the Weibull distribution of the time between failures of the fleet, with the
    same mean; 1 is exponential, below 1 they come in bursts. silent: from the failure until it is
    detected the job trains on, but with wrong numbers, so saves of that time are wrong too.
    """

    name: str
    mtbf: float
    nodes: int = 1
    detect: float = 0.0
    repair: float = 0.0
    shape: float = 1.0
    silent: bool = False


@dataclass(frozen=True, eq=False)
class Save:
    """One kind of checkpoint: to memory, to a disk, to a store.

    every: training time between two saves. cost: for how long training waits for one. lands: how
    much later it is complete, written while training continues. read: time to load it. survives:
    names of the faults after which it can be read; None for all. keep: how many are kept.
    """

    name: str
    every: float
    cost: float
    lands: float = 0.0
    read: float = 0.0
    survives: Sequence[str] | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every <= 0 or self.cost < 0 or self.keep < 1:
            raise ValueError(f"save {self.name!r}: needs every > 0, cost >= 0 and keep >= 1")
        if self.lands > self.every:
            raise ValueError(
                f"save {self.name!r} lands {self.lands:g} s later, after the next one has begun. "
                f"Fix: every >= {self.lands:g}."
            )


@dataclass(frozen=True)
class Fleet:
    """What a job runs on, and how it treats failures.

    nodes: that the job needs; spares come on top. restart: from having all nodes until training
    continues, without `read`. group: nodes of a replica group of an elastic job, 0 for a job that
    restarts as a whole. regroup: how long an elastic job stands still when groups change.
    """

    nodes: int
    faults: Sequence[Fault]
    saves: Sequence[Save] = ()
    spares: int = 0
    restart: float = 0.0
    gpus_per_node: int = 8
    group: int = 0
    regroup: float = 0.0


@dataclass
class Report:
    """What became of the time of a job. `useful` and all of `lost` together are `wall`.

    useful: training time whose result the job still has. lost: by cause, in seconds: "saves",
    "repeated: <fault>" for work that was done again, "detection", "waiting", "restart", and for an
    elastic job "regroup" and "missing groups". events: how many the simulation took.
    """

    wall: float
    gpus: int
    useful: float = 0.0
    lost: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    events: int = 0

    @property
    def goodput(self) -> float:
        """The share of the time that counts."""
        return self.useful / self.wall

    @property
    def gpu_hours(self) -> float:
        """What the job cost, spares included."""
        return self.gpus * self.wall / HOUR


def simulate(fleet: Fleet, days: float, seed: int = 0) -> Report:
    """Simulate so many days of a job. Equal seeds draw equal failures."""
    report = Report(days * DAY, (fleet.nodes + fleet.spares) * fleet.gpus_per_node)
    env = simpy.Environment()
    job = (_Elastic if fleet.group else _Job)(env, fleet, report, random.Random(seed))
    while env.peek() <= report.wall:
        env.step()
        report.events += 1
    job.finish()
    return report


class _Job:
    """A job that restarts as a whole."""

    def __init__(
        self, env: simpy.Environment, fleet: Fleet, report: Report, chance: random.Random
    ) -> None:
        self.env, self.fleet, self.report, self.chance = env, fleet, report, chance
        self.state = "train"
        self.clock = 0.0  # until here all time has been given to a cause
        self.work = 0.0  # training time whose result the job has
        # When complete and of which work, the newest last; one more may still be in flight.
        self.saved = {save: deque([(0.0, 0.0)], save.keep + 1) for save in fleet.saves}
        self.due = {save: save.every for save in fleet.saves}
        self.missing = 0  # nodes
        self.spares = simpy.Container(env, init=fleet.spares)
        self.process = env.process(self.run())
        for fault in fleet.faults:
            env.process(self.faults(fault))

    # ---- failures ----

    def faults(self, fault: Fault) -> Generator[simpy.Event, Any, None]:
        mean = fault.mtbf / self.fleet.nodes
        scale = mean / gamma(1 + 1 / fault.shape)  # a Weibull distribution with this mean
        while True:
            yield self.env.timeout(self.chance.weibullvariate(scale, fault.shape))
            self.report.failures[fault.name] += 1
            if fault.silent:
                self.env.process(self.detected_later(fault, self.env.now))
            else:
                self.strike(fault, self.env.now)

    def detected_later(self, fault: Fault, since: float) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(fault.detect)
        self.strike(fault, since)

    def strike(self, fault: Fault, since: float) -> None:
        self.process.interrupt((fault, since))

    def repair(self, fault: Fault) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(fault.repair)
        yield self.spares.put(fault.nodes)

    # ---- the states of the job ----

    def run(self) -> Generator[simpy.Event, Any, None]:
        detect: float | None = None  # None while training
        while True:
            try:
                if detect is not None:
                    yield from self.recover(detect)
                self.due = {save: self.work + save.every for save in self.fleet.saves}
                self.state = "train"
                yield self.env.timeout(inf)
            except simpy.Interrupt as interrupt:
                fault, since = interrupt.cause
                self.account()
                self.lose(fault, since)
                detect = 0.0 if fault.silent else fault.detect

    def recover(self, detect: float) -> Generator[simpy.Event, Any, None]:
        """Detect, wait, restart. Each state ends with `account`, as does an interrupt."""
        self.state = "detection"
        yield self.env.timeout(detect)
        self.account()
        self.state = "waiting"
        if self.missing:
            request = self.spares.get(self.missing)
            try:
                yield request
            finally:  # interrupted or not
                if request.triggered:
                    self.missing = 0
                request.cancel()
        self.account()
        self.state = "restart"
        save = self.newest()
        yield self.env.timeout(self.fleet.restart + (save.read if save else 0))
        self.account()

    def account(self, now: float | None = None) -> None:
        """Give the time since the last call to the state that the job was in."""
        now = self.env.now if now is None else now
        if self.state == "train":
            self.train(now)
        else:
            self.report.lost[self.state] += now - self.clock
        self.clock = now

    def train(self, until: float) -> None:
        """Train and save until then."""
        clock = self.clock
        while clock < until:
            save = min(self.due, key=self.due.__getitem__, default=None)
            work = min(self.due[save] - self.work, until - clock) if save else until - clock
            clock, self.work = clock + work, self.work + work
            if save is None or clock >= until:
                return
            waits = min(save.cost, until - clock)
            clock += waits
            self.report.lost["saves"] += waits
            if clock >= until and waits < save.cost:
                return  # the save was interrupted
            self.saved[save].append((clock + save.lands, self.work))
            self.due[save] = self.work + save.every

    def lose(self, fault: Fault, since: float) -> None:
        """Go back to the newest save that survives the fault."""
        for save, kept in self.saved.items():
            good = [one for one in kept if one[0] <= since]  # complete, and before it was wrong
            kept.clear()
            if save.survives is None or fault.name in save.survives:
                kept.extend(good)
        save = self.newest()
        work = self.saved[save][-1][1] if save else 0.0
        self.report.lost[f"repeated: {fault.name}"] += self.work - work
        self.work = work
        if fault.nodes:
            self.missing += fault.nodes
            self.env.process(self.repair(fault))

    def newest(self) -> Save | None:
        """The kind of save with the newest one; of equally new ones that which is read fastest."""
        kept = [save for save, some in self.saved.items() if some]
        return max(kept, key=lambda save: (self.saved[save][-1][1], -save.read), default=None)

    def finish(self) -> None:
        self.account(self.report.wall)
        self.report.useful = self.work


class _Elastic(_Job):
    """A job of replica groups: those left continue with a smaller batch, and no work is lost.

    A group that has a replacement for its lost nodes takes the state from another one. A failure
    within a group that is already missing changes nothing.
    """

    def __init__(self, env: simpy.Environment, fleet: Fleet, *others: Any) -> None:
        if fleet.nodes % fleet.group or any(fault.silent for fault in fleet.faults):
            raise ValueError(
                f"an elastic job needs equal groups and no silent faults; got {fleet.nodes} nodes "
                f"in groups of {fleet.group}. Fix: a group that divides nodes."
            )
        self.groups = fleet.nodes // fleet.group
        self.absent: set[int] = set()
        super().__init__(env, fleet, *others)

    def strike(self, fault: Fault, since: float) -> None:
        first = self.chance.randrange(self.groups)
        groups = range(first, first + max(1, ceil(fault.nodes / self.fleet.group)))
        hit = {group % self.groups for group in groups} - self.absent
        if not hit:
            return
        self.account()
        self.absent |= hit
        if len(self.absent) == self.groups:  # no group has the state any more
            self.lose(fault, since)
        elif fault.nodes:
            self.env.process(self.repair(fault))
        self.env.process(self.rejoin(hit, fault))
        self.process.interrupt(fault.detect + self.fleet.regroup)

    def rejoin(self, hit: set[int], fault: Fault) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(fault.detect)
        if fault.nodes:
            yield self.spares.get(fault.nodes)
        yield self.env.timeout(self.fleet.restart)
        self.account()
        self.absent -= hit
        self.process.interrupt(self.fleet.regroup)

    def run(self) -> Generator[simpy.Event, Any, None]:
        still = 0.0
        while True:
            try:
                if still:
                    self.state = "regroup"
                    yield self.env.timeout(still)
                    self.account()
                self.state = "train"
                yield self.env.timeout(inf)
            except simpy.Interrupt as interrupt:
                self.account()
                still = interrupt.cause

    def train(self, until: float) -> None:
        """Groups that are missing take their share of this time away, from saves too."""
        away = (until - self.clock) * len(self.absent) / self.groups
        self.report.lost["missing groups"] += away
        super().train(until - away)
