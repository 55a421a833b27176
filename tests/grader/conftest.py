"""What the tests of the grader share."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_course

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import Observed, find
from ddpz_lite.course.cli import grade as command
from ddpz_lite.course.grader import intake
from ddpz_lite.course.grader.sandbox.limits import Probe


@pytest.fixture
def one_task(monkeypatch):
    """The exercise of lesson 03 has one task: that of `small_course`."""
    monkeypatch.setattr(notebooks, "tasks", lambda lesson: [find("03.weighted_mean")])


@pytest.fixture
def no_ranks(monkeypatch):
    """No rank runs, for a test of what surrounds them: every answer counts as having raised."""

    def observe(task, cells, cases, limits, sandboxed):
        return [Observed(case, "raised", "rank 0 raised") for case in cases]

    monkeypatch.setattr(command, "observe_in_sandbox", observe)
    monkeypatch.setattr(command, "probe", lambda: Probe(True))


@pytest.fixture
def take(known, tmp_path):
    """Take in what lies at these paths: take("class", "all.zip"). Each file has its own `known`."""

    def run(*paths):
        return intake.take([tmp_path / path for path in paths], known)

    return run


@pytest.fixture
def put(tmp_path):
    """Write a file below the test's folder: put("class/ada/x.ipynb", text), by default a stub."""

    def write(name: str, text: str | bytes = small_course.handed_in()) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
