"""What jobs see next to an answer, and the words of judges."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest
import torch
from torch import nn

from ddpz_lite.course.check import data
from ddpz_lite.course.check.compare import number, whole
from ddpz_lite.course.check.run import observe
from ddpz_lite.course.check.task import Case, find
from ddpz_lite.course.check.vocabulary import explain, explain_number
from ddpz_lite.course.check.watch import Holding, Kept
from ddpz_lite.launcher import launch

K = 1000  # elements, 4 kB


def in_a_closure():
    kept = torch.zeros(K)
    return lambda: kept


def in_a_partial():
    return functools.partial(print, torch.zeros(K))


def in_a_graph():
    return (torch.zeros(K, requires_grad=True) * torch.ones(1)).sum()


def in_an_object():
    class Deep:
        __slots__ = ("inner",)

    deep = Deep()
    deep.inner = [{"a": (torch.zeros(K),)}]
    return deep


def in_a_hook():
    kept, layer = torch.zeros(K), nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: kept)
    return layer


def in_a_generator():
    def each():
        kept = torch.zeros(K)
        yield 1
        yield kept

    made = each()
    next(made)
    return made


def in_a_view():
    return torch.zeros(K)[:1]


def in_a_global():
    globals()["kept"] = torch.zeros(K)
    return "kept"


def in_a_circle():
    circle = [torch.zeros(K)]
    circle.append(circle)
    return circle


HOLDERS = (in_a_closure, in_a_partial, in_a_graph, in_an_object, in_a_hook, in_a_generator,
           in_a_view, in_a_global, in_a_circle)  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_storage_counts_until_no_holder_is_left(holder):
    with (holding := Holding()):
        held = holder()
    assert 4 * K <= holding.now() <= 4 * K + 64
    globals().pop("kept", None)
    del held
    assert holding.now() == 0


def test_the_jobs_own_and_what_is_made_outside_do_not_count():
    own = torch.zeros(K)
    with (holding := Holding([own])):
        view = own[:5]
    local = torch.ones(K)
    assert holding.now() == 0
    with holding:
        twice = local + own
    assert holding.now() == 8 * K and holding.now(besides=[local]) == 4 * K
    del view, twice


def test_the_peak_is_what_was_there_at_once():
    with (holding := Holding()):
        for _ in range(5):
            torch.zeros(K) + torch.zeros(K)
    assert holding.now() == 0 and holding.peak == 12 * K
    with holding:
        freed = torch.zeros(K)
        freed.untyped_storage().resize_(0)
    assert holding.now() == 0


def test_inputs_that_were_changed_are_named():
    weights, options = [torch.ones(2), torch.zeros(3)], {"rate": 0.1, "t": torch.tensor(2)}
    kept = Kept(weights=weights, options=options)
    assert kept.changed() == []
    weights[1][2] = -0.0
    assert kept.changed() == ["weights[1]"], "by bits"
    options["rate"] = 0.2
    weights.append(torch.ones(1))
    assert kept.changed() == ["weights[1]", "options['rate']", "weights[2]"]


def test_numbers_of_numpy_and_of_torch_are_numbers():
    there = data.unpack(data.pack([np.float32(0.5), np.int64(3), torch.tensor(4), True]))
    assert number(there[0]) == 0.5 and whole(there[1]) == 3 and whole(there[2]) == 4
    assert whole(there[3]) is None and whole(torch.tensor(4.0)) is None and whole(3.0) is None


def test_a_value_is_explained_by_the_mistake_that_gives_it():
    x = torch.tensor([1.0, 2.0])
    mistakes = {"is the sum.": lambda: 2 * x, "is nothing.": 0 * x}
    assert explain(x, x, "It", mistakes) is None
    assert explain(2 * x, x, "It", mistakes) == "It is the sum."
    assert explain(0 * x, x, "It", mistakes) == "It is nothing."
    assert "off by up to 3" in explain(x - 3, x, "It", mistakes)
    assert "dtype" in explain(2 * x.double(), x, "It", mistakes)
    assert explain_number(torch.tensor(4), 2, "It", {"is twice.": 4}) == "It is twice."
    assert explain_number("2", 2, "It", {}) == "It must be a number, not str."
    assert explain_number(float("nan"), 2, "It", {}) == "It is nan, which is wrong."


def test_the_heartbeat_keeps_no_local_alive():
    """The launcher's heartbeat looks at the rank's frames, and must not keep their locals."""

    def rank():
        def step():
            whole = torch.zeros(K)
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                pass
            return whole.numel()

        holding, held = Holding(), []
        for _ in range(10):
            with holding:
                step()
            held.append(holding.now())
        return held

    assert launch(rank, 1)[0] == [0] * 10


def test_an_error_of_torchs_own_is_not_the_stub():
    task = find("03.weighted_mean")
    case = Case("1 rank", [{"gradients": [torch.ones(3)], "samples": 1}])

    def torchs(gradients, samples):
        torch.optim.Optimizer(gradients, {}).step()

    def stub(gradients, samples):
        raise NotImplementedError

    assert observe(task, torchs, [case])[0].outcome == "raised"
    assert observe(task, stub, [case])[0].outcome == "unsolved"


def test_what_the_job_computes_or_knows_is_not_counted():
    holding = Holding()
    with holding:
        with holding.paused():
            own = torch.zeros(K)
        output = torch.zeros(K)
    assert holding.now() == 4 * K
    holding.know([output])
    assert holding.now() == 0 and own.numel() == K
