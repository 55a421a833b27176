"""Whatever goes wrong on a rank: the right rank, the learner's line, and control back, soon."""

import ctypes
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import leftovers
import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.launcher import failure, job, rank
from ddpz_lite.launcher.event_loop import EventLoop
from ddpz_lite.launcher.forkserver import ForkServer
from ddpz_lite.launcher.job import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])
HERE = os.path.basename(__file__)
RECORD = pytest.mark.parametrize("record", [True, False], ids=["wire", "plain"])


def meet():
    dist.all_reduce(torch.ones(4))


def fails(fn, world_size=4, **options):
    """Launch `fn`, which must fail; returns the error, with `.seconds` of the launch."""
    began = time.monotonic()
    with pytest.raises(dz.RankFailed) as caught:
        dz.launch(fn, world_size, **options)
    error = caught.value
    error.seconds = time.monotonic() - began
    return error


def line_of(text):
    """The number of the only line of this file that ends with the comment `# <text>`."""
    with open(__file__) as file:
        numbers = [
            number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")
        ]
    (number,) = numbers
    return f"{HERE}:{number}"


def in_setup():
    if dist.get_rank() == 1:
        raise KeyError("no such file")  # setup
    meet()


def in_forward():
    meet()
    model = torch.nn.Linear(3, 4)
    if dist.get_rank() == 2:
        model(torch.ones(5))  # forward
    meet()


def in_backward():
    x = torch.ones(3, requires_grad=True)
    if dist.get_rank() == 3:

        def hook(grad):
            raise ValueError("bad gradient")  # backward

        x.register_hook(hook)
    (x * 2).sum().backward()
    meet()


def in_a_collective():
    if dist.get_rank() == 1:
        dist.all_reduce([1, 2, 3])  # collective
    else:
        meet()


def while_others_wait():
    if dist.get_rank() == 0:
        time.sleep(0.5)
        raise RuntimeError("late")  # late
    meet()


def out_of_memory():
    if dist.get_rank() == 2:
        torch.empty(10**15)  # memory
    meet()


def calls_sys_exit():
    if dist.get_rank() == 1:
        sys.exit(3)  # sys.exit
    meet()


@RECORD
@pytest.mark.parametrize(
    ("fn", "rank", "line", "words"),
    [
        (in_setup, 1, "setup", "rank 1 raised KeyError: 'no such file'"),
        (
            in_forward,
            2,
            "forward",
            "mat1 and mat2 shapes cannot be multiplied",  # torch 2.15 says "addmm: " before
        ),
        (in_backward, 3, "backward", "rank 3 raised ValueError: bad gradient"),
        (in_a_collective, 1, "collective", "rank 1 raised"),
        (while_others_wait, 0, "late", "rank 0 raised RuntimeError: late"),
        (out_of_memory, 2, "memory", "rank 2 raised RuntimeError"),
        (calls_sys_exit, 1, "sys.exit", "rank 1 called sys.exit(3)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rank_raises(fn, rank, line, words, record):
    error = fails(fn, record=record)
    assert (error.rank, error.kind, error.where) == (rank, "raised", line_of(line))
    headline, _ = str(error).split("\n", 1)
    assert headline.startswith(f"rank {rank} ") and words in headline
    assert Path(__file__).read_text().splitlines()[int(error.where.split(":")[1]) - 1].split("#")[
        0
    ].strip() in str(error)
    assert error.kind != "timeout", "control comes back long before the time limit"


class Unreadable(Exception):
    def __str__(self):
        raise ValueError("no words")


def raises_the_unreadable():
    if dist.get_rank() == 1:
        raise Unreadable  # unreadable
    meet()


def test_an_exception_whose_str_raises_is_still_reported():
    error = fails(raises_the_unreadable, 2)
    assert (error.rank, error.kind, error.where) == (1, "raised", line_of("unreadable"))
    assert "Unreadable" in str(error)


class Wordy(Exception):
    def __str__(self):
        time.sleep(1)
        return "at last"


def raises_slowly():
    if dist.get_rank() == 1:
        raise Wordy
    meet()


def test_an_exception_is_reported_before_waiting_ranks_count_as_stuck():
    error = fails(raises_slowly, 2)
    assert (error.rank, error.kind) == (1, "raised") and "at last" in str(error)


def compiles_nonsense():
    exec("x = = 1")  # nonsense


def raises_a_group():
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ExceptionGroup("several", [error, ValueError("other")]) from None  # group


@pytest.mark.parametrize(
    ("fn", "line", "words"),
    [
        (compiles_nonsense, "nonsense", "rank 0 raised SyntaxError: invalid syntax at"),
        (raises_a_group, "group", "rank 0 raised ExceptionGroup: several (2 sub-exceptions) at"),
    ],
)
def test_exceptions_of_every_form_start_with_their_message(fn, line, words):
    error = fails(fn, 1)
    assert error.where == line_of(line)
    assert str(error).startswith(words)
    assert os.path.dirname(__file__) not in str(error), "files are named as the learner knows them"


def test_the_error_survives_a_trip_to_another_process():
    error = pickle.loads(pickle.dumps(fails(compiles_nonsense, 1)))
    assert (error.rank, error.kind) == (0, "raised") and "SyntaxError" in str(error)


def leaves_by_os_exit():
    meet()
    if dist.get_rank() == 1:
        os._exit(7)  # os._exit
    meet()


def segfault():
    meet()
    if dist.get_rank() == 1:
        ctypes.string_at(0)  # segfault
    meet()


def killed_from_outside():
    if dist.get_rank() == 1:
        pid = os.getpid()
        os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", f"sleep 3; kill -9 {pid}")
        while True:
            time.sleep(0.01)  # killed
    meet()


@RECORD
@pytest.mark.parametrize(
    ("fn", "kind", "line", "words"),
    [
        (leaves_by_os_exit, "exited", "os._exit", "rank 1 left with os._exit(7)"),
        (segfault, "killed", "segfault", "rank 1 was killed by SIGSEGV"),
        (killed_from_outside, "killed", "killed", "rank 1 was killed by SIGKILL"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_rank_dies(fn, kind, line, words, record, monkeypatch):
    monkeypatch.setattr(job, "GRACE_CONSEQUENCE", 300.0)  # its peers may speak long before
    error = fails(fn, record=record)
    assert (error.rank, error.kind, error.where) == (1, kind, line_of(line))
    assert str(error).startswith(words)


def killed_after_its_worker():
    if os.fork() == 0:
        os._exit(0)  # worker
    os.wait()
    time.sleep(1)  # the rank's own line
    os.kill(os.getpid(), signal.SIGKILL)


def outlives(dead: list[int], error: Exception | None) -> int:
    """On ranks in no group: some die, and then one of the others raises."""
    me = int(os.environ["RANK"])
    if me in dead:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    if error is not None and me == min({0, 1, 2} - set(dead)):
        raise error
    assert not dist.is_initialized()
    return me


def test_with_survivors_a_death_is_printed_and_ends_no_other_rank(capsys):
    run = dz.launch(outlives, 3, args=([0, 2], None), record=False, survivors=True)
    assert list(run) == [None, 1, None]
    messages = capsys.readouterr().out
    assert messages.count("was killed by SIGKILL") == 2 and "[rank 0] was" in messages
    for dead, error, ranks, words in (
        ([0, 1, 2], None, {0, 1, 2}, "killed by SIGKILL"),  # no rank is left
        ([0], ValueError("wrong"), {1}, "rank 1 raised ValueError: wrong"),
        ([1], RuntimeError("Connection closed by peer"), {1}, "rank 1 was killed by SIGKILL"),
    ):
        with pytest.raises(dz.RankFailed, match=words) as failed:
            dz.launch(outlives, 3, args=(dead, error), record=False, survivors=True)
        assert failed.value.rank in ranks
    with pytest.raises(ValueError, match="survivors needs record=False"):
        dz.launch(outlives, 3, args=([], None), survivors=True)


def test_a_worker_does_not_sign_in_the_name_of_its_rank():
    error = fails(killed_after_its_worker, 1)
    assert error.where != line_of("worker") and "last seen at" in str(error)


def test_a_rank_that_dies_at_birth_has_no_line(tmp_path):
    (tmp_path / "place.0").write_text(rank.SETUP)
    death = failure.from_status(0, 0.0, -signal.SIGTERM, failure.JobFolder(str(tmp_path)))
    assert death.where is None and death.sentence.endswith("; last seen setting up")


def test_ranks_that_die_alike_are_reported_together():
    deaths = [failure.from_status(r, r, -signal.SIGBUS, failure.JobFolder("")) for r in (0, 1)]
    headline = failure.explain(failure.root_cause(deaths), {})
    assert headline.startswith("ranks 0 and 1 were killed by SIGBUS (no space for a mapped file")


def endless_loop():
    if dist.get_rank() == 2:
        while True:
            pass  # loop
    meet()


@RECORD
def test_an_endless_loop_is_reported_at_the_timeout(record):
    error = fails(endless_loop, timeout=5, record=record)
    assert (error.rank, error.kind) == (2, "timeout")
    assert int(error.where.split(":")[1]) in range(int(line_of("loop").split(":")[1]) - 1, 10_000)
    assert "Look first at rank 2" in str(error)
    assert "rank 0 waits in all_reduce" in str(error)
    assert error.seconds >= 5


def swallows_interrupts():
    while True:
        try:  # noqa: SIM105 (as a learner writes it)
            time.sleep(10)
        except BaseException:
            pass


def test_a_rank_that_catches_everything_is_ended_too():
    assert fails(swallows_interrupts, 2, timeout=1).kind == "timeout"
    assert leftovers.processes() == []


def one_leaves_early():
    if dist.get_rank() == 0:
        return
    meet()


def test_a_rank_that_leaves_early_is_reported_before_the_timeout():
    error = fails(one_leaves_early, timeout=50)
    assert (error.rank, error.kind) == (0, "stalled")
    assert "rank 0" in str(error) and "returned" in str(error) and "all_reduce #0" in str(error)


def all_raise():
    raise ValueError("everywhere")


def test_ranks_that_fail_alike_are_reported_once(monkeypatch):
    monkeypatch.setattr(job, "GRACE", 300.0)  # all are heard, however far apart they fail
    for _ in range(3):
        error = fails(all_raise, 3)
        assert error.rank == 0
        assert error.seconds < 300, "when all have spoken there is nothing to wait for"
        assert (
            str(error).count("everywhere") == 3
        )  # the sentence, and once as code and once as message in the traceback


def wraps_the_consequence():
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        meet()
    except RuntimeError as error:
        raise ValueError("training failed") from error


@RECORD
def test_a_consequence_in_other_words_is_not_taken_for_the_cause(record, monkeypatch):
    monkeypatch.setattr(job, "GRACE_CONSEQUENCE", 300.0)
    error = fails(wraps_the_consequence, record=record)
    assert (error.rank, error.kind) == (1, "exited")


def returns_a_lock():
    return {"ok": 1, "bad": [threading.Lock()]} if dist.get_rank() == 1 else 0


def returns_a_generator():
    return (i for i in range(3))


class Unbuildable:
    def __reduce__(self):
        return int, ("no number",)


def returns_the_unbuildable():
    return Unbuildable() if dist.get_rank() == 1 else 0


def test_a_result_that_cannot_be_rebuilt_names_its_rank():
    error = fails(returns_the_unbuildable, 2)
    assert (error.rank, error.kind) == (1, "raised")
    assert "cannot be rebuilt" in str(error) and "no number" in str(error)


def returns_what_holds_itself():
    value = [threading.Lock()]
    value.insert(0, value)
    return value


def test_a_result_that_cannot_be_sent_is_named():
    assert "element [1], a _thread.lock" in str(fails(returns_what_holds_itself, 1))
    error = fails(returns_a_lock, 2)
    assert error.rank == 1 and "element [0], a _thread.lock" in str(error)
    assert "generator" in str(fails(returns_a_generator, 1))


def test_a_function_that_cannot_be_sent_is_named_before_any_process_starts():
    lock = threading.Lock()

    def helper():
        return lock

    def uses_a_lock():
        return helper()

    with pytest.raises(TypeError, match=r"`lock`, which helper\(\) uses, is a _thread.lock"):
        dz.launch(uses_a_lock, 2)

    def has_a_default(step=1, *, local=lock):
        return local

    with pytest.raises(
        TypeError, match=r"`local`, an argument of has_a_default\(\) with a default,"
    ):
        dz.launch(has_a_default, 2)
    with pytest.raises(TypeError, match=r"args\[1\] of meet\(\) is a _thread.lock"):
        dz.launch(meet, 2, args=(1, lock))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"world_size": 0}, ValueError, "from 1 to 64, got 0"),
        ({"world_size": -1}, ValueError, "from 1 to 64, got -1"),
        ({"world_size": 300}, ValueError, "from 1 to 64, got 300"),
        ({"world_size": 2.0}, TypeError, "whole number"),
        ({"world_size": True}, TypeError, "whole number"),
        ({"timeout": 0}, ValueError, "positive number of seconds"),
        ({"timeout": float("nan")}, ValueError, "positive number of seconds"),
        ({"backend": "mpi"}, ValueError, "auto, gloo, nccl"),
        ({"output": "loud"}, ValueError, "'stream' or 'by_rank'"),
        ({"network": 5}, TypeError, "dz.Network"),
        ({"args": 5}, TypeError, r"args=\(x,\)"),
        ({"args": "abc"}, TypeError, r"args=\(x,\)"),
        ({"kwargs": [1]}, TypeError, "dict of named arguments"),
    ],
)
def test_arguments_that_make_no_sense_get_one_clear_error(options, error, words):
    with pytest.raises(error, match=words):
        dz.launch(meet, **options)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match=r"Fix: pass fn, not fn\(\)"):
        dz.launch(meet.__name__, 2)


def launches_again():
    dz.launch(meet, 2)


def test_a_rank_cannot_launch():
    assert "ranks cannot start ranks" in str(fails(launches_again, 1))


def test_nccl_without_gpus_is_refused_with_a_fix():
    if torch.cuda.device_count() >= 4:
        pytest.skip("this machine has the GPUs")
    with pytest.raises(ValueError, match="one GPU per rank: 4 ranks"):
        dz.launch(meet, 4, backend="nccl")


def ignores_the_end():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()  # a daemon: neither our child's child in name, nor in its process group
        time.sleep(600)
    if dist.get_rank() == 1:
        raise ValueError("leave a daemon behind")
    meet()


def test_daemons_of_a_failed_rank_are_gone_too():
    fails(ignores_the_end, 2)
    assert leftovers.processes() == []


def kills_the_fork_server(path):
    with open(path, "a") as file:
        file.write("once ")
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_a_job_whose_fork_server_dies_is_not_run_again(tmp_path):
    path = tmp_path / "runs"
    with pytest.raises(RuntimeError, match="was killed, and the ranks with it"):
        dz.launch(kills_the_fork_server, 2, args=(str(path),))
    assert path.read_text() == "once once "
    assert leftovers.processes() == []
    assert list(dz.launch(dist.get_rank, 2)) == [0, 1]


@pytest.fixture
def interruptible():
    """Ctrl-C raises, as in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


AWKWARD = [(ForkServer, "start"), (EventLoop, "register"), (Job, "_let_exit"), (Job, "_end")]


@pytest.mark.parametrize(("owner", "name"), [*AWKWARD, (Job, "_close")])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_at_an_awkward_moment_leaves_nothing(owner, name, monkeypatch, tmp_path):
    dz.launch(dist.get_rank, 1)  # the fork server is up
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors = leftovers.descriptors()
    original = getattr(owner, name)

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        try:
            return original(*args)
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        dz.launch(dist.get_rank, 2)
    monkeypatch.undo()
    assert leftovers.processes() == []
    assert list(tmp_path.iterdir()) == []
    assert leftovers.descriptors() == descriptors
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert list(dz.launch(dist.get_rank, 2)) == [0, 1]


def test_the_programs_own_handler_may_let_the_job_continue():
    called = []
    before = signal.signal(signal.SIGINT, lambda *call: called.append(call))
    timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    try:
        assert len(dz.launch(time.sleep, 2, args=(1,))) == 2
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert len(called) == 1


def test_a_message_of_several_lines_is_cut_at_a_full_stop():
    def job():
        raise RuntimeError(
            "Reduction had not finished. You can enable a search\nfor what is unused."
        )

    error = fails(job, 1)
    assert str(error).startswith("rank 0 raised RuntimeError: Reduction had not finished. at")
    assert "for what is unused" in str(error)


def stops_at_a_breakpoint():
    if dist.get_rank() == 1:
        breakpoint()  # breakpoint
    meet()


def sets_a_trace():
    import pdb

    pdb.set_trace()  # trace


@pytest.mark.parametrize(
    ("fn", "line"), [(stops_at_a_breakpoint, "breakpoint"), (sets_a_trace, "trace")]
)
def test_a_debugger_in_a_rank_gets_one_sentence(fn, line):
    error = fails(fn, 2)
    assert (error.kind, error.where) == ("raised", line_of(line))
    assert "a rank has no keyboard, so no debugger can stop here. Fix: print" in str(error)
    assert "(Pdb)" not in str(error)


@pytest.mark.parametrize("caught", [True, False])
def test_a_launch_within_a_launch_is_refused_and_never_waits_for_itself(caught, monkeypatch):
    messages, start = [], job.Job._start

    def start_and_ring(self):
        start(self)
        signal.raise_signal(signal.SIGALRM)

    def handler(*_):
        try:
            dz.launch(meet, 2)
        except RuntimeError as error:
            messages.append(str(error))
            if not caught:
                raise

    before = signal.signal(signal.SIGALRM, handler)
    try:
        monkeypatch.setattr(job.Job, "_start", start_and_ring)
        if caught:
            assert len(dz.launch(time.sleep, 2, args=(0,))) == 2
        else:
            with pytest.raises(RuntimeError, match="in the middle of a launch"):
                dz.launch(time.sleep, 2, args=(100,))
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGALRM, before)
    assert len(messages) == 1 and "let the handler set a flag" in messages[0]
    assert leftovers.processes() == []
    assert list(dz.launch(dist.get_rank, 2)) == [0, 1]


def test_windows_is_refused_and_wsl_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OSError, match=r"Windows cannot fork.*WSL 2"):
        dz.launch(meet, 2)
