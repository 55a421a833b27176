"""A whole notebook under nbval, in a separate sandbox: bytes in, a report's bytes out.

The run is one process tree under the student's control, so nothing of its report is believed.
`grader.nbval` reads it as data.
"""

from __future__ import annotations

import os
import selectors
import threading
import time

from ddpz_lite.course.grader.sandbox import handle as handles
from ddpz_lite.course.grader.sandbox.frames import FrameSocket, Inbox, Refused, order
from ddpz_lite.course.grader.sandbox.handle import SandboxHandle
from ddpz_lite.course.grader.sandbox.limits import MIB, NOTEBOOK, NOTEBOOK_SECONDS
from ddpz_lite.course.grader.sandbox.pool import PASSED_ON, SandboxPool
from ddpz_lite.course.grader.sandbox.usage import memory

TICK = 0.1  # seconds between two looks at the clock and the memory
WIDTH = 200  # characters that are kept of pytest's last line


class NoReport(Exception):
    """nbval gave no readable report: the message says why."""


def run(notebook: bytes, name: str, pool: SandboxPool, stop: threading.Event) -> bytes:
    """pytest's JUnit report on a notebook, as it lay in the sandbox. Raises NoReport, NoRanks.

    name: of its file. stop: ends the run when it is set.
    """
    (handle,) = pool.start(1, order(1, NOTEBOOK_SECONDS, NOTEBOOK, True, "notebook", "/tmp"))
    orders = {
        "name": name,
        "cell": NOTEBOOK.cell,
        "most": NOTEBOOK.message,
        "environ": _environment(),
    }
    try:
        handle.line.settimeout(NOTEBOOK.start)
        FrameSocket(handle.line).send(orders, notebook)
        return _await(handle, stop)
    except Refused as refused:
        raise NoReport(f"what came in its place {refused}") from None
    finally:
        handles.release([handle])


def _await(handle: SandboxHandle, stop: threading.Event) -> bytes:
    """Drain what is printed, watch time and memory, until there is a report."""
    inbox, deadline = Inbox(handle.line, NOTEBOOK.message), time.monotonic() + NOTEBOOK_SECONDS
    with selectors.DefaultSelector() as selector:
        for sock in (handle.line, handle.control, handle.output):
            selector.register(sock, selectors.EVENT_READ)
        while not stop.is_set():
            ready = {key.fileobj for key, _ in selector.select(TICK)}
            if handle.output in ready and not handle.drain(NOTEBOOK.output):
                selector.unregister(handle.output)
            if handle.control in ready:
                handle.receive()
                if not handle.supervised:
                    selector.unregister(handle.control)
            try:
                taken = inbox.take()
            except EOFError:
                if handle.supervised:  # it may say why there was no run
                    handle.control.settimeout(handles.LEAVE)
                    handle.receive()
                raise NoReport("the run ended without one") from None
            if taken is not None:
                return _content(handle, bytes(taken[1]))
            if time.monotonic() > deadline:
                raise NoReport(f"the run took longer than {NOTEBOOK_SECONDS:g} s")
            if handle.pid is not None and memory(handle.pid, NOTEBOOK.memory) > NOTEBOOK.memory:
                raise NoReport(f"the run used more than {NOTEBOOK.memory // MIB} MiB of memory")
    raise NoReport("it was interrupted")


def _content(handle: SandboxHandle, report: bytes) -> bytes:
    if report:
        return report
    lines = handle.printed.decode(errors="replace").strip().splitlines() or ["nothing"]
    raise NoReport(f"pytest wrote none. It said last: {lines[-1][:WIDTH]}")


def _environment() -> dict[str, str]:
    """pytest's environment, and so the kernel's: nothing that is secret."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        **kept,
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "rank",
        "PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
