"""The fork server of the grader: torch imported once, no task, no judge, no answer in its memory.

It is a separate program, so it holds nothing of the grader's memory, and its forks hold nothing of
an earlier submission: cells and inputs go to a rank directly, never through here. For each rank it
forks a supervisor. The supervisor makes the namespaces, forks the rank into them, and makes sure
that everything in there is dead once the grader closes the control socket or ends. A notebook for
nbval has a supervisor of the same kind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any

from ddpz_lite.course.grader.sandbox import isolation
from ddpz_lite.course.grader.sandbox.frames import REQUEST, SOCKETS
from ddpz_lite.course.grader.sandbox.limits import Limits
from ddpz_lite.launcher import huge_pages
from ddpz_lite.wire import callsite

# Imported before the first fork: what ranks need, and what is slow.
PRELOAD = [
    "numpy",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.testing",
    "ddpz_lite.course.check.watch",
    "ddpz_lite.meter",
    "ddpz_lite.wire",
    *{profile.inside for profile in isolation.PROFILES.values()},
]


def serve(requests: socket.socket) -> None:
    """Fork ranks until the grader is gone."""
    while True:
        raw, fds, _, _ = socket.recv_fds(requests, REQUEST.size, 253)
        if not raw:
            return
        order = json.loads(requests.recv(REQUEST.unpack(raw)[0], socket.MSG_WAITALL))
        gc.freeze()  # pages that no collection touches stay shared between the ranks
        for rank in range(order["world"]):
            fds_of_rank = fds[SOCKETS * rank : SOCKETS * (rank + 1)]
            if os.fork() == 0:
                _Supervisor(order, *fds_of_rank).keep()
        for fd in fds:
            os.close(fd)


class _Supervisor:
    """Stands between the grader and one rank, outside the sandbox; runs no code of the rank."""

    def __init__(self, order: dict[str, Any], line: int, handle: int, output: int):
        self.order = order
        self.line, self.handle, self.output = line, handle, output

    def keep(self) -> None:
        """Never returns."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(self.output, 1)
            os.dup2(self.output, 2)
            _close_all_but(self.line, self.handle)
            self.uid, self.taken = isolation.take_user()
            if self.order["sandboxed"]:
                isolation.separate(self.uid)
            else:
                isolation.adopt_orphans()
            pid = os.fork()
            if pid == 0:
                self._become_rank()
            self._watch(pid)
        except OSError as error:
            self._tell(error=isolation.why(error))
        finally:
            os._exit(0)

    def _watch(self, pid: int) -> None:
        """Wait until the rank ends or the control socket closes; then end all its processes."""
        self._tell(pid=pid, supervisor=os.getpid())
        for fd in (self.line, 1, 2):
            os.close(fd)
        ended = os.pidfd_open(pid)
        ready, _, _ = select.select([ended, self.handle], [], [])
        if ended not in ready:
            os.kill(pid, signal.SIGKILL)
        # With a pid namespace this returns when all processes in it are gone.
        _, status = os.waitpid(pid, 0)
        if not self.order["sandboxed"]:
            isolation.end_group(pid)
            if ended not in ready:  # the case is over, and the grader may be gone
                shutil.rmtree(self.order["folder"], ignore_errors=True)
        self._tell(status=os.waitstatus_to_exitcode(status))

    def _become_rank(self) -> None:
        try:
            os.setsid()
            self.taken.close()  # a reference to the outer namespace
            limits, seconds = Limits(**self.order["limits"]), self.order["seconds"]
            profile = isolation.PROFILES[self.order["profile"]]
            if self.order["sandboxed"]:
                isolation.enter(self.uid, limits, seconds, profile)
            else:
                isolation.restrict_without_namespaces(
                    self.uid, limits, seconds, self.order["folder"]
                )
        except OSError as error:
            self._tell(error=isolation.why(error))
            os._exit(1)
        os.close(self.handle)
        sys.modules[profile.inside].run(socket.socket(fileno=self.line))

    def _tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the grader is gone: then no process is left to notify
            os.write(self.handle, json.dumps(message).encode() + b"\n")


def _close_all_but(*kept: int) -> None:
    """Close all descriptors but these and the three standard ones."""
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.chdir("/")
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the grader, which closes the sandboxes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects ended supervisors
    with callsite.uncollected():  # an import makes much, and hardly any garbage
        for module in PRELOAD:
            importlib.import_module(module)
    _ask_the_processor()
    for profile in isolation.PROFILES.values():
        isolation.shown_to(profile)
    for _ in huge_pages.compact():
        pass
    serve(requests)


def _ask_the_processor() -> None:
    """torch asks what the processor can do when it first needs to know, of files that a sandbox
    does not show. Small tensors, one thread: no thread pool exists at the forks.
    """
    import torch

    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer = torch.nn.Linear(2, 2, dtype=dtype)
        layer(torch.ones(1, 2, dtype=dtype)).sum().backward()


if __name__ == "__main__":
    main()
