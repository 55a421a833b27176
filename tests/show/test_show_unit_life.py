"""The life of a unit: the schedule that the widget plays, what it counts, and its picture."""

from __future__ import annotations

import itertools

import pytest

from ddpz_lite.course.show.unit_life import ALLOCATED, ROOT, STATES, calls, held, life, show_step

OPTIONS = list(itertools.product((1, 2, 5), (False, True), (False, True)))
SIZES = {ROOT: 120, "block 0": 240, "block 1": 240, "block 2": 240}


def most_unsharded(moments, sizes=SIZES):
    return max(held(moment, sizes, 2)["unsharded units"] for moment in moments)


@pytest.mark.parametrize(("blocks", "overlap", "keep"), OPTIONS)
def test_every_unit_is_unsharded_used_twice_and_resharded(blocks, overlap, keep):
    moments = life(blocks, overlap, keep)
    assert set(moments[0].states.values()) == set(moments[-1].states.values()) == {"sharded"}
    assert moments[-1].reduced == set(moments[-1].states)
    names = [ROOT, *(f"block {i}" for i in range(blocks))]
    for name in names:
        states = [moment.states[name] for moment in moments]
        assert set(states) <= set(STATES)
        for before, now in itertools.pairwise(states):
            if now in ("unsharded", "forward", "backward"):
                assert before in ALLOCATED  # no unit computes with a shard
        assert {"forward", "backward"} <= set(states)


@pytest.mark.parametrize(("blocks", "overlap", "keep"), OPTIONS)
def test_number_and_order_of_collectives(blocks, overlap, keep):
    found = calls(life(blocks, overlap, keep))
    gathers = [name for op, name in found if op == "all_gather"]
    reduced = [name for op, name in found if op == "reduce_scatter"]
    forward = [ROOT, *(f"block {i}" for i in range(blocks))]
    back = [f"block {i}" for i in reversed(range(blocks))]
    assert gathers == (forward if keep else forward + back)
    assert reduced == [*back, ROOT]


@pytest.mark.parametrize(
    ("overlap", "keep", "size"),
    [(False, False, 120 + 240), (True, False, 120 + 480), (False, True, 840), (True, True, 840)],
)
def test_what_is_unsharded_at_the_peak(overlap, keep, size):
    assert most_unsharded(life(3, overlap, keep)) == size


def test_gradients_are_full_and_then_shards():
    moments = life(3, overlap=True)
    last = held(moments[-1], SIZES, 4)
    assert last["unsharded gradients"] == 0 and last["shards of gradients"] == 840 / 4
    assert last["shards of parameters"] == 840 / 4 and last["unsharded units"] == 0
    started = next(i for i, m in enumerate(moments) if m.in_backward)
    assert moments[started].states[ROOT] == "backward"
    roots = [held(m, SIZES, 4)["unsharded gradients"] >= 120 for m in moments]
    assert roots == [started <= i < len(moments) - 1 for i in range(len(moments))]
    first = next(m for m in moments if "block 2 computes backward" in m.text)
    assert held(first, SIZES, 4)["unsharded gradients"] == 240 + 120  # the head's are there
    second = next(m for m in moments if "block 1 computes backward" in m.text)
    assert held(second, SIZES, 4)["unsharded gradients"] == 480 + 120  # block 2's is in flight


def test_overlap_hides_all_gathers_but_the_first_of_each_pass():
    """Moments in which ranks only wait."""
    for overlap, waits in ((False, 3 * 3 + 2), (True, 4)):
        idle = [
            m
            for m in life(3, overlap)
            if m.calls and not {"forward", "backward"} & {*m.states.values()}
        ]
        assert len(idle) == waits


def test_one_step_is_shown_unit_by_unit(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "ddpz_lite.course.show.unit_life.show_figure",
        lambda fig, alt, table: shown.append((alt, table)),
    )
    show_step(3, title="a step")
    ((alt, table),) = shown
    assert table[0] == ["moment", ROOT, "block 0", "block 1", "block 2"]
    assert [row[1:] for row in table[1:]] == [[*m.states.values()] for m in life(3)]
    assert alt.index("block 2 computes forward") < alt.index("block 2 computes backward")
