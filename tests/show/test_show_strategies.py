"""The chooser of lesson 12b: its arithmetic, and that each strategy wins somewhere."""

from dataclasses import replace

import pytest

from ddpz_lite.course.show import lesson12
from ddpz_lite.course.show.lesson12 import LINKS, NAMES, Setting, chosen, fits, held, spent
from ddpz_lite.strategies.costs import zero_memory

SLOW = LINKS["100 Gbit/s"]


def setting(params=7e9, nodes=2, link=SLOW, **more):
    return Setting(params, 32, nodes, link, **more)


def test_what_each_strategy_holds():
    one = setting(7.5e9, nodes=8)
    assert held(one, "DDP") == zero_memory(7.5e9, 64, 0)
    assert held(one, "ZeRO-1") == zero_memory(7.5e9, 64, 1)
    assert held(one, "ZeRO-3") == zero_memory(7.5e9, 64, 3)
    assert held(one, "hybrid") == zero_memory(7.5e9, 8, 3) == 15e9
    assert held(one, "ZeRO-1 across") == pytest.approx((4 / 8 + 12 / 64) * 7.5e9)


def test_bytes_through_the_cable_are_three_to_two():
    no_latency = replace(setting(nodes=4), link=(12.5e9, 0.0))
    far = {name: spent(no_latency, name)["inter-node"] for name in NAMES}
    assert far["ZeRO-3"] / far["hybrid"] == pytest.approx(1.5)
    assert far["hybrid"] == far["ZeRO-1 across"] == pytest.approx(far["DDP"])
    assert far["DDP"] == pytest.approx(2 * 7e9 * 2 * (3 / 4) / 12.5e9)


def test_a_flat_ring_waits_for_more_hops():
    only_latency = replace(setting(nodes=4), link=(1e30, 1e-5))
    assert spent(only_latency, "ZeRO-3")["inter-node"] == pytest.approx(3 * 32 * 31 * 1e-5)
    assert spent(only_latency, "hybrid")["inter-node"] == pytest.approx(2 * 32 * 3 * 1e-5)


def test_one_node_sends_nothing_to_other_nodes():
    assert all(
        spent(setting(nodes=1), name)["inter-node"] == 0 for name in ("DDP", "ZeRO-1", "ZeRO-3")
    )


@pytest.mark.parametrize(
    ("one", "best"),
    [
        (setting(1.3e9), "DDP"),
        (setting(7e9, nodes=8), "ZeRO-1"),
        (setting(30e9, nodes=2), "hybrid"),
        (setting(30e9, nodes=8), "hybrid"),
        (setting(60e9, nodes=8), "ZeRO-1 across"),
        (setting(175e9, nodes=8), "ZeRO-3"),
        (setting(30e9, nodes=1), "ZeRO-3"),
        (setting(175e9, nodes=2), None),
    ],
)
def test_which_one_is_chosen(one, best):
    name, words = chosen(one)
    assert name == best, words
    assert words.startswith(best or "Nothing fits")
    assert best is None or fits(one, best)


def test_the_figure_says_what_is_chosen():
    fig, words, table = lesson12.draw(setting(30e9, nodes=8))
    assert "hybrid" in words
    assert [row[0] for row in table[1:]] == list(NAMES)
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert sum("chosen" in text for text in texts) == 1
    assert any("does not fit" in text for text in texts)
