"""Ranks from a function call: results, output, environment, devices, speed."""

import contextlib
import gc
import io
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from pathlib import Path

import cloudpickle
import leftovers
import numpy
import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.launcher import CannotSend, devices, event_loop, job, printer, serialize

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rank_and_sum(offset, scale=1):
    t = torch.ones(3) * dist.get_rank()  # (3,)
    dist.all_reduce(t)
    return dist.get_rank(), dist.get_world_size(), scale * t.sum().item() + offset


def leave_a_finalizer(folder):
    """How many finalizers of what was imported before the fork would run when the rank ends, and
    whether all are gone through then.
    """
    gone_through = weakref.finalize._registered_with_atexit
    inherited = sum(finalizer.atexit for finalizer in list(weakref.finalize._registry))
    weakref.finalize(os, Path(folder, str(dist.get_rank())).touch)
    return inherited, gone_through


def test_a_rank_ends_with_its_own_finalizers_alone(tmp_path, monkeypatch):
    """Those of torch's operators cost more than the start of a rank: `Server.drop_finalizers`."""
    monkeypatch.setattr(job, "LEAVE", 300.0)
    run = dz.launch(leave_a_finalizer, 2, args=(str(tmp_path),), record=False)
    assert list(run) == [(0, False)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("world_size", [1, numpy.int64(3)])
@pytest.mark.parametrize("record", [True, False], ids=["wire", "plain"])
def test_results_come_back_by_rank(world_size, record):
    run = dz.launch(rank_and_sum, world_size, args=(5,), kwargs={"scale": 2}, record=record)
    total = 3 * sum(range(world_size))
    assert list(run) == [(rank, world_size, 2 * total + 5) for rank in range(world_size)]
    assert len(run) == run.world_size == world_size
    assert run[-1] == run[world_size - 1]
    assert run.seconds > 0
    assert bool(run.ledger) == record


def big_result():
    return torch.full((1 << 20,), float(dist.get_rank()))  # (1 Mi,), 4 MiB


def test_large_results_arrive():
    run = dz.launch(big_result, 3)
    assert all(
        torch.equal(result, torch.full((1 << 20,), float(rank))) for rank, result in enumerate(run)
    )


def prints():
    for i in range(3):
        print("line", i, flush=True)
        dist.barrier()
    sys.stderr.write("a warning\n")
    os.write(1, b"from below python\n")
    sys.stdout.write("no newline at the end")


def test_streamed_output_names_the_rank():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run = dz.launch(prints, 2)
    lines = out.getvalue().splitlines()
    assert sorted(lines) == sorted(f"[rank {r}] {line}" for r in range(2) for line in run.output[r])
    expected = [
        "line 0",
        "line 1",
        "line 2",
        "a warning",
        "from below python",
        "no newline at the end",
    ]
    assert run.output == [expected, expected]


def test_output_by_rank_is_the_same_every_time():
    def text():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            dz.launch(prints, 3, output="by_rank")
        return out.getvalue()

    first = text()
    assert [line[:8] for line in first.splitlines()] == [
        f"[rank {r}]" for r in range(3) for _ in range(6)
    ]
    assert text() == first


def prints_a_flood():
    for i in range(3 * printer.MAX_LINES):
        print(i)


def test_a_flood_of_output_is_cut():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run = dz.launch(prints_a_flood, 1)
    assert len(run.output[0]) == printer.MAX_LINES + 1
    assert "not shown" in out.getvalue().splitlines()[-1]


def test_output_without_newlines_is_kept_small():
    with contextlib.redirect_stdout(io.StringIO()):
        bar, flood = printer.Printer(1, "stream"), printer.Printer(1, "stream")
        for step in range(printer.LONGEST):
            bar.feed(0, b"\rstep %010d\r" % step)
            assert len(bar._pending[0]) <= 40
        for _ in range(3 * printer.MAX_LINES * printer.LINE // (1 << 16)):
            flood.feed(0, b"x" * (1 << 16))
            assert len(flood._pending[0]) <= printer.LONGEST
        bar.finish()
        flood.finish()
    assert bar.lines == [[f"step {step:010d}"]]
    shown = sum(map(len, flood.lines[0]))
    assert shown <= printer.MAX_LINES * printer.LINE
    assert "not shown" in flood.lines[0][-1]


def replaces_its_output():
    print("before")
    sys.__stdout__.write("under the old name\n")
    sys.stdout = None
    return dist.get_rank()


def test_a_rank_may_do_as_it_likes_with_its_streams():
    with contextlib.redirect_stdout(io.StringIO()):
        run = dz.launch(replaces_its_output, 2)
    assert list(run) == [0, 1]
    assert run.output == [["before", "under the old name"]] * 2


def forks_and_comes_back():
    dist.barrier()
    if os.fork() == 0:
        print("a fork")
        return "the fork's"
    os.wait()
    if os.fork() == 0:
        sys.exit(5)
    return os.waitstatus_to_exitcode(os.wait()[1])


config = 3  # also the name of a submodule of torch.distributed, of its own type


def uses_config():
    return config + dist.get_rank()


def test_a_global_may_have_the_name_of_a_submodule_of_what_a_function_uses():
    assert sys.modules["torch.distributed.config"].__class__ is not type(sys)
    assert list(dz.launch(uses_config, 2)) == [3, 4]
    lock = threading.Lock()

    def needs_a_lock():
        return config, dist, lock

    with pytest.raises(CannotSend, match="`lock`, which needs_a_lock"):
        dz.launch(needs_a_lock, 2)


def test_a_fork_that_comes_back_does_not_speak_for_the_rank():
    with contextlib.redirect_stdout(io.StringIO()):
        run = dz.launch(forks_and_comes_back, 2)
    assert list(run) == [5, 5]
    assert run.output == [["a fork"]] * 2


def test_views_of_a_large_buffer_travel_alone():
    buffer = torch.arange(1 << 20, dtype=torch.float32)  # (1 Mi,), 4 MiB
    views = [buffer[i : i + 2] for i in range(10)]  # (2,) each
    views.append(buffer[5:7].clone().requires_grad_())
    views.append(torch.nn.Parameter(buffer[7:9]))
    views.append(buffer.view(1024, 1024).t()[:, 0])  # (1024,), strided
    body = serialize.pack_result(views)
    assert len(body) < 100_000
    for sent, came in zip(views, pickle.loads(body), strict=True):
        assert torch.equal(sent, came) and type(sent) is type(came)
        assert sent.requires_grad == came.requires_grad


def test_a_time_limit_of_any_length_is_taken():
    assert list(dz.launch(nothing, 2, timeout=1e15)) == [None, None]


def test_a_folder_deleted_under_the_notebook_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert list(dz.launch(dist.get_rank, 2)) == [0, 1]


def test_too_few_descriptors_are_an_error_with_a_fix():
    resource = pytest.importorskip("resource")
    dz.launch(dist.get_rank, 1)  # the fork server is up
    before = leftovers.descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"64 ranks need 256 open files.*ulimit -n"):
            dz.launch(dist.get_rank, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert leftovers.descriptors() == before


def test_a_full_disk_is_an_error_with_a_fix(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddpz_lite.wire.StatusFile.create", full)
    with pytest.raises(OSError, match="No space left") as caught:
        dz.launch(dist.get_rank, 1)
    assert "set TMPDIR" in caught.value.__notes__[0]


def looks_around():
    return {
        "cwd": os.getcwd(),
        "variable": os.environ["DDPZ_TEST_VARIABLE"],
        "env": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
        "path": sys.path[-1],
        "threads": torch.get_num_threads(),
        "stdin": sys.stdin.read() if sys.stdin else "",
        "backend": dist.get_backend(),
    }


def test_a_rank_sees_the_world_of_its_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("DDPZ_TEST_VARIABLE", "kept")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "not yet there"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "last")])
    for rank, seen in enumerate(dz.launch(looks_around, 2, record=False)):
        assert seen["cwd"] == str(tmp_path)
        assert seen["variable"] == "kept"
        assert seen["env"] == [str(rank), str(rank), "2"]
        assert seen["path"] == str(tmp_path / "last")
        assert seen["threads"] >= 1
        assert seen["backend"] == "gloo"


def draws():
    return random.random(), float(numpy.random.rand()), torch.initial_seed()


def test_ranks_do_not_share_the_random_state_of_the_fork_server():
    first, second = dz.launch(draws, 2)
    assert first[0] != second[0] and first[1] != second[1]
    assert first[2] == second[2], (
        "torch starts every process with the same seed, with or without a fork server"
    )


def warns_in_torchs_files():
    warnings.simplefilter("always")
    out = torch.empty(dist.get_world_size())
    dist._all_gather_base(out, torch.ones(1))  # the line that is named
    warnings.warn("local", stacklevel=1)


def test_a_warning_names_the_line_of_the_learner_and_no_file_of_torch_or_ours(capsys):
    dz.launch(warns_in_torchs_files, 2, output="by_rank")
    first = warns_in_torchs_files.__code__.co_firstlineno
    old, *own = capsys.readouterr().out.splitlines()
    name = f"{Path(__file__).name}:{first + 3}: FutureWarning: `torch.distributed._all_gather_base"
    assert old.startswith(f"[rank 0] {name}"), "once: it is the same on all ranks"
    line = f"{Path(__file__).name}:{first + 4}: UserWarning: local"
    assert own == [f"[rank 0] {line}", f"[rank 1] {line}"]


def fails():
    raise ValueError("local")


def test_a_script_sees_one_frame_of_ours_and_the_full_message():
    with pytest.raises(
        dz.RankFailed, match=r"raised ValueError: local at test_launcher\.py:"
    ) as error:
        dz.launch(fails, 2)
    files = [Path(str(entry.path)).name for entry in error.traceback]
    assert files == [Path(__file__).name, "__init__.py"], "the learner's line, and launch itself"


def counts():
    for _ in dz.progress(range(7), label="batch"):
        dist.barrier()


def test_progress_of_all_ranks_is_one_bar(monkeypatch):
    updates = []

    class Bar:
        def __init__(self, world_size):
            self.world_size = world_size

        def update(self, rank, label, done, total):
            updates.append((rank, label, done, total))

        def close(self):
            updates.append("closed")

    monkeypatch.setattr(event_loop, "Bar", Bar)
    dz.launch(counts, 2)
    assert updates[-1] == "closed"
    for rank in range(2):
        local = [entry for entry in updates[:-1] if entry[0] == rank]
        assert local[0] == (rank, "batch", 0, 7) and local[-1] == (rank, "batch", 7, 7)
        assert [entry[2] for entry in local] == sorted(entry[2] for entry in local)


@pytest.mark.parametrize("launches", [8, pytest.param(64, marks=pytest.mark.extra)])
def test_many_launches_leave_nothing_behind(launches, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dz.launch(rank_and_sum, 2, args=(0,))
    descriptors = leftovers.descriptors()
    for attempt in range(launches):
        assert dz.launch(rank_and_sum, 1 + attempt % 3, args=(attempt,))[0][2] >= attempt
    assert leftovers.processes() == []
    assert list(tmp_path.iterdir()) == []
    assert leftovers.descriptors() == descriptors


def nothing():
    dist.barrier()


def test_world_sizes_and_gpus_make_a_plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.plan(3) == devices.Plan("gloo", (None, None, None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.plan(2) == devices.Plan("cpu:gloo,cuda:nccl", (0, 1))
    assert devices.plan(2, "gloo") == devices.Plan("gloo", (0, 1))
    shared = devices.plan(4)
    assert (shared.backend, shared.devices) == ("gloo", (0, 1, 0, 1))
    assert "4 ranks share 2 GPUs" in shared.note


SCRIPT = """
import ddpz_lite as dz
import psutil
import torch.distributed as dist
import warnings

def cautious():
    try:
        warnings.warn("local")
    except UserWarning as error:
        return f"{dist.get_rank()}: {error}"

print(len(psutil.Process().children()), list(dz.launch(cautious, 2)))
"""


def test_ranks_collect_garbage_which_their_fork_server_does_not():
    assert list(dz.launch(gc.isenabled, 2)) == [True, True]


def test_a_script_needs_no_guard_starts_nothing_early_and_ends_without_a_warning(tmp_path):
    """Warnings that are errors: the ranks see them, the fork server does not."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-X", "dev", str(path)]
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.stderr == ""
    assert (done.stdout, done.returncode) == ("0 ['0: local', '1: local']\n", 0)
