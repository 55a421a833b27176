"""Two nodes on one machine: no root, no package, no second host; the lines that one types."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddpz_lite.course.check import notebooks

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
SCRIPT = "import os; print('rank', *(os.environ[n] for n in ('RANK', 'GROUP_RANK', 'WORLD_SIZE')))"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def typed(script: str) -> list[str]:
    """The lines of the course's own answer to 16.launch_plan, for two nodes that are this one."""
    (path,) = (ROOT / "solutions").glob("16_*.ipynb")
    space: dict = {}
    for name, source in notebooks.program(notebooks.read(path), "16.launch_plan"):
        exec(compile(source, name, "exec"), space)
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    here = {"address": "127.0.0.1", "interface": interface, "gpus": 1}
    return space["launch_plan"]([here, here], script, "two-nodes", free_port())


def by_hand(script: str) -> list[str]:
    port = free_port()
    names = f"HEAD=127.0.0.1 NODES=2 RANKS=1 PORT={port} WAIT=60"
    return [f"{names} NODE={node} deploy/node.sh {script}" for node in range(2)]


@pytest.mark.extra
@pytest.mark.parametrize("lines_of", [typed, by_hand])
def test_the_lines_start_one_job_in_which_each_rank_is_there_once(tmp_path, lines_of):
    script = tmp_path / "who.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    nodes = [
        subprocess.Popen(
            ["bash", "-c", line],
            cwd=ROOT,
            env=os.environ | {"PATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines_of(str(script))
    ]
    printed = "".join(node.communicate(timeout=90)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], printed
    who = re.findall(r"^rank (\d) (\d) (\d)$", printed, re.M)
    assert sorted(rank for rank, _, _ in who) == ["0", "1"], printed
    assert sorted(node for _, node, _ in who) == ["0", "1"] and {w for *_, w in who} == {"2"}
