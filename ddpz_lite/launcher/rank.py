"""What a process does from the moment it becomes a rank until its last frame is sent.

The rank never decides whether the job failed: it sends what happened (a result, or an exception as
text) and waits for the kernel's word. A rank that raised therefore keeps its sockets open, its
peers stay where they were, and the report can say where that was, instead of showing four
"connection closed by peer".
"""

from __future__ import annotations

import atexit
import bdb
import contextlib
import datetime
import faulthandler
import io
import linecache
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddpz_lite.launcher.control import Control
from ddpz_lite.launcher.ship import pack_result
from ddpz_lite.launcher.telling import describe
from ddpz_lite.wire import callsite

HEARTBEAT = 0.2  # seconds between two notes of where the main thread is
PLACE_BYTES = 256  # the size of such a note in the job's folder
LONGEST = 365 * 86400.0  # seconds: the longest time limit that gloo can count
SETUP = "setting up"


@dataclass(frozen=True)
class Orders:
    """All that a rank needs to know; sent to it as its first frame."""

    call: bytes  # cloudpickle of (fn, args, kwargs)
    rank: int
    world_size: int
    folder: str  # the job's private folder: store, board, stacks, places
    backend: str  # "gloo", "nccl", or one for each device: "cpu:gloo,cuda:nccl"
    devices: tuple[int | None, ...]  # the CUDA device of each rank
    network: Any  # wire.Network or None
    record: bool
    timeout: float  # seconds
    origin: float  # time.monotonic() at the start of the job
    threads: int
    cells: dict[str, tuple[str, list[str]]]  # see `ship.cell_sources`
    path: list[str]
    cwd: str | None  # None: it was deleted under the notebook
    environ: dict[str, str] = field(repr=False)
    survivors: bool = False  # they form the group, and the death of one does not end the job

    @property
    def labels(self) -> dict[str, str]:
        """{file name of a cell's code: "cell 12"}."""
        return {name: label for name, (label, _) in self.cells.items()}


@dataclass
class Rank:
    """This process as a rank; `current` is None everywhere else."""

    rank: int
    control: Control
    device: int | None


current: Rank | None = None


def main(sock: socket.socket, zygote: int) -> int:
    """Be a rank of the job whose orders arrive on `sock`. Returns the exit status.

    zygote: the process id of our parent; when it is gone, so is the job.
    """
    global current
    control = Control(sock)
    frame = control.receive()
    if frame is None:
        return 1
    orders: Orders = pickle.loads(frame[1])
    current = Rank(orders.rank, control, orders.devices[orders.rank])
    _settle(orders)
    _watch(orders, zygote)
    board = _board(orders)
    try:
        body = _work(orders, board)
        kind = "result"
    except BaseException as error:  # SystemExit ends a rank too, and must be told
        kind, body = "raised", pickle.dumps(describe(error, _history(orders)))
    _flush()
    control.send(kind, body)
    if board and kind == "raised":  # told first: a peer that waits for us is no stall of its own
        board.mark("raised")
    control.receive()  # the kernel says when: peers may still need this rank's sockets
    if kind == "result":
        atexit._run_exitfuncs()
    _flush()
    return 0 if kind == "result" else 1


# -- the surroundings ------------------------------------------------------------------------------


def _settle(orders: Orders) -> None:
    """Make this process look like the one that called launch."""
    if orders.cwd is not None:
        os.chdir(orders.cwd)
    sys.path[:] = orders.path
    _settle_environment(orders)
    _settle_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for filename, (_, lines) in orders.cells.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    callsite.set_cells(orders.labels)
    bdb.Bdb.set_trace = _no_debugger  # every debugger's breakpoint comes through here
    warnings.showwarning = partial(_warn, orders.rank)
    if "numpy" in sys.modules:  # torch and random reseed themselves in a fork, numpy does not
        sys.modules["numpy"].random.seed()


def _settle_environment(orders: Orders) -> None:
    """Write what differs only: the zygote has most of it, in pages that ranks share."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    wanted = {
        "GLOO_SOCKET_IFNAME": loopback,
        **orders.environ,
        "RANK": str(orders.rank),
        "LOCAL_RANK": str(orders.rank),
        "WORLD_SIZE": str(orders.world_size),
        "LOCAL_WORLD_SIZE": str(orders.world_size),
    }
    for name in set(os.environ) - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _settle_streams() -> None:
    """An empty standard input, and output that leaves line by line."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(os.fdopen(fd, "wb", buffering=0, closefd=False))
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _warn(
    rank: int,
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """A warning with the learner's line: torch's own file, or one of ours, would say nothing.

    That something is deprecated is the same on all ranks, and rank 0 says it.
    """
    if rank and issubclass(category, (FutureWarning, DeprecationWarning)):
        return
    own = not callsite.is_library(filename)
    where = callsite.label(filename, lineno) if own else callsite.caller()
    place = "" if where == callsite.UNKNOWN else f"{where}: "
    print(f"{place}{category.__name__}: {message}", file=file or sys.stderr)


def _no_debugger(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "a rank has no keyboard, so no debugger can stop here. Print what you want to see, or "
        "return it and look at run[rank] in the notebook; with one rank, call the function itself."
    )


# -- traces for the report -------------------------------------------------------------------------


def _watch(orders: Orders, zygote: int) -> None:
    """Leave traces for the report: stacks on a crash or on request, and places."""
    stack = open(os.path.join(orders.folder, f"stack.{orders.rank}"), "w")  # noqa: SIM115 (open until the end)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    leave = os._exit

    def tell_and_exit(status: int) -> None:
        faulthandler.dump_traceback(stack, all_threads=False)
        _flush()
        leave(status)

    def disown() -> None:
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
        os._exit = leave

    os._exit = tell_and_exit  # the one way out that leaves no trace of its own
    os.register_at_fork(after_in_child=disown)  # a worker must not sign in the rank's name
    path = os.path.join(orders.folder, f"place.{orders.rank}")
    place = os.open(path, os.O_CREAT | os.O_WRONLY)
    beat = (place, threading.get_ident(), zygote, leave)
    threading.Thread(target=_beat, args=beat, name="ddpz-heartbeat", daemon=True).start()


def _beat(place: int, main_thread: int, zygote: int, leave: Callable[[int], None]) -> None:
    """Note where the main thread is, again and again, and end with the zygote."""
    pause = HEARTBEAT / 16  # a job may be short
    while True:
        time.sleep(pause)
        pause = min(2 * pause, HEARTBEAT)
        note = callsite.of_thread(main_thread) or SETUP
        os.lseek(place, 0, os.SEEK_SET)
        os.write(place, note.encode()[:PLACE_BYTES].ljust(PLACE_BYTES, b"\0"))
        if os.getppid() != zygote:
            with contextlib.suppress(OSError):
                os.killpg(0, signal.SIGKILL)
            leave(1)


# -- the work --------------------------------------------------------------------------------------


def _board(orders: Orders) -> Any:
    if not orders.record:
        return None
    from ddpz_lite.wire import Board

    return Board.open(os.path.join(orders.folder, "board"), orders.rank)


def _work(orders: Orders, board: Any) -> bytes:
    """Join the group if there is one, call the function, return the body of the result frame."""
    import torch

    torch.set_num_threads(orders.threads)
    if (device := orders.devices[orders.rank]) is not None:
        torch.cuda.set_device(device)
    fn, args, kwargs = pickle.loads(orders.call)
    if not orders.survivors:
        _join(orders, board)
    value = _call(fn, args, kwargs)
    if board:
        board.mark("returned")
    return pickle.dumps((pack_result(value), _history(orders)))


def _join(orders: Orders, board: Any) -> None:
    """Make the process group of all ranks, on the wire if the job is recorded."""
    import torch.distributed as dist

    from ddpz_lite import wire

    backend = orders.backend
    if orders.record:
        wire.attach(board, backend=backend, network=orders.network, origin=orders.origin)
        backend = "wire"
    # The launcher's own timeout comes first: it knows more than the backend when it has to say
    # what hangs.
    timeout = datetime.timedelta(seconds=min(orders.timeout + 60, LONGEST))
    store = dist.FileStore(os.path.join(orders.folder, "store"), orders.world_size)
    world = {"rank": orders.rank, "world_size": orders.world_size}
    dist.init_process_group(backend, store=store, timeout=timeout, **world)


def _call(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the function returns.

    A fork that it made and that comes back ends here: only the rank itself speaks to the kernel.
    """
    rank = os.getpid()
    try:
        return fn(*args, **kwargs)
    finally:
        if os.getpid() != rank:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, SystemExit):
                traceback.print_exc()
            _flush()
            code = error.code if isinstance(error, SystemExit) else int(error is not None)
            os._exit(code if isinstance(code, int) else int(code is not None))


def _history(orders: Orders) -> tuple[list, list]:
    """What the wire saw on this rank: (records, spans)."""
    from ddpz_lite import wire

    return wire.detach() if orders.record else ([], [])


def _flush() -> None:
    """Send what the streams hold.

    The learner may have closed them or put anything in their place, which is no reason to lose the
    result.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
