"""A sandboxed process: run the cells, run the job, send data. It decides nothing.

An answer runs in the same process and can change everything here. So nothing here is secret (only
the inputs of this rank's case came with the orders), and the trusted side treats everything that
is sent as data.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import signal
import socket
import sys
import threading
import traceback
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ddpz_lite.course.check import data
from ddpz_lite.course.check import job as jobs
from ddpz_lite.course.check.task import TASKS
from ddpz_lite.course.grader.arena import group
from ddpz_lite.course.grader.sandbox.frames import FrameSocket
from ddpz_lite.launcher import rank as launched
from ddpz_lite.launcher.exceptions import exception_data
from ddpz_lite.wire import ledger

TEXT = 2000  # characters of an exception's words that are sent
JOBS = (f"{TASKS}.", f"{jobs.__package__}.")  # modules that stand next to an answer
THREADS = 12  # with which a rank may come to its own task; honest cells leave none, or a small pool


class TooLong(Exception):
    """A cell's top level took more than its time."""


class Spans:
    """Replaces the ledger: `dz.span` sends a frame to the broker, whose clock counts.

    Names without a prefix are the job's. An answer that asks for a span gets one of another name.
    """

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames

    def span(self, name: str):
        frame = sys._getframe(1)
        while (caller := frame.f_globals.get("__name__", "")) in (ledger.__name__, "contextlib"):
            frame = frame.f_back
        return self._report_span(name if caller.startswith(JOBS) else f"the answer's {name}")

    @contextlib.contextmanager
    def _report_span(self, name: str):
        self._frames.send({"kind": "span", "name": name, "edge": "begin"})
        try:
            yield
        finally:
            self._frames.send({"kind": "span", "name": name, "edge": "end"})


def main(sock: socket.socket) -> None:
    """Run one rank, from its orders to its data; returns when the broker ends the case."""
    frames = FrameSocket(sock)
    frames.send({"kind": "ready"})
    orders, inputs = frames.receive()
    _set_up(orders)
    line = group.Line(frames)
    line.start()
    launched.current = launched.Rank(orders["rank"], _Mute(), None)
    ledger.current = Spans(frames)
    try:
        body = _work(orders, bytes(inputs), line)
        frames.send({"kind": "result"}, body)
    except BaseException as error:  # SystemExit ends a rank too, and must be reported
        message = exception_data(error, ([], []))
        frames.send(
            {
                "kind": "raised",
                "type": message["type"],
                "summary": message["summary"][:TEXT],
                "where": message["where"],
                "message": message["messages"][0][:TEXT],
                "stub": _is_stub(error),
            }
        )
    line.over.wait()


def _is_stub(error: BaseException) -> bool:
    """Whether a cell's own line raised the bare NotImplementedError of the stub, and not torch."""
    if not isinstance(error, NotImplementedError) or error.args:
        return False
    *_, last = traceback.walk_tb(error.__traceback__)
    return last[0].f_code.co_filename.startswith("cell ")


class _Mute:
    """Replaces the launcher's channel, which a rank of the grader does not have."""

    def send(self, kind: str, body: bytes = b"") -> None:
        return None


def _set_up(orders: dict[str, Any]) -> None:
    """Set up a rank: environment, streams, seeds."""
    os.environ.clear()
    os.environ.update(orders["environ"])
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(fd, "wb", buffering=0, closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (the process's own, to its end)
    sys.argv[:] = ["rank"]
    torch.set_num_threads(orders["threads"])
    torch.seed()
    if "numpy" in sys.modules:  # torch and random reseed themselves in a fork, numpy does not
        sys.modules["numpy"].random.seed()
    signal.signal(signal.SIGALRM, _ring)


def _ring(_: int, __: FrameType | None) -> None:
    raise TooLong("this cell took too long; definitions alone take no time")


@contextlib.contextmanager
def _at_most(seconds: float):
    """Raise `TooLong` in the body, or on the way out of it, and never afterwards."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _work(orders: dict[str, Any], inputs: bytes, line: group.Line) -> bytes:
    jobs.find(orders["job"])  # imported before the cells: what they patch elsewhere it has already
    answer = _define(orders, line.frames)
    if dist.is_initialized():  # by a cell, for itself
        dist.destroy_process_group()
    group.join(line, orders["rank"], orders["world"])
    return jobs.run(orders["job"], answer, data.unpack(inputs), orders["guarded"])


def _define(orders: dict[str, Any], frames: FrameSocket) -> Any:
    """Run the cells in a module of their own; the answer that they define.

    Only the last cell is the task's: an exception in another one is not this task's business. Nor
    is what that cell tries out below its answer. No process group is there yet, as in a notebook.
    """
    module, me = _notebook(), os.getpid()
    *earlier, own = orders["cells"]
    for index, (name, source) in enumerate(earlier):
        frames.send({"kind": "cell", "index": index})
        try:
            with _at_most(orders["cell"]):
                _execute(name, source, module)
        except BaseException as error:  # the alarm too, whenever it rings
            with contextlib.suppress(BaseException):  # the name and the stream may be the cell's
                print(f"{name}: {type(error).__name__}", file=sys.stderr)
        _end_leftovers(me)
    vars(module).pop(orders["answer"], None)
    frames.send({"kind": "cell", "index": len(earlier)})
    try:
        _execute(*own, module)
    except BaseException as error:
        if orders["answer"] not in vars(module):
            raise
        print(f"{own[0]}, below the answer: {type(error).__name__}: {error}", file=sys.stderr)
    if orders["answer"] not in vars(module):
        raise NameError(f"{own[0]} does not define {orders['answer']}")
    return vars(module)[orders["answer"]]


class _Check:
    """Replaces `ddpz_lite.check`, which does nothing while answers are graded."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    hint = __call__


def _notebook() -> ModuleType:
    """The module in which cells run, with what a notebook has there."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    checking = sys.modules["ddpz_lite.course.check.cell"] = ModuleType(
        "ddpz_lite.course.check.cell"
    )
    checking.check = module.check = _Check()
    module.display = lambda *_, **__: None
    return module


def _end_leftovers(me: int) -> None:
    """End what an earlier cell started, because it would use up this task's limits.

    Processes can be ended, in a sandbox. Threads cannot: a rank with many of them leaves, and the
    broker tries again without the cell.
    """
    if os.getpid() != me:  # a fork of that cell, not the rank
        os._exit(0)
    if me == 1:  # the first process of a sandbox: every other process came from that cell
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    if threading.active_count() > THREADS:
        os._exit(1)


def _execute(name: str, source: str, module: ModuleType) -> None:
    filename = f"cell {name}"
    lines = source.splitlines(keepends=True)
    linecache.cache[filename] = (len(source), None, lines, filename)
    exec(compile(source, filename, "exec", dont_inherit=True), vars(module))


def run(sock: socket.socket) -> None:
    """`main`, and then the end of this process, whatever happened."""
    try:
        main(sock)
    except BaseException as error:
        with contextlib.suppress(Exception):
            print(f"the rank failed: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(0)
