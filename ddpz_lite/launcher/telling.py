"""An exception on a rank as plain data, for the kernel to report.

Exceptions themselves often cannot be pickled, and their tracebacks show frames and paths that say
nothing to a learner.
"""

from __future__ import annotations

import os
import re
import traceback
from typing import Any

from ddpz_lite.launcher.ship import CannotSend
from ddpz_lite.wire import callsite


def describe(error: BaseException, history: tuple[list, list]) -> dict[str, Any]:
    """An exception as plain data: exceptions themselves often cannot be pickled."""
    story = traceback.TracebackException.from_exception(error)
    where = None
    for part in _stories(story):
        part.stack[:] = _learners_frames(part.stack)
        if part.stack:
            own = [frame for frame in part.stack if not callsite.is_library(frame.filename)]
            where = where or (callsite.label(own[-1].filename, own[-1].lineno) if own else None)
        for place in (*part.stack, part):  # a SyntaxError has a file name itself
            if getattr(place, "filename", None):
                place.filename = _short(place.filename)
    # The lines of code that come before the message of a SyntaxError are indented.
    text = next(line for line in story.format_exception_only() if not line.startswith("  "))
    if isinstance(error, CannotSend):
        text, story = str(error), None
    return {
        "type": type(error).__name__,
        "summary": text.strip(),
        "traceback": "".join(story.format()).rstrip() if story else "",
        "where": where,
        "messages": [_text(e) for e in _exceptions(error)],
        "history": history,
    }


def _stories(story: traceback.TracebackException) -> list[traceback.TracebackException]:
    """The story, those it came from and those it holds (of an ExceptionGroup)."""
    found = [story]
    for part in found:  # grows while it is read
        before = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        found += [*filter(None, [before]), *(part.exceptions or ())]
    return found


def _exceptions(error: BaseException) -> list[BaseException]:
    """The exception, those it came from and those it holds."""
    found = [error]
    for part in found:  # grows while it is read
        held = part.exceptions if isinstance(part, BaseExceptionGroup) else ()
        for other in (part.__cause__ or part.__context__, *held):
            if other is not None and not any(other is known for known in found):
                found.append(other)
    return found


def _text(error: BaseException) -> str:
    """str(error), which is the learner's code and may fail itself."""
    try:
        return str(error)
    except Exception as trouble:
        return f"(its str() raises {type(trouble).__name__})"


def _learners_frames(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The learner's own frames, and a library's last one if the error came from there."""
    inside = os.path.dirname(os.path.abspath(__file__))
    stack = [f for f in stack if not f.filename.startswith(inside)]
    return [f for f in stack[:-1] if not callsite.is_library(f.filename)] + stack[-1:]


def _short(filename: str) -> str:
    """A file for the reader: the cell, the path inside the installed package, or its name."""
    if (name := callsite.set_name(filename)) != filename:
        return name
    inside = re.split(r"[\\/](?:site|dist)-packages[\\/]", filename)
    return inside[-1] if len(inside) > 1 else os.path.basename(filename)
