"""The `ddpz` command: quick to answer, honest about this machine, clear when a lesson fails."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import pytest

from ddpz_lite.course.authoring import rules
from ddpz_lite.course.cli import doctor, kernel, lessons, machine, main, shared

ROOT = Path(__file__).resolve().parents[2]


def ddpz(*words, cwd=ROOT, **environment):
    """Run the command in a separate process."""
    command = [sys.executable, "-m", "ddpz_lite", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


# ---- the command itself ----


HELP_STAYS_LIGHT = """
import sys
from ddpz_lite.course.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    heavy = {"torch", "numpy", "matplotlib", "nbclient"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else end.code)
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["doctor", "--help"], ["lessons", "--help"]]
)
def test_help_and_version_import_neither_torch_nor_jupyter(words):
    command = [sys.executable, "-c", HELP_STAYS_LIGHT, *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["doctor", "lessons"])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"example: ddpz {command}" in re.sub(" +", " ", capsys.readouterr().out)


def test_version_is_that_of_the_package(capsys):
    import ddpz_lite

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ddpz-lite {ddpz_lite.__version__}\n"


def test_an_unknown_command_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as end:
        main(["physician"])
    assert end.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch, capsys):
    """What `pip install .` alone leaves out: nbformat is not there, as if never installed."""
    for name in ("nbformat", "ddpz_lite.course.cli.check", "ddpz_lite.course.check.notebooks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "nbformat", None)
    monkeypatch.setattr(shared.metadata, "requires", lambda name: REQUIRES)
    assert main(["check", "03"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ddpz check: nbformat is not installed. Fix: ")
    assert 'in the folder of the course: pip install ".[lab]"' in error
    assert len(error.splitlines()) == 1


REQUIRES = [
    "torch>=2.11",
    'nbformat>=5.10; extra == "lab"',
    'jupyter-client>=8.0; extra == "lab"',
    'jupyterlab>=4.2; extra == "lab"',
    'pillow>=10.0; extra == "lab"',
    'nbval>=0.11; extra == "test"',
]


@pytest.mark.parametrize(
    ("module", "extra"),
    [("jupyter_client.manager", "lab"), ("PIL", "lab"), ("nbval", "test"), ("jupyter", None)],
)
def test_a_module_is_looked_up_by_the_name_of_its_package(module, extra, monkeypatch):
    monkeypatch.setattr(shared.metadata, "requires", lambda name: REQUIRES)
    problem = shared.missing(ModuleNotFoundError(name=module))
    assert (problem is None) if extra is None else (f'".[{extra}]"' in str(problem))


def test_a_reader_that_leaves_early_gets_no_traceback():
    script = "ddpz_lite progress | true; echo ${PIPESTATUS[0]}"
    command = ["bash", "-c", f"{sys.executable} -u -m {script}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_subcommands_do_not_import_the_command():
    """No circle: cli/__init__ imports them, and what they share lies in cli/shared."""
    for path in sorted((ROOT / "ddpz_lite/course/cli").glob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "ddpz_lite.course.cli":
                    names = {alias.name for alias in node.names}
                    assert all((ROOT / f"ddpz_lite/course/cli/{n}.py").exists() for n in names), (
                        path.name
                    )


# ---- doctor ----


@pytest.fixture(scope="module")
def report():
    return ddpz("doctor")


def test_doctor_ends_with_an_all_reduce_that_ran(report):
    assert report.returncode == 0, report.stdout + report.stderr
    last = report.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"all-reduce of 1 MiB on 4 ranks over (\w+): 1 \+ 2 \+ 3 \+ 4 = 10 on every rank, "
        r"([\d.]+) ms; job ([\d.]+) s",
        last,
    )
    assert found, last
    assert 0 < float(found[2]) / 1e3 < float(found[3])


def test_doctor_says_what_the_machine_is_without_its_paths(report):
    rows = {line[:12].strip(): line[13:] for line in report.stdout.splitlines()[:-1]}
    import torch

    assert rows["torch"].startswith(torch.__version__.split("+")[0])
    assert rows["cores"].split()[0] == str(machine.cores().usable)
    assert {"memory", "GPUs", "backends", "sandbox", "Chromium", "disk", "4 ranks run"} <= set(rows)
    for path in (str(ROOT), sys.prefix, os.path.expanduser("~/")):
        assert path not in report.stdout


@pytest.mark.rest
def test_doctor_with_three_ranks(capsys):
    assert main(["doctor", "--ranks", "3"]) == 0
    assert "1 + 2 + 3 = 6 on every rank" in capsys.readouterr().out.splitlines()[-1]


def test_doctor_refuses_a_strange_number_of_ranks(capsys):
    assert main(["doctor", "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "ddpz doctor: --ranks takes 1 to 64, not 0.\n"


def test_doctor_fails_with_a_fix_when_the_ranks_do(monkeypatch, capsys):
    import ddpz_lite as dz

    def broken(*args, **kwargs):
        raise RuntimeError("rank 2: no route to host")

    monkeypatch.setattr(dz, "launch", broken)
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0] == "all-reduce on 4 ranks FAILED: rank 2: no route to host"
    assert last[1].startswith("Fix: ")


def test_a_wrong_sum_is_not_called_right():
    good = doctor.RankReport(10.0, True, 0.001, 1, "cpu", "gloo")
    wrong = doctor.RankReport(9.0, True, 0.001, 1, "cpu", "gloo")
    torn = doctor.RankReport(10.0, False, 0.001, 1, "cpu", "gloo")
    one_wrong = doctor.Result(4, 1.0, [good, good, good, wrong])
    uneven = doctor.Result(4, 1.0, [good, good, good, torn])
    assert doctor.Result(4, 1.0, [good] * 4).right
    assert not one_wrong.right and "WRONG" in doctor.last_line(one_wrong)
    assert not uneven.right and "WRONG" in doctor.last_line(uneven)


# ---- the machine: limits of a container, and what does not work ----


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Makes a tree of control groups from {path: text}; this process is in the group `a/b`."""
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    real = machine.Path
    monkeypatch.setattr(
        machine, "Path", lambda *p: own if p == ("/proc/self/cgroup",) else real(*p)
    )

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"a/b/cpu.max": "max 100000\n"}, None),
        ({"a/b/cpu.max": "50000 100000\n"}, 0.5),
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/a/b/cpu.cfs_quota_us": "-1\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/a/b/cpu.cfs_quota_us": "300000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}, 3.0),
    ],
)
def test_the_cpu_quota_of_a_container(cgroups, files, quota):
    root = cgroups(files)
    assert machine.cpu_quota(root) == quota
    usable = machine.cores(root).usable
    everything = machine.cores(root / "none").usable
    assert usable == (everything if quota is None else min(everything, max(1, -(-quota // 1))))


def test_the_memory_limit_of_a_container(cgroups):
    assert not machine.memory(cgroups({"a/memory.max": "max\n", "a/memory.current": "5\n"})).limited
    root = cgroups({"a/memory.max": "1000000\n", "a/memory.current": "400000\n"})
    limited = machine.memory(root)
    assert (limited.total, limited.available, limited.limited) == (1_000_000, 600_000, True)


# ---- lessons ----


def test_lessons_runs_and_tells_the_time_of_each(make_notebook, tmp_path, capsys):
    path = make_notebook("00_good", "import os\nx = 2", "print(x, os.path.basename(os.getcwd()))")
    make_notebook("01_other", "1 + 1")
    before = path.read_bytes()
    assert main(["lessons", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^00_good +2 +\d+\.\d$", out, re.M) and re.search(r"^01_other +1 ", out, re.M)
    assert "2 of 2 ran to the end" in out
    assert path.read_bytes() == before, "without --write a notebook stays as it is"


def test_lessons_write_stores_no_stderr(make_notebook, tmp_path, capsys):
    path = make_notebook("00_stray", "import sys\nprint('port taken', file=sys.stderr)")
    before = path.read_bytes()
    assert main(["lessons", "--write", "--dir", str(tmp_path)]) == 1
    assert "cell 0 wrote to stderr, nothing was stored: port taken" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_lessons_write_stores_outputs_and_nothing_of_this_machine(make_notebook, tmp_path):
    path = make_notebook("00_good", "print('hello')")
    assert main(["lessons", "good", "--write", "--dir", str(tmp_path)]) == 0
    notebook = nbformat.read(path, as_version=4)
    (cell,) = notebook.cells
    assert cell.outputs[0].text == "hello\n" and cell.execution_count == 1
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert "execution" not in cell.metadata


def test_what_ran_is_kept_so_that_stale_outputs_are_found():
    cell = nbformat.v4.new_code_cell("x = 1")
    lesson = nbformat.v4.new_notebook(cells=[cell], metadata={"ddpz": {"title": "X"}})
    lessons.scrub(lesson)
    assert list(rules.fresh(lesson)) == []
    cell.source = "x = 2"
    assert "code has changed since the stored run" in next(rules.fresh(lesson))


def test_lessons_leaves_nothing_in_the_temporary_folder(make_notebook, monkeypatch):
    path = make_notebook("01_one", "import tempfile\nprint(tempfile.mkdtemp())")
    with tempfile.TemporaryDirectory() as temporary:  # not tmp_path: names of sockets are short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        assert lessons.execute(path, timeout=60, write=True).error is None
        (output,) = nbformat.read(path, as_version=4).cells[0].outputs
        assert output.text.startswith(temporary)
        gc.collect()  # the kernel's manager removes its own folder when it is collected
        assert not os.listdir(temporary)


def test_the_folder_of_a_kernel_that_is_still_ending_is_removed(tmp_path):
    (folder := tmp_path / "kernel").mkdir()
    until = time.monotonic() + 0.3

    def end_slowly():
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                (folder / "socket").touch()

    ending = threading.Thread(target=end_slowly)
    ending.start()
    kernel._remove(str(folder))
    ending.join()
    assert not folder.exists()


def test_lessons_runs_in_the_python_that_was_asked(make_notebook, tmp_path):
    path = make_notebook("00_where", "import sys\nprint(sys.prefix)")
    assert main(["lessons", "--write", "--dir", str(tmp_path)]) == 0
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text.strip() == sys.prefix


@pytest.mark.rest
def test_a_failing_lesson_is_named_and_the_others_run(make_notebook, tmp_path, capsys):
    path = make_notebook("00_bad", "x = 1", "x / 0  # on purpose", "x = 3")
    make_notebook("01_good", "1 + 1")
    make_notebook("02_dies", "import os\nos._exit(1)")
    before = path.read_bytes()
    assert main(["lessons", "--write", "--dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^00_bad .* FAILED$", out, re.M)
    assert "cell 1: x / 0  # on purpose" in out and "ZeroDivisionError: division by zero" in out
    assert "the kernel died" in out
    assert "1 of 3 ran to the end" in out
    assert path.read_bytes() == before, "a failed run is not stored"


def test_a_cell_that_never_ends_is_stopped(make_notebook, tmp_path, capsys):
    make_notebook("00_slow", "import time\ntime.sleep(60)")
    assert main(["lessons", "--timeout", "1", "--dir", str(tmp_path)]) == 1
    assert "the cell did not end in time" in capsys.readouterr().out


def test_where_a_kernel_died_is_the_last_cell_that_began():
    """An exercise's check that did not run has the number 0."""
    counts = (1, 2, None, 0)
    cells = [nbformat.v4.new_code_cell("x", execution_count=count) for count in counts]
    assert lessons._stopped_at(nbformat.v4.new_notebook(cells=cells))[0] == 1


def test_a_number_means_one_notebook_and_no_second_one(make_notebook):
    first, second = make_notebook("01_one_device", "1"), make_notebook("01b_memory", "1")
    assert lessons.choose([first, second], ["1"]) == [first]
    assert lessons.choose([first, second], ["1b"]) == [second]
    assert lessons.choose([first, second], ["mem"]) == [second]


def test_an_unknown_lesson_is_answered_with_those_there(make_notebook, tmp_path, capsys):
    make_notebook("00_start_here", "1")
    assert main(["lessons", "47", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "ddpz lessons: no lesson is called '47'. There are: 00_start_here.\n"
    )


def test_an_empty_folder_is_answered_with_what_to_do(tmp_path, capsys):
    assert main(["lessons", "--dir", str(tmp_path)]) == 2
    assert "no notebook in" in capsys.readouterr().err
