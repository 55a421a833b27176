"""`ddpz train` under torchrun: ranks killed at random points and restarted lose not one bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from leftovers import gone
from train_state import assert_same, state, write_text

from ddpz_lite.course.cli import main
from ddpz_lite.trainer.recipe import Recipe, flag_of

pytestmark = pytest.mark.usefixtures("own_temporary")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train_faults.py")
KILLS, EVERY = 20, 2
DEADLINE = 400.0  # seconds for one command


def recipe_of(folder: Path, **options) -> Recipe:
    """Small enough that an update takes milliseconds; dropout, so that random generators count."""
    text = write_text(folder / "text", length=1090)
    sizes = {"context": 16, "layers": 1, "heads": 2, "width": 8, "batch": 2}
    return Recipe(text=text, dropout=0.1, accumulate=2, save_every=EVERY, **sizes | options)


def words(recipe: Recipe, checkpoint: Path) -> list[str]:
    names = ("text", "context", "layers", "heads", "width", "batch", "dropout", "accumulate")
    names += ("save_every", "steps", "stage", "precision", "validate", "sample", "report")
    printed = [word for n in names for word in (flag_of(n), str(getattr(recipe, n)))]
    return ["train", *printed, "--checkpoint", str(checkpoint), "--resume"]


def run(folder: Path, *command: str, status: int = 0) -> str:
    """Run Python with a folder for what it leaves; returns its output. What it started must end."""
    with tempfile.TemporaryDirectory(prefix="dz-") as temporary:  # short: sockets are made in it
        return _run(folder, temporary, command, status)


def _run(folder: Path, temporary: str, command: Sequence[str], status: int) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        words = [sys.executable, *command]
        process = subprocess.Popen(words, env=env, stdout=output, stderr=output)
        try:
            found = process.wait(DEADLINE)
            assert gone(_started(temporary), within=DEADLINE / 4)
        finally:
            for pid in _started(temporary):
                os.kill(pid, signal.SIGKILL)
            process.wait()
    text = (folder / "output").read_text(errors="replace")
    assert found == status, text[-4000:]
    return text


def _started(temporary: str) -> list[int]:
    """The processes that have the folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another's, or it has just ended
            if process.environ().get("TMPDIR") == temporary:
                found.append(process.pid)
    return found


def numbers(output: str) -> list[str]:
    """What was printed of each step, but for the speed."""
    return re.findall(r"^(step \d+/.*?)(?:  [\d,]+ tokens/s)?\n", output, re.MULTILINE)


@pytest.mark.extra  # half a minute by nature
def test_twenty_kills_under_torchrun_change_nothing(tmp_path):
    """An attempt is killed before its second save on average, so 21 saves outlast 20 kills."""
    recipe = recipe_of(tmp_path, steps=EVERY * (KILLS + 1), stage=3, validate=0, sample=0)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, str(SCRIPT), "torchrun", "0", "2", str(whole), *words(recipe, whole / "runs"))
    before, calls = map(int, (whole / "calls").read_text().split())
    limit = before + 2 * EVERY * (calls - before) // recipe.steps
    command = ["torchrun", str(KILLS), str(limit), str(killed)]
    output = run(killed, str(SCRIPT), *command, *words(recipe, killed / "runs"))

    kills = [line.split() for line in (killed / "kills").read_text().splitlines()]
    assert [int(attempt) for attempt, *_ in kills] == list(range(KILLS))
    assert {rank for _, rank, *_ in kills} == {"0", "1"}
    assert len({place for *_, place in kills}) > KILLS // 2
    assert output.count("resumed at step") > KILLS // 2
    last = f"step-{recipe.steps:08d}"
    assert_same(state(recipe, killed / "runs" / last), state(recipe, whole / "runs" / last))


def test_the_command_itself_under_torchrun(tmp_path, capsys):
    """`torchrun -m ddpz_lite train` prints and computes what `ddpz train` does, bit for bit."""
    recipe = recipe_of(tmp_path, steps=6, stage=2, report=1, validate=3, sample=30)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = run(
        tmp_path, "-m", *torchrun, "-m", "ddpz_lite", *words(recipe, tmp_path / "torchrun")
    )
    capsys.readouterr()
    assert main([*words(recipe, tmp_path / "launch"), "--ranks", "2"]) == 0
    here = capsys.readouterr().out.replace("[rank 0] ", "")
    assert len(numbers(here)) == 8 and numbers(printed) == numbers(here)
    ends = [state(recipe, tmp_path / way / "step-00000006") for way in ("torchrun", "launch")]
    assert_same(*ends)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_wrong_option_is_reported_by_one_rank(local_rank, tmp_path, monkeypatch, capsys):
    """Before anybody is met: what torchrun gives a rank is a few variables."""
    given = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    wrong = [*words(recipe_of(tmp_path, steps=6), tmp_path / "runs"), "--context", "2000"]
    assert main(wrong) != 0
    assert capsys.readouterr().err.count("ddpz train: corpus: ") == 1 - local_rank
