"""Stretches of time as pairs (start, end): joined, cut, measured."""

from __future__ import annotations

from collections.abc import Iterable

Stretch = tuple[float, float]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Stretches of time joined where they overlap, in order."""
    joined: list[Stretch] = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def minus(stretches: Iterable[Stretch], others: Iterable[Stretch]) -> list[Stretch]:
    """What the stretches have outside of the others, in order."""
    left, cuts, first = [], union(others), 0
    for start, end in union(stretches):
        while first < len(cuts) and cuts[first][1] <= start:
            first += 1
        index = first
        while index < len(cuts) and cuts[index][0] < end:
            if cuts[index][0] > start:
                left.append((start, cuts[index][0]))
            start, index = max(start, cuts[index][1]), index + 1
        if start < end:
            left.append((start, end))
    return left


def within(stretches: Iterable[Stretch], start: float, end: float) -> list[Stretch]:
    """The parts of the stretches between `start` and `end`, one by one."""
    return [(max(a, start), min(b, end)) for a, b in stretches if a < end and b > start]


def gaps(stretches: Iterable[Stretch], until: float) -> list[Stretch]:
    """What the stretches leave free between 0 and `until`."""
    return minus([(0, until)], stretches)


def length(stretches: Iterable[Stretch]) -> float:
    """Seconds covered by stretches, overlaps counted once."""
    return sum(end - start for start, end in union(stretches))
