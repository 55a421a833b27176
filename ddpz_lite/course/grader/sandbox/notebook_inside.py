"""What runs nbval in a sandbox: starts pytest there, and sends its report. Decides nothing.

An answer shares this sandbox and can change all of it. The report is sent back unmodified,
although an answer may have written it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ddpz_lite.course.grader.sandbox.frames import FrameSocket

# Neither neighbouring files nor installed plugins influence how it is run.
PYTEST = [
    *("-m", "pytest", "--nbval-lax", "--nbval-current-env", "--color=no", "--noconftest"),
    *("-c", "/dev/null", "--rootdir=/tmp", "-p", "no:cacheprovider"),
    *("-p", "nbval.plugin", "-p", "ddpz_lite.course.cli.kernel"),
]


def run(sock: socket.socket) -> None:
    """Take the notebook, run pytest on it, send the report; never returns."""
    try:
        frames = FrameSocket(sock)
        orders, notebook = frames.receive()
        for number in (signal.SIGINT, signal.SIGTERM):  # nbval interrupts a cell without end
            signal.signal(number, signal.SIG_DFL)
        path, report = Path("/tmp", orders["name"]), Path("/tmp/nbval.xml")
        path.write_bytes(notebook)
        words = [f"--nbval-cell-timeout={orders['cell']:g}", f"--junitxml={report}", str(path)]
        status = subprocess.run(
            [sys.executable, *PYTEST, *words], env=orders["environ"], stdin=subprocess.DEVNULL
        ).returncode
        frames.send({"kind": "ended", "status": status}, _content(report, orders["most"]))
    finally:
        os._exit(0)


def _content(report: Path, most: int) -> bytes:
    """The report, and a byte too many of one that is too long; nothing where there is none."""
    try:
        with open(report, "rb") as file:
            return file.read(most + 1)
    except OSError:
        return b""
