"""`ddpz train`: deterministic, fair to unequal batches, resumable bit for bit, clear when wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from train_state import assert_same, state, write_text

import ddpz_lite as dz
from ddpz_lite.checkpoint import save_load as checkpoint
from ddpz_lite.checkpoint.background import Saving
from ddpz_lite.course.cli import main
from ddpz_lite.data import RankSampler, corpus
from ddpz_lite.trainer import loop, saving
from ddpz_lite.trainer.batches import Batches
from ddpz_lite.trainer.loop import FLOOR, build, learning_rate, shard, train
from ddpz_lite.trainer.recipe import Recipe, flag_of, steps_or_auto
from ddpz_lite.trainer.save_interval import best_interval
from ddpz_lite.trainer.saving import TrainingError

# 61 windows: 15 micro-batches of 2 ranks x 2 windows, then one with a single window for rank 0.
TINY = {"context": 16, "layers": 1, "heads": 2, "width": 8, "batch": 2, "sample": 0, "validate": 0}
WINDOWS = 61


@pytest.fixture
def text(tmp_path) -> str:
    return write_text(tmp_path / "text", length=1090)


def tiny(text: str, **options) -> Recipe:
    return Recipe(text=text, **TINY | options)


def words(recipe: Recipe) -> list[str]:
    """A recipe as it is typed."""
    typed = ["train"]
    for option in fields(Recipe):
        value = getattr(recipe, option.name)
        if value is True:
            typed.append(flag_of(option.name))
        elif value not in (None, False) or option.name in ("validate", "sample"):
            typed += [flag_of(option.name), str(value)]
    return typed


# ---- the schedule and the batches ----


def test_the_learning_rate_rises_then_falls_along_a_cosine():
    recipe = Recipe(steps=110, warmup=10, lr=0.5)
    rates = [learning_rate(recipe, done) for done in range(111)]
    assert rates[:10] == pytest.approx([0.05 * n for n in range(1, 11)])
    assert rates[10] == 0.5 and rates[110] == pytest.approx(0.5 * FLOOR)
    assert rates[60] == pytest.approx(0.5 * (1 + FLOOR) / 2)  # half-way
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert learning_rate(Recipe(steps=5, warmup=5), 5) == 1e-3  # nothing but warm-up


def micro_batches_of(recipe: Recipe, resume_after: int) -> list[tuple]:
    """Two epochs of micro-batches: (first bytes of the windows that count, dealt to all)."""
    text = corpus(recipe.text)
    batches = Batches(text, "train", recipe, torch.device("cpu"))
    stream, out = iter(batches), []
    length = len(batches.windows)
    while sum(n for _, n in out) < 2 * length:
        if len(out) == resume_after:
            state = batches.state_dict()  # of any rank: they are the same
            batches = Batches(text, "train", recipe, torch.device("cpu"))
            batches.load_state_dict(state)
            stream = iter(batches)
        batch = next(stream)
        windows = [tuple(w) for w in batch.inputs.tolist()]
        out.append((windows[: batch.count], batch.total))
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_uses_every_window_once(text, world):
    recipe = tiny(text)
    all_windows = sorted(tuple(x.tolist()) for x, _ in corpus(text).windows(16))
    assert len(all_windows) == WINDOWS
    for resume_after in (-1, 3, -(-WINDOWS // (2 * world))):
        ranks = dz.launch(micro_batches_of, world, args=(recipe, resume_after), record=False)
        assert len({len(of_rank) for of_rank in ranks}) == 1  # all enter every collective
        epochs: list[list] = [[], []]
        for together in zip(*ranks, strict=True):
            counted = [window for windows, _ in together for window in windows]
            assert {n for _, n in together} == {len(counted)}
            epochs[len(epochs[0]) == WINDOWS] += counted
        assert sorted(epochs[0]) == sorted(epochs[1]) == all_windows
        assert epochs[0] != epochs[1]
        if resume_after == -1:
            uninterrupted = ranks
        assert list(ranks) == list(uninterrupted)


def losses(recipe: Recipe) -> list[float]:
    result = train(recipe)
    return [*result["losses"], *result["validation"].values()]


@pytest.mark.parametrize(("stage", "world"), [(0, 3), (1, 2), (2, 3), (3, 3)])
def test_unequal_batches_train_as_one_process_on_all_of_them(text, stage, world):
    """Through the end of an epoch, where one rank has less, or nothing."""
    recipe = tiny(text, steps=14, accumulate=2, lr=0.01, warmup=2, stage=stage, validate=7)
    parts = dz.launch(losses, world, args=(recipe,), record=False)
    first_run = losses(replace(recipe, batch=2 * world, stage=0))
    assert len(first_run) == 16 and first_run[-3] < first_run[0]
    for part in parts:
        assert part == parts[0]  # the same numbers on all ranks
        assert part == pytest.approx(first_run, abs=2e-4)


def test_shards_of_two_and_replicas_train_as_one_process(text):
    recipe = tiny(text, steps=4, stage=3, shard_size=2)
    parts = dz.launch(losses, 4, args=(recipe,), record=False)
    first_run = losses(replace(recipe, batch=8, stage=0, shard_size=0))
    for part in parts:
        assert part == parts[0]
        assert part == pytest.approx(first_run, abs=2e-4)
    with pytest.raises(TrainingError, match="--shard-size 2 does not divide the 1 ranks"):
        train(recipe)


# ---- deterministic, and resumed bit for bit ----


def interrupted(recipe: Recipe, stages: list[tuple[int, str]], folder: str) -> dict:
    """Each (stage, precision): a whole run, then again from its middle. Losses of both."""
    out = {}
    for stage, precision in stages:
        first_run = replace(
            recipe, stage=stage, precision=precision, checkpoint=f"{folder}/{stage}-{precision}"
        )
        first = train(first_run)
        end = Path(first_run.checkpoint, f"step-{recipe.steps:08d}")
        dist.barrier()
        if dist.get_rank() == 0:
            end.rename(end.parent / f"whole-{end.name}")
        dist.barrier()
        again = train(replace(first_run, resume=True))
        out[stage, precision] = first["losses"], again["first"], again["losses"]
    return out


def test_resume_is_bit_for_bit_at_each_stage(tmp_path, text):
    """Past the end of an epoch, with dropout, accumulation, and a loss scale that has halved."""
    recipe = tiny(text, steps=12, save_every=6, accumulate=2, dropout=0.1, lr=0.01, validate=4)
    stages = [*((s, "fp32") for s in range(4)), (2, "fp16"), (3, "bf16"), (0, "fp16")]
    ranks = dz.launch(interrupted, 2, args=(recipe, stages, str(tmp_path)), record=False)
    for (stage, precision), (first_run, first, again) in ranks[0].items():
        assert (len(first_run), first) == (12, 6)
        assert again == first_run[6:], (stage, precision)
        folder = tmp_path / f"{stage}-{precision}"
        resumed, uninterrupted = folder / "step-00000012", folder / "whole-step-00000012"
        assert_same(state(recipe, resumed), state(recipe, uninterrupted))
        assert state(recipe, resumed)["extra"]["sampler"]["epoch"] == 1
    fp32 = [ranks[0][stage, "fp32"][0] for stage in range(4)]
    for of_stage in fp32[1:]:  # alike but for the rounding of the norm, which shards sum in parts
        assert of_stage == pytest.approx(fp32[0], abs=1e-4)
    assert ranks[0][2, "fp16"][0] != fp32[0]


def twice(recipe: Recipe) -> list[dict]:
    return [train(recipe), train(recipe), train(replace(recipe, seed=1))]


def test_the_seed_decides_everything(text):
    recipe = tiny(text, steps=4, dropout=0.2, sample=30, stage=2)
    for first, second, other in dz.launch(twice, 2, args=(recipe,), record=False):
        assert first == second and len(first["sample"]) > 0
        assert first["losses"] != other["losses"] and first["sample"] != other["sample"]


# ---- checkpoints ----


def test_the_last_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path, text, capsys):
    recipe = tiny(text, steps=5, save_every=1, checkpoint=str(tmp_path / "runs"), resume=True)
    (tmp_path / "runs" / "step-00000001" / "remains").mkdir(parents=True)  # of a kill
    first_run = train(recipe)  # with nothing to resume from
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert first_run["first"] == 0 and folders == ["step-00000004", "step-00000005"]
    uninterrupted = state(recipe, tmp_path / "runs" / folders[-1])
    newest = tmp_path / "runs" / folders[-1]
    (newest / (newest / "CURRENT").read_text() / "extra.pt").write_bytes(b"damaged")
    capsys.readouterr()
    again = train(recipe)
    assert (again["first"], again["losses"]) == (4, first_run["losses"][4:])
    printed = capsys.readouterr().out
    assert re.search(r"skipped step-00000005: .* is damaged", printed)
    assert "resumed at step 4 of 5" in printed
    assert_same(state(recipe, newest), uninterrupted)
    finished = train(recipe)  # nothing left to do
    assert (finished["first"], finished["losses"]) == (5, [])


def test_a_run_continues_at_another_stage_world_and_length(tmp_path, text):
    recipe = tiny(text, steps=3, checkpoint=str(tmp_path / "runs"), resume=True, stage=1)
    dz.launch(losses, 3, args=(recipe,), record=False)
    more = replace(recipe, steps=6, stage=3)
    assert {len(found) for found in dz.launch(losses, 2, args=(more,), record=False)} == {3}


def killed_while_saving(recipe: Recipe, victim: int, share: float) -> None:
    """Count the calls of the second save; in the third, end when `share` of them have been made.

    In the background they are those of the thread.
    """
    where, name = (Saving, "_run") if recipe.save_in_background else (saving.Saver, "save")
    save, saves, calls, limit = getattr(where, name), 0, 0, 0.0

    def count(frame, event, _) -> None:
        nonlocal calls
        calls += event == "call"
        if saves == 3 and calls >= limit and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, *args: object) -> None:
        nonlocal calls, saves, limit
        saves, limit, calls = saves + 1, share * calls, 0
        sys.setprofile(count)
        save(self, *args)
        sys.setprofile(None)

    setattr(where, name, counted)
    train(recipe)


@pytest.mark.parametrize(
    ("background", "moments"),
    [(False, 3), (True, 3), pytest.param(False, 8, marks=pytest.mark.extra)],
)
def test_a_kill_during_a_save_leaves_a_checkpoint_to_continue_from(
    tmp_path, text, background, moments
):
    """At so many moments of a save: at its begin, in its middle, at its end, or more."""
    recipe = tiny(text, steps=5, save_every=1, dropout=0.1, stage=2)
    uninterrupted = replace(recipe, checkpoint=str(tmp_path / "undisturbed"))
    dz.launch(losses, 2, args=(uninterrupted,), record=False)
    wanted = state(recipe, tmp_path / "undisturbed" / "step-00000005")
    draw, left_at = random.Random(0), set()
    for attempt in range(moments):
        folder = tmp_path / str(attempt)
        killed = replace(recipe, checkpoint=str(folder), save_in_background=background)
        share, victim = (attempt + draw.random()) / moments, draw.randrange(2)
        with pytest.raises(dz.RankFailed) as failure:
            dz.launch(killed_while_saving, 2, args=(killed, victim, share), record=False)
        assert (failure.value.kind, failure.value.rank) == ("killed", victim)
        newest = saving.complete(folder)[0]
        step = state(recipe, newest)["extra"]["step"]
        assert newest.name == f"step-{step:08d}" and step in (2, 3)
        left_at.add(step)
        again = dz.launch(losses, 2, args=(replace(killed, resume=True),), record=False)
        assert len(again[0]) == 5 - step
        assert_same(state(recipe, folder / "step-00000005"), wanted)
    assert 2 in left_at


# ---- saved in the background ----


def test_saved_in_the_background_and_resumed_bit_for_bit(tmp_path, text):
    recipe = tiny(text, steps=12, save_every=3, dropout=0.1, lr=0.01, checkpoint=str(tmp_path))
    recipe = replace(recipe, save_in_background=True)
    stages = [(0, "fp32"), (2, "fp16"), (3, "bf16")]
    waits = replace(recipe, save_in_background=False)
    both = [
        dz.launch(interrupted, 2, args=(how, stages, str(tmp_path / name)), record=False)[0]
        for name, how in {"background": recipe, "waits": waits}.items()
    ]
    assert both[0] == both[1]
    for stage, precision in stages:
        first_run, first, again = both[0][stage, precision]
        assert first == 9 and again == first_run[9:]
        for name in ("step-00000012", "whole-step-00000012"):
            of_run = f"{stage}-{precision}/{name}"
            ends = [state(recipe, tmp_path / way / of_run) for way in ("background", "waits")]
            assert_same(*ends)


def copies_while_training(recipe: Recipe) -> list[tuple[bool, int, int]]:
    """Of each save: whether it was written after one more step; bytes copied; copies held before.

    Every save but the last is held back until a step has been done.
    """
    update, write, copy = loop.update, checkpoint._write, checkpoint.Content.copy
    gate, copies, sizes, before, went_on = threading.Event(), [], [], [], []

    def copied(content: checkpoint.Content) -> checkpoint.Content:
        before.append(sum(one() is not None for one in copies))
        own = copy(content)
        tensors = [getattr(t, "tensor", t) for t in own.tensors.values()]
        sizes.append(sum(t.nbytes for t in tensors if t.dim()))
        copies.append(weakref.ref(own))
        if len(copies) < recipe.steps // recipe.save_every:
            gate.clear()
        return own

    def held_back(*args: object) -> None:
        went_on.append(gate.wait(60))
        write(*args)

    def stepped(*args: object) -> torch.Tensor | None:
        found = update(*args)
        gate.set()
        return found

    loop.update, checkpoint._write, checkpoint.Content.copy = stepped, held_back, copied
    train(recipe)
    loop.update, checkpoint._write, checkpoint.Content.copy = update, write, copy
    return list(zip(went_on, sizes, before, strict=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_save_in_the_background_costs_one_copy_and_no_step(tmp_path, text, stage):
    recipe = tiny(text, steps=6, save_every=2, stage=stage, checkpoint=str(tmp_path / "runs"))
    recipe = replace(recipe, save_in_background=True)
    ranks = dz.launch(copies_while_training, 2, args=(recipe,), record=False)
    numel = sum(p.numel() for p in build(recipe, corpus(text)).parameters())
    for saves in zip(*ranks, strict=True):
        assert all(went_on and held == 0 for went_on, _, held in saves)
        sizes = [size for _, size, _ in saves]  # of weights and AdamW's two means, in fp32
        assert sum(sizes) == 12 * numel * (1 if stage else 2)
    assert len(saving.complete(tmp_path / "runs")) == 2


def test_an_error_in_the_background_is_raised(tmp_path, text):
    recipe = tiny(text, steps=4, save_every=2, checkpoint=str(tmp_path / "runs"))
    recipe = replace(recipe, save_in_background=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-00000002").write_text("a file, where a folder should be")
    with pytest.raises(OSError, match="the checkpoint was not saved"):
        train(recipe)
    other = replace(recipe, checkpoint=str(tmp_path / "other"), save_every=1, report=4)
    with pytest.raises(TrainingError, match="diverged"):
        train(replace(other, lr=1e30, clip=0.0))  # step 1 is being saved
    assert saving.complete(tmp_path / "other")


# ---- what it says ----


def test_the_command_trains_and_tells(tmp_path, text, capsys):
    recipe = tiny(text, steps=60, stage=3, lr=0.02, report=20, validate=30, sample=40)
    assert main([*words(recipe), "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "981 bytes to train, 109 to validate" in printed
    assert "ZeRO-3 on 2 ranks over gloo (cpu), fp32, 64 tokens a step" in printed
    lines = re.findall(r"step (\d+)/60  loss (\S+)  lr (\S+)  norm (\S+)  [\d,]+ tokens/s", printed)
    assert [int(line[0]) for line in lines] == [20, 40, 60]
    validation = re.findall(r"step (\d+)/60  validation (\S+)", printed)
    assert [int(step) for step, _ in validation] == [30, 60]
    assert float(validation[1][1]) < float(validation[0][1]) < 5.5  # ln 256 = 5.55: it has learned
    assert "--- sample" in printed


def test_an_interrupt_names_each_ranks_step_and_line_and_how_to_continue(tmp_path, text):
    recipe = tiny(text, steps=10**6, report=1, checkpoint=str(tmp_path / "runs"), save_every=10**6)
    code = (
        "import signal, sys; from ddpz_lite.course.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, *words(recipe), "--ranks", "2"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **how) as process:
        assert any("] step 300/" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        printed, error = process.communicate(timeout=200)
    assert process.returncode == 130
    for rank in range(2):
        found = re.search(rf"  rank {rank} (.*); it had finished step (\d+) of 1000000\n", printed)
        assert re.search(r"was running \w+\.py:\d+|waits in \w+ \(\w+\.py:\d+\)", found[1])
        assert int(found[2]) > 0
    assert "Continue with --resume: the same command then starts from the last save." in error


def test_the_standard_library_is_the_default_text(capsys):
    assert main([*words(Recipe(**TINY | {"steps": 1})), "--ranks", "1"]) == 0
    assert "standard library of Python" in capsys.readouterr().out


def test_help_has_every_option_with_its_default_and_imports_no_torch():
    code = (
        "import sys; from ddpz_lite.course.cli import main\n"
        "try: main(['train', '--help'])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    helps = {part.split()[0]: part for part in re.split(r"\n  (?=--)", done.stdout)}
    for option in fields(Recipe):
        stated = re.search(r"\(default ([^:)]*)\)", helps[flag_of(option.name)])
        has_default = option.default is not None and option.default is not False
        assert (stated and stated[1]) == (str(option.default) if has_default else None)
    assert "example:  ddpz train --ranks 2" in done.stdout and "torchrun" in done.stdout


WRONG = {
    "--steps 0": "--steps must be at least 1, got 0",
    f"--seed {2**31}": "--seed must be at most 2147483647, got 2147483648",
    f"--steps {10**20}": f"--steps must be at most 2147483647, got {10**20}",
    "--lr -1": "--lr must be at least 0, got -1.0",
    "--lr nan": "--lr must be at least 0, got nan",
    "--dropout 1": "--dropout must be below 1, got 1.0",
    "--width 9": "--width 9 does not divide into --heads 2",
    "--ranks 0": "--ranks takes 1 to 64, not 0; for more machines, torchrun.",
    "--resume": "--resume needs --checkpoint DIR, the folder to resume from",
    "--survive --stage 1": "the dead rank's shard would be lost. Fix: use --stage 0 alone; or",
    "--survive --mesh 2x1x1": "here it is sharded",
    "--survive --checkpoint anywhere --save-in-background": "cannot be combined",
    "--save-in-background": "--save-in-background needs --checkpoint DIR, the folder to save to",
    "--steps 2 --profile anywhere": "--profile begins after 2 steps, and --steps is 2",
    "--text nowhere.txt": "'nowhere.txt'",
    "--context 2000": "needs 2001",
    "--validate 1 --context 200": "the validation split",
    "--lr 1e30 --clip 0 --ranks 1": "training has diverged. Fix: use a lower --lr",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_option_is_one_line(wrong, text, capsys):
    assert main([*words(tiny(text, steps=4)), *wrong.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ddpz train: ") and WRONG[wrong] in error
    assert error.count("\n") == 1


def test_checkpoints_of_another_run_are_refused(tmp_path, text, capsys):
    recipe = tiny(text, steps=1, checkpoint=str(tmp_path / "runs"))
    other = write_text(tmp_path / "other", length=1090, seed=1)
    assert main([*words(recipe), "--ranks", "1"]) == 0
    resume = [*words(replace(recipe, steps=2)), "--ranks", "2", "--resume"]
    for more, typed in {
        (): None,
        ("--text", other): "come from another text than other. Fix: use the same --text",
        ("--seed", "1"): "saved with seed=0, this sampler has seed=1",
        ("--width", "16"): "is of another model",
    }.items():
        capsys.readouterr()
        status = main([*resume, *more])
        error = capsys.readouterr().err
        if typed is None:
            assert (status, error) == (0, "")
        else:
            assert status == 2 and typed in error and error.count("\n") == 1
    assert main([*words(recipe), "--ranks", "1"]) == 2
    error = capsys.readouterr().err
    assert "holds checkpoints already, the newest step-00000002. Fix: --resume" in error


def test_a_checkpoint_folder_that_is_a_file_is_one_line(text, capsys):
    assert main([*words(tiny(text, checkpoint=text))]) == 2
    assert text in capsys.readouterr().err


def test_a_checkpoint_folder_without_rights_is_one_line(tmp_path, text, capsys, monkeypatch):
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)  # root may write anywhere
    assert main([*words(tiny(text, checkpoint=str(tmp_path / "runs")))]) == 2
    error = capsys.readouterr().err
    assert "runs cannot be written to: Permission denied. Fix: another --checkpoint" in error
    assert error.count("\n") == 1


# ---- TensorBoard ----


def test_without_tensorboard_the_fix_is_one_line(text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main([*words(tiny(text)), "--tensorboard", "anywhere"]) == 2
    typed = "--tensorboard needs the package tensorboard. Fix: pip install tensorboard"
    assert capsys.readouterr().err == f"ddpz train: {typed}\n"


def test_scalars_are_those_of_the_lines(text, monkeypatch):
    written: dict[str, dict[int, float]] = {}

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == ("board", 1)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.setdefault(name, {})[step] = value

        def close(self) -> None:
            written["closed"] = {}

    fake = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    result = train(tiny(text, steps=4, report=2, validate=4, tensorboard="board", precision="fp16"))
    assert written["loss"] == {2: result["losses"][1], 4: result["losses"][3]}
    assert written["validation"] == result["validation"]
    wanted = {"loss", "lr", "norm", "scale", "skipped", "tokens_per_second", "validation", "closed"}
    assert set(written) == wanted


def test_a_profile_of_three_steps_for_each_rank(tmp_path, text, capsys):
    recipe = tiny(text, steps=7, profile=str(tmp_path / "profile"))
    assert main([*words(recipe), "--ranks", "2"]) == 0
    files = sorted((tmp_path / "profile").iterdir())
    assert [re.sub(r"\d{12,}", "TIME", file.name) for file in files] == [
        "rank0.TIME.pt.trace.json",  # as TensorBoard's plugin wants it: WORKER.TIME.pt.trace.json
        "rank1.TIME.pt.trace.json",
    ]
    for rank, file in enumerate(files):
        first_run = json.loads(file.read_text())
        assert first_run["distributedInfo"]["rank"] == rank
        steps = {e["name"] for e in first_run["traceEvents"] if "ProfilerStep#" in e["name"]}
        assert steps == {f"ProfilerStep#{number}" for number in (2, 3, 4)}
        assert any(e["name"] == "gloo:all_reduce" for e in first_run["traceEvents"])


def test_a_run_that_ends_early_has_a_shorter_profile_or_none(tmp_path, text):
    runs = {"steps": 3, "checkpoint": str(tmp_path / "runs"), "save_every": 3}
    train(tiny(text, **runs, profile=str(tmp_path / "one")))
    (file,) = (tmp_path / "one").iterdir()
    assert "ProfilerStep#2" in file.read_text()
    later = runs | {"steps": 5, "resume": True}
    train(tiny(text, **later, profile=str(tmp_path / "none")))  # two steps: the profiler warms up
    assert not (tmp_path / "none").exists()


def test_auto_saves_by_young_from_what_a_save_takes(tmp_path, text, monkeypatch):
    """A step takes one second here and a save two; a failure comes every quarter of an hour."""
    assert best_interval(60.0, 54 * 24 * 3600 / 466) == pytest.approx(18.3 * 60, rel=0.01)
    recipe = tiny(text, checkpoint=str(tmp_path), save_every="auto", failure_hours=0.25)
    words = corpus(text)
    gpt, optimizer = shard(recipe, build(recipe, words))
    now = [0.0]
    monkeypatch.setattr(saving.time, "perf_counter", lambda: now[0])
    saver = saving.Saver(recipe, words, gpt, optimizer, RankSampler(9, rank=0, world_size=1))
    due, typed = [], []
    monkeypatch.setattr(saver, "_write", lambda step: now.__setitem__(0, now[0] + 2))
    for step in range(1, 150):
        now[0] += 1
        if saver.due(step):
            due.append(step)
            saver.save(step, typed.append)
    assert due == [10, 70, 130]  # sqrt(2 * 2 * 900) = 60
    assert typed[0] == "saved step 10 in 2 s; the next save is due in 60 steps"


def test_auto_trains_and_resumes_on_two_ranks(tmp_path, text):
    recipe = tiny(text, steps=12, save_every="auto", checkpoint=str(tmp_path), resume=True)
    first_run = dz.launch(train, 2, args=(recipe,), record=False)
    assert saving.complete(tmp_path)[0].name == "step-00000012"
    shutil.rmtree(tmp_path / "step-00000012")
    again = dz.launch(train, 2, args=(recipe,), record=False)[0]
    assert again["first"] >= 10 and again["losses"] == first_run[0]["losses"][again["first"] :]


def test_what_save_every_takes():
    assert Recipe(save_every=steps_or_auto("auto")).save_every == "auto"
    for value in ("often", "0", str(2**31)):
        with pytest.raises(ValueError, match=r"--save-every must be|invalid literal"):
            Recipe(save_every=steps_or_auto(value))
