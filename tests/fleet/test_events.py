"""The simulated fleet: its time adds up, and it agrees with the formulas where there are some."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddpz_lite.course.fleet.events import DAY, HOUR, MINUTE, Fault, Fleet, Save, simulate

MEAN = 3 * HOUR  # between failures of the whole fleet of 100 nodes
CRASH = Fault("crash", mtbf=100 * MEAN, nodes=0, detect=MINUTE)
NODE = Fault("node", mtbf=100 * MEAN, detect=MINUTE, repair=12 * HOUR)
STORE = Save("store", every=20 * MINUTE, cost=MINUTE, read=MINUTE)
MEMORY = Save("memory", every=MINUTE, cost=0.1, lands=5, survives=["crash", "node"])


def fleet(*faults: Fault, saves=(STORE,), **more) -> Fleet:
    return Fleet(nodes=100, faults=faults, saves=saves, **{"restart": 5 * MINUTE, **more})


@pytest.mark.parametrize(
    "job",
    [
        fleet(),
        fleet(CRASH),
        fleet(CRASH, NODE, spares=3),
        fleet(CRASH, NODE),
        fleet(CRASH, NODE, saves=(MEMORY, STORE), spares=20),
        fleet(NODE, spares=20, group=10, regroup=20),
        fleet(Fault("rack", mtbf=10 * MEAN, nodes=16, repair=DAY), group=10, spares=16),
        fleet(replace(CRASH, silent=True, detect=HOUR)),
        fleet(CRASH, saves=()),
    ],
)
def test_all_of_the_time_is_useful_or_has_a_cause(job):
    report = simulate(job, days=30)
    assert report.useful + sum(report.lost.values()) == pytest.approx(report.wall)
    assert min(report.lost.values(), default=0) >= 0 and 0 <= report.goodput <= 1


def test_without_failures_only_saves_cost_time():
    report = simulate(fleet(), days=1)
    assert report.goodput == pytest.approx(20 / 21, rel=0.02) and set(report.lost) == {"saves"}


@pytest.mark.parametrize(("cost", "mean"), [(MINUTE, 3 * HOUR), (10 * MINUTE, HOUR)])
@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_goodput_is_that_of_dalys_model(cost, mean, factor):
    """Daly 2006, equation for the expected time with exponential failures, also during restarts."""
    every, restart = factor * math.sqrt(2 * cost * mean), 5 * MINUTE
    fault = Fault("crash", mtbf=100 * mean, nodes=0)
    job = fleet(fault, saves=[Save("store", every, cost)], restart=restart)
    expected = every / (mean * math.exp(restart / mean) * math.expm1((every + cost) / mean))
    found = [simulate(job, days=500, seed=seed).goodput for seed in range(4)]
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.02)


def test_failures_come_at_the_rate_of_all_nodes_together():
    for shape in (1, 0.7):
        found = simulate(fleet(replace(CRASH, shape=shape)), days=1000)
        assert found.failures["crash"] == pytest.approx(1000 * DAY / MEAN, rel=0.05)


def test_equal_seeds_draw_equal_failures():
    assert simulate(fleet(NODE), 30) == simulate(fleet(NODE), 30)
    assert simulate(fleet(NODE), 30) != simulate(fleet(NODE), 30, seed=1)


def test_a_hundred_thousand_gpus_take_few_events():
    """What grows is the number of failures; neither nodes nor saves are events."""
    faults = replace(CRASH, mtbf=8000 * HOUR), replace(NODE, mtbf=8000 * HOUR)
    job = Fleet(12_500, faults, saves=[MEMORY, STORE], spares=40, restart=5 * MINUTE)
    for one in (job, replace(job, group=125, regroup=20)):
        report = simulate(one, days=60)
        assert 3000 < report.failures.total() < 6000
        assert report.events < 14 * report.failures.total()


def test_a_save_must_survive_the_failure_and_be_complete():
    both = fleet(CRASH, saves=(MEMORY, STORE))
    blind = fleet(CRASH, saves=(replace(MEMORY, survives=["node"]), STORE))
    late = fleet(CRASH, saves=(replace(STORE, lands=20 * MINUTE),))
    lost = [simulate(job, 300).lost["repeated: crash"] for job in (both, blind, fleet(CRASH), late)]
    failures = simulate(both, 300).failures["crash"]
    assert lost[0] / failures < 2 * MINUTE  # half an interval of a minute, and what was in flight
    assert lost[1] / failures == pytest.approx(10 * MINUTE, rel=0.1)
    assert lost[2] == pytest.approx(lost[1], rel=0.05)
    # Up to 20 minutes more, and less where a failure comes before the first save.
    assert 24 * MINUTE < lost[3] / failures < 29 * MINUTE


def test_without_a_spare_the_job_waits_for_the_repair():
    """Also for all nodes that fail meanwhile."""
    none, few, many = (simulate(fleet(NODE, spares=spares), 300) for spares in (0, 5, 30))
    assert none.lost["waiting"] / none.failures["node"] > 0.2 * NODE.repair
    assert none.goodput < few.goodput < many.goodput and many.lost["waiting"] == 0
    assert many.gpu_hours == pytest.approx(130 * 8 * 300 * 24)


def test_a_silent_fault_costs_what_was_trained_until_it_was_found():
    def lost(detect: float, keep: int) -> float:
        fault = replace(CRASH, mtbf=100 * DAY, detect=detect, silent=True)
        report = simulate(fleet(fault, saves=[replace(STORE, keep=keep)]), days=300)
        return report.lost["repeated: crash"] / report.failures["crash"]

    assert lost(MINUTE, 3) == pytest.approx(11 * MINUTE, rel=0.15)
    assert lost(2 * HOUR, 20) == pytest.approx(130 * MINUTE, rel=0.15)
    assert lost(2 * HOUR, 3) > DAY / 2  # all saves that are left are wrong: back to the beginning


def test_an_elastic_job_loses_a_group_and_no_work():
    job = fleet(NODE, spares=30, group=10, regroup=20)
    whole, elastic = simulate(replace(job, group=0), 300), simulate(job, 300)
    assert not [cause for cause in elastic.lost if cause.startswith("repeated")]
    # A tenth of the fleet is missing for the detection and a restart of 5 minutes.
    per_failure = elastic.lost["missing groups"] / elastic.failures["node"]
    assert per_failure == pytest.approx(5 * MINUTE / 10, rel=0.2)
    assert elastic.goodput > whole.goodput
    with pytest.raises(ValueError, match="Fix: a group that divides"):
        simulate(replace(job, group=7), 1)


def test_when_all_groups_are_lost_the_job_goes_back_to_a_save():
    rack = Fault("rack", mtbf=100 * DAY, nodes=100, repair=HOUR)
    report = simulate(fleet(rack, spares=100, group=10), days=300)
    assert report.lost["repeated: rack"] / report.failures["rack"] == pytest.approx(600, rel=0.2)


def test_a_save_that_cannot_be_complete_is_refused():
    with pytest.raises(ValueError, match="Fix: every >= 90"):
        Save("store", every=60, cost=1, lands=90)
    with pytest.raises(ValueError, match="needs every > 0"):
        Save("store", every=0, cost=1)
