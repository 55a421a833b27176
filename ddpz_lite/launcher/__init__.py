"""Ranks from a notebook cell: `run = dz.launch(fn, world_size=4)` starts four real processes.

zygote      the fork server: torch imported once, a rank forked in milliseconds
forkserver  the kernel's side of it
processes   the ranks of one job, as the kernel holds them
control     the frames in which kernel and ranks talk
ship        the function there, the result back; names what cannot travel
rank        what a process does from its first line to its last frame
telling     an exception on a rank, as plain data
hearing     the kernel's loop: hears all ranks, prints what they print
job         one launch: starts, judges, times out, cleans up
crowd       what a busy machine took from the ranks, which a time limit does not count
interrupts  Ctrl-C, obeyed where it does no harm
failure     from what was seen to the one sentence that says why
devices     which backend, which GPU
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
from ddpz_lite.launcher.crowd import cores
from ddpz_lite.launcher.devices import BACKENDS, device, plan
from ddpz_lite.launcher.failure import RankFailed
from ddpz_lite.launcher.forkserver import SERVER, ForkServerGone
from ddpz_lite.launcher.job import Job
from ddpz_lite.launcher.printer import Printer
from ddpz_lite.launcher.progress import progress
from ddpz_lite.launcher.run import Run
from ddpz_lite.launcher.ship import CannotSend, cell_sources, pack_call
from ddpz_lite.wire import callsite

__all__ = ["CannotSend", "RankFailed", "Run", "device", "launch", "progress", "warm"]

MAX_WORLD = 64
_said: set[str] = set()  # notes that this kernel has printed once
_one_at_a_time = threading.RLock()  # see `_run`
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
              of who waited where. What other programs keep the ranks from running is not counted
    backend   "gloo", "nccl", or "auto": NCCL where there is a GPU for each rank, otherwise gloo
    network   a `Network`, to make the links between ranks slower on purpose
    record    keep the ledger; False runs on the plain backend
    output    "stream" prints what ranks print as it comes, "by_rank" at the end, rank 0 first
    survivors  True: the death of a rank is printed, and does not end the others; `run[r]` is None
              for it. The ranks are in no group: `Survivors` forms one. Needs record=False

    Returns a `Run`. Raises RankFailed when a rank fails or the job hangs, CannotSend when the
    function cannot travel, ValueError or TypeError for arguments that make no sense. In every case
    all processes of the job are gone.
    """
    kwargs = {} if kwargs is None else kwargs
    world_size = _check(fn, world_size, args, kwargs, timeout, backend, network, record, output)
    _check_survivors(survivors, record)
    try:
        call = pack_call(fn, tuple(args), dict(kwargs))
        SERVER.warm()  # it imports torch while this process does
        orders = _orders(call, world_size, backend, network, record, float(timeout))
        orders = replace(orders, survivors=bool(survivors))
        return _run(orders, Printer(world_size, output))
    except RankFailed as error:
        raise error.with_traceback(None) from error.__cause__  # see the note below
    except KeyboardInterrupt as error:
        # [Note: frames] The launcher's frames say nothing to a learner. In a script one is left;
        # IPython asks the error how it wants to be shown. It stays a plain KeyboardInterrupt, by
        # which Python ends with the status of an interrupted program.
        shown = f"KeyboardInterrupt: launch was interrupted at {callsite.caller()}"
        error._render_traceback_ = lambda: [shown]
        raise error.with_traceback(None) from None


def _orders(
    call: bytes, world_size: int, backend: str, network: Any, record: bool, timeout: float
) -> _rank.Orders:
    """What all ranks of the job are told; `Job` adds what differs."""
    folder = _folder()
    chosen = plan(world_size, backend)
    if chosen.note and chosen.note not in _said:
        print(chosen.note)
        _said.add(chosen.note)
    return _rank.Orders(
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
        threads=max(1, cores() // world_size),
        cells=cell_sources(),
        path=_import_path(folder),
        cwd=folder,
        environ=dict(os.environ),
    )


def _run(orders: _rank.Orders, printer: Printer) -> Run:
    """One job at a time: other threads wait for their turn, this one cannot wait for itself."""
    global _launching
    with _one_at_a_time:
        if _launching:
            raise RuntimeError(
                "launch: this thread is in the middle of a launch, and something that interrupted "
                "it (a signal handler, a destructor) called launch again. Let the handler set a "
                "flag, and launch when the first job has returned."
            )
        _launching = True
        callsite.set_cells(orders.labels)
        try:
            return Job(orders, SERVER, printer).run()
        except ForkServerGone:  # it was killed while it was idle; a new one may do
            SERVER.close()
            return Job(orders, SERVER, printer).run()
        finally:
            _launching = False


def warm() -> None:
    """Start the fork server in the background, so that the first launch finds torch imported."""
    SERVER.warm()


def _check(fn, world_size, args, kwargs, timeout, backend, network, record, output) -> int:
    """The world size as an int. Raises for arguments that make no sense, and where none would."""
    if sys.platform == "win32":
        raise OSError(
            "launch: Windows cannot fork, and ranks are forks of a process that has torch "
            "imported. Run the course in WSL 2 (`wsl --install`); the README says how."
        )
    if _rank.current is not None:
        raise RuntimeError(
            f"launch: rank {_rank.current.rank} of a job called launch; ranks cannot start ranks"
        )
    if not callable(fn):
        raise TypeError(
            f"launch: the first argument must be a function, got {type(fn).__name__}. "
            "Pass fn, not fn()."
        )
    _check_call(args, kwargs)
    _check_options(timeout, backend, output)
    if network is not None:
        _check_network(network, record)
    return _world(world_size)


def _world(world_size: Any) -> int:
    """The number of ranks; any whole number will do, one of numpy's too."""
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
    """The folder that this process stands in; None if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _import_path(folder: str | None) -> list[str]:
    """sys.path with its relative entries made absolute.

    A rank may stand in another folder by the time it imports.
    """
    if folder is None:
        return list(sys.path)
    return [os.path.normpath(os.path.join(folder, entry)) for entry in sys.path]
