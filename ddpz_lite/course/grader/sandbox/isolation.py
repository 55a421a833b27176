"""Isolation: a process in here can compute, and do nothing else.

`separate` gives the processes that will be forked next namespaces of their own: pid, mount, ipc,
uts, network (with nothing in it but a loopback, which is down), and a user namespace where this is
not root. `enter`, in the forked process, builds a root folder out of what Python and torch need,
read only, with two small folders in memory to write to, moves there, gives up every right, and sets
the limits. A `Profile` says what differs between a rank and a whole notebook. `confine` sets only
the limits, for machines that do not allow the rest.

This file does not import torch. Try it: `python -m ddpz_lite.course.grader.sandbox.isolation`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import site
import socket
import struct
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ddpz_lite.course.grader.sandbox.limits import Limits
from ddpz_lite.course.grader.sandbox.syscalls import (
    CLONE_NEWUSER,
    LOOPBACK,
    SEPARATE,
    UNIX,
    Unavailable,
    call,
    libc,
    refuse,
)

# Numbers that no system gives to a person or a service (systemd, UIDS-GIDS: 60578 to 61183).
FIRST_UID, UIDS = 60578, 606
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_SETATTR, READ_ONLY = 442, 1 | 2 | 4  # MOUNT_ATTR_RDONLY, _NOSUID, _NODEV
PR_SET_DUMPABLE, PR_CAPBSET_DROP = 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAP_SYS_ADMIN, LAST_CAP = 21, 63
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

PACKAGE = Path(__file__).absolute().parents[3]  # ddpz_lite/, as modules know it
ABSENT = Path(__file__).absolute().with_name("absent.py")
# What a rank sees of the package, from its top: a file, a folder with all that is in it, or a
# pattern. A folder, or a file of the checks, that is not named here is invisible.
SHOWN = (
    "__init__.py",
    *("model.py", "data", "wire", "launcher", "strategies", "checkpoint", "meter"),
    *("course/__init__.py", "course/interactive.py", "course/show"),
    *(f"course/check/{name}.py" for name in ("__init__", "watch", "data", "guard", "job", "task")),
    *("course/tasks/__init__.py", "course/tasks/*/__init__.py", "course/tasks/*/job.py"),
    "course/tasks/lesson03/broken.py",  # which a job of lesson 03 runs
)
# What a task that asks to build a strategy sees as ABSENT: every file in there, also later ones.
READY_MADE = (
    "strategies",
    "checkpoint",
    "data/sampler.py",
    "data/token_budget.py",
    "data/work_queue.py",
)
# Files of these that are not strategies.
FACTS = ("strategies/placement.py", "strategies/costs.py", "strategies/pipeline/schedules.py")
DEVICES = ("null", "full", "random", "urandom")  # of "zero" one could map shared memory
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")


@dataclass(frozen=True)
class Profile:
    """What one kind of sandbox runs, sees and may do."""

    inside: str  # the module whose `run(sock)` is called inside
    see_all: bool = False  # whether all of the package is seen, or what is SHOWN
    absent: tuple[str, ...] = ()  # of what is SHOWN: folders and files in whose place ABSENT is
    python: bool = False  # whether Python can be started, as a program, and finds a /proc
    loopback: bool = False  # whether its processes reach each other over IPv4
    signs: bool = False  # whether they may see each other's locks on files, and the like


GRADER = __package__.rpartition(".")[0]
PROFILES = {
    "rank": Profile(f"{GRADER}.arena.inside"),
    # for a task that asks to build a strategy: without the ready-made ones
    "builder": Profile(f"{GRADER}.arena.inside", absent=READY_MADE),
    # a learner's notebook with its kernel, its fork server and its ranks: all of the package
    "notebook": Profile(
        f"{GRADER}.sandbox.notebook_inside", see_all=True, python=True, loopback=True, signs=True
    ),
}


def why(error: OSError) -> str:
    """An error's words and the file that it is about."""
    words = error.strerror or str(error)
    return f"{words} ({error.filename})" if error.filename else words


def is_admin() -> bool:
    """Whether this process may make namespaces without a user namespace."""
    with open("/proc/self/status") as file:
        held = next(line for line in file if line.startswith("CapEff:"))
    return os.geteuid() == 0 and bool(int(held.split()[1], 16) >> CAP_SYS_ADMIN & 1)


def take_user() -> tuple[int, socket.socket]:
    """A user that no other rank of any grader is as long as the socket is open. Raises Unavailable.

    The system counts processes and threads by user: a rank that shared its own could use up
    another's. A name in the abstract namespace is taken by one, and free when that one is gone.
    """
    for uid in range(FIRST_UID, FIRST_UID + UIDS):
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            taken.bind(f"\0ddpz-lite grader, user {uid}")
        except OSError as error:
            taken.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return uid, taken
    raise Unavailable(errno.EAGAIN, f"all {UIDS} users for ranks are taken")


def separate(uid: int) -> None:
    """Namespaces for the processes that this one forks from now on. Raises Unavailable.

    uid: what the sandboxed process will be. As root it is really that user; otherwise it is called
    so inside, and is this process's user outside.
    """
    if not sys.platform.startswith("linux"):
        raise Unavailable(0, f"it is made of Linux namespaces, and this is {sys.platform}")
    if is_admin():
        call("new namespaces", libc.unshare(SEPARATE))
        return
    if os.geteuid() == 0:  # root without its rights, as in many containers
        _change_user(uid)
        call("reading its own /proc", libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
    outside = os.geteuid(), os.getegid()
    call("a new user namespace", libc.unshare(CLONE_NEWUSER | SEPARATE))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outside[0]} 1"),
        ("gid_map", f"{uid} {outside[1]} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter(uid: int, limits: Limits, seconds: float, profile: Profile) -> None:
    """Isolate this process, after `separate` and a fork. Raises Unavailable."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # a machine out of memory ends this first
    held = _held()  # while there is a /proc for certain
    _build_root(uid, limits, profile)
    socket.sethostname("rank")
    if profile.loopback:
        _loopback_up()
    confine(limits, seconds, held, processes=limits.processes)
    for capability in range(LAST_CAP + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails where it is gone, or not known
    if os.geteuid() == 0:
        _change_user(uid)
    _give_up_rights()
    refuse(LOOPBACK if profile.loopback else UNIX, profile.signs)


def _held() -> int:
    """Bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def confine(limits: Limits, seconds: float, held: int, processes: int | None = None) -> None:
    """Limits that hold for this process and all it starts. seconds: of processor time; held: bytes
    of address space that it had before, which do not count.
    """
    for kind, most in (
        (resource.RLIMIT_AS, held + limits.memory),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CPU, int(seconds) + limits.cpu),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        *([] if processes is None else [(resource.RLIMIT_NPROC, processes)]),
    ):
        _, ceiling = resource.getrlimit(kind)
        if ceiling != resource.RLIM_INFINITY:
            most = min(most, ceiling)
        resource.setrlimit(kind, (most, most))


# -- without a sandbox -----------------------------------------------------------------------------


def restrict_without_namespaces(uid: int, limits: Limits, seconds: float, folder: str) -> None:
    """The limits, the filter of system calls, a folder to stand in; for root, another user, where
    that one can read Python: the ranks of a case are several, so the folder is open to all, like
    /tmp. Hides nothing.
    """
    confine(limits, seconds, _held())
    if os.geteuid() == 0 and _all_can_read(Path(sys.base_prefix), PACKAGE, Path(os.__file__)):
        os.chmod(folder, 0o1777)
        _change_user(uid)
    call("no new rights", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    refuse(UNIX)
    os.chdir(folder)


def _all_can_read(*paths: Path) -> bool:
    """Whether any user can reach these."""
    way = {part for path in paths for part in (path, *path.parents)}
    return all(part.stat().st_mode & 0o5 >= (5 if part.is_dir() else 4) for part in way)


def adopt_orphans() -> None:
    """Processes that a rank leaves behind become this process's children."""
    call("adopting orphans", libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def end_group(pid: int) -> None:
    """Kill what the ended rank `pid` left behind, until nothing is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = [int(child) for child in file.read().split()]
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


# -- the root folder -------------------------------------------------------------------------------


def _build_root(uid: int, limits: Limits, profile: Profile) -> None:
    """A new root in memory, with what is needed bound into it, read only."""
    call("a private mount table", libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    root = Path("/tmp")  # covered here alone: the mount table is our own
    sources = {(path, path.is_dir()): os.open(path, os.O_PATH) for path in _needed(profile)}
    package = shown_to(profile)
    shown_to.cache_clear()  # what another kind sees is not for this one
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    _tmpfs(root, "size=1m,mode=755")
    for name in ("proc", "tmp", "dev/shm", "etc", "old"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "dev/shm"):  # first: what is needed may itself lie in /tmp
        _tmpfs(root / name, f"size={limits.scratch},nr_inodes=4096,mode=1777")
    for (path, folder), fd in sources.items():
        _bind(fd, root / path.relative_to("/"), folder)
        _read_only(bytes(root / path.relative_to("/")))
    for link in map(Path, ("/lib", "/lib32", "/lib64")):
        if link.is_symlink():
            (root / link.relative_to("/")).symlink_to(os.readlink(link))
    if package:
        for path in {PACKAGE, PACKAGE.resolve()}:  # modules know either name
            _furnish(root / path.relative_to("/"), package)
    for name, fd in devices.items():
        _bind(fd, root / "dev" / name, False)
    (root / "etc/passwd").write_text(f"rank:x:{uid}:{uid}::/tmp:/nowhere\n")
    for fd in (*sources.values(), *devices.values()):
        os.close(fd)  # each is a reference to the old root
    _move_to(root, profile.python)


@lru_cache
def shown_to(profile: Profile) -> dict[str, bytes]:
    """What that kind of sandbox sees of this package: read before the forks, once for all."""
    return {} if profile.see_all else shown(PACKAGE, profile.absent)


def shown(package: Path, absent: Sequence[str] = ()) -> dict[str, bytes]:
    """What of a package is SHOWN: path -> content.

    Of what is `absent`, or in it, ABSENT's; and of an `__init__.py` there, an empty one, without
    which the others could not be found.
    """
    stand_in = ABSENT.read_bytes()
    found: dict[str, bytes] = {}
    for pattern in SHOWN:
        for path in package.glob(pattern):
            for file in path.rglob("*") if path.is_dir() else [path]:
                name = file.relative_to(package)
                if file.suffix == ".pyc" or not file.is_file():
                    continue
                closed = any(name.is_relative_to(place) for place in absent)
                if not closed or str(name) in FACTS:
                    found[str(name)] = file.read_bytes()
                elif file.suffix == ".py":
                    found[str(name)] = b"" if file.name == "__init__.py" else stand_in
    return found


def _furnish(folder: Path, files: Mapping[str, bytes]) -> None:
    """A folder with these files and nothing else, whatever is there."""
    folder.mkdir(parents=True, exist_ok=True)
    _tmpfs(folder, "size=8m,mode=755")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    _read_only(bytes(folder))


def _move_to(root: Path, proc: bool) -> None:
    """Make `root` the root and forget the old one."""
    os.chdir(root)
    call("a new root", libc.pivot_root(b".", b"old"))
    os.chdir("/")
    if proc:
        # Refused where the outer /proc is covered in part, as in a container; Python does without.
        # It shows the processes of this sandbox, and the paths outside of what is bound into it.
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
        libc.mount(b"proc", b"/proc", b"proc", flags, b"subset=pid")
    call("leaving the old root", libc.umount2(b"/old", MNT_DETACH))
    os.rmdir("/old")
    _read_only(b"/")
    os.chdir("/tmp")


def _needed(profile: Profile) -> list[Path]:
    """What Python and torch read: libraries, installed packages, and this one."""
    wanted = [Path(name) for name in LIBRARIES if not Path(name).is_symlink()]
    wanted += [Path("/etc/ld.so.cache"), *map(Path, site.getsitepackages())]
    wanted += [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")]
    if site.ENABLE_USER_SITE:
        wanted.append(Path(site.getusersitepackages()))
    if profile.see_all:
        wanted.append(PACKAGE)
    if profile.python:
        wanted += [
            Path(sys.executable),
            Path(sys.prefix, "pyvenv.cfg"),
            Path(sys.base_prefix, "lib"),
        ]
    wanted = [path.absolute() for path in wanted if path.exists()]
    wanted = sorted({*wanted, *(path.resolve() for path in wanted)})  # modules know either name
    return [p for p in wanted if not any(p != q and p.is_relative_to(q) for q in wanted)]


def _bind(fd: int, target: Path, folder: bool) -> None:
    """Show what is behind `fd` at `target`."""
    if folder:
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    source = f"/proc/self/fd/{fd}".encode()
    call(f"showing {target}", libc.mount(source, bytes(target), None, MS_BIND | MS_REC, None))


def _read_only(target: bytes) -> None:
    """Nothing can be written at or below `target`, however it was mounted (Linux 5.12)."""
    attributes = struct.pack("=QQQQ", READ_ONLY if target != b"/" else 1, 0, 0, 0)
    recursive = AT_RECURSIVE if target != b"/" else 0
    done = libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, target, recursive, attributes, ctypes.c_size_t(len(attributes))
    )
    call("a read-only mount (Linux 5.12 or newer)", done)


def _tmpfs(target: Path, options: str) -> None:
    flags = MS_NOSUID | MS_NODEV
    done = libc.mount(b"tmpfs", bytes(target), b"tmpfs", flags, options.encode())
    call(f"a folder in memory at {target}", done)


# -- rights ----------------------------------------------------------------------------------------


def _loopback_up() -> None:
    """Switch on the one interface of this network namespace; it leads nowhere else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
        except OSError as error:
            raise Unavailable(error.errno, f"its own loopback: {error.strerror}") from None


def _change_user(uid: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise Unavailable(error.errno, f"becoming user {uid}: {error.strerror}") from None


def _give_up_rights() -> None:
    """No capabilities, and no way to new ones."""
    header = struct.pack("=Ii", 0x20080522, 0)
    call("giving up capabilities", libc.capset(header, bytes(24)))
    call("no new rights", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def main() -> None:
    """Make a sandbox, end at once; says on stderr why it cannot."""
    try:
        uid, _taken = take_user()
        separate(uid)
        pid = os.fork()
        if pid == 0:
            try:
                enter(uid, Limits(), 5.0, PROFILES["builder"])
                os._exit(0)
            except OSError as error:
                print(why(error), file=sys.stderr, flush=True)
                os._exit(1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except OSError as error:
        print(why(error), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
