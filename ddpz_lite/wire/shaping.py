"""Compute when an operation ends on the shaped network.

Each rank has one link. An operation starts when its last participant has arrived and the link is
free, and takes the time of the alpha-beta model (`cost.Cost`: steps x latency + path / bandwidth).
Nothing is slowed down: the backend moves the data at once, and the result is held back until the
computed time. All times are time.monotonic(), one clock for all processes of a machine; the
arrivals of other ranks are read from the status file.

[Note: same answer on every rank]
Every rank computes the end of a collective from the same published arrivals, so the ranks agree
without communicating. A rank publishes as its arrival the moment when its own link is free, if that
is later than the call. Operations are processed in the order in which they became ready, not in the
order in which the backend's threads finish them.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_PR_SET_TIMERSLACK = 29


@dataclass(eq=False)
class Transfer:
    """One operation on the link. `ready()`: when its last participant arrived, None if unknown."""

    ready: Callable[[bool], float | None]
    latency: float  # seconds in flight while the link is already free again
    occupied: float  # seconds that the link is busy
    way: str  # "in", "both", or "booked" if the link was reserved by `Link.depart`
    finish: float | None = None


class Link:
    """This rank's link: full duplex, one transfer at a time each way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Transfer] = []
        self.free = {"out": 0.0, "in": 0.0}

    def arrive(self, way: str) -> float:
        """The arrival time to publish for an operation that is issued now."""
        return max(time.monotonic(), self._free(way))

    def depart(self, seconds: float) -> float:
        """Reserve the outgoing link for a message that is sent now; returns when it starts."""
        with self._lock:
            start = self.arrive("out")
            self.free["out"] = start + seconds
        return start

    def add(self, transfer: Transfer) -> None:
        with self._lock:
            self._waiting.append(transfer)

    def drop(self, transfer: Transfer) -> None:
        """Forget a transfer that failed."""
        with self._lock:
            if transfer in self._waiting:
                self._waiting.remove(transfer)

    def finish_time(self, transfer: Transfer) -> float:
        """When a transfer ends whose data has arrived; earlier transfers are computed first."""
        with self._lock:
            while transfer.finish is None:
                known = [(t.ready(t is transfer), index) for index, t in enumerate(self._waiting)]
                at, index = min((at, index) for at, index in known if at is not None)
                self._reserve(self._waiting.pop(index), at)
        return transfer.finish

    def _reserve(self, transfer: Transfer, at: float) -> None:
        start = at if transfer.way == "booked" else max(at, self._free(transfer.way))
        for way in {"both": ("out", "in"), "in": ("in",), "booked": ()}[transfer.way]:
            self.free[way] = start + transfer.occupied
        transfer.finish = start + transfer.latency + transfer.occupied

    def _free(self, way: str) -> float:
        return max(self.free.values()) if way == "both" else self.free[way]


class Timer:
    """One sleeping thread that runs actions at given times."""

    def __init__(self, started: Callable[[], None]) -> None:
        self._started = started  # called when the thread starts
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Run `action` in the timer's thread at `moment`, or as soon as it wakes after it."""
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._order), action))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ddpz-wire-timer", daemon=True
                )
                self._started()
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        sharpen_sleep()
        while True:
            with self._changed:
                while not self._due or (left := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._due else None)
                _, _, action = heapq.heappop(self._due)
            action()


def sharpen_sleep() -> None:
    """Ask Linux to wake this thread on time; by default it may be 50 microseconds late."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


def sleep_until(moment: float) -> None:
    """Sleep, without spinning, until time.monotonic() reaches `moment`."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
