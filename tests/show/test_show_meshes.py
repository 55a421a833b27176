"""The figures of lesson 20b: rooflines, meshes by cause and by kind, predictions."""

from __future__ import annotations

import pytest

from ddpz_lite.course.fleet.hardware import h100
from ddpz_lite.course.fleet.models import LLAMA_70B
from ddpz_lite.course.fleet.plan import Plan, memory, step_time
from ddpz_lite.course.show import lesson20b


@pytest.fixture
def seen(monkeypatch):
    """What the last figure was shown with."""
    shown = {}
    monkeypatch.setattr(lesson20b, "show_figure", lambda fig, **rest: shown.update(fig=fig, **rest))
    return shown


def test_operations_lie_on_the_roof(seen):
    operations = {"small": (100.0, 10.0), "large": (9000.0, 10.0), "moves": (0, 10.0)}
    lesson20b.roofline({"a block": operations}, peak=500e12, bandwidth=5e12, title="x")
    assert seen["table"][1:] == [["a block", "small", 10, 50], ["a block", "large", 900, 500]]
    roof = seen["fig"].axes[0].lines[0]
    assert list(roof.get_xdata())[1] == 100 and list(roof.get_ydata())[1:] == [500, 500]


def test_bars_of_a_mesh_add_up_to_its_step_and_its_memory(seen):
    plan = Plan(tp=8, pp=4, dp=8)
    step, held = step_time(LLAMA_70B, h100(256), plan, 512), memory(LLAMA_70B, plan, 512)
    lesson20b.meshes({"a": (step, held), "b": (step, held)}, 30e9, title="two")
    left, right = seen["fig"].axes
    for axes, total in ((left, step.total), (right, sum(held.values()) / 1e9)):
        ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
        assert max(ends) == pytest.approx(total)
    words = [text.get_text() for text in right.texts]
    assert words == [f"{sum(held.values()) / 1e9:.0f} GB, too much"] * 2
    assert seen["table"][0][0] == "mesh" and len(seen["table"]) == 3


def test_the_explorer_names_the_reason_why_a_mesh_cannot_run(monkeypatch):
    drawn = {}
    monkeypatch.setattr(lesson20b, "explore", lambda picture, **_: drawn.update(picture=picture))
    lesson20b.explorer(LLAMA_70B, h100(256), 512)
    _, alt, _ = drawn["picture"](8, 1, 1, 1, "none")
    assert "dp 32: fits" in alt
    _, alt, _ = drawn["picture"](1, 1, 1, 3, "none")
    assert "needs 192 GB of 80" in alt
    _, alt, rows = drawn["picture"](64, 16, 1, 1, "none")
    assert "the mesh has 1024 GPUs" in alt and len(rows) == 2


def test_errors_are_drawn_from_published_to_hidden(seen):
    lesson20b.published({"r": (1.32, 0.74, False), "f": (1.0, 0.9, True)}, title="x")
    assert seen["table"][1:] == [["r", 1.32, 0.74], ["f", 1.0, 0.9]]
    texts = [text.get_text() for text in seen["fig"].axes[0].texts]
    assert texts == ["+32%", "+0%"]
