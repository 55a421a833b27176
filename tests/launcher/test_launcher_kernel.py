"""Launching from real Jupyter kernels: cells, interrupts, restarts, sudden death, two at once."""

import os
import queue
import signal
import time

import leftovers
import psutil
import pytest

from ddpz_lite.course.cli.kernel import BlockingManager

DEADLINE = 200


class Kernel:
    """A kernel of this Python, and what a notebook does with it."""

    def __init__(self, folder):
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.cells = 0  # that were sent: the number of the last one
        self.manager = BlockingManager(kernel_name="python3")
        self.manager.start_kernel(env={**os.environ, "TMPDIR": str(self.temporary)})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def send(self, code):
        self.cells += 1
        return self.client.execute(code)

    def wait(self, message_id):
        """(text on stdout and stderr, the error's traceback or None) of a cell that was sent.

        What it displayed is left in `self.shown`, one dict of texts by kind for each display.
        """
        text, error, self.shown = "", None, []
        while True:
            message = self.client.get_iopub_msg(timeout=DEADLINE)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] in ("display_data", "update_display_data"):
                self.shown.append(content["data"])
            elif message["msg_type"] == "error":
                error = "\n".join(content["traceback"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text, error

    def run(self, code):
        return self.wait(self.send(code))

    def until_printed(self, word):
        """Wait until a running cell has printed `word`."""
        text = ""
        deadline = time.monotonic() + DEADLINE
        while word not in text:
            assert time.monotonic() < deadline, f"the cell never printed {word!r}, but {text!r}"
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["msg_type"] == "stream":
                text += message["content"]["text"]

    def descendants(self):
        return [process.pid for process in psutil.Process(self.pid).children(recursive=True)]

    def jobs(self):
        """The folders of its jobs that still exist."""
        return [path for path in self.temporary.iterdir() if path.name.startswith("ddpz-")]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """One kernel for what leaves a kernel as it was: a learner's stays open for hours, too."""
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        yield kernel
    finally:
        kernel.close()


@pytest.fixture
def kernel(tmp_path):
    """A kernel of the test's own, which may restart it."""
    kernel = Kernel(tmp_path)
    try:
        yield kernel
    finally:
        kernel.close()


def gone_soon(listing):
    """Whether what `listing()` lists is gone within the time the system may take."""
    deadline = time.monotonic() + leftovers.WITHIN
    while listing() and time.monotonic() < deadline:
        time.sleep(0.05)
    return listing() == []


CELLS = [
    "import ddpz_lite as dz, torch, torch.distributed as dist\nscale = 10",
    "def helper(x):\n    return x * scale",
    "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b",
    "def step():\n    t = torch.ones(2) * dist.get_rank()\n    dist.all_reduce(t)\n"
    "    return Pair(helper(t.sum().item()), dist.get_rank())",
    "run = dz.launch(step, 4)\n"
    "print([(p.a, p.b) for p in run], isinstance(run[0], Pair), run.ledger[0].where)",
]


def test_a_function_of_one_cell_uses_those_of_others(notebook):
    for cell in CELLS:
        text, error = notebook.run(cell)
        assert error is None, error
    pairs = [(120.0, rank) for rank in range(4)]
    assert text.strip() == f"{pairs} True cell {notebook.cells - 1}:3"
    notebook.run("scale = 100")
    text, _ = notebook.run(CELLS[-1])
    assert "1200.0" in text, "a changed global is sent again"


def test_an_error_shows_the_learners_cell_and_nothing_of_the_launcher(notebook):
    notebook.run("import ddpz_lite as dz, torch, torch.distributed as dist")
    notebook.run(
        "def fail():\n    if dist.get_rank() == 1:\n"
        "        raise ValueError('local')\n    dist.barrier()"
    )
    cell = f"cell {notebook.cells}"
    _, error = notebook.run("dz.launch(fail, 2)")
    assert f'File "{cell}", line 3, in fail' in error
    assert "raise ValueError('local')" in error
    assert f"rank 1 raised ValueError: local at {cell}:3" in error
    assert "launcher" not in error and "ipykernel" not in error and "job.py" not in error


COUNTS = """
import ddpz_lite as dz, torch.distributed as dist
def count():
    for _ in dz.progress(range(5), label="batch"):
        dist.barrier()
dz.launch(count, 2);
"""


def test_the_bar_of_a_notebook_ends_as_a_line_without_times(notebook):
    text, error = notebook.run(COUNTS)
    assert error is None and text == ""
    assert "<progress" in notebook.shown[0]["text/html"]
    assert notebook.shown[-1] == {
        "text/html": "batch 5 of 5 on 2 ranks",
        "text/plain": "batch 5 of 5 on 2 ranks",
    }


WAITS = """
import time, ddpz_lite as dz, torch.distributed as dist
def wait():
    print("ready", flush=True)
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()
"""


def test_an_interrupt_ends_the_ranks_and_keeps_the_kernel(notebook):
    notebook.run(WAITS)
    waits = notebook.cells
    message = notebook.send("dz.launch(wait, 3)")
    notebook.until_printed("[rank 0] ready")
    notebook.manager.interrupt_kernel()
    text, error = notebook.wait(message)
    assert error == f"KeyboardInterrupt: launch was interrupted at cell {waits + 1}:1"
    assert f"rank 0 was running cell {waits}:" in text
    assert leftovers.processes(notebook.pid) == []
    text, error = notebook.run("print(len(dz.launch(lambda: 1, 2)))")
    assert error is None and text.strip() == "2"


def test_a_restarted_kernel_leaves_no_ranks(kernel):
    kernel.run(WAITS)
    kernel.send("dz.launch(wait, 3)")
    kernel.until_printed("ready")
    ranks = kernel.descendants()
    assert len(ranks) >= 4 and len(kernel.jobs()) == 1
    kernel.manager.restart_kernel(now=True)
    assert leftovers.gone(ranks)
    assert gone_soon(kernel.jobs)
    kernel.client.wait_for_ready(timeout=DEADLINE)
    text, error = kernel.run("import ddpz_lite as dz\nprint(len(dz.launch(lambda: 1, 2)))")
    assert error is None and text.strip() == "2"


STUCK = WAITS.replace(
    "time.sleep(600)", "10 ** 10 ** 9  # C code that holds the interpreter lock for hours"
)


# Of ranks that are stuck, three are asleep, too: they wait in the barrier for the one in C.
@pytest.mark.parametrize(
    "cell",
    [pytest.param(WAITS, marks=pytest.mark.extra, id="asleep"), pytest.param(STUCK, id="in C")],
)
def test_a_killed_kernel_leaves_no_ranks(cell, tmp_path):
    kernel = Kernel(tmp_path)
    try:
        kernel.run(cell)
        kernel.send("dz.launch(wait, 4)")
        kernel.until_printed("ready")
        ranks = kernel.descendants()
        assert len(ranks) >= 5  # the fork server and four ranks
        os.kill(kernel.pid, signal.SIGKILL)
        assert leftovers.gone(ranks)
        assert gone_soon(kernel.jobs)
    finally:
        kernel.close()


def test_a_kernel_starts_its_fork_server_at_import_and_replaces_a_killed_one(kernel):
    kernel.run("import ddpz_lite as dz")
    assert len(kernel.descendants()) == 1
    kernel.run("dz.launch(lambda: 1, 2)")
    for pid in kernel.descendants():
        os.kill(pid, signal.SIGKILL)
    text, error = kernel.run("print(len(dz.launch(lambda: 1, 2)))")
    assert error is None, error
    assert text.strip() == "2"


MANY = """
import ddpz_lite as dz, torch, torch.distributed as dist
def total(value):
    t = torch.full((1000,), float(value))
    for _ in range(5):
        dist.all_reduce(t)
        t /= dist.get_world_size()
    return t[0].item()
print([list(dz.launch(total, 3, args=(VALUE,))) for _ in range(2)])
"""


@pytest.mark.rest
def test_two_kernels_at_once_do_not_disturb_each_other(notebook, kernel):
    kernels = [notebook, kernel]
    sent = [k.send(MANY.replace("VALUE", str(value))) for value, k in enumerate(kernels, 1)]
    for value, (k, message) in enumerate(zip(kernels, sent, strict=True), 1):
        text, error = k.wait(message)
        assert error is None, error
        assert text.strip() == str([[float(value)] * 3] * 2)
