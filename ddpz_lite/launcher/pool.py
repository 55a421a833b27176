"""Ranks from processes started ahead of time, for systems that cannot fork (Windows).

Slower than the zygote when the pool is empty (every process imports torch itself), as fast when the
spares are ready. A process is never used twice, so that no job sees what another left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

from .ranks import START_DEADLINE, Output, Ranks, environment
from .zygote import SIGNAL_STACKS


class Pool:
    """Spare processes, each good for one rank of one job; it speaks the zygote's protocol."""

    note = (
        "This system cannot fork: ranks come from a pool of processes that each import torch. "
        "The first launch takes some seconds; later ones find processes ready."
    )

    def __init__(self) -> None:
        self._spares: list[_Worker] = []
        self._jobs: list[threading.Thread] = []
        self._lock = threading.Lock()

    def warm(self, count: int = 4) -> None:
        with self._lock:
            self._spares = [worker for worker in self._spares if worker.process.poll() is None]
            self._spares += [_Worker() for _ in range(count - len(self._spares))]

    def start(self, world_size: int, folder: str) -> Ranks:
        self.warm(world_size)
        with self._lock:
            workers, self._spares = self._spares[:world_size], self._spares[world_size:]
        events, ours = socket.socketpair()
        try:
            ranks = Ranks([w.connect() for w in workers], [w.output() for w in workers], events)
        except OSError:
            for worker in workers:
                worker.process.kill()
            raise
        atexit.register(self.close)
        job = threading.Thread(target=self._attend, args=(workers, ours), daemon=True)
        self._jobs = [*filter(threading.Thread.is_alive, self._jobs), job]
        job.start()
        return ranks

    def close(self) -> None:
        """End the spares; the pool can be used again, cold."""
        atexit.unregister(self.close)
        for job in self._jobs:
            job.join()
        with self._lock:
            for worker in self._spares:
                worker.process.kill()
                worker.process.wait()
                worker.close()
            self._spares = []

    def _attend(self, workers: list[_Worker], ours: socket.socket) -> None:
        """Speak the zygote's protocol for one job, then start the spares of the next."""
        lock = threading.Lock()

        def tell(**message: object) -> None:
            with lock, contextlib.suppress(OSError):
                ours.sendall(json.dumps(message).encode() + b"\n")

        def wait(rank: int, worker: _Worker) -> None:
            tell(rank=rank, status=worker.process.wait())

        tell(pids=[worker.process.pid for worker in workers])
        waits = [
            threading.Thread(target=wait, args=item, daemon=True) for item in enumerate(workers)
        ]
        for thread in waits:
            thread.start()
        closer = threading.Thread(target=self._listen, args=(workers, ours), daemon=True)
        closer.start()
        for thread in waits:
            thread.join()
        tell(over=True)
        closer.join()
        for worker in workers:
            worker.close()
        ours.close()
        self.warm(len(workers))

    @staticmethod
    def _listen(workers: list[_Worker], ours: socket.socket) -> None:
        word = b"."
        while word:
            try:
                word = ours.recv(1)
            except OSError:
                word = b""
            for worker in workers:
                if word == SIGNAL_STACKS:
                    if hasattr(signal, "SIGUSR1") and worker.process.poll() is None:
                        worker.process.send_signal(signal.SIGUSR1)
                else:
                    worker.process.kill()


class _Worker:
    """One process of the pool, and the loopback connection over which it takes its orders."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1)
        self._listener.settimeout(0.5)
        self._token = secrets.token_bytes(16)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "ddpz_lite.launcher.worker",
                str(self._listener.getsockname()[1]),
            ],
            stdin=subprocess.PIPE,  # held open by the kernel: the worker ends when it closes
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        self.process.stdin.write(self._token)
        self.process.stdin.flush()

    def connect(self) -> socket.socket:
        deadline = time.monotonic() + START_DEADLINE
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                control, _ = self._listener.accept()
            except TimeoutError:
                continue
            control.settimeout(5.0)
            if secrets.compare_digest(_receive(control, len(self._token)), self._token):
                control.settimeout(None)
                self._listener.close()
                return control
            control.close()  # not our worker: someone else on this machine found the port
        said = (
            self.process.stdout.read().decode(errors="replace")
            if self.process.poll() is not None
            else "no answer"
        )
        raise OSError(
            f"launch: a worker did not come up within {START_DEADLINE:.0f} s: {said.strip()}"
        )

    def output(self) -> Output:
        ours, theirs = socket.socketpair()

        def pump() -> None:
            with theirs, contextlib.suppress(OSError):
                while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
                    theirs.sendall(chunk)

        threading.Thread(target=pump, daemon=True).start()
        return Output(ours)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self._listener.close()


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := sock.recv(size - len(data))):
        data += chunk
    return data
