"""The fork server: a process that has imported torch once, and forks a ready rank in milliseconds.

Python's `multiprocessing` has a fork server too. This one differs in three ways:

* A job is a socket. The server reports each rank's end on it. When the launcher closes it, for any
  reason (the job is done, Ctrl-C, `kill -9` of the kernel), every process of the job is killed and
  its folder removed.
* Ranks are children of the server, and the server ends with its parent, so on Linux the operating
  system itself kills them (PR_SET_PDEATHSIG), even one that is stuck in C code with the
  interpreter lock held.
* The caller's `__main__` is never imported again, because the function is sent by value (see
  serialize.py). So a launch costs the same from a notebook, a script and a test, and a script needs
  no `if __name__ == "__main__"`.

The server stays single-threaded and never computes: forking is safe only while torch has no
thread pool.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddpz_lite.launcher import huge_pages
from ddpz_lite.wire import callsite

# Needed by every rank; imported before the first fork.
PRELOAD = [
    "torch",
    "torch.distributed",
    "cloudpickle",
    "numpy",
    "ddpz_lite.wire.backend",
    "ddpz_lite.launcher.rank",
]
# Needed by some ranks, and slow. The first optimizer imports torch._dynamo.
PRELOAD_IDLE = [
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "ddpz_lite.strategies.parallelize",
    "ddpz_lite.checkpoint.save_load",
    "ddpz_lite.meter",
]
# A request: the number of ranks and the length of the folder's name, which follows. Descriptors are
# passed with it.
REQUEST = struct.Struct("!II")
# Signals of the launcher about a job. A closed socket means SIGNAL_KILL too.
SIGNAL_STACKS = b"S"  # ask every living rank for its stack (faulthandler, SIGUSR1)
SIGNAL_KILL = b"K"  # end every rank now
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAUSE = 0.5  # seconds between two checks whether the parent lives


@dataclass
class ForkedJob:
    """The ranks of one job: its socket, its private folder, and the ranks that still live."""

    sock: socket.socket
    folder: str
    alive: dict[int, int] = field(default_factory=dict)  # pid -> rank

    def send(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # the launcher may be gone
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def ask_for_stacks(self) -> None:
        for pid in self.alive:
            os.kill(pid, signal.SIGUSR1)

    def kill(self) -> None:
        for pid in self.alive:
            with contextlib.suppress(ProcessLookupError):  # just forked: not yet in its own group
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)


class Server:
    """Waits for requests, forks ranks, and reports their ends.

    quiet: closed in every rank, to restore the user's warning filters and garbage collection.
    """

    def __init__(self, requests: socket.socket, quiet: contextlib.ExitStack):
        self.requests, self.quiet = requests, quiet
        self.jobs: dict[socket.socket, ForkedJob] = {}
        self.selector = selectors.DefaultSelector()
        self.libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self.pid = os.getpid()
        self.parent = os.getppid()

    def serve(self) -> None:
        """Fork ranks until the parent is gone."""
        self.prepare()
        try:
            while os.getppid() == self.parent:
                self.turn()
        except EOFError:
            pass  # the launcher closed its end: the normal way to stop
        finally:
            if os.getpid() == self.pid:
                for job in self.jobs.values():
                    job.kill()
                    self.clean_up(job)

    def prepare(self) -> None:
        """Wake up for requests and for the end of a child."""
        if self.libc:  # a daemon that a rank leaves behind becomes our child: see `reap`
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.wake, self.waker = socket.socketpair()  # a signal writes to one, we read the other
        for end in (self.wake, self.waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.requests, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.idle: Iterator[None] | None = self.prepare_more()

    def prepare_more(self) -> Iterator[None]:
        """One step at a time while no request waits: import more, then compact the memory."""
        for module in PRELOAD_IDLE:
            importlib.import_module(module)
            yield
        yield from huge_pages.compact()
        self.idle = None

    def turn(self) -> None:
        """Handle what has arrived; without requests and jobs, prepare more."""
        free = self.idle is not None and not self.jobs
        ready = self.selector.select(0 if free else PAUSE)
        if not ready and free:
            next(self.idle, None)
        for key, _ in ready:
            if key.fileobj is self.requests:
                self.start()
            elif key.fileobj is self.wake:
                self.wake.recv(4096)
            else:
                self.listen(self.jobs[key.fileobj])
        self.reap()

    def start(self) -> None:
        """Fork the ranks of a new job.

        Descriptors: the job's socket, then (control, output) for each rank.
        """
        data, fds, _, _ = socket.recv_fds(self.requests, REQUEST.size, 253)
        if not data:
            raise EOFError
        world, length = REQUEST.unpack(data)
        folder = os.fsdecode(self.requests.recv(length, socket.MSG_WAITALL))
        wanted = 1 + 2 * world
        if len(fds) != wanted:
            raise OSError(f"fork server: {world} ranks need {wanted} descriptors, got {len(fds)}")
        job = ForkedJob(socket.socket(fileno=fds[0]), folder)
        gc.freeze()  # pages that no collection touches stay shared between the ranks
        self.drop_finalizers()
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                self.become_rank(fds, control=fds[1 + 2 * rank], output=fds[2 + 2 * rank])
            job.alive[pid] = rank
        for fd in fds[1:]:
            os.close(fd)
        self.jobs[job.sock] = job
        self.selector.register(job.sock, selectors.EVENT_READ)
        job.send(started=True)

    def drop_finalizers(self) -> None:
        """Drop the finalizers and caches that the imports here made, once instead of in each rank.

        A rank would touch the pages that ranks share, which costs more than starting it. torch's
        operators have hundreds of finalizers; torch.compile prints a table of its times at exit,
        and has a cache of names, which init_process_group empties.
        """
        for finalizer in list(weakref.finalize._registry):
            finalizer.atexit = False
        atexit.unregister(weakref.finalize._exitfunc)
        weakref.finalize._registered_with_atexit = False  # the first one in a rank registers again
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None:
            compiler.trace_rules.clear_lru_cache()
            if "TORCH_LOGS" not in os.environ:
                atexit.unregister(compiler.utils.dump_compile_times)

    def become_rank(self, fds: list[int], control: int, output: int) -> None:
        """In the child: drop what belongs to the fork server, then run as a rank. Never returns."""
        code = 1
        try:
            os.setpgid(0, 0)
            if self.libc:
                self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != self.pid:
                    os._exit(1)
            self.drop()
            for fd in fds:
                if fd not in (control, output):
                    os.close(fd)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            from ddpz_lite.launcher import rank

            code = rank.main(socket.socket(fileno=control), server=self.pid)
        except BaseException:
            traceback.print_exc()  # the rank's output; the exit status makes it a failure
        finally:
            os._exit(code)

    def drop(self) -> None:
        """In the child: drop the server's signals and sockets, and restore warnings and garbage."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        self.requests.close()
        self.wake.close()
        self.waker.close()
        for job in self.jobs.values():
            job.sock.close()
        self.quiet.close()

    def listen(self, job: ForkedJob) -> None:
        """A signal of the launcher about a job."""
        try:
            signal_byte = job.sock.recv(1)
        except ConnectionError:
            signal_byte = b""
        if signal_byte == SIGNAL_STACKS:
            job.ask_for_stacks()
            return
        job.kill()
        if not signal_byte:  # closed: the job is over
            self.selector.unregister(job.sock)
            del self.jobs[job.sock]
            self.clean_up(job)

    def reap(self) -> None:
        """Collect ended ranks and report them; end the processes that a rank left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = [job for job in self.jobs.values() if pid in job.alive]
            for job in ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # its data-loader workers and other children
                job.send(rank=job.alive.pop(pid), status=os.waitstatus_to_exitcode(status))
            self.kill_orphans()
            for job in ended:
                if not job.alive:
                    job.send(over=True)

    def clean_up(self, job: ForkedJob) -> None:
        """Wait for the killed ranks of a closed job, then remove its folder."""
        for pid in job.alive:
            os.waitpid(pid, 0)
        job.alive.clear()
        self.kill_orphans()
        shutil.rmtree(job.folder, ignore_errors=True)  # the launcher has usually removed it already
        job.sock.close()

    def kill_orphans(self) -> None:
        """Once no rank lives, kill the daemons of ranks, which became our children."""
        if any(job.alive for job in self.jobs.values()):
            return
        try:
            with open(f"/proc/self/task/{self.pid}/children") as file:
                children = {int(pid) for pid in file.read().split()}
        except OSError:
            return  # no /proc (macOS): only the process groups are ended
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve the requests that arrive on the descriptor sys.argv[1].

    [Note: warnings] PYTHONWARNINGS=error is meant for the user's code. It must not end the imports
    here, so the fork server ignores warnings, and each rank restores the filters.

    [Note: garbage] Imports create hundreds of thousands of objects and hardly any garbage;
    collecting it takes a sixth of their time. Each rank collects again.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the launcher closes the job
    # A rank that has no handler yet must not die of a request for its stack.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(warnings.catch_warnings(action="ignore"))
        quiet.enter_context(callsite.uncollected())
        for module in [*PRELOAD, *sys.argv[2:]]:
            importlib.import_module(module)
        Server(requests, quiet).serve()
    os._exit(0)  # unloading torch takes a second


if __name__ == "__main__":
    main()
