"""Makes nbval strict for the course's own notebooks, wherever pytest is started.

nbval runs a notebook cell by cell and believes what the notebook says about itself: a tag skips a
cell, another excuses its exception, a misspelt magic is only a line on stderr, and a kernel that
ended is waited for until the cell's deadline. For `lessons/` and `solutions/` none of this passes.
"""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
import time
from pathlib import Path
from queue import Empty

import pytest

from ddpz_lite.wire import callsite

pytest_plugins = ["ddpz_lite.course.cli.kernel"]  # kernels draw no ports

OURS = ("lessons", "solutions")
SPINE = ("00_", "01_", "02_", "03_", "05_", "08_", "09_", "10_", "11_")  # the way to ZeRO-3
SOLUTION = "08_"  # the one whose notebook `make test-rest` runs: its checks take no time
# Tags and comments by which a notebook tells nbval to look away.
EXCUSES = ("skip", "check_exception")
OUTPUT = 60  # seconds for what a cell has shown to arrive after its end; nbval's 5 are a stall
LIVENESS = 0.5  # seconds between two looks at whether the kernel still lives


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--answers-seed",
        default=datetime.date.today().isoformat(),
        help="draws the wrong answers that `make test` tries; by default the date of today",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"wrong answers drawn with --answers-seed={config.getoption('--answers-seed')}"


def pytest_configure(config: pytest.Config) -> None:
    """A test run keeps no progress of exercises: running the solutions solves nothing."""
    home = tempfile.TemporaryDirectory(prefix="ddpz-home-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    os.environ["DDPZ_HOME"] = home.name


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests are made here, and stay: no garbage to look for, now or later."""
    with callsite.uncollected():
        result = yield
    gc.freeze()
    return result


@pytest.hookimpl(tryfirst=True)  # before -m is obeyed
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cells of the notebooks that `make test` leaves out.

    Of the solutions all but one notebook are `extra`, because their answers run elsewhere:
    `tests/check/test_exercises.py` judges them, and it runs the remaining cells of all solutions,
    which the exercises have too, in a kernel. How a check in a kernel reaches its judge does not
    depend on the task; a check on ranks is in the notebook that the test of `ddpz check` runs.
    """
    for item in items:
        folder, name = folder_of(item), Path(item.path).name
        if folder == "lessons" and not name.startswith(SPINE):
            item.add_marker(pytest.mark.rest)
        elif folder == "solutions":
            one = name.startswith(SOLUTION)
            item.add_marker(pytest.mark.rest if one else pytest.mark.extra)


def folder_of(item: pytest.Item) -> str | None:
    """The folder of the project that holds the notebook of which `item` is a cell, run by nbval."""
    if type(item).__name__ != "IPyNbCell":
        return None
    return Path(item.path).resolve().relative_to(item.config.rootpath.resolve()).parts[0]


def is_ours(item: pytest.Item) -> bool:
    """Whether `item` is a cell, run by nbval, of one of the course's notebooks."""
    return folder_of(item) in OURS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    """Notebooks write into a folder of the test run, since nbval kills their kernels at the end."""
    if not is_ours(item):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", os.environ["DDPZ_HOME"])
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item):
    if not is_ours(item):
        return (yield)
    excuses = [name for name in EXCUSES if item.options[name]]
    if excuses or item.options["check"]:
        item.raise_cell_error("the cell carries a tag or comment for nbval; a lesson has none")
    watch_kernel(item.parent.kernel)
    item.output_timeout = OUTPUT
    result = yield
    for output in item.test_outputs:
        if output.output_type == "stream" and output.name == "stderr":
            item.raise_cell_error("the cell wrote to stderr", output.text)
    return result


def watch_kernel(kernel) -> None:
    """Let nbval notice within a second that the kernel has ended, instead of at the deadline."""
    if "get_message" in vars(kernel):
        return
    wait_for = kernel.get_message

    def get_message(stream, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LIVENESS if deadline is None else min(LIVENESS, deadline - time.monotonic())
            try:
                return wait_for(stream, timeout=max(left, 0))
            except Empty:
                if not kernel.is_alive():
                    raise RuntimeError("the kernel ended while this cell ran") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    kernel.get_message = get_message
