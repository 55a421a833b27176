"""What a process does from the moment it becomes a rank until its last message is sent.

The rank never decides whether the job failed. It sends what happened (a result, or an exception as
text) and waits for the launcher. So a rank that raised keeps its sockets open, its peers stay where
they were, and the report can name those lines instead of four "connection closed by peer".
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

from ddpz_lite.launcher.exceptions import exception_data
from ddpz_lite.launcher.messages import MessageSocket
from ddpz_lite.launcher.serialize import pack_result
from ddpz_lite.wire import callsite

HEARTBEAT = 0.2  # seconds between two notes of the main thread's line
PLACE_BYTES = 256  # of such a note in the job's folder
LONGEST = 365 * 86400.0  # seconds: the longest time limit that gloo can count
SETUP = "setting up"


@dataclass(frozen=True)
class JobSpec:
    """What a rank has to run and how; its first message."""

    call: bytes  # cloudpickle of (fn, args, kwargs)
    rank: int
    world_size: int
    folder: str  # the job's private folder: store, status file, stacks, last lines
    backend: str  # "gloo", "nccl", or one for each device: "cpu:gloo,cuda:nccl"
    devices: tuple[int | None, ...]  # the CUDA device of each rank
    network: Any  # wire.Network or None
    record: bool
    timeout: float  # seconds
    origin: float  # time.monotonic() at the start of the job
    threads: int
    cells: dict[str, tuple[str, list[str]]]  # see `serialize.cell_sources`
    path: list[str]
    cwd: str | None  # None: it was deleted under the notebook
    environ: dict[str, str] = field(repr=False)
    survivors: bool = False  # they form the group; the death of one does not end the job

    @property
    def labels(self) -> dict[str, str]:
        """{file name of a cell's code: "cell 12"}."""
        return {name: label for name, (label, _) in self.cells.items()}


@dataclass
class Rank:
    """This process as a rank; `current` is None everywhere else."""

    rank: int
    control: MessageSocket
    device: int | None


current: Rank | None = None


def main(sock: socket.socket, server: int) -> int:
    """Run the job that arrives on `sock` as one of its ranks. Returns the exit status.

    server: the process id of the parent; the rank ends when the parent is gone.
    """
    global current
    control = MessageSocket(sock)
    frame = control.receive()
    if frame is None:
        return 1
    spec: JobSpec = pickle.loads(frame[1])
    current = Rank(spec.rank, control, spec.devices[spec.rank])
    _set_up_process(spec)
    _install_traces(spec, server)
    status_file = _open_status_file(spec)
    try:
        body = _run_function(spec, status_file)
        kind = "result"
    except BaseException as error:  # SystemExit ends a rank too, and is reported
        kind, body = "raised", pickle.dumps(exception_data(error, _history(spec)))
    _flush()
    control.send(kind, body)
    if status_file and kind == "raised":  # sent first: then a waiting peer is not a stall
        status_file.mark("raised")
    control.receive()  # wait for the launcher: peers may still need this rank's sockets
    if kind == "result":
        atexit._run_exitfuncs()
    _flush()
    return 0 if kind == "result" else 1


# -- the process -----------------------------------------------------------------------------------


def _set_up_process(spec: JobSpec) -> None:
    """Give this process the folder, import path, streams and cells of the caller of launch."""
    if spec.cwd is not None:
        os.chdir(spec.cwd)
    sys.path[:] = spec.path
    _set_environment(spec)
    _set_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for filename, (_, lines) in spec.cells.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    callsite.set_cells(spec.labels)
    bdb.Bdb.set_trace = _no_debugger  # every debugger's breakpoint calls it
    warnings.showwarning = partial(_warn, spec.rank)
    if "numpy" in sys.modules:  # torch and random reseed themselves in a fork, numpy does not
        sys.modules["numpy"].random.seed()


def _set_environment(spec: JobSpec) -> None:
    """Change only what differs from the fork server: the rest stays in shared pages."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    wanted = {
        "GLOO_SOCKET_IFNAME": loopback,
        **spec.environ,
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.world_size),
    }
    for name in set(os.environ) - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_streams() -> None:
    """An empty standard input, and output that is flushed after each line."""
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
    """Print a warning with the line of user code instead of a line in torch or this library.

    Deprecations are the same on all ranks, so only rank 0 prints them.
    """
    if rank and issubclass(category, (FutureWarning, DeprecationWarning)):
        return
    own = not callsite.is_library(filename)
    where = callsite.label(filename, lineno) if own else callsite.caller()
    place = "" if where == callsite.UNKNOWN else f"{where}: "
    print(f"{place}{category.__name__}: {message}", file=file or sys.stderr)


def _no_debugger(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "a rank has no keyboard, so no debugger can stop here. Fix: print the value, or return it "
        "and look at run[rank] in the notebook; with one rank, call the function directly."
    )


# -- traces for the report -------------------------------------------------------------------------


def _install_traces(spec: JobSpec, server: int) -> None:
    """Write what the report needs: stacks on a crash or on request, and the last known line."""
    stack = open(os.path.join(spec.folder, f"stack.{spec.rank}"), "w")  # noqa: SIM115 (open until the end)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    leave = os._exit

    def trace_and_exit(status: int) -> None:
        faulthandler.dump_traceback(stack, all_threads=False)
        _flush()
        leave(status)

    def stop_in_child() -> None:
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
        os._exit = leave

    os._exit = trace_and_exit  # the only exit that leaves no trace otherwise
    os.register_at_fork(after_in_child=stop_in_child)  # a worker is not the rank
    path = os.path.join(spec.folder, f"place.{spec.rank}")
    place = os.open(path, os.O_CREAT | os.O_WRONLY)
    beat = (place, threading.get_ident(), server, leave)
    threading.Thread(target=_heartbeat, args=beat, name="ddpz-heartbeat", daemon=True).start()


def _heartbeat(place: int, main_thread: int, server: int, leave: Callable[[int], None]) -> None:
    """Note the main thread's line repeatedly, and end the rank when the fork server is gone."""
    pause = HEARTBEAT / 16  # a job may be short
    while True:
        time.sleep(pause)
        pause = min(2 * pause, HEARTBEAT)
        note = callsite.of_thread(main_thread) or SETUP
        os.lseek(place, 0, os.SEEK_SET)
        os.write(place, note.encode()[:PLACE_BYTES].ljust(PLACE_BYTES, b"\0"))
        if os.getppid() != server:
            with contextlib.suppress(OSError):
                os.killpg(0, signal.SIGKILL)
            leave(1)


# -- the work --------------------------------------------------------------------------------------


def _open_status_file(spec: JobSpec) -> Any:
    if not spec.record:
        return None
    from ddpz_lite.wire import StatusFile

    return StatusFile(os.path.join(spec.folder, "status"), spec.rank)


def _run_function(spec: JobSpec, status_file: Any) -> bytes:
    """Join the process group, call the function, return the body of the result message."""
    import torch

    torch.set_num_threads(spec.threads)
    if (device := spec.devices[spec.rank]) is not None:
        torch.cuda.set_device(device)
    fn, args, kwargs = pickle.loads(spec.call)
    if not spec.survivors:
        _join(spec, status_file)
    value = _call(fn, args, kwargs)
    if status_file:
        status_file.mark("returned")
    return pickle.dumps((pack_result(value), _history(spec)))


def _join(spec: JobSpec, status_file: Any) -> None:
    """Form the process group of all ranks, on the wire if the job is recorded."""
    import torch.distributed as dist

    from ddpz_lite import wire

    backend = spec.backend
    if spec.record:
        wire.attach(status_file, backend=backend, network=spec.network, origin=spec.origin)
        backend = "wire"
    # Longer than the launcher's timeout, which comes first because its report knows more.
    timeout = datetime.timedelta(seconds=min(spec.timeout + 60, LONGEST))
    store = dist.FileStore(os.path.join(spec.folder, "store"), spec.world_size)
    world = {"rank": spec.rank, "world_size": spec.world_size}
    dist.init_process_group(backend, store=store, timeout=timeout, **world)


def _call(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the function. A fork that it made and that returns ends here: only the rank reports."""
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


def _history(spec: JobSpec) -> tuple[list, list]:
    """What the wire recorded on this rank: (records, spans)."""
    from ddpz_lite import wire

    return wire.detach() if spec.record else ([], [])


def _flush() -> None:
    """Flush the streams; user code may have closed or replaced them, which is not a failure."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
