"""Which line of the learner's asked for this?

A collective is issued by torch, often from C++ and far below the line that caused it:
`loss.backward()`, `model(x)`, `optimizer.step()`. The wire and the launcher name that line: the
innermost frame which belongs neither to torch, nor to this library, nor to Python's own library.
Code from a notebook cell is named by its cell, "cell 12:3".

Nothing here imports torch: the launcher uses this module in the kernel too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

UNKNOWN = "?"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_WRAPPERS = ("torch" + os.sep, "typing_extensions.py")  # the second wraps what torch deprecates
_TORCH = tuple(place + part for place in _INSTALLED for part in _WRAPPERS)
# Code without a file is the learner's ("<stdin>", "<timed exec>"), unless a library made it.
_GENERATED = ("<frozen ", "<eval_with_key>", "<decorator-gen", "<attrs ", "<__array_function__")

_cells: dict[str, str] = {}  # file name -> "cell 12"
_library: dict[str, bool] = {}  # file name -> whether it is to be skipped
_labels: dict[tuple[CodeType, int], str] = {}
_main = threading.main_thread().ident
looking = threading.Lock()  # held while a thread looks at another's frames: see `of_thread`


def set_cells(cells: Mapping[str, str]) -> None:
    """Name the files that are really notebook cells: {file name of the cell's code: "cell 12"}."""
    _cells.clear()
    _cells.update(cells)
    _library.clear()
    _labels.clear()


def is_library(filename: str) -> bool:
    """Whether this file is machinery (torch, this library, Python's own), not the learner's."""
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


def set_name(filename: str) -> str:
    """The cell's name for a cell's file, the file name itself for any other."""
    return _cells.get(filename, filename)


def filename(name: str) -> str:
    """The file behind a label's name, where `set_cells` gave it one; other names as they are."""
    return next((file for file, cell in _cells.items() if cell == name), name)


def label(filename: str, lineno: int) -> str:
    """A place as the learner knows it: "cell 12:3", or "train.py:40"."""
    return f"{_cells.get(filename) or os.path.basename(filename)}:{lineno}"


def of_frame(frame: FrameType | None) -> str | None:
    """The label of the innermost learner's frame at or above `frame`; None if there is none."""
    while frame is not None:
        code = frame.f_code
        known = _library.get(code.co_filename)
        if known is None:
            known = is_library(code.co_filename)
        if not known:
            key = (code, frame.f_lineno)
            found = _labels.get(key)
            if found is None:
                found = _labels[key] = label(code.co_filename, frame.f_lineno)
            return found
        frame = frame.f_back
    return None


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def of_thread(ident: int) -> str | None:
    """The label of the innermost learner's frame of a thread.

    Whoever looks at a frame keeps its locals, tensors of any size: it is let go at once, and
    `looking` is held as long as it is kept.

    [Note: no garbage is collected meanwhile] CPython makes the object of a frame when one asks for
    it, and may collect garbage to make it. What is collected may give way to the thread whose frame
    that is (a tensor does); it returns from the frame, and the new object writes over its stack.
    """
    with looking, uncollected():
        return of_frame(sys._current_frames().get(ident))


def caller() -> str:
    """The label of the learner's line that led to this call.

    A thread without any line of the learner's (autograd runs backward on GPUs in its own threads)
    is taken to work for the main thread, so its line is used. "?" if that has none either.
    """
    found = of_frame(sys._getframe(1))
    if found is None and threading.get_ident() != _main:
        found = of_thread(_main)
    return found or UNKNOWN
