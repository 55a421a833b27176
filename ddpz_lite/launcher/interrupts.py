"""Ctrl-C, noted when it comes and obeyed where it does no harm.

An exception in the middle of starting the ranks, or of ending them, would leave processes, files or
descriptors behind. So while a job runs the signal is only noted; the job's loop asks for it.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Around a job: `with Interrupts() as interrupts: ... interrupts.obey()`.

    It stands in for a handler written in Python, and in the main thread only: other threads never
    see Ctrl-C, and a program that ignores the signal goes on ignoring it.
    """

    def __enter__(self) -> Interrupts:
        self._noted: tuple[Any, ...] | None = None
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *call: Any) -> None:
        self._noted = call

    def obey(self) -> None:
        """Call the program's own handler if the signal came; most raise KeyboardInterrupt."""
        if self._noted is not None:
            call, self._noted = self._noted, None
            self._handler(*call)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.obey()
