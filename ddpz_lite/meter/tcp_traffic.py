"""Count the bytes that a process has sent over TCP, with the counters of the Linux kernel."""

from __future__ import annotations

import os
import socket
import stat
import struct

_BYTES_SENT = 200  # where struct tcp_info (linux/tcp.h, from Linux 4.19 on) has tcpi_bytes_sent,
_TWO_COUNTERS = struct.Struct("=QQ")  # followed by tcpi_bytes_retrans


def tcp_bytes_sent() -> int | None:
    """Bytes that the open TCP connections of this process have sent so far, each byte once.

    The kernel counts them, so this number depends on no formula of ours. It contains what a backend
    sends besides the tensors, for example gloo's headers. None where the system does not count
    (macOS).
    """
    if not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile
            continue
        if len(info) < _BYTES_SENT + _TWO_COUNTERS.size:
            return None
        sent, again = _TWO_COUNTERS.unpack_from(info, _BYTES_SENT)
        total += sent - again
    return total
