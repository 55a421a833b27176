"""Layers that sleep, and the fastest step of a run: what pictures of time are made from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import ddpz_lite as dz
from ddpz_lite import show


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))


def test_a_simulate_compute_module_computes_the_same():
    inputs = torch.ones(2, 4)
    plain, simulate_compute = network(), show.simulate_compute(network(), forward=0.0, backward=0.0)
    for module in (plain, simulate_compute):
        module(inputs).square().sum().backward()
    assert torch.equal(plain(inputs), simulate_compute(inputs))
    for p, q in zip(plain.parameters(), simulate_compute.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_it_sleeps_as_long_as_asked_in_forward_and_in_backward():
    module, began = show.simulate_compute(network(), forward=0.05, backward=0.1), time.monotonic()
    loss = module(torch.ones(2, 4)).sum()
    after_forward = time.monotonic()
    loss.backward()
    assert after_forward - began >= 0.05
    assert time.monotonic() - after_forward >= 0.1


def test_it_sleeps_in_proportion_to_the_weights_before_their_gradients():
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 3))  # 1 and 3 weights
    show.simulate_compute(layers, forward=0.0, backward=0.2)
    ready = {}
    for name, p in layers.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: ready.update({name: clock()}))
    loss = layers(torch.ones(2, 1)).sum()
    clock = time.monotonic
    began = clock()
    loss.backward()
    assert ready["1.weight"] - began >= 0.75 * 0.2
    assert ready["0.weight"] - ready["1.weight"] >= 0.25 * 0.2


def test_a_unit_sleeps_once_before_its_backward_and_in_spans():
    def ranks_nap():
        module = show.simulate_compute_in_unit(network(), forward=0.02, backward=0.04)
        ready = []
        module[2].weight.register_post_accumulate_grad_hook(lambda p: ready.append(clock()))
        began = clock()
        module(torch.ones(2, 4)).sum().backward()
        plain = network()
        plain(torch.ones(2, 4)).sum().backward()
        assert torch.equal(module[0].weight.grad, plain[0].weight.grad)
        return ready[0] - began

    clock = time.monotonic
    run = dz.launch(ranks_nap, 1)
    assert run[0] >= 0.06  # both sleeps, before the gradient of the last layer
    slept = {span.name: span.finished - span.started for span in run.spans}
    assert slept["forward"] >= 0.02 and slept["backward"] >= 0.04
    with pytest.raises(ValueError, match="must not be negative"):
        show.simulate_compute_in_unit(network(), 0.0, -1.0)


@pytest.mark.parametrize(
    ("module", "seconds", "complaint"),
    [(nn.Tanh(), 1.0, "no linear layer"), (network(), -1.0, "must not be negative")],
)
def test_what_simulate_compute_refuses(module, seconds, complaint):
    with pytest.raises(ValueError, match=complaint):
        show.simulate_compute(module, seconds, seconds)


@dataclass
class Event:
    rank: int
    op: str
    started: float
    finished: float | None


@dataclass
class FakeRun:
    world_size: int
    ledger: list = field(default_factory=list)
    spans: list = field(default_factory=list)


def three_steps():
    """Two ranks; steps of 9, 3 and 5 seconds on either, each after a barrier of 1 second."""
    events, at = [], 0.0
    for seconds in (9.0, 3.0, 5.0):
        for rank in (0, 1):
            events.append(Event(rank, "barrier", at, at + 1))
            events.append(Event(rank, "all_reduce", at + 1, at + 1 + seconds))
        at += 1 + seconds
    return FakeRun(2, events)


def test_the_fastest_step_is_found_and_cut_out():
    step, seconds = show.fastest_step(three_steps())
    assert seconds == show.seconds_of(step) == 3.0
    assert [(e.rank, e.op, e.started) for e in step.ledger] == [
        (0, "all_reduce", 11.0),
        (1, "all_reduce", 11.0),
    ]


def test_the_first_step_does_not_count():
    run = three_steps()
    run.ledger = [e for e in run.ledger if e.started < 14.0]  # 9 and 3 seconds
    for event in run.ledger:
        if event.op == "all_reduce" and event.started == 1.0:
            event.finished = 1.5  # the first is the fastest now
    assert show.fastest_step(run)[1] == 3.0


def test_one_step_is_too_few():
    run = three_steps()
    run.ledger = run.ledger[:4]
    with pytest.raises(ValueError, match="1 barriers"):
        show.fastest_step(run)


def test_what_never_ended_takes_no_time():
    stuck = Event(0, "all_reduce", 1.0, None)
    assert show.seconds_of(FakeRun(1, [stuck])) == 0.0
    assert show.seconds_of(FakeRun(1, [stuck, Event(0, "send", 2.0, 2.5)])) == 0.5
