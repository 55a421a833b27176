"""Answers to 03.weighted_mean that attack the process they run in, and what must come of each.

Every cell may use `right(gradients, samples)`, the honest solution, and SECRETS, the paths of what
it must not read. Of 5 points 4 are for values and 1 for the number of calls.
"""

# ruff: noqa: E501 (attacks are written as their authors would write them)

from __future__ import annotations

from dataclasses import dataclass

RIGHT = '''
import builtins, ctypes, gc, glob, io, json, os, signal, socket, struct, subprocess, sys, threading, time
import torch, torch.distributed as dist

def right(gradients, samples):
    flat = torch.cat([g.reshape(-1) for g in gradients] + [torch.ones(1)]) * samples
    dist.all_reduce(flat)
    at = 0
    for g in gradients:
        g.copy_((flat / flat[-1])[at:at + g.numel()].view(g.shape))
        at += g.numel()

def channel():
    """The rank's line to the broker, as anyone in this process can find it."""
    return next(o for o in gc.get_objects() if type(o).__name__ == "FrameSocket")

def wrong(gradients, samples):
    for g in gradients:
        dist.all_reduce(g)
'''  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """One hostile answer.

    number: its class in the design. statuses: what the verdict may say. points: the most it may
    get. alone: whether limits alone, without a sandbox, hold it too.
    """

    number: int
    name: str
    source: str
    statuses: tuple[str, ...] = ("wrong",)
    points: int = 0
    alone: bool = True

    @property
    def id(self) -> str:
        return f"{self.number:02d} {self.name}"


ATTACKS: list[Attack] = []


def add(number: int, name: str, body: str, before: str = "", **expected) -> None:
    """body: of the answer; before: at the cell's top level."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    source = f"{before.strip()}\ndef weighted_mean(gradients, samples):\n{lines}"
    ATTACKS.append(Attack(number, name, source, **expected))


ANY = ("wrong", "crashed", "refused", "timeout")
# -- 4: the notebook's own machinery ---------------------------------------------------------------

add(4, "a compiler that rewrites what follows", "wrong(gradients, samples)", """
import ast
real = builtins.compile
builtins.compile = lambda source, *a, **k: real("", *a, **k) if "assert" in str(source) else real(source, *a, **k)
""")  # fmt: skip
add(4, "exceptions that hide themselves", "raise RuntimeError('nothing to see')", """
import traceback
traceback.TracebackException.from_exception = classmethod(lambda *a, **k: None)
sys.excepthook = lambda *a: None
""", statuses=ANY)  # fmt: skip
add(
    4, "the notebook's shell", "right(gradients, samples)", "get_ipython().ast_transformers.clear()"
)
add(4, "a trace that ends every function", "pass", """
def trace(frame, event, arg):
    if frame.f_code.co_name == "differs": os._exit(0)
    return trace
sys.settrace(trace); threading.settrace(trace)
""", statuses=ANY)  # fmt: skip

# -- 5: patched torch, builtins, modules, library --------------------------------------------------

add(5, "comparisons that are always true", "wrong(gradients, samples)", """
torch.allclose = torch.equal = torch.Tensor.allclose = torch.Tensor.equal = lambda *a, **k: True
torch.Tensor.__eq__ = lambda *a: True
""", statuses=ANY)  # fmt: skip
add(5, "an all_reduce that does nothing", "right(gradients, samples)",
    "dist.all_reduce = lambda *a, **k: None")  # fmt: skip
add(5, "builtins", "wrong(gradients, samples)", """
builtins.abs = builtins.max = builtins.len = lambda *a, **k: 0
""", statuses=ANY)  # fmt: skip
add(5, "a judge of one's own", "wrong(gradients, samples)", """
from types import ModuleType
fake = ModuleType("ddpz_lite.course.check.compare")
fake.differs = fake.close = lambda *a, **k: None
sys.modules["ddpz_lite.course.check.compare"] = sys.modules["ddpz_lite.course.check.score"] = fake
""")  # fmt: skip
add(5, "a packer of one's own", "pass", """
import ddpz_lite.course.check.data, ddpz_lite.course.check.job as jobs
jobs.pack = ddpz_lite.course.check.data.pack = lambda value: b"all points, please"
""", statuses=("refused",))  # fmt: skip
add(5, "a group that claims less than it sends", "wrong(gradients, samples)", """
group = sys.modules["ddpz_lite.course.grader.arena.group"]
issue = group.Line.issue
def less(self, head, inputs, outputs):
    return issue(self, {**head, "elements": 1, "parts": [1]}, inputs, outputs)
group.Line.issue = less
""", statuses=("refused",))  # fmt: skip
SEVERAL = """
for g in gradients: g.mul_(samples); dist.all_reduce(g)
total = torch.tensor([float(samples)]); dist.all_reduce(total)
for g in gradients: g.div_(total)
"""
add(5, "calls behind the end of a span", """
line = channel()
line.send({"kind": "span", "name": "answer", "edge": "end"})
""" + SEVERAL + """
line.send({"kind": "span", "name": "answer", "edge": "begin"})
""", points=4, statuses=ANY)  # fmt: skip
add(5, "calls behind the last end of a span", """
line, real = channel(), type(channel()).send
real(line, {"kind": "span", "name": "answer", "edge": "end"})
type(line).send = lambda self, head, *b: None if head.get("edge") == "end" else real(self, head, *b)
""" + SEVERAL, points=4, statuses=ANY)  # fmt: skip
add(5, "a ledger that is switched off", "wrong(gradients, samples)", """
import ddpz_lite.wire.ledger as ledger
ledger.current = None
""")  # fmt: skip

# -- 6: objects that are not what they seem --------------------------------------------------------

add(6, "a tensor that equals everything", "gradients[:] = [g.as_subclass(Same) for g in gradients]", """
class Same(torch.Tensor):
    def __eq__(self, other): return True
    def allclose(self, *a, **k): return True
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None): return True
""", statuses=ANY)  # fmt: skip
add(6, "an object that equals everything", "gradients[:] = [Same() for _ in gradients]", """
class Same:
    def __eq__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
""")  # fmt: skip
add(6, "not a number", "for g in gradients: g.fill_(float('nan'))")
add(6, "infinity", "for g in gradients: g.fill_(float('inf'))")
add(6, "another dtype",
    "right(gradients, samples); gradients[:] = [g.double() for g in gradients]")  # fmt: skip
add(6, "a shape that broadcasts", "gradients[:] = [g.mean().reshape(1) for g in gradients]")
add(6, "empty tensors", "gradients[:] = [torch.empty(0) for _ in gradients]")
add(6, "no tensors", "gradients.clear()")
add(6, "too many tensors", "gradients += gradients")
add(6, "numbers", "gradients[:] = [0.0 for _ in gradients]")
add(6, "strings and None", "gradients[:] = [None, 'pass', True]")
add(6, "a tensor on no device", "gradients[:] = [g.to('meta') for g in gradients]")
add(6, "a sparse tensor", "gradients[:] = [g.to_sparse() for g in gradients]")
add(6, "one dict that holds itself", "gradients[:] = [{}]; gradients[0]['x'] = gradients[0]")
add(6, "a dict that lies about its items", "gradients[:] = [Liar() for _ in gradients]", """
class Liar(dict):
    def items(self): return ((i, i) for i in range(10**9))
""", statuses=ANY)  # fmt: skip

# -- 7: memory and /proc ---------------------------------------------------------------------------

add(7, "all tensors that are in memory", """
found = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.numel() < 100]
gradients[:] = [o.detach().clone().float() for o in found]
""", statuses=ANY)  # fmt: skip
add(7, "all frames above", """
frame, names = sys._getframe(), []
while frame is not None:
    names += [f"{k}={v!r}"[:2000] for k, v in {**frame.f_globals, **frame.f_locals}.items()]
    frame = frame.f_back
gradients[:] = names
""", statuses=ANY)  # fmt: skip
add(7, "everything that the collector knows", """
words = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
gradients[:] = [s[:300] for w in words for s in map(str, list(w)[:20]) if "canary" in s.lower()]
""", statuses=ANY)  # fmt: skip
add(7, "the memory of every process", """
found = []
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    for name in ("environ", "cmdline"):
        try: found.append(open(f"/proc/{pid}/{name}", "rb").read()[:5000].decode(errors="replace"))
        except OSError: pass
gradients[:] = found
""", alone=False)  # fmt: skip
add(7, "its own memory, byte by byte", """
import re
found = []
try:
    memory = open("/proc/self/mem", "rb", 0)
    for line in open("/proc/self/maps"):
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if " rw" in line and end - start < 1 << 26:
            try:
                memory.seek(start)
                found += re.findall(b"CANARY-[0-9a-f]{6}", memory.read(end - start))
            except OSError: pass
except OSError: pass
gradients[:] = [str(f) for f in found]
""")  # fmt: skip
add(7, "open descriptors and what is above them", """
found = []
for fd in range(256):
    for up in ("..", "../..", "../../..", "../../../.."):
        try: found += os.listdir(os.open(up, os.O_RDONLY, dir_fd=fd))
        except OSError: pass
gradients[:] = found
""")  # fmt: skip
add(7, "the memory of the parent, by system call", """
libc = ctypes.CDLL(None)
buffer = ctypes.create_string_buffer(1 << 16)
class Part(ctypes.Structure): _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here, there = Part(ctypes.addressof(buffer), 1 << 16), Part(0x400000, 1 << 16)
got = [libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) for pid in range(1, 400)]
gradients[:] = [max(got), libc.ptrace(16, os.getppid(), 0, 0)]
""")  # fmt: skip

# -- 8: files that are not for it ------------------------------------------------------------------

add(8, "solutions, checks, tests, the repository", """
found = []
for path in SECRETS + glob.glob("/*/*") + glob.glob("/home/*/*") + glob.glob("/root/*"):
    for name in [path, *glob.glob(path + "/**", recursive=True)[:50]]:
        try: found.append(open(name, errors="replace").read(3000))
        except OSError: pass
gradients[:] = [f for f in found if "CANARY-" in f or "BEGIN SOLUTION" in f]
""", statuses=("wrong", "timeout"), alone=False)  # fmt: skip
add(8, "the judge, imported", """
from ddpz_lite.course.tasks.lesson03 import judge
gradients[:] = [judge.__file__, str(judge.TASKS)]
""", alone=False)  # fmt: skip
add(8, "the judge, compiled", """
import ddpz_lite.course.tasks
place = os.path.dirname(ddpz_lite.course.tasks.__file__)
found = glob.glob(place + "/*/__pycache__/judge*") + glob.glob(place + "/*/judge.pyc")
gradients[:] = [open(name, "rb").read()[:200].decode(errors="replace") + "CANARY-judge" for name in found]
""", alone=False)  # fmt: skip
add(8, "the judge, found through the library", """
from ddpz_lite.course.check.task import find
task = find("03.weighted_mean")
gradients[:] = [str(criterion) for criterion in task.criteria] + ["CANARY-task"]
""", alone=False)  # fmt: skip
add(8, "a link out of the folder", """
found = []
for index, path in enumerate(SECRETS):
    try:
        os.symlink(path, f"{os.environ['TMPDIR']}/link{index}")
        found.append(open(f"{os.environ['TMPDIR']}/link{index}").read())
    except OSError: pass
gradients[:] = found
""", alone=False)  # fmt: skip
add(8, "the inputs of the other rank", """
rank = dist.get_rank()
for folder in ("/tmp", "/dev/shm", os.environ["TMPDIR"]):
    try: torch.save([gradients, samples], f"{folder}/of-{rank}")
    except Exception: pass
time.sleep(0.3)
for folder in ("/tmp", "/dev/shm", os.environ["TMPDIR"]):
    for name in glob.glob(f"{folder}/of-{1 - rank}"):
        theirs, n = torch.load(name)
        os.unlink(name)
        for g, t in zip(gradients, theirs): g.mul_(samples).add_(t * n).div_(samples + n)
        sys.exit("done without a call")
""", alone=False)  # fmt: skip

# -- 10: ends --------------------------------------------------------------------------------------

add(10, "sys.exit(0)", "sys.exit(0)")
add(10, "os._exit(0)", "os._exit(0)", statuses=("crashed",))
add(10, "os._exit(0) on one rank", "os._exit(0) if dist.get_rank() else dist.barrier()",
    statuses=("crashed",))  # fmt: skip
add(10, "a handler at exit", "sys.exit(0)", """
import atexit
atexit.register(lambda: channel().send({"kind": "result"}, b"x"))
""")  # fmt: skip
add(10, "the parent, killed", """
for pid in (os.getppid(), 1, 2, 3):
    if pid not in (0, os.getpid()):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
""", alone=False, statuses=ANY)  # fmt: skip
add(10, "every process, killed", "os.kill(-1, signal.SIGKILL)", alone=False, statuses=ANY)
add(10, "its process group, killed", "os.killpg(0, signal.SIGKILL)", statuses=ANY)
add(10, "a segmentation fault", "ctypes.string_at(0)", statuses=("crashed",))
add(10, "an abort", "os.abort()", statuses=("crashed",))
add(10, "a stopped process", "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
    statuses=("timeout",))  # fmt: skip
add(10, "a recursion without end", "weighted_mean(gradients, samples)",
    "sys.setrecursionlimit(10**9)", statuses=ANY)  # fmt: skip
add(10, "all descriptors closed", "os.closerange(0, 1000)\nright(gradients, samples)", statuses=ANY)
add(10, "another program in its place", "os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    statuses=ANY)  # fmt: skip
add(10, "a keyboard interrupt", "raise KeyboardInterrupt")

# -- 11: work that is not done ---------------------------------------------------------------------

add(
    11,
    "remembered results",
    "gradients[:] = [torch.zeros(3, 5), torch.zeros(7), torch.zeros(2, 1, 2)]",
)
add(11, "rank 0 does it all", """
rank, world = dist.get_rank(), dist.get_world_size()
mine = torch.cat([g.reshape(-1) for g in gradients] + [torch.ones(1)]) * samples
parts = [torch.empty_like(mine) for _ in range(world)] if rank == 0 else None
dist.gather(mine, parts)
whole = sum(parts) if rank == 0 else mine
dist.broadcast(whole, 0)
at = 0
for g in gradients: g.copy_((whole / whole[-1])[at:at + g.numel()].view(g.shape)); at += g.numel()
""", points=4)  # fmt: skip
add(11, "torch's DDP", """
model = torch.nn.Linear(2, 2)
torch.nn.parallel.DistributedDataParallel(model)
right(gradients, samples)
""")  # fmt: skip
add(11, "the library's ZeRO", "import ddpz_lite.strategies.zero1\nright(gradients, samples)")
add(11, "data through the store", """
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
store.set(f"of-{rank}", str(float(samples)))
theirs = float(store.get(f"of-{1 - rank}"))
""", statuses=ANY)  # fmt: skip
add(11, "a store of one's own", """
store = dist.TCPStore("127.0.0.1", 29876, 2, dist.get_rank() == 0)
store.set(f"of-{dist.get_rank()}", "x")
""", statuses=ANY)  # fmt: skip
add(11, "objects instead of a tensor", """
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, (gradients, samples))
total = sum(n for _, n in everyone)
for i, g in enumerate(gradients): g.copy_(sum(t[i] * n for t, n in everyone) / total)
""", points=4)  # fmt: skip

# -- 12: hangs -------------------------------------------------------------------------------------

add(12, "a loop without end", "while True: pass", statuses=("timeout",))
add(12, "a loop that swallows interrupts", """
for number in range(1, 64):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try: time.sleep(1)
    except BaseException: pass
""", statuses=("timeout",))  # fmt: skip
add(12, "one stuck rank", "time.sleep(60) if dist.get_rank() else right(gradients, samples)",
    statuses=("timeout",))  # fmt: skip
add(
    12,
    "the interpreter's lock, never released",
    "ctypes.PyDLL(None).sleep(60)",
    statuses=("timeout",),
)
add(12, "calls that do not match",
    "dist.barrier() if dist.get_rank() else right(gradients, samples)")  # fmt: skip
add(12, "a receive without a send", "dist.recv(gradients[0], 1 - dist.get_rank())",
    statuses=("timeout",))  # fmt: skip
add(12, "calls without end", """
while True: dist.all_reduce(gradients[0], async_op=True)
""", statuses=ANY)  # fmt: skip
add(12, "messages without a receive", """
big = torch.zeros(1 << 22)
while True: dist.isend(big, 1 - dist.get_rank())
""", statuses=ANY)  # fmt: skip
add(12, "a loop at the top of the cell", "pass", "while True: pass", statuses=("timeout",))

# -- 13: bombs -------------------------------------------------------------------------------------

add(13, "memory", "held = []\nwhile True: held.append(bytearray(1 << 26))", statuses=ANY)
add(13, "memory in many processes", """
for _ in range(20):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20) * 150); time.sleep(60)
time.sleep(60)
""", statuses=ANY)  # fmt: skip
add(13, "a fork that answers too", "os.fork()\nwrong(gradients, samples)", statuses=ANY)

# -- 14: words for the report ----------------------------------------------------------------------

add(14, "a flood of output", "while True: print('flood ' * 10_000)", statuses=("timeout",))
add(14, "colours, links, commands, turned text", """
raise RuntimeError("\\x1b[2J\\x1b]0;x\\x07::set-output name=points::5\\n\\u202e<script>alert(1)</script>" * 100)
""")  # fmt: skip
add(
    14,
    "a name for an exception",
    "raise type('<img src=x onerror=alert(1)>\\x1b[0m', (Exception,), {})('x' * 10**6)",
)
add(14, "where everything lies on the teacher's disk", """
try: mounts = open("/proc/self/mountinfo").read()
except OSError: mounts = ""
raise RuntimeError(mounts + " ".join([torch.__file__, os.__file__, *sys.path]))
""")  # fmt: skip
add(14, "bytes out of band", """
for of in (1, 2, channel()._sock.fileno()):
    sock = socket.socket(fileno=os.dup(of))
    for _ in range(3): sock.send(b"x", socket.MSG_OOB); time.sleep(0.05)
""", statuses=ANY)  # fmt: skip
add(14, "a place that is another file", """
code = compile("raise ValueError('read me')", "/etc/passwd", "exec")
exec(code)
""")  # fmt: skip

# -- 15: network, installs, tokens -----------------------------------------------------------------

add(15, "connections", """
for kind in (socket.AF_INET, socket.AF_INET6, 16, 40):
    for address in (("1.1.1.1", 53), ("127.0.0.1", 22), ("169.254.169.254", 80)):
        try: s = socket.socket(kind, socket.SOCK_STREAM); s.settimeout(0.2); s.connect(address)
        except Exception: continue
        gradients[:] = ["CANARY-net"]
""", statuses=ANY)  # fmt: skip
add(15, "an installation", """
done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
gradients[:] = ["CANARY-pip"] if done.returncode == 0 else []
""", alone=False)  # fmt: skip
add(15, "tokens of the environment", """
gradients[:] = [f"{k}={v}" for k, v in os.environ.items()]
""")  # fmt: skip
add(15, "names of the network", "socket.getaddrinfo('example.org', 80)", alone=False)

# -- 16: forged frames -----------------------------------------------------------------------------


def forged(name: str, lines: str, **expected) -> None:
    add(16, name, f"line = channel()\nraw = line._sock.sendall\n{lines}\ntime.sleep(60)",
        **{"statuses": ("refused",), **expected})  # fmt: skip


forged(
    "a pickle for a result",
    """
import pickle
class Run:
    def __reduce__(self): return os.system, ("touch /tmp/ddpz-pwned",)
line.send({"kind": "result"}, pickle.dumps(Run()))""",
)
forged(
    "tensors with a lying header",
    """
head = json.dumps({"0": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
tree = json.dumps({"items": [["gradients", [{"tensor": "0"}]]]}).encode()
line.send({"kind": "result"}, struct.pack("<Q", len(tree)) + tree + struct.pack("<Q", len(head)) + head)""",
)
forged(
    "a header without end",
    """
line.send({"kind": "result"}, struct.pack("<Q", 1 << 62) + bytes(100))""",
)
forged(
    "numbers without end",
    """
tree = b'{"items": [["gradients", ' + b"9" * 100_000 + b"]]}"
line.send({"kind": "result"}, struct.pack("<Q", len(tree)) + tree + struct.pack("<Q", 2) + b"{}")""",
)
forged(
    "lists without end",
    """
tree = b"[" * 1_000_000
line.send({"kind": "result"}, struct.pack("<Q", len(tree)) + tree + struct.pack("<Q", 2) + b"{}")""",
)
forged("an oversized frame", "raw(struct.pack('<IQ', 2, 1 << 50) + b'{}')")
forged("an oversized head", "raw(struct.pack('<IQ', 1 << 31, 0))")
forged("noise", "raw(os.urandom(1 << 16))", statuses=ANY)
forged("two results", "line.send({'kind': 'result'}, b'x'); line.send({'kind': 'result'}, b'x')")
forged(
    "a frame sent again",
    """
head = {"kind": "call", "group": "0", "op": "all_reduce", "dtype": "float32", "elements": 1, "reduce": "sum",
        "root": None, "parts": [1], "says": "", "id": 1, "where": "?"}
text = json.dumps(head).encode()
raw(3 * (struct.pack("<IQ", len(text), 4) + text + bytes(4)))  # at once: none is answered before""",
)
forged(
    "numbers that make no sense",
    """
line.send({"kind": "call", "group": "0", "op": "all_reduce", "dtype": "float32", "elements": -1,
           "reduce": "sum", "root": None, "parts": [-1], "says": "", "id": 1, "where": "?"})""",
)
forged("a call of no known kind", "line.send({'kind': '__class__'})")
forged("a group of others", "line.send({'kind': 'join', 'group': 'x', 'ranks': [7, 8]})")
forged("a place that is a file", """
line.send({"kind": "raised", "type": "X", "summary": "y", "message": "z", "where": "/etc/passwd:1"})""",
       statuses=("wrong",))  # fmt: skip
forged("a frame that never ends", "raw(struct.pack('<IQ', 100, 0) + b'{')", statuses=ANY)

forged(
    "spans without end",
    """
for _ in range(100_000):
    for edge in ("begin", "end"): line.send({"kind": "span", "name": "compute", "edge": edge})""",
)

# -- 20: failing to learn something ----------------------------------------------------------------

add(20, "an assertion that shows all it knows", """
frame, seen = sys._getframe(), []
while frame is not None: seen.append(repr(frame.f_locals)); frame = frame.f_back
raise AssertionError(seen)
""")  # fmt: skip
add(20, "inputs in the message", "raise ValueError(f'{gradients} {samples}')")
add(20, "an exception with a hostile str", "raise Bad()", """
class Bad(Exception):
    def __str__(self): os._exit(0)
""", statuses=ANY)  # fmt: skip

# -- 21: innocent people ---------------------------------------------------------------------------

HONEST: list[tuple[str, str]] = [
    ("the right answer", "weighted_mean = right"),
    ("warnings on stderr", """
import warnings
def weighted_mean(gradients, samples):
    warnings.warn("old function")
    print("a note", file=sys.stderr)
    right(gradients, samples)"""),
    ("much output", """
def weighted_mean(gradients, samples):
    print("debug " * 100_000)
    right(gradients, samples)"""),
    ("a slow machine", """
def weighted_mean(gradients, samples):
    time.sleep(0.5)
    right(gradients, samples)"""),
    ("computing in threads and processes of its own", """
def weighted_mean(gradients, samples):
    from multiprocessing import get_context
    with get_context("fork").Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
    thread = threading.Thread(target=right, args=(gradients, samples)); thread.start(); thread.join()
    """),
    ("files of its own", """
import tempfile
def weighted_mean(gradients, samples):
    with tempfile.TemporaryFile() as file: torch.save(gradients, file)
    right(gradients, samples)  # when it returns all ranks have settled, each as its own user
    with open(f"of rank {dist.get_rank()}", "wb") as file: torch.save(gradients, file)"""),
]  # fmt: skip
