"""The strict nbval of the root conftest: what a lesson cannot get away with."""

from __future__ import annotations

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest

pytestmark = pytest.mark.rest

CELL_DEADLINE = 200  # seconds; a dead kernel must be noticed long before

GOOD = ["x = 20 + 1", "assert x == 21\nx"]
BAD = {
    "raises": ["1 / 0"],
    "magic": ["%no_such_magic"],
    "stderr": ["import sys\nprint('careful', file=sys.stderr)"],
    "warning": ["import warnings\nwarnings.warn('old')"],
    "skip_comment": ["# NBVAL_SKIP\n1 / 0"],
    "raise_comment": ["# NBVAL_RAISES_EXCEPTION\n1 / 0"],
    "dies": ["import os\nos._exit(0)"],
}
TAGGED = {"skip_tag": "nbval-skip", "raise_tag": "raises-exception"}


@pytest.fixture(scope="module")
def report(tmp_path_factory, root):
    """By notebook: the message of its failure, or "passed" or "skipped", and its seconds."""
    project = tmp_path_factory.mktemp("project")
    lessons = project / "lessons"
    lessons.mkdir()
    shutil.copy(root / "conftest.py", project)
    shutil.copy(root / "pyproject.toml", project)
    for name, sources in {"good": GOOD, **BAD}.items():
        write(lessons / f"{name}.ipynb", sources)
    for name, tag in TAGGED.items():
        write(lessons / f"{name}.ipynb", ["1 / 0"], tag)
    write(project / "elsewhere" / "foreign.ipynb", ["# NBVAL_SKIP\n1 / 0"])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    command += ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={CELL_DEADLINE}"]
    command += ["--color=no", "--junitxml=report.xml", "lessons", "elsewhere"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=850)
    assert done.returncode == 1, done.stdout + done.stderr
    return {
        case.get("classname").split(".")[-2]: (outcome(case), float(case.get("time")))
        for case in ElementTree.parse(project / "report.xml").iter("testcase")
    }


# Something that listens has taken the port drawn for the kernel's output.
TAKEN = """
import socket
from jupyter_client.provisioning import LocalProvisioner

launch, listener = LocalProvisioner.pre_launch, socket.socket()


async def taken(self, **kwargs):
    ready = await launch(self, **kwargs)
    if self.parent.transport == "tcp":
        listener.bind((self.parent.ip, self.parent.iopub_port))
        listener.listen()
    return ready


LocalProvisioner.pre_launch = taken
"""


@pytest.mark.extra  # nbval gives up by the clock: ten seconds of waiting
def test_no_other_program_can_take_the_port_of_a_kernel(tmp_path, root):
    """Four ranks open dozens of ports while a kernel next to them begins: it must not need one."""

    def run(conftest, limit):
        (tmp_path / "conftest.py").write_text(conftest)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--nbval-lax"]
        command += [f"--nbval-kernel-startup-timeout={limit}", "--nbval-current-env", "lessons"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)

    write(tmp_path / "lessons" / "good.ipynb", GOOD)
    shutil.copy(root / "pyproject.toml", tmp_path)
    ours = run((root / "conftest.py").read_text() + TAKEN, limit=60)
    assert ours.returncode == 0, ours.stdout
    theirs = run(TAKEN, limit=10)
    assert "didn't respond" in theirs.stdout, "the test's own hostile neighbour does nothing"


def outcome(case):
    for element in case:
        if element.tag in ("failure", "error"):
            return element.text
    return "skipped" if case.find("skipped") is not None else "passed"


def write(path, sources, tag=None):
    path.parent.mkdir(exist_ok=True)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for cell in cells:
        cell.metadata["tags"] = [tag] if tag else []
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def test_a_good_lesson_passes(report):
    assert report["good"][0] == "passed"


def test_nbval_alone_lets_a_cell_excuse_itself(report):
    """The hole that the conftest closes: outside lessons/ it is still open."""
    assert report["foreign"][0] == "skipped"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "ZeroDivisionError"),
        ("magic", "wrote to stderr"),
        ("stderr", "wrote to stderr"),
        ("warning", "wrote to stderr"),
        ("skip_comment", "a tag or comment for nbval"),
        ("raise_comment", "a tag or comment for nbval"),
        ("skip_tag", "a tag or comment for nbval"),
        ("raise_tag", "a tag or comment for nbval"),
        ("dies", "the kernel ended while this cell ran"),
    ],
)
def test_a_bad_lesson_fails(report, name, message):
    assert message in report[name][0]


def test_a_dead_kernel_is_noticed_before_the_deadline(report):
    assert report["dies"][1] < CELL_DEADLINE
