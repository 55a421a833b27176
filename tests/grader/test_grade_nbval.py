"""What nbval says about a merged notebook: shown to the student, never believed, worth no point."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import small_course
from grade_cases import by_broker, case
from leftovers import descriptors, family, gone
from small_course import SOLVED

from ddpz_lite.course.check import notebooks
from ddpz_lite.course.check.task import Observed, find
from ddpz_lite.course.cli import grade as command
from ddpz_lite.course.cli import main
from ddpz_lite.course.grader import SandboxPool, merge, nbval, probe
from ddpz_lite.course.grader.batch import Terms
from ddpz_lite.course.grader.exercise import pristine
from ddpz_lite.course.grader.nbval import Cell, NbvalReport
from ddpz_lite.course.grader.sandbox import limits, notebook_inside
from ddpz_lite.course.grader.sandbox import notebook as notebook_run
from ddpz_lite.course.grader.sandbox.frames import Refused, frame
from ddpz_lite.course.grader.sandbox.handle import SandboxHandle
from ddpz_lite.course.grader.sandbox.limits import Probe
from ddpz_lite.course.grader.sandbox.notebook import NoReport
from ddpz_lite.course.grader.sandbox.syscalls import AF_NETLINK
from ddpz_lite.course.grader.submission import Submission

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("one_task")]

CAN = probe()
sandboxed = pytest.mark.skipif(not CAN.ok, reason=f"no sandbox here: {CAN.why}")
TASK = find("03.weighted_mean")
TERMS = Terms("0.1.0+test", 7, "yes")
EXERCISE = f"{small_course.NAME}.ipynb"
CANARY = "CANARY-77ab10"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def exercise(course):
    return pristine(course / "solutions" / EXERCISE)


def handed_in(source: str | None) -> Submission:
    answers = () if source is None else ((small_course.CELL, source),)
    return Submission("ada", "03", "ada.ipynb", "ab" * 32, answers)


# ---- the merged notebook ----


def test_answers_stand_in_the_pristine_notebook(exercise):
    made = merge.merged(exercise, handed_in("x = 1"))
    assert [cell.source for cell in made.cells if cell.cell_type == "code"] == [
        small_course.GIVEN,
        "x = 1",
        small_course.CHECK,
    ]
    assert made.metadata.kernelspec == notebooks.KERNELSPEC


@pytest.mark.parametrize("source", [None, "!curl example.org", "%run x.py"])
def test_what_is_refused_or_missing_leaves_the_stub(exercise, source):
    made = merge.merged(exercise, handed_in(source))
    assert made.cells[3].source == notebooks.stubbed(small_course.ANSWER)


# ---- its report, as data ----


def junit(*cases: str) -> bytes:
    head = '<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>'
    return f"{head}{''.join(cases)}</testsuite></testsuites>".encode()


LEAD = nbval.LEAD + "\nCell 2: Cell execution caused an exception\n\nInput:\ncheck(x)\n\n"


def test_a_cell_passes_fails_or_was_not_run():
    found = nbval.read(
        junit(
            '<testcase name="Cell 0"/>',
            f'<testcase name="Cell 1"><failure message="m">{LEAD}Traceback:\n\n#x1B[31m---\n'
            "CheckFailed#x1B[0m: 3 of 5 points</failure></testcase>",
            f'<testcase name="Cell 2"><failure message="m">{LEAD}</failure></testcase>',
            '<testcase name="Cell 3"><error message="Kernel dead">a long traceback</error>'
            "</testcase>",
            '<testcase name="Cell 4"><skipped message="expected">x</skipped></testcase>',
        )
    )
    assert found == {
        "Cell 0": ("passed", ""),
        "Cell 1": ("failed", "CheckFailed: 3 of 5 points"),
        "Cell 2": ("failed", "Cell 2: Cell execution caused an exception\nInput:\ncheck(x)"),
        "Cell 3": ("failed", "Kernel dead"),
        "Cell 4": ("not run", "expected"),
    }


def test_of_a_failure_the_first_lines_are_kept():
    long = "\n".join("x" * 10_000 for _ in range(1000))
    found = nbval.read(junit(f'<testcase name="c"><failure>{LEAD}{long}</failure></testcase>'))
    assert len(found["c"][1]) <= nbval.LINES * (nbval.WIDTH + 1)


BILLION = '<!DOCTYPE r [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><r>&b;</r>'


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not XML"),
        (b"{}", "not XML"),
        (b"\xff\xfe\x00", "not XML"),
        (junit("<testcase>"), "not XML"),
        (BILLION.encode(), "a declaration"),
        (BILLION.encode("utf-16"), "not XML"),
        (b'<?xml version="1.0" encoding="utf-7"?>+ADwAIQ-DOCTYPE', "not XML"),
    ],
)
def test_a_malformed_report_is_an_error(raw, why):
    with pytest.raises(NoReport, match=why):
        nbval.read(raw)


def test_a_report_as_deep_as_it_may_be_long_is_read():
    assert nbval.read(b"<a>" * 140_000 + b"</a>" * 140_000) == {}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (junit('<testcase name="Cell 2"/>'), {"cells": (Cell(TASK.id, "passed"),)}),
        (junit('<testcase name="Cell 7"/>'), {"cells": (Cell(TASK.id, ""),)}),
        (b"x" * 100, {"trouble": "it is not XML (syntax error: line 1, column 0)"}),
    ],
)
def test_of_a_report_the_check_cells_are_kept(exercise, monkeypatch, raw, expected):
    monkeypatch.setattr(nbval, "run_notebook", lambda *_: raw)
    report = nbval.run(handed_in("x = 1"), exercise, TERMS, None, threading.Event())
    assert report == NbvalReport("ab" * 32, TERMS.version, **expected)


# ---- the command ----


@pytest.fixture
def no_ranks(monkeypatch):
    """No rank and no nbval runs: all that a test wants is what stands around them."""
    ran = []

    def observe(task, cells, cases, limits, sandboxed):
        return [Observed(case, "raised", "rank 0 raised") for case in cases]

    def run(submission, exercise, terms, pool, stop):
        ran.append(submission.student)
        cells = (Cell("03.weighted_mean", "failed", "CheckFailed: <b>oh</b>"),)
        if submission.student == "bob":
            return NbvalReport(submission.sha256, terms.version, trouble="it is not XML")
        return NbvalReport(submission.sha256, terms.version, cells)

    monkeypatch.setattr(command, "observe_in_sandbox", observe)
    monkeypatch.setattr(command, "probe", lambda: Probe(True))
    monkeypatch.setattr(nbval, "run", run)
    return ran


def test_it_is_shown_in_the_reports_and_summed(class_of, no_ranks, course, capsys):
    place = class_of(ada=SOLVED, bob=None)
    assert main(["grade", place, "--out", "out", "--nbval"]) == 0
    line = "nbval, worth no points: 0 of 1 check cells passed; notebooks without a report: 1"
    assert line in capsys.readouterr().out
    assert line in (course / "out/summary.md").read_text().replace("\\", "")
    for name, words in {
        "ada": ("03.weighted_mean: failed", "CheckFailed: &lt;b&gt;oh&lt;/b&gt;"),
        "bob": ("nbval gave no report: it is not XML",),
    }.items():
        for kind in ("html", "md"):
            text = (course / f"out/students/{name}/feedback.{kind}").read_text().replace("\\", "")
            assert all(word in text for word in ("What nbval says", *words)), (name, kind)


def test_it_is_asked_for_and_what_is_known_is_not_run_again(class_of, no_ranks, course):
    place = class_of(ada=SOLVED)
    assert main(["grade", place, "--out", "out"]) == 0
    assert no_ranks == []
    assert "nbval" not in (course / "out/students/ada/feedback.html").read_text()
    before = (course / "out/grades/ada.03.json").read_text()
    for _ in range(2):
        assert main(["grade", place, "--out", "out", "--nbval"]) == 0
    assert no_ranks == ["ada"]
    assert (course / "out/grades/ada.03.json").read_text() == before
    kept = course / "out/nbval/ada.03.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "sha256": "0" * 64}))
    assert main(["grade", place, "--out", "out", "--nbval"]) == 0
    assert no_ranks == ["ada", "ada"]


def test_without_a_sandbox_it_refuses(class_of, no_ranks, monkeypatch, course, capsys):
    monkeypatch.setattr(command, "probe", lambda: Probe(False, "unshare: not permitted"))
    assert main(["grade", class_of(ada=SOLVED), "--nbval", "--out", "out"]) == 2
    report = capsys.readouterr().err
    assert "--nbval: no sandbox is possible here, so nothing was graded. unshare" in report
    assert "or without --nbval" in report and report.count("\n") == 1
    assert not (course / "out").exists()


def test_without_nbval_it_refuses(class_of, no_ranks, monkeypatch, course, capsys):
    monkeypatch.setattr(nbval, "NEEDED", ("pytest", "no_such_nbval"))
    assert main(["grade", class_of(ada=SOLVED), "--nbval", "--out", "out"]) == 2
    assert "--nbval: no_such_nbval cannot be imported" in capsys.readouterr().err
    assert not (course / "out").exists()


# ---- in its sandbox ----


@pytest.fixture(scope="module")
def pool():
    with SandboxPool() as made:
        by_broker("", case(1))  # the fork server is there before processes are counted
        yield made


@pytest.fixture
def run(exercise, pool):
    """Run nbval on an answer; the one check cell's `Cell`, or why there is no report."""

    def run(source: str | None, stop: threading.Event | None = None) -> Cell | str:
        stop = stop or threading.Event()
        report = nbval.run(handed_in(source), exercise, TERMS, pool, stop)
        return report.trouble or report.cells[0]

    return run


# What is found inside is raised by the check cell, whose failure is in the report.
TELL = "\ndef weighted_mean(): pass\ndef check(*_): raise RuntimeError(f'found {found}')\n"


@sandboxed
def test_what_it_sees_and_reaches(run, course, monkeypatch, class_of):
    """This package, judges too, and its own loopback; no secret, no other student, no network."""
    class_of(bob=SOLVED)
    (course / "hidden_checks.py").write_text(CANARY)
    monkeypatch.setenv("GITHUB_TOKEN", CANARY)
    secrets = [course / "hidden_checks.py", course / "class", course / "solutions"]
    secrets += [ROOT / "solutions", ROOT / "tests", ROOT / ".git", ROOT / "conftest.py"]
    with socket.create_server(("127.0.0.1", 0)) as outside:
        cell = run(
            f"""
import os, socket, subprocess, sys
from ddpz_lite.course.tasks.lesson03 import judge
found, made = [path for path in {[str(path) for path in secrets]!r} if os.path.exists(path)], set()
found += [name for name, value in os.environ.items() if "CANARY-" in value]
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    for name in ("environ", "cmdline"):
        try: found += ["proc"] * ("CANARY-" in open(f"/proc/{{pid}}/{{name}}").read())
        except OSError: pass
for program in ("/bin/sh", "/usr/bin/env", "/bin/ls"):
    found += [program] * os.path.exists(program)
for path in (os.__file__, judge.__file__, "/new", sys.executable):
    try: open(path, "a").close(); found.append(path)
    except OSError: pass
for kind in range(46):
    for how in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try: socket.socket(kind, how).close(); made.add(kind)
        except OSError: pass
for address in (("1.1.1.1", 53), {outside.getsockname()!r}, ("169.254.169.254", 80)):
    try: socket.create_connection(address, 0.5); found.append(address)
    except OSError: pass
inside = socket.create_server(("127.0.0.1", 0))
socket.create_connection(inside.getsockname())
found.append(sorted(made))
"""
            + TELL
        )
    kinds = [socket.AF_UNIX, socket.AF_INET, AF_NETLINK]
    assert f"RuntimeError: found [{[int(kind) for kind in kinds]}]" in cell.says, cell


ALL_AT_ONCE = """
import os, time
os.mkfifo("/tmp/nbval.xml")
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: time.sleep(1)
        os._exit(0)
for _ in range(20): print("flood " * 100_000)
while True:
    try: os.fork()
    except OSError: time.sleep(0.1)
"""


@sandboxed
def test_an_interrupt_ends_a_run_and_all_that_it_started(run, monkeypatch):
    monkeypatch.setattr(notebook_run, "NOTEBOOK", replace(limits.NOTEBOOK, processes=64))
    before, fds, stop = family(), descriptors(), threading.Event()

    def interrupt():
        for _ in range(800):
            if len(family() - before) > 30:
                break
            time.sleep(0.1)
        stop.set()

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    assert run(ALL_AT_ONCE, stop) == "it was interrupted"
    watcher.join()
    assert gone(list(family() - before))
    assert descriptors() == fds


# ---- how a run ends, without a kernel ----


@pytest.fixture
def held():
    """A run that is held, and the other ends of its line, its control socket and its output."""
    pairs = [socket.socketpair() for _ in range(3)]
    held = SandboxHandle(*(ours for ours, _ in pairs))
    yield held, *(theirs for _, theirs in pairs)
    for pair in pairs:
        for sock in pair:
            sock.close()


def awaited(held: SandboxHandle, stop: threading.Event | None = None) -> str:
    """Why there was no report."""
    with pytest.raises((NoReport, Refused)) as raised:
        notebook_run._await(held, stop or threading.Event())
    return str(raised.value)


def test_a_run_without_a_report_ends_in_time_with_the_reason(held, monkeypatch):
    held, line, _, output = held
    monkeypatch.setattr(notebook_run, "NOTEBOOK_SECONDS", 0.2)
    output.sendall(b"x" * 100_000)  # is drained
    line.sendall(frame({"kind": "ended"}, 10) + b"half")  # never whole
    assert awaited(held) == "the run took longer than 0.2 s"
    assert len(held.printed) == limits.NOTEBOOK.output


def test_a_run_that_holds_too_much_is_ended(held, monkeypatch):
    held, _, control, _ = held
    control.sendall(b'{"pid": 1, "supervisor": 2}\n')
    monkeypatch.setattr(notebook_run, "memory", lambda pid, enough: enough + pid)
    assert awaited(held) == "the run used more than 4096 MiB of memory"


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (frame({"kind": "ended"}, limits.NOTEBOOK.message + 1), "more than allowed"),
        (frame({"kind": "ended"}, 0), "pytest wrote none. It said last: oh"),
        (b"", "the run ended without one"),
    ],
)
def test_a_report_that_is_too_long_or_not_there_is_none(held, sent, words):
    held, line, control, output = held
    output.sendall(b"first\noh\n")
    held.drain(1000)
    line.sendall(sent)
    line.shutdown(socket.SHUT_WR)
    control.close()
    assert words in awaited(held)


@pytest.mark.parametrize("name", ["/dev/zero", "/nowhere/nbval.xml"])
def test_of_a_report_one_byte_too_many_is_read_at_most(name):
    assert len(notebook_inside._content(Path(name), 1000)) == (1001 if "zero" in name else 0)


def test_an_interrupt_ends_the_wait(held):
    stop = threading.Event()
    stop.set()
    assert awaited(held[0], stop) == "it was interrupted"
