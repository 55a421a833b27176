"""Kernels for notebooks that run without a browser: reached over files, not over ports.

Jupyter draws a kernel's five free ports and then starts it, which takes a second. In that second
another program may take one of them, and four ranks that connect to each other take dozens. The
kernel that finds the port of its output taken neither answers nor ends.

This file is also a plugin of pytest (`-p ddpz_lite.course.cli.kernel`), for nbval.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from typing import Any

from jupyter_client.manager import AsyncKernelManager, KernelManager


def _remove(folder: str) -> None:
    """Remove a kernel's folder. The kernel, which may still be ending, writes and removes sockets
    there.
    """
    until = time.monotonic() + 5
    while os.path.exists(folder) and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):
            time.sleep(0.01)


class _OverFiles:
    """A kernel manager whose sockets are files of its own folder (Unix; ports on Windows)."""

    def __init__(self, **options: Any) -> None:
        if os.name == "posix":
            folder = tempfile.mkdtemp(prefix="ddpz-kernel-")
            weakref.finalize(self, _remove, folder)
            options |= {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        super().__init__(**options)


class BlockingManager(_OverFiles, KernelManager):
    """For nbval and for tests."""


class AsyncManager(_OverFiles, AsyncKernelManager):
    """For nbclient."""


def pytest_runtest_setup(item: Any) -> None:
    """Called before nbval starts a notebook's kernel, which it does for the first cell."""
    if type(item).__name__ == "IPyNbCell":
        import nbval.kernel

        nbval.kernel.KernelManager = BlockingManager
