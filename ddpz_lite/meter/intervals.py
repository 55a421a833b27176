"""Intervals of time as pairs (start, end): union, difference, length."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def minus(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The parts of the intervals outside the others, in order."""
    left, cuts, first = [], union(others), 0
    for start, end in union(intervals):
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


def within(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The parts of the intervals between `start` and `end`, one by one."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def gaps(intervals: Iterable[Interval], until: float) -> list[Interval]:
    """The time between 0 and `until` outside the intervals."""
    return minus([(0, until)], intervals)


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the intervals; overlaps count once."""
    return sum(end - start for start, end in union(intervals))
