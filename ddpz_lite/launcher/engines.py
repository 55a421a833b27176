"""Where ranks come from: forked by the zygote (Linux, macOS), or from a pool of warm processes.

Both hand back the same thing, `Ranks`: a control channel and an output stream for each rank, one
stream of events ("rank 2 ended with status -9"), and the means to end them all. The rest of the
room does not know which it got.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol

from .forkserver import ForkServer
from .pool import Pool
from .ranks import Ranks


class Engine(Protocol):
    """What starts the ranks of a job."""

    note: str

    def warm(self) -> None:
        """Prepare in the background; returns at once."""

    def start(self, world_size: int, folder: str) -> Ranks:
        """The processes of a new job, which wait for their orders. Raises EngineGone."""

    def close(self) -> None:
        """End what was prepared; the engine can be used again, cold."""


_engine: Engine | None = None


def engine() -> Engine:
    """The engine of this process; DDPZ_ENGINE=pool asks for the pool where both exist."""
    global _engine
    if _engine is None:
        pool = sys.platform == "win32" or os.environ.get("DDPZ_ENGINE") == "pool"
        _engine = Pool() if pool else ForkServer()
    return _engine
