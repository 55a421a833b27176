"""An exception on a rank as plain data, for the launcher's report.

Exceptions often cannot be pickled, and their tracebacks contain frames and paths of the library.
"""

from __future__ import annotations

import os
import re
import traceback
from typing import Any

from ddpz_lite.launcher.serialize import CannotSend
from ddpz_lite.wire import callsite


def exception_data(error: BaseException, history: tuple[list, list]) -> dict[str, Any]:
    """Type, summary, traceback, user line, messages of the chain, and the wire's history."""
    report = traceback.TracebackException.from_exception(error)
    where = None
    for part in _chain(report):
        part.stack[:] = _user_frames(part.stack)
        if part.stack:
            own = [frame for frame in part.stack if not callsite.is_library(frame.filename)]
            where = where or (callsite.label(own[-1].filename, own[-1].lineno) if own else None)
        for place in (*part.stack, part):  # a SyntaxError has a file name itself
            if getattr(place, "filename", None):
                place.filename = _short(place.filename)
    # The lines of code that come before the message of a SyntaxError are indented.
    text = next(line for line in report.format_exception_only() if not line.startswith("  "))
    if isinstance(error, CannotSend):
        text, report = str(error), None
    return {
        "type": type(error).__name__,
        "summary": text.strip(),
        "traceback": "".join(report.format()).rstrip() if report else "",
        "where": where,
        "messages": [_text(e) for e in _exceptions(error)],
        "history": history,
    }


def _chain(report: traceback.TracebackException) -> list[traceback.TracebackException]:
    """The report with its causes and the members of exception groups."""
    found = [report]
    for part in found:  # grows during the loop
        before = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        found += [*filter(None, [before]), *(part.exceptions or ())]
    return found


def _exceptions(error: BaseException) -> list[BaseException]:
    """The exception with its causes and the members of exception groups."""
    found = [error]
    for part in found:  # grows during the loop
        members = part.exceptions if isinstance(part, BaseExceptionGroup) else ()
        for other in (part.__cause__ or part.__context__, *members):
            if other is not None and not any(other is known for known in found):
                found.append(other)
    return found


def _text(error: BaseException) -> str:
    """str(error), which may be user code and may fail itself."""
    try:
        return str(error)
    except Exception as trouble:
        return f"(its str() raises {type(trouble).__name__})"


def _user_frames(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of user code, and the innermost one if the error came from a library."""
    launcher = os.path.dirname(os.path.abspath(__file__))
    stack = [f for f in stack if not f.filename.startswith(launcher)]
    return [f for f in stack[:-1] if not callsite.is_library(f.filename)] + stack[-1:]


def _short(filename: str) -> str:
    """A file as printed: the cell, the path inside the installed package, or the file name."""
    if (name := callsite.set_name(filename)) != filename:
        return name
    inside = re.split(r"[\\/](?:site|dist)-packages[\\/]", filename)
    return inside[-1] if len(inside) > 1 else os.path.basename(filename)
