"""What a rank of the grader can see and reach, and what is left of it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from grade_cases import by_broker, case, returned
from leftovers import descriptors, family, gone

import ddpz_lite
from ddpz_lite.course.check.task import lessons
from ddpz_lite.course.grader import Limits, SandboxPool, probe
from ddpz_lite.course.grader.sandbox import isolation
from ddpz_lite.course.grader.sandbox.frames import Inbox, Refused, clean, frame
from ddpz_lite.course.grader.sandbox.usage import memory

pytestmark = pytest.mark.rest

CAN = probe()
sandboxed = pytest.mark.skipif(not CAN.ok, reason=f"no sandbox here: {CAN.why}")
PACKAGE = Path(ddpz_lite.__file__).parent
BOTH = [pytest.param(True, marks=sandboxed, id="sandbox"), pytest.param(False, id="limits alone")]


@pytest.fixture(autouse=True, scope="module")
def pool():
    with SandboxPool():
        yield


def look(source: str, **options) -> list:
    """What one rank puts into `out`, in the sandbox."""
    seen = by_broker(source, case(1, timeout=20), **options)
    assert seen.outcome == "ok", seen.sentence
    return returned(seen)[0]


ATTEMPT = """
def attempt(action):
    try: action()
    except BaseException as error: return type(error).__name__
    return "done"
"""

# -- what it sees ----------------------------------------------------------------------------------


# Where Python or this package are below /tmp, the path to them is seen there, and nothing else.
WAY = {
    Path(place).parts[2]
    for place in (sys.prefix, sys.base_prefix, str(PACKAGE))
    if Path(place).parts[1] == "tmp"
}


# What is seen of the package (path -> digest of its content), and what lies at the top and beside.
WALK = f"""
import hashlib, os
package, found = {str(PACKAGE)!r}, {{}}
for folder, _, names in os.walk(package):
    for name in names:
        path = os.path.join(folder, name)
        found[os.path.relpath(path, package)] = hashlib.sha256(open(path, "rb").read()).hexdigest()
out += [found, os.listdir("/"), os.listdir(os.path.dirname(package)), os.listdir("/tmp")]
"""


def digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


@sandboxed
def test_files_are_python_the_packages_and_what_is_shown_of_this_package():
    found, top, beside, tmp = look(WALK)
    assert found == digests(isolation.shown(PACKAGE))
    assert not {"home", "var", "etc/shadow", "old", "sys", "run"} & set(top)
    assert set(tmp) == WAY
    assert "ddpz_lite" in beside and not {"solutions", "exercises", "tests", ".git"} & set(beside)


@sandboxed
def test_a_task_that_builds_a_strategy_sees_the_same_without_the_ready_made_ones():
    lines = "".join(f"    {line}\n" for line in ["out = []", *WALK.splitlines()])
    seen = build(f"def weighted_mean(gradients, samples):\n{lines}    gradients[:] = [found]\n")
    assert seen.outcome == "ok", seen.sentence
    assert returned(seen)[0] == [digests(isolation.shown(PACKAGE, isolation.READY_MADE))]


@sandboxed
def test_every_job_finds_what_it_imports():
    names = [f"ddpz_lite.course.tasks.lesson{lesson}.job" for lesson in lessons()]
    seen = build(f"""
import importlib
def weighted_mean(gradients, samples):
    gradients[:] = [importlib.import_module(name).__name__ for name in {names!r}]
""")
    assert seen.outcome == "ok", seen.sentence
    assert returned(seen)[0] == names


def test_what_is_added_to_the_package_is_closed_without_anyone_remembering_it(tmp_path):
    package = tmp_path / "ddpz_lite"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = isolation.shown(package, isolation.READY_MADE)
    for name in (
        *("strategies/later.py", "strategies/deep/__init__.py", "strategies/deep/inner.py"),
        *(
            "course/tasks/lesson99/__init__.py",
            "course/tasks/lesson99/job.py",
            "course/tasks/lesson99/judge.py",
        ),
        *(
            "room/__init__.py",
            "room/inner.py",
            "loose.py",
            "course/check/later.py",
            "course/grader/later.py",
        ),
        *("course/tasks/__pycache__/judge.pyc", "wire/__pycache__/call.pyc"),
    ):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("new = 1\n")
    stand_in = isolation.ABSENT.read_bytes()
    after = isolation.shown(package, isolation.READY_MADE)
    added = {name: content for name, content in after.items() if name not in before}
    assert added == {
        "strategies/later.py": stand_in,
        "strategies/deep/__init__.py": b"",
        "strategies/deep/inner.py": stand_in,
        "course/tasks/lesson99/__init__.py": b"new = 1\n",
        "course/tasks/lesson99/job.py": b"new = 1\n",
    }
    assert before.items() <= after.items()
    facts = set(isolation.FACTS)
    assert not {after[name] for name in facts} & {stand_in, b""}
    closed = [name for name in after if name.startswith("strategies/") or "sampler" in name]
    closed = [name for name in closed if name not in facts]
    assert len(closed) > 12 and {after[name] for name in closed} == {stand_in, b""}
    assert not [name for name in after if "judge" in name or name.startswith("course/grader")]
    assert isolation.shown(package)["strategies/later.py"] == b"new = 1\n"


@sandboxed
def test_what_stands_in_for_a_strategy_can_be_imported_and_not_called():
    seen = build("""
import sys
import ddpz_lite as dz
from ddpz_lite import data
from ddpz_lite.strategies.comm import Comm
from ddpz_lite.strategies.parallelize import parallelize
from ddpz_lite.meter import memory
strategy = dz.ZeRO1
def weighted_mean(gradients, samples):
    def said(make):
        try: return make()
        except RuntimeError as error: return f"{type(error).__name__}: {error}"
    gradients[:] = [said(Comm), said(lambda: parallelize(None)), said(lambda: data.RankSampler(3))]
    gradients += [len(data.Windows(torch.zeros(9), 4)) > 0, memory is not None]
    try: open(sys.modules[Comm.__module__].__file__, "w").close()
    except OSError: gradients += ["not written"]
""")
    assert seen.outcome == "ok", seen.sentence
    words = "ReadyMade: ddpz_lite.{} is ready-made; this task asks you to build what it does"
    names = "strategies.comm.Comm", "strategies.parallelize.parallelize", "data.sampler.RankSampler"
    assert returned(seen)[0] == [*map(words.format, names), True, True, "not written"]


def build(*sources: str, world: int = 1, sandboxed: bool = True):
    """What is seen of these cells, graded as the task's; the last one is its answer."""
    from grade_cases import GIVEN, TASK

    from ddpz_lite.course.grader import observe_in_sandbox

    *earlier, answer = sources
    cells = [("given", GIVEN), *((f"c{i}", source) for i, source in enumerate(earlier))]
    cells.append(("weighted_mean-answer", answer))
    limits = Limits(cell=30.0)
    (seen,) = observe_in_sandbox(TASK, cells, [case(world)], limits, sandboxed)
    return seen


# -- what it sees of a notebook --------------------------------------------------------------------

SEVEN = "def weighted_mean(gradients, samples): gradients[:] = [7]\n"
TRIED_OUT = {
    "a check": 'from ddpz_lite import check\ncheck("03.weighted_mean", weighted_mean)\n',
    "a check by its full name": 'import ddpz_lite as dz\ndz.check("03.f1", weighted_mean)\n',
    "a hint": 'from ddpz_lite import check\ncheck.hint("03.weighted_mean")\n',
    "a display": "display(weighted_mean)\n",
    "a call that fails": "weighted_mean(None, 1)\n1 / 0\n",
    "an end": "import sys\nsys.exit()\n",
    "a launch": "import ddpz_lite as dz\ndz.launch(weighted_mean, world_size=2, args=([1], 2))\n",
    "a collective, which fails in a notebook": "dist.all_reduce(torch.ones(1))\n",
    "a group of its own": 'dist.init_process_group("fake", rank=0, world_size=2)\n',
}


@pytest.mark.parametrize("isolated", BOTH)
@pytest.mark.parametrize("what", TRIED_OUT)
def test_trying_out_below_the_answer_costs_nothing(what, isolated):
    seen = build(SEVEN + TRIED_OUT[what], world=2, sandboxed=isolated)
    assert seen.outcome == "ok", seen.sentence
    assert returned(seen) == [[7], [7]] and not seen.ledger


def test_a_check_above_a_helper_does_not_hide_it():
    source = "def weighted_mean(gradients, samples): gradients[:] = [helper()]\n"
    helper = "def helper(): return 7\n"
    seen = build(source + TRIED_OUT["a check"] + TRIED_OUT["a display"] + helper, sandboxed=CAN.ok)
    assert seen.outcome == "ok" and returned(seen) == [[7]]


def test_a_cell_that_fails_above_its_answer_has_failed():
    seen = build("1 / 0\n" + SEVEN, sandboxed=CAN.ok)
    assert seen.outcome == "raised" and "ZeroDivisionError" in seen.sentence


def test_annotations_are_evaluated_as_in_a_notebook():
    source = "def f(x: 3): pass\ndef weighted_mean(gradients, samples):"
    seen = build(source + " gradients[:] = [f.__annotations__['x']]\n", sandboxed=CAN.ok)
    assert returned(seen) == [[3]]


def test_many_cells_that_end_the_process_do_not_cost_a_later_task():
    seen = build(*["import os; os._exit(0)"] * 5, SEVEN, sandboxed=CAN.ok)
    assert seen.outcome == "ok", seen.sentence
    assert returned(seen) == [[7]]


def test_a_tensor_that_was_sent_can_be_freed():
    source = """
y = x.clone().view(-1)
dist.all_reduce(y)
dist.all_gather([torch.empty_like(y) for _ in range(n)], y)
z = torch.empty_like(y)
dist.broadcast(z if r else y, 0)
for t in (y, z): t.untyped_storage().resize_(0); out.append(t.untyped_storage().nbytes())
"""
    seen = by_broker(source, case(2), sandboxed=CAN.ok)
    assert seen.outcome == "ok", seen.sentence
    assert returned(seen) == [[0, 0]] * 2


# -- who it is -------------------------------------------------------------------------------------


@sandboxed
def test_a_rank_is_an_unprivileged_user_alone(monkeypatch):
    monkeypatch.setenv("DDPZ_CANARY", "secret-of-the-grader")
    ids, pid, proc, host, environ, *rights = look("""
import ctypes
libc = ctypes.CDLL(None)
out += [list(os.getresuid()), os.getpid(), os.listdir("/proc"), os.uname().nodename]
header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
out += [dict(os.environ), libc.capget(header, held), list(held)]
out += [[libc.prctl(23, cap, 0, 0, 0) for cap in range(41)]]  # PR_CAPBSET_READ
out += [libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0)]  # _GET_NO_NEW_PRIVS, _GET_SECCOMP
""")
    assert set(ids) <= set(range(isolation.FIRST_UID, isolation.FIRST_UID + isolation.UIDS))
    assert pid == 1 and host == "rank"
    assert proc == [], "there one reads where on the teacher's disk everything lies"
    assert "canary" not in str(environ).lower()
    assert rights == [0, [0] * 6, [0] * 41, 1, 2]


@sandboxed
def test_it_is_a_user_that_no_rank_of_another_grader_is():
    """Or a bomb there would take the processes that this one may start."""
    with contextlib.ExitStack() as others:  # more than this file starts one after the other
        taken = [isolation.take_user() for _ in range(isolation.UIDS // 2)]
        for _, sock in taken:
            others.enter_context(sock)
        (ids,) = look("out.append(list(os.getresuid()))")
    assert not set(ids) & {uid for uid, _ in taken}


@sandboxed
def test_users_are_given_back_and_run_out_with_one_clear_error(monkeypatch):
    monkeypatch.setattr(
        isolation, "FIRST_UID", os.getpid() + (1 << 23)
    )  # no other test takes these
    monkeypatch.setattr(isolation, "UIDS", 2)
    (one, first), (two, second) = isolation.take_user(), isolation.take_user()
    with second:
        with first, pytest.raises(OSError, match="all 2 users for ranks are taken"):
            isolation.take_user()
        again, third = isolation.take_user()
        third.close()
    assert one == again and one != two


@pytest.mark.parametrize("isolated", BOTH)
def test_it_holds_no_descriptor_but_its_own(isolated):
    """Any other one would be a door: to the grader's files, or to the root folder outside."""
    source = """
out += [fd for fd in range(4096) if os.path.exists(f"/proc/self/fd/{fd}")]
for fd in range(4096):
    try: os.fstat(fd); out.append(fd)
    except OSError: pass
"""
    fds = sorted(set(look(source, sandboxed=isolated)))
    assert len(fds) <= 6 and fds[:3] == [0, 1, 2]


@sandboxed
def test_ranks_do_not_see_each_other():
    seen = by_broker(
        """
open(f"/tmp/of-{r}", "w").close(); open(f"/dev/shm/of-{r}", "w").close()
dist.barrier()
out += [os.listdir("/tmp"), os.listdir("/dev/shm"), os.getpid()]
dist.barrier()
""",
        case(2),
    )
    found = [[set(tmp) - WAY, shm, pid] for tmp, shm, pid in returned(seen)]
    assert found == [[{f"of-{r}"}, [f"of-{r}"], 1] for r in range(2)]


# -- what it can do --------------------------------------------------------------------------------


@sandboxed
def test_a_rank_reaches_no_network_program_or_file():
    source = (
        ATTEMPT
        + f"""
import ctypes, socket, subprocess
out.append(attempt(lambda: socket.socket()))
out.append(attempt(lambda: socket.create_connection(("127.0.0.1", 1), 1)))
out.append(attempt(lambda: subprocess.run([{sys.executable!r}, "-c", ""])))
out.append(attempt(lambda: subprocess.run(["/bin/sh", "-c", ""])))
for path in ("/new", "/etc/passwd", os.__file__, torch.__file__, {str(PACKAGE / "new")!r}):
    out.append(attempt(lambda: open(path, "a").close()))
    out.append(attempt(lambda: os.chmod(path, 0o777)))
"""
    )
    assert "done" not in look(source)


@sandboxed
def test_system_calls_that_reach_further_are_refused():
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, *args in (
    ("unshare", 0x10000000), ("setns", 0, 0), ("mount", b"x", b"/tmp", b"tmpfs", 0, None),
    ("umount2", b"/proc", 2), ("ptrace", 0, 0, 0, 0), ("chroot", b"/tmp"), ("setuid", 0),
    ("memfd_create", b"x", 0), ("shmget", 0, 1 << 20, 0o1600), ("setresuid", 0, 0, 0),
    ("klogctl", 10, None, 0), ("syscall", 444, None, 0, 1),  # landlock_create_ruleset
):
    out.append((name, getattr(libc, name)(*args), ctypes.get_errno()))
"""
    for name, result, error in look(source):
        assert result == -1 and error in (errno.EPERM, errno.EINVAL), name


@sandboxed
def test_signals_through_a_shared_file_are_refused_and_other_calls_are_not():
    refused, others = look("""
import ctypes, fcntl, struct, tempfile
libc, fd = ctypes.CDLL(None, use_errno=True), os.open(torch.__file__, os.O_RDONLY)
lock = ctypes.create_string_buffer(struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 1, 0))
page = ctypes.create_string_buffer(8192)
refused = []
for name, *args in (
    ("flock", fd, 1), ("inotify_init",), ("inotify_init1", 0), ("posix_fadvise", fd, 0, 0, 4),
    ("inotify_add_watch", fd, b"/", 2), ("mincore", 0, 4096, page), ("fanotify_init", 0, 0),
    ("sysinfo", page),
    *(("fcntl", fd, command, lock) for command in (5, 6, 7, 36, 37, 38, 1024, 1026, 1036)),
):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*args)
    refused.append((name, str(args[1:2]), 1 in (result, ctypes.get_errno())))
for flags in (os.RWF_HIPRI, os.RWF_NOWAIT):
    try: os.preadv(fd, [bytearray(9)], 0, flags)
    except PermissionError: refused.append(("preadv2", flags, True))
out.append(refused)
copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
flags = fcntl.fcntl(copy, fcntl.F_GETFL), fcntl.fcntl(copy, fcntl.F_SETFD, 0)
with tempfile.NamedTemporaryFile() as file:
    torch.save(x, file.name); same = torch.equal(torch.load(file.name, mmap=True), x)
out.append([flags[0] & os.O_ACCMODE, flags[1], same, len(os.pread(copy, 9, 0))])
""")
    assert len(refused) == 19 and all(done for *_, done in refused), refused
    assert others == [os.O_RDONLY, 0, True, 9]


@sandboxed
def test_a_fork_cannot_take_a_new_namespace():
    source = """
import ctypes, platform
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
out.append(ctypes.CDLL(None).syscall(clone, 0x10000000 | 17, 0, 0, 0, 0))
pid = os.fork()
if pid == 0: os._exit(7)
out.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert look(source) == [-1, 7]


@pytest.mark.parametrize("isolated", BOTH)
def test_memory_files_and_output_are_limited(isolated):
    source = (
        ATTEMPT
        + """
out.append(attempt(lambda: len(bytearray(3 << 30))))
out.append(attempt(lambda: torch.ones(1 << 30)))
out.append(attempt(lambda: open("big", "wb").write(bytes(64 << 20))))
out.append(attempt(lambda: [os.open("/dev/null", 0) for _ in range(5000)]))
print("flood " * 1_000_000)
"""
    )
    found = look(source, sandboxed=isolated)
    assert found == ["MemoryError", "RuntimeError", "OSError", "OSError"]


@pytest.mark.parametrize("isolated", BOTH)
def test_memory_that_can_be_held_and_not_be_counted_is_refused(isolated):
    source = (
        ATTEMPT
        + """
import mmap
out.append(attempt(lambda: mmap.mmap(-1, 1 << 20)))
out.append(attempt(lambda: mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
out.append(attempt(lambda: os.memfd_create("x")))
with open(os.environ["TMPDIR"] + "/file", "w+b") as file:
    file.truncate(1 << 20)
    out.append(attempt(lambda: mmap.mmap(file.fileno(), 0)))
out.append(os.path.exists("/dev/zero"))
"""
    )
    found = look(source, sandboxed=isolated)
    assert found == ["PermissionError", "done", "PermissionError", "done", not isolated]


@sandboxed
def test_what_lies_in_sockets_counts():
    """It is in the system's memory: 50 pairs of sockets with large buffers held 784 MiB."""
    buffers, attempts = look("""
import socket
one, other = socket.socketpair()
before, refused = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), []
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    try: one.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
    except PermissionError: refused.append(option)
one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
out += [[before, one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)], refused]
""")
    assert buffers[0] == buffers[1] and len(attempts) == 4
    closed = """
import socket, time
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/all")
listener.listen(4096)
for _ in range(3000):
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect("/tmp/all")
        sender.setblocking(False)
        sender.send(bytes(1 << 16))
time.sleep(60)
"""
    seen = by_broker(closed, case(1, timeout=20), limits=Limits(memory=512 << 20))
    assert "used more than 512 MiB of memory" in seen.sentence


UNSEEN = """
import ctypes, os, signal
from ddpz_lite.course.grader.sandbox.usage import memory
libc, (ready, tell) = ctypes.CDLL(None), os.pipe()
if (child := os.fork()) == 0:
    held = bytearray(os.urandom(1 << 20)) * 64
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: only root may look at its memory
    os.write(tell, b"x")
    signal.pause()
os.read(ready, 1)
libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # not even as root
print(memory(child, 1 << 20))
os.kill(child, signal.SIGKILL)
"""


def test_a_process_that_forbids_a_closer_look_counts():
    done = subprocess.run([sys.executable, "-c", UNSEEN], capture_output=True, text=True)
    assert int(done.stdout) > 64 << 20, done


def test_memory_that_processes_share_counts():
    source = """
import mmap
shared = mmap.mmap(-1, 64 << 20)
shared.write(bytes(64 << 20))
print(flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", source], **pipes) as child:
        child.stdout.readline()
        held = memory(child.pid, 1 << 50)
        child.communicate(b"\n")
    assert 64 << 20 < held < 120 << 20


@sandboxed
def test_disks_in_memory_are_small():
    source = (
        ATTEMPT
        + """
def fill(folder):
    for index in range(16):
        with open(f"{folder}/{index}", "wb") as file: file.write(bytes(16 << 20))
out += [attempt(lambda: fill("/tmp")), attempt(lambda: fill("/dev/shm"))]
out.append(attempt(lambda: [os.close(os.open(f"/tmp/n{i}", os.O_CREAT)) for i in range(10_000)]))
"""
    )
    assert look(source) == ["OSError"] * 3


@sandboxed
def test_the_number_of_processes_is_limited():
    source = (
        ATTEMPT
        + """
def bomb():
    while True:
        if os.fork() == 0:
            import time
            while True: time.sleep(1)
out.append(attempt(bomb))
"""
    )
    assert look(source) == ["BlockingIOError"]


@pytest.mark.parametrize("isolated", BOTH)
def test_the_memory_of_all_processes_together_is_limited(isolated):
    source = """
import time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(1 << 20) * 60
        time.sleep(60)
time.sleep(60)
"""
    limits = Limits(memory=256 << 20)
    seen = by_broker(source, case(1, timeout=20), sandboxed=isolated, limits=limits)
    assert seen.outcome == "died"
    assert "used more than 256 MiB of memory" in seen.sentence


# -- what is left of it ----------------------------------------------------------------------------

DAEMONS = """
import signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: time.sleep(0.01)
        os._exit(0)
open(os.environ["TMPDIR"] + "/left", "w").close()
"""


@pytest.mark.parametrize("isolated", BOTH)
@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.kill(os.getpid(), 11)", "while True: 0"])
def test_daemons_end_with_the_case(isolated, ending, monkeypatch):
    warm = by_broker("", case(1), sandboxed=isolated)
    assert warm.outcome == "ok"
    before, open_files = family(), descriptors()
    folder = tempfile.mkdtemp()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    os.chmod(folder, 0o711)  # a rank may be another user
    by_broker(DAEMONS + ending, case(2, timeout=1), sandboxed=isolated)
    assert gone(list(family() - before))
    assert descriptors() == open_files
    os.rmdir(folder)  # which is empty


GRADER = """
import sys, torch
sys.path.insert(0, {tests!r})
from grade_cases import by_broker, case
by_broker({source!r}, case(2, timeout=60), sandboxed={isolated})
"""
STAY = """
import ctypes, signal, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # asks the system not to end it with its parent
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
os.fork()
while True: time.sleep(0.01)
"""


@pytest.mark.parametrize(
    "isolated",
    [BOTH[0], pytest.param(False, marks=pytest.mark.extra, id="limits alone")],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_the_grader(isolated, number):
    source = GRADER.format(tests=str(Path(__file__).parent), source=STAY, isolated=isolated)
    process = subprocess.Popen(
        [sys.executable, "-c", source], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        pids = wait_for(lambda: all_of(process))
        process.send_signal(number)
        process.wait(120)
        assert gone(pids)
    finally:
        process.kill()


def all_of(grader: subprocess.Popen) -> list[int] | None:
    """The fork server, and for each of two ranks its supervisor, itself and its fork; else None."""
    assert grader.poll() is None, "the grader ended before its ranks were there"
    found = [process.pid for process in psutil.Process(grader.pid).children(recursive=True)]
    return found if len(found) >= 1 + 2 * 3 else None


def wait_for(ready, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := ready()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("not there in time")


# -- frames ----------------------------------------------------------------------------------------


def inbox(raw: bytes, limit: int = 1000) -> Inbox:
    import socket

    ours, theirs = socket.socketpair()
    theirs.sendall(raw)
    theirs.close()
    return Inbox(ours, limit)


@pytest.mark.parametrize(
    "raw",
    [
        frame({"kind": "x"}, 1001) + bytes(1001),
        frame({"kind": "x" * 40_000}),
        b"\x02\x00\x00\x00" + bytes(8) + b"[]",
        b"\x04\x00\x00\x00" + bytes(8) + b"\xff\xfe\x00{",
        (30_000).to_bytes(4, "little") + bytes(8) + b"[" * 30_000,
        (30_000).to_bytes(4, "little") + bytes(8) + b"9" * 30_000,
    ],
)
def test_a_frame_that_no_rank_sends_is_refused(raw):
    box = inbox(raw)
    with pytest.raises(Refused):
        box.take()
    box.sock.close()


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("No such file: '/home/ada/course/x.py'", "No such file: '.../x.py'"),
        ("36 35 98:0 /srv/venv/lib /lib ro,relatime", "36 35 98:0 .../lib /lib ro,relatime"),
        ("in /tmp/x.txt, a/b/c, 3/4 and 1 / 2", "in /tmp/x.txt, a/b/c, 3/4 and 1 / 2"),
        ("in /tmp/course/tasks/x.py", "in .../x.py"),
        ("see https://example.org/a/b.html", "see https://example.org/a/b.html"),
        ("/a/b/c:/d/e/f", ".../c:.../f"),
    ],
)
def test_words_of_a_rank_do_not_say_where_files_lie(sent, shown):
    assert clean(sent, 200) == shown


def test_words_of_a_rank_are_cut_to_what_can_be_printed():
    assert clean("a\x1b[31mb\u202ec\x00\nd", 20) == "a[31mbc d"
    assert clean("x" * 100, 5) == "xxxxx"
    assert clean(json.loads("[]"), 5) == "?"


@sandboxed
@pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare(1)")
def test_a_container_that_covers_a_part_of_proc_can_have_it():
    """There no new /proc can be mounted."""
    isolated = "exec unshare -U --map-user=1000 --map-group=1000"
    probing = (
        f"{isolated} {shlex.quote(sys.executable)} -P -m ddpz_lite.course.grader.sandbox.isolation"
    )
    covered = f"mount -t tmpfs none /proc/fs || exit 77; {probing}"
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", covered], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"no part of /proc can be covered here: {done.stderr}")
    assert done.returncode == 0, done.stderr
