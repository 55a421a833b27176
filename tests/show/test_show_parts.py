"""Bars of a step's parts: what the picture says in words and numbers."""

from __future__ import annotations

import pytest

from ddpz_lite.course.show.lesson15 import step_parts_figure


def test_the_table_and_the_words_give_each_row_and_its_exposed_share():
    rows = {"rank 0": {"compute": 0.03, "exposed": 0.01}, "rank 1": {"compute": 0.04}}
    _, alt, table = step_parts_figure(rows)
    assert "rank 0: 40 ms, 25% of it exposed" in alt and "rank 1: 40 ms, 0%" in alt
    assert table[1][:3] == ["rank 0", 30.0, 10.0] and table[2][1] == 40.0


@pytest.mark.parametrize("rows", [{}, {"rank 0": {"sleep": 1.0}}])
def test_refuses_no_rows_and_parts_of_another_name(rows):
    with pytest.raises(ValueError, match="give"):
        step_parts_figure(rows)
