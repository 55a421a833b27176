"""An error on one rank becomes an error on all.

If a disk fills on one rank, the others would wait for it in their next collective. So a step that
may fail on one rank ends with a small gather of the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ddpz_lite.strategies.comm import Comm

T = TypeVar("T")
KINDS = (FileNotFoundError, OSError, TypeError, ValueError)  # the first that fits is raised


def on_all_ranks(comm: Comm, step: Callable[[], T]) -> T:
    """Run `step()` on every rank and return its result on this rank; every rank calls it.

    Raises on all ranks what the first failing rank raised, as FileNotFoundError, OSError,
    TypeError, ValueError, or otherwise as RuntimeError. `step` itself calls no collective.
    """
    result = cause = None
    try:
        result = step()
    except Exception as error:
        cause = error
    failed = comm.gather_objects(None if cause is None else _words(cause))
    for rank, found in enumerate(failed):
        if found is not None:
            kind, words = found
            raise kind(f"rank {rank}: {words}" if rank else words) from cause
    return result


def _words(error: Exception) -> tuple[type[Exception], str]:
    kind = next((some for some in KINDS if isinstance(error, some)), RuntimeError)
    known = kind is not RuntimeError or type(error) is RuntimeError
    return kind, str(error) if known else f"{type(error).__name__}: {error}"
