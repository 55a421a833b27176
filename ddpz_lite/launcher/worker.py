"""A warm process of the pool: imports torch, connects, and waits to become a rank. Run by
engines.Pool.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading

from .zygote import PRELOAD


def main() -> int:
    kernel = os.dup(0)  # the rank's own standard input will be empty
    token = os.read(kernel, 16)
    if len(token) < 16:
        return 1

    def end_with_the_kernel() -> None:
        os.read(kernel, 1)
        os._exit(1)

    threading.Thread(target=end_with_the_kernel, daemon=True).start()
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the rank can answer it with its stack
    for module in PRELOAD:
        importlib.import_module(module)
    control = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    control.sendall(token)
    from . import rank

    return rank.main(control)


if __name__ == "__main__":
    os._exit(main())
