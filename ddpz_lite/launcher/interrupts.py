"""Delay Ctrl-C until the launcher can handle it.

An exception while ranks are started or ended would leave processes, files or descriptors behind. So
while a job runs the signal is only stored, and the job's loop asks for it.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Around a job: `with Interrupts() as interrupts: ... interrupts.raise_pending()`.

    Replaces a Python handler of SIGINT, in the main thread only: other threads never see Ctrl-C,
    and a program that ignores the signal keeps ignoring it.
    """

    def __enter__(self) -> Interrupts:
        self._pending: tuple[Any, ...] | None = None
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._store)
        return self

    def _store(self, *call: Any) -> None:
        self._pending = call

    def raise_pending(self) -> None:
        """If the signal came, call the program's own handler; most raise KeyboardInterrupt."""
        if self._pending is not None:
            call, self._pending = self._pending, None
            self._handler(*call)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.raise_pending()
