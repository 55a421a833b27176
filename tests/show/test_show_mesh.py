"""A mesh on nodes: partners, links, seconds."""

from __future__ import annotations

import pytest

from ddpz_lite.course.show import mesh

INSIDE = [("tensor", 8), ("data", 2), ("pipeline", 4)]
OUTSIDE = [("pipeline", 4), ("data", 2), ("tensor", 8)]


def test_partners_along_each_axis():
    assert mesh.partners(INSIDE, 9) == {
        "tensor": list(range(8, 16)),
        "data": [1, 9],
        "pipeline": [9, 25, 41, 57],
    }
    for plan in (INSIDE, OUTSIDE):
        for rank in range(64):
            assert all(rank in group for group in mesh.partners(plan, rank).values())


def test_what_crosses_nodes_is_slower_by_the_ratio_of_the_links():
    inside, outside = mesh.seconds(INSIDE), mesh.seconds(OUTSIDE)
    assert outside["tensor"] == pytest.approx(inside["tensor"] * mesh.NEAR / mesh.FAR)
    assert outside["compute"] == inside["compute"]
    assert mesh.held(INSIDE) == mesh.held(OUTSIDE)
