"""Which line of user code asked for this?

A collective is issued by torch, often from C++ and far below the line that caused it:
`loss.backward()`, `model(x)`, `optimizer.step()`. The wire and the launcher name that line: the
innermost frame that belongs neither to torch, nor to this library, nor to the standard library.
Code from a notebook cell is named by its cell, "cell 12:3". In `ddpz train`, which runs no user
code, it is the innermost line of the trainer.

Nothing here imports torch, because the launcher uses this module too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType

UNKNOWN = "?"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TRAINER = os.path.join(_PACKAGE, "trainer") + os.sep
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_WRAPPERS = ("torch" + os.sep, "typing_extensions.py")  # the second wraps what torch deprecates
_TORCH = tuple(place + part for place in _INSTALLED for part in _WRAPPERS)
# Code without a file is user code ("<stdin>", "<timed exec>"), unless a library generated it.
_GENERATED = ("<frozen ", "<eval_with_key>", "<decorator-gen", "<attrs ", "<__array_function__")

_cells: dict[str, str] = {}  # file name -> "cell 12"
_library: dict[str, bool] = {}  # file name -> whether it is to be skipped
_labels: dict[tuple[CodeType, int], str] = {}
_main = threading.main_thread().ident
frames_lock = threading.Lock()  # held while a thread reads another's frames: see `of_thread`


def set_cells(cells: Mapping[str, str]) -> None:
    """Name the files that are notebook cells: {file name of the cell's code: "cell 12"}."""
    _cells.clear()
    _cells.update(cells)
    _library.clear()
    _labels.clear()


def is_library(filename: str) -> bool:
    """Whether this file is torch, this library or Python's standard library, not user code."""
    known = _library.get(filename)
    if known is None:
        known = _library[filename] = _is_library(filename)
    return known


def _is_library(filename: str) -> bool:
    if filename in _cells:
        return False
    if filename.startswith("<"):
        return filename.startswith(_GENERATED)
    if filename.startswith(_PACKAGE) or any(part in filename for part in _TORCH):
        return True
    return filename.startswith(_STDLIB) and not any(part in filename for part in _INSTALLED)


def _skipped(filename: str, function: str) -> bool:
    """Whether a frame is not user code: a library's file, or a method that a dataclass generated.

    Generated methods are compiled under "<string>", the name that `python -c` has too.
    """
    generated = filename == "<string>" and function.startswith("__")
    return generated or is_library(filename)


def set_name(filename: str) -> str:
    """The cell's name for a cell's file, the file name itself for any other."""
    return _cells.get(filename, filename)


def filename(name: str) -> str:
    """The file of a name that `set_cells` gave; other names are returned unchanged."""
    return next((file for file, cell in _cells.items() if cell == name), name)


def label(filename: str, lineno: int) -> str:
    """A line as the user knows it: "cell 12:3", or "train.py:40"."""
    return f"{_cells.get(filename) or os.path.basename(filename)}:{lineno}"


def of_frame(frame: FrameType | None) -> str | None:
    """The label of the innermost line of user code at or above `frame`, else of the trainer, or
    None.
    """
    found = frame
    while found is not None and _skipped(found.f_code.co_filename, found.f_code.co_name):
        found = found.f_back
    if found is None:
        found = frame
        while found is not None and not found.f_code.co_filename.startswith(_TRAINER):
            found = found.f_back
    if found is None:
        return None
    key = (found.f_code, found.f_lineno)
    if key not in _labels:
        _labels[key] = label(found.f_code.co_filename, found.f_lineno)
    return _labels[key]


def of_stack(stack: Sequence[tuple[str, int, str]]) -> str | None:
    """The same for a stack of (file name, line, function), innermost first."""
    user = (place for place in stack if not _skipped(place[0], place[2]))
    trainer = (place for place in stack if place[0].startswith(_TRAINER))
    found = next(user, None) or next(trainer, None)
    return None if found is None else label(found[0], found[1])


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside the block."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def of_thread(ident: int) -> str | None:
    """The label of the innermost line of user code of a thread, see `of_frame`.

    A reference to a frame keeps its local variables alive, tensors of any size. So it is released
    at once, and `frames_lock` is held meanwhile.

    [Note: no garbage collection] CPython creates the frame object on request, and may collect
    garbage to do so. A finalizer that runs then may yield to the thread whose frame it is (a
    tensor's does); that thread returns from the frame, and the new object overwrites its stack.
    """
    with frames_lock, uncollected():
        return of_frame(sys._current_frames().get(ident))


def caller() -> str:
    """The label of the line of user code that led to this call, "?" if there is none.

    A thread without user code (autograd runs backward on GPUs in its own threads) is assumed to
    work for the main thread, so the main thread's line is used.
    """
    found = of_frame(sys._getframe(1))
    if found is None and threading.get_ident() != _main:
        found = of_thread(_main)
    return found or UNKNOWN
