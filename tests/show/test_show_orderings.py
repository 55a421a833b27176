"""Steps to bring into an order: the model without a browser, and the view's buttons."""

import pytest

from ddpz_lite.course.show.orderings import Ordering, _view

STEPS = {"A": "boil the water", "B": "pour it", "C": "add the leaves"}


def test_moving_a_step():
    steps = Ordering(STEPS)
    steps.move("C", -1)
    assert steps.order == ["A", "C", "B"]
    steps.move("A", 1)
    assert steps.code == '["C", "A", "B"]'


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="there is no step 'D'"):
        Ordering(STEPS).move("D", 1)
    with pytest.raises(ValueError, match="give two or more"):
        Ordering({"A": "alone"})


def test_the_buttons_move_what_stands_in_their_row():
    steps = Ordering(STEPS)
    *rows, status = _view(steps)
    up, down, text = rows[2].children
    assert "add the leaves" in text.value and "Move C up" in up.tooltip
    up.click()
    assert steps.order == ["A", "C", "B"] and "pour it" in text.value
    assert '["A", "C", "B"]' in status.value.replace("&quot;", '"')
    down.click()
    assert steps.order == ["A", "C", "B"]  # B stands there now, at the end
