"""Linux's own calls, by ctypes: what namespaces are made of, and a filter of what may be called."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterable

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP = 0x2000000
SEPARATE = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
PR_SET_SECCOMP = 22

libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(OSError):
    """The sandbox cannot be made here; the message says why."""


def call(what: str, result: int) -> None:
    """Raise Unavailable for a call of `libc` that failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise Unavailable(number, f"{what}: {os.strerror(number)}")


# System calls that no answer needs and that reach further than a process's own memory and files.
# Name -> (number on x86_64, number on aarch64)
CALLS = {
    "ptrace": (101, 117),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "landlock_create_ruleset": (444, 444),
    "syslog": (103, 116),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
}
# What one process can learn of another one by a file that both can only read: locks, watches, and
# which pages are in memory. Ranks see the same installed packages. And how many processes there
# are on the machine, and how much memory is free.
SIGNS = {
    "flock": (73, 32),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fadvise64": (221, 223),
    "mincore": (27, 232),
    "cachestat": (451, 451),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "sysinfo": (99, 179),
}
# Memory that processes share and that is no file's: one that has touched it can drop it from all
# that is counted as held, and it is still there.
MMAP = (9, 222)
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20  # the first is a bit of MAP_SHARED_VALIDATE too
FCNTL = (72, 25)
FCNTL_SIGNS = {  # of fcntl's commands
    "F_GETLK": 5,
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_OFD_GETLK": 36,
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    "F_SETLEASE": 1024,
    "F_NOTIFY": 1026,
    "F_GET_RW_HINT": 1035,
    "F_SET_RW_HINT": 1036,
}
# The size of a socket's buffers, which no process holds; other options of these numbers (of TCP,
# say) are not needed either.
SETSOCKOPT = (54, 208)
BUFFERS = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97


# (family, protocol) of the sockets that may be made; pairs of Unix ones always may
AF_NETLINK = 16  # Linux alone has it
UNIX = ((socket.AF_UNIX, 0),)
# and, to reach each other: IPv4, and the list of the interfaces (NETLINK_ROUTE is 0)
LOOPBACK = (
    *UNIX,
    (socket.AF_INET, 0),
    (socket.AF_INET, socket.IPPROTO_TCP),
    (AF_NETLINK, 0),
)
Sockets = tuple[tuple[int, int], ...]


def refuse(sockets: Sockets, signs: bool = False) -> None:
    """Refuse CALLS, new namespaces, shared memory that is no file's, all but these `sockets`,
    larger buffers of them, and SIGNS unless `signs`, by a seccomp filter that holds for this
    process and all it starts.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        return  # namespaces and limits hold without it
    program = _program(MACHINES[machine], list(MACHINES).index(machine), sockets, signs)
    code = ctypes.create_string_buffer(program)
    filters = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    call("a filter of system calls", libc.prctl(PR_SET_SECCOMP, 2, filters, 0, 0))


def _program(machine: int, column: int, sockets: Sockets, signs: bool) -> bytes:
    """The filter: (code, jump if true, jump if false, value), read from top to bottom."""
    no, rest = ERRNO | EPERM, 4 * len(sockets) + 1
    lines = [
        (LOAD, 0, 0, 4),  # the machine whose numbers are used
        (EQUAL, 1, 0, machine),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the number of the call
        (AT_LEAST, 0, 1, 0x40000000),  # x86_64's second set of numbers
        (RETURN, 0, 0, no),
    ]
    for numbers in (CALLS if signs else CALLS | SIGNS).values():
        if numbers[column] is not None:
            lines += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, no)]
    if not signs:
        lines += _where(FCNTL[column], 24, FCNTL_SIGNS.values())  # the second argument
    lines += _where(SETSOCKOPT[column], 32, BUFFERS.values())  # the third argument
    lines += [
        (EQUAL, 0, 5, MMAP[column]),
        (LOAD, 0, 0, 40),  # the fourth argument
        (ANY_BIT, 0, 2, MAP_SHARED),
        (ANY_BIT, 0, 1, MAP_ANONYMOUS),
        (RETURN, 0, 0, no),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, 1, CLONE3[column]),  # its flags cannot be seen; the C library falls back
        (RETURN, 0, 0, ERRNO | ENOSYS),
        (EQUAL, 0, 3, CLONE[column]),
        (LOAD, 0, 0, 16),  # the first argument
        (ANY_BIT, 0, 2 + rest, SEPARATE | CLONE_NEWUSER | CLONE_NEWCGROUP),
        (RETURN, 0, 0, no),
        (EQUAL, 0, rest, SOCKET[column]),
    ]
    for index, (family, protocol) in enumerate(sockets):
        lines += [
            (LOAD, 0, 0, 16),
            (EQUAL, 0, 2, family),
            (LOAD, 0, 0, 32),  # the third argument
            (EQUAL, rest - 4 * (index + 1), 0, protocol),
        ]
    lines += [
        (RETURN, 0, 0, ERRNO | EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _where(number: int, argument: int, values: Iterable[int]) -> list[tuple[int, int, int, int]]:
    """Lines that refuse call `number` where the argument at that offset is one of these values."""
    refused = [
        line for value in values for line in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ERRNO | EPERM))
    ]
    start = (EQUAL, 0, len(refused) + 2, number), (LOAD, 0, 0, argument)
    return [*start, *refused, (RETURN, 0, 0, ALLOW)]
