"""Jobs under torchrun, for lessons 15c, 16 and 16b: a port, what a job prints, where it hangs."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 240  # for a script that ends
Frames = list[tuple[str, str]]  # (function, "script.py:12"), the innermost first


def free_port() -> int:
    """A port on which no program listens, below those that the system gives to connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def under_torchrun(script: str, folder: Path, **environment: str) -> list[str]:
    """The lines that two ranks of a script print, without those of torchrun.

    script: prints lines that begin with "[rank]". folder: where it is written, and run.
    """
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [*TORCHRUN, "script.py"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
    )
    return sorted(line for line in done.stdout.splitlines() if line.startswith("["))


def hang(script: str, case: str, folder: Path) -> list[tuple[str, Frames]]:
    """Run a script that hangs on two ranks, until each has written its record; then end it.

    script: takes `case` as its argument, writes record_RANK in a thread, and registers faulthandler
    with the file stack_RANK_PID. Returns the stack of each rank, with the name of the tool that
    found it.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    folder.mkdir()
    (folder / "script.py").write_text(script)
    job = subprocess.Popen(
        [*TORCHRUN, "script.py", case],
        env=os.environ | {"TORCH_FR_BUFFER_SIZE": "100"},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 100
        while len(list(folder.glob("record_*"))) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        files = sorted(folder.glob("stack_*"))
        return [_stack(int(file.name.split("_")[2]), file) for file in files]
    finally:
        job.terminate()  # torchrun ends its ranks
        job.wait()


def _stack(pid: int, file: Path) -> tuple[str, Frames]:
    """Where a process is. By py-spy; where it is missing or forbidden, by Python itself."""
    spy = Path(sys.executable).with_name("py-spy")
    if spy.exists():
        plain = os.environ | {"CLICOLOR": "0", "CLICOLOR_FORCE": "0"}  # Jupyter asks for colors
        command = [str(spy), "dump", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, env=plain)
        if done.returncode == 0:
            frame = re.compile(r"^    (\S+) \((?:\S*/)?(\S+:\d+)\)", re.M)
            return "py-spy dump", frame.findall(done.stdout)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    frames = re.findall(r'File "(?:\S*/)?(\S+)", line (\d+) in (\S+)', file.read_text())
    return "faulthandler", [(name, f"{path}:{line}") for path, line, name in frames]


def show_stacks(stacks: list[tuple[str, Frames]]) -> None:
    """Print the frames of the script and of torch.distributed, the innermost first."""
    for rank, (tool, frames) in enumerate(stacks):
        print(f"rank {rank}, by {tool}:")
        for name, at in frames:
            if at.startswith(("script", "distributed_c10d")):
                print(f"  {name} ({at})")
