"""Ranks from a notebook cell: `run = dz.launch(fn, world_size=4)` starts four real processes.

In the order to read:

job         one launch: start, receive, find the cause of a failure, clean up
forkserver  the launcher's side of the fork server: ask for ranks
server      the fork server: torch imported once, a rank forked in milliseconds
huge_pages  what makes its forks cheap
processes   the ranks of one job, as the launcher holds them
rank        what a rank does from its first line to its last message
messages    the protocol between launcher and ranks
serialize   the function there, the result back; names what cannot be sent
event_loop  receives messages and output of all ranks
printer     prints the output; `progress` draws one bar for all ranks
failure     the root cause of a failed job, in one sentence
exceptions  an exception on a rank, as plain data
interrupts  delays Ctrl-C until the job can be ended cleanly
devices     which backend, which GPU
run         the results of a job
"""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ddpz_lite.launcher import rank as _rank
from ddpz_lite.launcher.devices import BACKENDS, device, plan, usable_cores
from ddpz_lite.launcher.failure import RankFailed
from ddpz_lite.launcher.forkserver import SERVER, ForkServerGone
from ddpz_lite.launcher.job import Job
from ddpz_lite.launcher.printer import Printer
from ddpz_lite.launcher.progress import progress
from ddpz_lite.launcher.run import Run
from ddpz_lite.launcher.serialize import CannotSend, cell_sources, pack_call
from ddpz_lite.wire import callsite

__all__ = ["CannotSend", "RankFailed", "Run", "device", "launch", "progress", "warm"]

MAX_WORLD = 64
_printed: set[str] = set()  # notes that are printed once per process
_launch_lock = threading.RLock()  # see `_run`
_launching = False


def launch(
    fn: Callable[..., Any],
    world_size: int = 4,
    *,
    args: tuple[Any, ...] | list[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    backend: str = "auto",
    network: Any = None,
    record: bool = True,
    output: str = "stream",
    survivors: bool = False,
) -> Run:
    """Run `fn(*args, **kwargs)` on `world_size` processes, joined in one process group.

    `fn` may be defined in a cell and use anything that other cells defined. It takes no rank: it
    asks `torch.distributed`, so the same function runs under `torchrun`.

    timeout   seconds from the start of the ranks; a job that takes longer is ended, with a report
              of where each rank was
    backend   "gloo", "nccl", or "auto": NCCL where there is a GPU for each rank, otherwise gloo
    network   a `Network`, to make the links between ranks slower on purpose
    record    keep the ledger; False runs on the plain backend
    output    "stream" prints the ranks' output immediately, "by_rank" at the end, rank 0 first
    survivors  True: the death of a rank is printed, and does not end the others; `run[r]` is None
              for it. The ranks are in no group: `Survivors` forms one. Needs record=False

    Returns a `Run`. Raises RankFailed when a rank fails or the job hangs, CannotSend when the
    function cannot be sent to a process, ValueError or TypeError for invalid arguments. In every
    case all processes of the job have ended.
    """
    kwargs = {} if kwargs is None else kwargs
    world_size = _check(fn, world_size, args, kwargs, timeout, backend, network, record, output)
    _check_survivors(survivors, record)
    try:
        call = pack_call(fn, tuple(args), dict(kwargs))
        SERVER.warm()  # it imports torch while this process does, too
        spec = _job_spec(call, world_size, backend, network, record, float(timeout))
        spec = replace(spec, survivors=bool(survivors))
        return _run(spec, Printer(world_size, output))
    except RankFailed as error:
        raise error.with_traceback(None) from error.__cause__  # see the note below
    except KeyboardInterrupt as error:
        # [Note: frames] A user does not need the launcher's frames. In a script one is left;
        # IPython asks the error how to show itself. It stays a plain KeyboardInterrupt, by which
        # Python ends with the status of an interrupted program.
        shown = f"KeyboardInterrupt: launch was interrupted at {callsite.caller()}"
        error._render_traceback_ = lambda: [shown]
        raise error.with_traceback(None) from None


def _job_spec(
    call: bytes, world_size: int, backend: str, network: Any, record: bool, timeout: float
) -> _rank.JobSpec:
    """The specification for all ranks; `Job` fills in what differs between them."""
    folder = _folder()
    chosen = plan(world_size, backend)
    if chosen.note and chosen.note not in _printed:
        print(chosen.note)
        _printed.add(chosen.note)
    return _rank.JobSpec(
        call=call,
        rank=-1,
        world_size=world_size,
        folder="",
        backend=chosen.backend,
        devices=chosen.devices,
        network=network,
        record=record,
        timeout=timeout,
        origin=0.0,
        threads=max(1, usable_cores() // world_size),
        cells=cell_sources(),
        path=_import_path(folder),
        cwd=folder,
        environ=dict(os.environ),
    )


def _run(spec: _rank.JobSpec, printer: Printer) -> Run:
    """One job at a time: other threads wait, and a call from the same thread is an error."""
    global _launching
    with _launch_lock:
        if _launching:
            raise RuntimeError(
                "launch: this thread is in the middle of a launch, and something that interrupted "
                "it (a signal handler, a destructor) called launch again. Fix: let the handler set "
                "a flag, and launch when the first job has returned."
            )
        _launching = True
        callsite.set_cells(spec.labels)
        try:
            return Job(spec, SERVER, printer).run()
        except ForkServerGone:  # it was killed while it was idle; start a new one
            SERVER.close()
            return Job(spec, SERVER, printer).run()
        finally:
            _launching = False


def warm() -> None:
    """Start the fork server in the background, so that the first launch finds torch imported."""
    SERVER.warm()


def _check(fn, world_size, args, kwargs, timeout, backend, network, record, output) -> int:
    """The world size as an int. Raises for invalid arguments and on an unsupported system."""
    if sys.platform == "win32":
        raise OSError(
            "launch: Windows cannot fork, and ranks are forks of a process that has torch "
            "imported. Fix: run the course in WSL 2 (`wsl --install`); the README shows how."
        )
    if _rank.current is not None:
        raise RuntimeError(
            f"launch: rank {_rank.current.rank} of a job called launch; ranks cannot start ranks"
        )
    if not callable(fn):
        raise TypeError(
            f"launch: the first argument must be a function, got {type(fn).__name__}. "
            "Fix: pass fn, not fn()."
        )
    _check_call(args, kwargs)
    _check_options(timeout, backend, output)
    if network is not None:
        _check_network(network, record)
    return _world(world_size)


def _world(world_size: Any) -> int:
    """The number of ranks as an int; NumPy's integers are accepted."""
    try:
        size = None if isinstance(world_size, bool) else operator.index(world_size)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"launch: world_size must be a whole number of ranks, got {world_size!r}")
    if not 1 <= size <= MAX_WORLD:
        raise ValueError(
            f"launch: world_size must be from 1 to {MAX_WORLD}, got {size}. "
            "Each rank is a process on this machine; for more, use torchrun on several machines, "
            "or torch's 'fake' backend to count without running."
        )
    return size


def _check_call(args: Any, kwargs: Any) -> None:
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            "launch: args must be a tuple or a list, one element for each argument of the "
            f"function, got {type(args).__name__}; for a single argument write args=(x,)"
        )
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            f"launch: kwargs must be a dict of named arguments, got {type(kwargs).__name__}"
        )


def _check_options(timeout: Any, backend: Any, output: Any) -> None:
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"launch: timeout must be a positive number of seconds, got {timeout!r}")
    if backend not in BACKENDS:
        raise ValueError(f"launch: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if output not in ("stream", "by_rank"):
        raise ValueError(f"launch: output must be 'stream' or 'by_rank', got {output!r}")


def _check_network(network: Any, record: bool) -> None:
    from ddpz_lite.wire import Network

    if not isinstance(network, Network):
        raise TypeError(f"launch: network must be a dz.Network, got {type(network).__name__}")
    if not record:
        raise ValueError(
            "launch: network needs record=True: the recording backend is what slows the links"
        )


def _check_survivors(survivors: Any, record: bool) -> None:
    if survivors and record:
        raise ValueError(
            "launch: survivors needs record=False: what is recorded is the group that launch forms"
        )


def _folder() -> str | None:
    """The current working directory; None if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _import_path(folder: str | None) -> list[str]:
    """sys.path with absolute entries, since a rank may import from another working directory."""
    if folder is None:
        return list(sys.path)
    return [os.path.normpath(os.path.join(folder, entry)) for entry in sys.path]
