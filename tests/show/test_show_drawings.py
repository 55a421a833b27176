"""The drawings of single lessons: what they count, what they say, that they are drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpz_lite.course.show.lesson05 import bucket_sizes, exposed, versions
from ddpz_lite.course.show.lesson07 import delay, path
from ddpz_lite.course.show.lesson09 import balance, larger_models
from ddpz_lite.course.show.lesson10 import ways
from ddpz_lite.course.show.lesson11 import (
    FUNCTIONS,
    METHODS,
    memory_changes,
    watched_fsdp2,
)
from ddpz_lite.strategies import costs

NONE = dict.fromkeys(
    ("parameters", "gradients", "optimizer", "buffers", "transient", "activations", "temporary"), 0
)


@pytest.fixture
def shown(monkeypatch):
    """What a function that shows a figure hands over: (alt, table)."""
    calls = []
    for module in ("lesson11", "one_axis"):
        monkeypatch.setattr(
            f"ddpz_lite.course.show.{module}.show_figure",
            lambda fig, alt, table: (fig.canvas.draw(), calls.append((alt, table))),
        )
    return calls


def test_accumulation_pays_with_memory_or_with_traffic():
    found = ways(7.5e9, 64, 4)
    once = 2 * costs.elements_moved(7.5e9, 64, 2)
    assert found["ZeRO-1"] == found["ZeRO-2, no_sync"] == (costs.zero_memory(7.5e9, 64, 1), once)
    held, sent = found["ZeRO-2, keep shards"]
    assert held == costs.zero_memory(7.5e9, 64, 2)
    assert sent == pytest.approx(once * 5 / 2)  # (m + 1) Ψ against 2 Ψ
    assert ways(1e9, 8, 1)["ZeRO-2, no_sync"] == ways(1e9, 8, 1)["ZeRO-2, keep shards"]


def test_balance_says_how_far_the_fullest_is_from_an_equal_share():
    fig, alt, table = balance("a model", [600_000, 200_000])
    fig.canvas.draw()
    assert "1.50 × an equal share" in fig.axes[0].get_title(loc="left")
    assert "from 1.6 to 4.8 MB" in alt and "equal share is 3.2 MB" in alt
    assert [row[1] for row in table[1:]] == [4.8, 1.6]


def test_larger_models_have_the_sizes_that_their_names_say():
    found = larger_models()
    assert round(sum(found["GPT-2, 124 M"]) / 1e6) == 124
    assert round(sum(found["GPT-2, 355 M"]) / 1e6) == 355
    assert max(found["four layers, 256,000 tokens"]) == 256_000 * 1024


def test_changes_begin_at_forward_and_tell_the_peak(shown):
    samples = [
        (0.0, {**NONE, "parameters": 9000}),
        (1.0, {**NONE, "parameters": 100}),
        (2.0, {**NONE, "parameters": 100, "transient": 400}),
        (3.0, {**NONE, "parameters": 100}),
    ]
    marks = [(0.5, "forward"), (1.5, "backward"), (3.0, "end")]
    memory_changes(samples, marks, alt="units come and go", names={"transient": "whole units"})
    ((alt, table),) = shown
    assert alt == "units come and go"
    assert table[1:] == [["parameters", 100], ["whole units", 400]]
    with pytest.raises(ValueError, match='no mark "forward"'):
        memory_changes(samples, [(3.0, "end")], alt="units come and go")


def test_fsdp2_is_watched_only_inside_the_with():
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as source

    before = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    before += [getattr(source, n) for n in FUNCTIONS]
    with watched_fsdp2() as log:
        assert source.foreach_reduce is not before[-1]
        assert log == []
    after = [getattr(source.FSDPParamGroup, n) for n in METHODS]
    assert [*after, *(getattr(source, n) for n in FUNCTIONS)] == before


def step(*, waits: float | None = None, sent: float = 9.0):
    """A step of two ranks: forward 1 to 2, backward 2 to 4 (6 with a wait), one all-reduce."""
    spans = [("forward", 1.0, 2.0), ("backward", 2.0, 4.0 if waits is None else 6.0)]
    spans += [] if waits is None else [("wait", waits, 6.0)]
    both = [
        SimpleNamespace(rank=rank, name=name, started=a, finished=b + rank)
        for rank in (0, 1)
        for name, a, b in spans
    ]
    calls = [SimpleNamespace(rank=r, op="all_reduce", started=3.0, finished=sent) for r in (0, 1)]
    return SimpleNamespace(spans=both, ledger=calls)


@pytest.mark.parametrize(
    ("one", "seconds"),
    [(step(), 5.0), (step(waits=4.5), 4.5), (step(sent=3.5), 0.0)],
    ids=["after backward", "inside backward, after computing", "hidden altogether"],
)
def test_exposed_is_what_goes_on_when_rank_0_has_computed(one, seconds):
    assert exposed(one) == seconds


def test_versions_share_an_axis_and_count_in_backwards(shown):
    versions({"early": step(waits=4.5), "late": step()}, unit=2.0)
    ((alt, table),) = shown
    assert table == [
        ["version", "collectives", "step", "exposed"],
        ["early", 1, 4.0, 2.25],
        ["late", 1, 4.0, 2.5],
    ]
    assert "late: collectives 1, step 4.0, exposed 2.5" in alt


def test_bucket_sizes_draw_one_step_and_compare_all():
    transfers = {0.1: [(0.01, 0.02), (0.02, 0.05)], 1.0: [(0.04, 0.10)], 4.0: [(0.0, 0.01)]}
    fig, alt, table = bucket_sizes(transfers, 0.1, forward=0.01, computing=0.04)
    fig.canvas.draw()
    assert "2 all-reduces end the step after 50 ms; computing alone takes 40 ms" in alt
    assert "The best of the limits is 4 MB, 40 ms" in alt  # never shorter than computing
    assert [row[:2] for row in table[1:]] == [[0.1, 2], [1.0, 1], [4.0, 1]]
    assert fig.axes[0].get_title(loc="left") == "2 calls, 1.25 x computing"
    with pytest.raises(ValueError, match="no limit of 2 MB"):
        bucket_sizes(transfers, 2, 0.01, 0.04)


@pytest.mark.parametrize(("late", "limit"), [(0, 2.0), (1, 1.0), (2, 0.618), (8, 0.1845)])
def test_old_gradients_shrink_below_the_limit_and_grow_above_it(late, limit):
    """2 sin(pi / (4 delay + 2)): two, one, the golden ratio less one."""
    assert max(map(abs, path(0.97 * limit, late, 4000)[-50:])) < 0.1
    assert max(map(abs, path(1.03 * limit, late, 4000)[-50:])) > 10
    for rate, word in ((round(0.9 * limit, 3), "shrinks"), (round(1.1 * limit, 3), "grows")):
        fig, alt, table = delay(late, rate)
        fig.canvas.draw()
        assert alt.endswith(f"it {word}.") and f"rate {rate}" in alt
        assert table[1] == [f"delay {late}, rate {rate}", 0, 1.0]
