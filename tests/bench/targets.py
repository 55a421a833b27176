"""What users wait for on this machine, each next to the most that it should take."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp

from ddpz_lite.course.bench import steps
from ddpz_lite.course.cli import machine
from ddpz_lite.course.grader.sandbox import usage
from ddpz_lite.launcher import launch

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = steps.Workload(steps.about(11e6), batch=4, rounds=20)
RANKS, MANY = 4, 16
LAUNCHES, SPAWNS, CALLS = 10, 2, 500
SUBMISSIONS, HANDED_IN = 100, "01"  # copies of one solution
SERVER_TIMEOUT_S = 60.0  # for JupyterLab to start


@dataclass(frozen=True)
class Row:
    """One measurement: a smaller number is better, and `target` is the most it should be."""

    what: str
    measured: float
    target: float
    unit: str = "s"

    @property
    def met(self) -> bool:
        return self.measured <= self.target


def rows(groups: Sequence[str]) -> Iterator[Row]:
    """The measurements of these groups, one after the other. groups: keys of GROUPS."""
    for group in groups:
        yield from GROUPS[group]()


# ---- ranks that start ----


@dataclass(frozen=True)
class Start:
    """How ranks start in a process that has just imported the library."""

    first: float  # seconds of the first launch
    later: float  # of a later one, the median
    memory: int  # bytes of all ranks and what starts them, beyond this process; 0 if not on Linux


# A prompt: importing the library starts the fork server there. The function is of no module, like
# a cell's: it travels as it is, and no rank imports this bench for it.
START = """
import sys
sys.ps1 = ">>> "
import ddpz_lite, torch
def nothing():
    torch.distributed.barrier()
from bench import targets
targets.print_start({ranks}, nothing)
"""


def start(ranks: int) -> Start:
    """Measure it in a fresh process that imports torch and the library, as a notebook does."""
    command = [sys.executable, "-c", START.format(ranks=ranks)]
    tests = ROOT / "tests"
    done = subprocess.run(command, cwd=tests, check=True, stdout=subprocess.PIPE, text=True)
    return Start(**json.loads(done.stdout))


def print_start(ranks: int, nothing: Callable[[], None]) -> None:
    """Print how ranks that do nothing start, as JSON."""
    first = timed(lambda: launch(nothing, ranks))
    later = statistics.median(timed(lambda: launch(nothing, ranks)) for _ in range(LAUNCHES))
    memory = max(launch(_memory, ranks, args=(os.getpid(),)))
    print(json.dumps(asdict(Start(first, later, memory))))


def _memory(kernel: int) -> int:
    """On rank 0 the bytes of all that process `kernel` has started, while all ranks are there."""
    dist.barrier()
    memory = 0
    if dist.get_rank() == 0 and sys.platform == "linux":
        alone = psutil.Process(kernel).memory_full_info().pss
        memory = usage.memory(kernel, enough=0) - alone  # a shared page counts in parts
    dist.barrier()
    return memory


def _starts() -> Iterator[Row]:
    few = start(RANKS)
    yield Row(f"the first result of {RANKS} ranks after the import", few.first, 1.5)
    yield Row(f"a later launch of {RANKS} ranks", few.later, 0.15)
    yield Row(f"a later launch of {MANY} ranks", start(MANY).later, 0.6)
    if few.memory:
        yield Row(f"memory of {RANKS} ranks beyond the kernel", few.memory / 1e6, 350, "MB")
    spawned = statistics.median(timed(_spawn) for _ in range(SPAWNS))
    yield Row("a later launch, of torch's spawn", few.later / spawned, 0.25, "times")
    ours, torch_alone = (
        timed(lambda name=name: _run([sys.executable, "-c", f"import {name}"]))
        for name in ("ddpz_lite", "torch")
    )
    yield Row("import ddpz_lite, of import torch", ours / torch_alone, 1.0, "times")
    yield Row("a small all_reduce on the wire, of plain gloo's", wire_cost(), 1.3, "times")


def _spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_spawned, (f"{folder}/store", RANKS), RANKS, start_method="spawn")


def _spawned(rank: int, store: str, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist.barrier()


def wire_cost() -> float:
    """Median time of a small all_reduce on the wire over that of plain gloo, on 2 ranks."""
    return max(launch(_wire_cost, 2))


def _wire_cost() -> float:
    import torch

    from ddpz_lite.wire import backend

    ours = dist.group.WORLD
    make = dist.distributed_c10d._new_process_group_helper
    dist.distributed_c10d._new_process_group_helper = backend._make_group  # torch's own
    try:
        plain = dist.new_group(backend="gloo")
    finally:
        dist.distributed_c10d._new_process_group_helper = make
    x, times = torch.ones(4), {ours: [], plain: []}
    for turn in range(CALLS):
        for group in (ours, plain) if turn % 2 else (plain, ours):
            times[group].append(timed(lambda group=group: dist.all_reduce(x, group=group)))
    return statistics.median(times[ours]) / statistics.median(times[plain])


# ---- notebooks ----


def _checks() -> Iterator[Row]:
    took = {path.stem: check_seconds(path) for path in _notebooks(ROOT / "solutions")}
    every = [seconds for tasks in took.values() for seconds in tasks.values()]
    yield Row(f"a check, the median of {len(every)} tasks", statistics.median(every), 2.0)
    slowest = max(took, key=lambda name: sum(took[name].values()))
    yield Row(f"all checks of {slowest}, the slowest", sum(took[slowest].values()), 15.0)


def check_seconds(solution: Path) -> dict[str, float]:
    """Seconds of each task's check until its verdict, on the solution: {task: seconds}."""
    from ddpz_lite.course.check import notebooks
    from ddpz_lite.course.check.run import draw, observe
    from ddpz_lite.course.check.score import score
    from ddpz_lite.course.check.task import tasks

    notebook = notebooks.read(solution)
    took = {}
    for task in tasks(notebook.metadata["ddpz"]["exercise"]):
        space = {"__name__": "__main__"}
        for name, source in notebooks.program(notebook, task.id):
            exec(compile(source, f"<{name}>", "exec"), space)
        answer = space[task.answer]
        took[task.id] = timed(
            lambda task=task, answer=answer: score(task, observe(task, answer, draw(task)))
        )
    return took


def _lessons() -> Iterator[Row]:
    folder = ROOT / "lessons"
    took = {
        path.stem: timed(lambda name=path.stem: _ddpz("lessons", name, "--dir", str(folder)))
        for path in _notebooks(folder)
    }
    yield Row(f"all {len(took)} notebooks of lessons", sum(took.values()) / 60, 12, "min")
    slowest = max(took, key=took.__getitem__)
    yield Row(f"{slowest}, the slowest", took[slowest], 60)


def _class() -> Iterator[Row]:
    (solution,) = (ROOT / "solutions").glob(f"{HANDED_IN}_*.ipynb")
    checks = SUBMISSIONS * sum(check_seconds(solution).values())
    ratio = graded(solution, SUBMISSIONS).seconds / checks
    yield Row(f"{SUBMISSIONS} submissions, of their checks one by one", ratio, 1.2, "times")


@dataclass(frozen=True)
class Graded:
    """What it took to grade a class."""

    seconds: float
    memory: int  # bytes: the largest process, at its peak


def graded(solution: Path, submissions: int, *options: str) -> Graded:
    """Grade so many copies of a solution, of one student each. options: words for `ddpz grade`."""
    with tempfile.TemporaryDirectory(prefix="ddpz-class-") as folder:
        handed_in = Path(folder, "handed-in")
        for number in range(submissions):
            student = handed_in / f"student{number:04}"
            student.mkdir(parents=True)
            shutil.copy(solution, student)
        began = time.perf_counter()
        words = ["grade", str(handed_in), "--out", f"{folder}/grades", *options]
        memory = _ddpz(*words)
        return Graded(time.perf_counter() - began, memory)


# ---- pages ----


def _pages() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="ddpz-book-") as folder:
        _run([sys.executable, str(ROOT / "book/build.py"), "--to", folder])
        page = max(Path(folder, "html").rglob("*.html"), key=lambda path: path.stat().st_size)
        size = page.stat().st_size / 1e6
    yield Row(f"the site's largest page, {page.stem}", size, 1.0, "MB")
    largest = max(_notebooks(ROOT / "lessons"), key=lambda path: path.stat().st_size)
    if browser := machine.browser():
        yield Row(f"opening {largest.stem} in JupyterLab", opening(largest, browser), 3.0)


def opening(notebook: Path, browser: str) -> float:
    """Seconds until JupyterLab, opened at this notebook, shows its first cell of code.

    The browser has opened JupyterLab before, so its scripts are in the cache.
    """
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with _lab(notebook.parent) as address, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=flags)
        page = chromium.new_context().new_page()
        page.goto(address.format("lab"))
        page.locator("#jp-main-dock-panel").wait_for()
        began = time.perf_counter()
        page.goto(address.format(f"lab/tree/{notebook.name}"))
        page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.wait_for()
        seconds = time.perf_counter() - began
        chromium.close()
    return seconds


@contextlib.contextmanager
def _lab(folder: Path) -> Iterator[str]:
    """A separate JupyterLab that serves `folder`; the address, with {} for a page's path."""
    with tempfile.TemporaryDirectory(prefix="ddpz-lab-") as home:
        places = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        env = os.environ | {f"JUPYTER_{name}": f"{home}/{name}" for name in places}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--allow-root"]
        command += [f"--ServerApp.root_dir={folder}", "--ServerApp.disable_check_xsrf=True"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen([*command, f"--LabApp.workspaces_dir={home}"], env=env, **silent)
        try:
            about = _until(lambda: next(Path(home, "RUNTIME_DIR").glob("jpserver-*.json"), None))
            server_info = json.loads(about.read_text())
            yield f"{server_info['url']}{{}}?token={server_info['token']}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:  # jupyterlab issue 10442: a thread that never ends
                server.kill()
                server.wait()


def _until(look: Callable[[], Path | None]) -> Path:
    deadline = time.monotonic() + SERVER_TIMEOUT_S
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"bench: JupyterLab did not start in {SERVER_TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    return found


# ---- steps ----


def _steps() -> Iterator[Row]:
    names = [*steps.OURS, steps.ALONE, *steps.PEERS.values()]
    times = steps.measure(names, WORKLOAD, 2)
    for name, peer in steps.PEERS.items():
        added = steps.added(times, name, peer)
        what = f"what {name} adds to a step, of what {peer} adds"
        yield Row(what, added, steps.ADDED_TARGETS[name], "times")


GROUPS: dict[str, Callable[[], Iterator[Row]]] = {
    "start": _starts,
    "checks": _checks,
    "lessons": _lessons,
    "class": _class,
    "pages": _pages,
    "steps": _steps,
}


# ---- what all use ----


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _notebooks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ipynb"))


def _ddpz(*words: str) -> int:
    """Run `ddpz` with these words; the bytes of its largest process."""
    return _run([sys.executable, "-m", "ddpz_lite", *words])


def _run(command: list[str]) -> int:
    """Run a command to its end without an error; the bytes of its largest process at the peak."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"bench: {' '.join(command)} ended with {output.read()[-2000:]}")
    return used.ru_maxrss << 10
