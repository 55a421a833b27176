"""What a process does from the moment it becomes a rank until its last frame is sent.

The rank never decides whether the job failed: it sends what happened (a result, or an exception as
text) and waits for the kernel's word. A rank that raised therefore keeps its sockets open, its
peers stay where they were, and the report can say where that was, instead of showing four
"connection closed by peer".
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import io
import linecache
import os
import pickle
import re
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

from ..wire import callsite
from .channel import Channel
from .ship import CannotSend, pack_result

HEARTBEAT = 0.2  # seconds between two notes of where the main thread is
PLACE_BYTES = 256  # the size of such a note in the job's folder
SETUP = "setting up"


@dataclass(frozen=True)
class Orders:
    """All that a rank needs to know; sent to it as its first frame."""

    call: bytes  # cloudpickle of (fn, args, kwargs)
    rank: int
    world_size: int
    folder: str  # the job's private folder: store, board, stacks, places
    backend: str  # "gloo" or "nccl"
    devices: tuple[int | None, ...]  # the CUDA device of each rank
    network: Any  # wire.Network or None
    record: bool
    timeout: float  # seconds
    origin: float  # time.monotonic() at the start of the job
    threads: int
    cells: dict[str, tuple[str, list[str]]]
    path: list[str]
    cwd: str
    environ: dict[str, str] = field(repr=False)


@dataclass
class Session:
    """This process as a rank; `current` is None everywhere else."""

    rank: int
    world_size: int
    channel: Channel
    device: int | None


current: Session | None = None


def main(control: socket.socket, watch_pid: int | None = None) -> int:
    """Be a rank of the job whose orders arrive on `control`. Returns the exit status."""
    global current
    channel = Channel(control)
    frame = channel.receive()
    if frame is None:
        return 1
    orders: Orders = pickle.loads(frame[1])
    current = Session(orders.rank, orders.world_size, channel, orders.devices[orders.rank])
    _settle(orders)
    _watch(orders, watch_pid)
    board = _board(orders)
    try:
        body = _work(orders, board)
        kind = "result"
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt end a rank too, and must be told
        if board:
            board.mark("raised")
        kind, body = "raised", pickle.dumps(_describe(error, _history(orders)))
    _flush()
    channel.send(kind, body)
    channel.receive()  # the kernel says when: peers may still need this rank's sockets
    if kind == "result":
        atexit._run_exitfuncs()
    _flush()
    return 0 if kind == "result" else 1


def _settle(orders: Orders) -> None:
    """Make this process look like the one that called launch: folder, paths, environment, output,
    cells.
    """
    with contextlib.suppress(
        FileNotFoundError
    ):  # a folder deleted under the notebook: stay where we are
        os.chdir(orders.cwd)
    sys.path[:] = orders.path
    os.environ.clear()
    os.environ.update(orders.environ)
    os.environ.update(
        RANK=str(orders.rank),
        LOCAL_RANK=str(orders.rank),
        WORLD_SIZE=str(orders.world_size),
        LOCAL_WORLD_SIZE=str(orders.world_size),
        GLOO_SOCKET_IFNAME=orders.environ.get(
            "GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
        ),
    )
    if sys.platform == "win32":
        del os.environ["GLOO_SOCKET_IFNAME"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(fd, "wb", buffering=0, closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
    for filename, (_, lines) in orders.cells.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    callsite.set_cells({filename: label for filename, (label, _) in orders.cells.items()})
    if (
        "numpy" in sys.modules
    ):  # forked from one process: torch and random reseed themselves, numpy does not
        sys.modules["numpy"].random.seed()


def _watch(orders: Orders, watch_pid: int | None) -> None:
    """Leave traces for the report: stacks on a crash or on request, and where the main thread was
    last seen.
    """
    stack = open(os.path.join(orders.folder, f"stack.{orders.rank}"), "w")  # noqa: SIM115 (open until the end)
    faulthandler.enable(stack)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    leave = os._exit

    def tell_and_exit(status: int) -> None:
        faulthandler.dump_traceback(stack, all_threads=False)
        _flush()
        leave(status)

    os._exit = tell_and_exit  # the one way out that leaves no trace of its own
    place = os.open(os.path.join(orders.folder, f"place.{orders.rank}"), os.O_CREAT | os.O_WRONLY)
    main_thread = threading.get_ident()

    def beat() -> None:
        stop = threading.Event()
        while not stop.wait(HEARTBEAT):
            frame = sys._current_frames().get(main_thread)
            note = callsite.of_frame(frame) or SETUP
            os.lseek(place, 0, os.SEEK_SET)
            os.write(place, note.encode()[:PLACE_BYTES].ljust(PLACE_BYTES, b"\0"))
            if watch_pid is not None and os.getppid() != watch_pid:
                with contextlib.suppress(OSError):
                    os.killpg(0, signal.SIGKILL)
                leave(1)

    threading.Thread(target=beat, name="ddpz-heartbeat", daemon=True).start()


def _board(orders: Orders) -> Any:
    if not orders.record:
        return None
    from ..wire import Board

    return Board.open(os.path.join(orders.folder, "board"), orders.rank)


def _work(orders: Orders, board: Any) -> bytes:
    """Join the group, call the function, and return the body of the result frame."""
    import torch
    import torch.distributed as dist

    from .. import wire

    torch.set_num_threads(orders.threads)
    if (device := orders.devices[orders.rank]) is not None:
        torch.cuda.set_device(device)
    fn, args, kwargs = pickle.loads(orders.call)
    backend = orders.backend
    if orders.record:
        wire.attach(
            board,
            backend=orders.backend,
            network=orders.network,
            origin=orders.origin,
            cells={name: label for name, (label, _) in orders.cells.items()},
        )
        backend = "wire"
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.path.join(orders.folder, "store"), orders.world_size),
        rank=orders.rank,
        world_size=orders.world_size,
        # The launcher's own timeout comes first: it knows more than the backend when it has to say
        # what hangs.
        timeout=datetime.timedelta(seconds=orders.timeout + 60),
    )
    value = fn(*args, **kwargs)
    if board:
        board.mark("returned")
    return pickle.dumps((pack_result(value), _history(orders)))


def _history(orders: Orders) -> tuple[list, list]:
    """What the wire saw on this rank: (records, spans)."""
    from .. import wire

    return wire.detach() if orders.record else ([], [])


def _describe(error: BaseException, history: tuple[list, list]) -> dict[str, Any]:
    """An exception as plain data: exceptions themselves often cannot be pickled."""
    story = traceback.TracebackException.from_exception(error)
    where = None
    for part in _chain(story):
        part.stack[:] = _learners_frames(part.stack)
        if part.stack:
            own = [frame for frame in part.stack if not callsite.is_library(frame.filename)]
            where = where or (callsite.label(own[-1].filename, own[-1].lineno) if own else None)
        for frame in part.stack:
            frame.filename = _short(frame.filename)
    text = "".join(story.format_exception_only()).strip()
    if isinstance(error, CannotSend):
        text, story = str(error), None
    return {
        "type": type(error).__name__,
        "summary": text,
        "traceback": "".join(story.format()).rstrip() if story else "",
        "where": where,
        "messages": [str(e) for e in _exceptions(error)],
        "history": history,
    }


def _chain(story: traceback.TracebackException | None) -> list[traceback.TracebackException]:
    chain = []
    while story is not None:
        chain.append(story)
        story = story.__cause__ or (None if story.__suppress_context__ else story.__context__)
    return chain


def _exceptions(error: BaseException | None) -> list[BaseException]:
    """The exception and those it came from."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _learners_frames(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that help: the learner's own, and the last one of a library if the error came from
    there.
    """
    inside = os.path.dirname(os.path.abspath(__file__))
    stack = [f for f in stack if not f.filename.startswith(inside)]
    return [f for f in stack[:-1] if not callsite.is_library(f.filename)] + stack[-1:]


def _short(filename: str) -> str:
    """A file as a reader of the message needs it: the cell, the path inside the installed package,
    or the last part.
    """
    if (name := callsite.set_name(filename)) != filename:
        return name
    inside = re.split(r"[\\/](?:site|dist)-packages[\\/]", filename)
    return inside[-1] if len(inside) > 1 else os.path.basename(filename)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            OSError, ValueError
        ):  # the learner may have closed it, or the kernel is gone
            stream.flush()
