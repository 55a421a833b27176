"""Reusable threads that wait for the backend while the program computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class WorkerThreads:
    """Daemon threads, one job at a time each, reused until the process ends."""

    def __init__(self, started: Callable[[], None]) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._started = started  # called for each new thread

    def run(self, job: Callable[[], None]) -> None:
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            self._started()
            name = "ddpz-wire-waiter"
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        inbox.put(job)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)
