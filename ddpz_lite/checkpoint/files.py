"""The contents of a checkpoint's files: packed without code, and written durably.

extra.pt       options of the groups, loss scale, what the caller passed
rng-<r>.pt     random generators of rank r: restored if the world size is the same

`checkpoint.folder` decides where they are, and which of them count.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch


def pack(value: Any) -> bytes:
    """`value` as bytes that load without running code. Raises TypeError if impossible."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle's errors have no common class
        raise TypeError(f"{type(error).__name__}: {error}") from error
    return buffer.getvalue()


def check_extra(extra: dict[str, Any]) -> None:
    """Raise TypeError for the first of the caller's values that could not be saved and loaded."""
    for name, value in extra.items():
        try:
            pack(value)
        except TypeError as error:
            raise TypeError(
                f"{name}= is or holds what cannot be saved: extra may hold numbers, strings, "
                "tensors, and lists, tuples and dicts of them. Fix: for an object, pass its "
                f"state_dict(). ({str(error).splitlines()[0]})"
            ) from error


def write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
