"""`ddpz bench`: every contestant takes the same steps, and the table says what was measured."""

import dataclasses
import math
import shutil

import pytest

from ddpz_lite import bench, cli, targets
from ddpz_lite.cli import bench as command

TINY = bench.Workload(bench.about(5e4, context=8), batch=2, rounds=2, warmup=1)


@pytest.mark.parametrize("millions", [1, 3, 11, 30, 100])
def test_a_size_asked_for_is_about_what_one_gets(millions):
    workload = bench.Workload(bench.about(1e6 * millions), batch=1, rounds=1)
    assert workload.num_params == pytest.approx(1e6 * millions, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "model"),
    [
        (2, bench.TorchGPT),
        *(pytest.param(n, bench.GPT, marks=pytest.mark.extra) for n in (1, 2, 3)),
    ],
)
def test_all_contestants_run_interleaved(world_size, model):
    names = [*bench.OURS, bench.ALONE, *bench.PEERS.values()]
    workload = dataclasses.replace(TINY, model=model)
    measured = bench.measure(names, workload, world_size, timeout=100)
    assert list(measured) == names
    for times in measured.values():
        for values in (times.seconds, times.cpu_seconds):
            assert len(values) == 2 and min(values) > 0


def test_a_ratio_is_taken_within_a_round():
    walls = {"a": [1.0, 20.0, 3.0], "b": [2.0, 40.0, 1.0]}
    times = {name: bench.Times(seconds, [9.0] * 3) for name, seconds in walls.items()}
    assert bench.ratios(times, "a", "b") == [0.5, 0.5, 3.0]
    assert bench.median(bench.ratios(times, "a", "b")) == 0.5


def test_what_a_strategy_adds_is_taken_by_first_quartiles():
    walls = {"a": [3.0, 2.0, 9.0, 2.0, 2.0], "b": [6.0, 5.0, 5.0, 5.0, 8.0], bench.ALONE: [1.0] * 5}
    times = {name: bench.Times(seconds, [9.0] * 5) for name, seconds in walls.items()}
    assert bench.added(times, "a", "b") == 0.25
    assert math.isnan(bench.added(times, "a", bench.ALONE))


def test_the_table(monkeypatch, capsys):
    walls = {"DDP": 0.001, "torch DDP": 0.005, bench.ALONE: 0.0005}

    def measure(names, *_):
        return {name: bench.Times([walls.get(name, 0.01)] * 3, [0.25] * 3) for name in names}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "deepspeed_here", lambda: False)
    assert cli.main(["bench", "--peers", "--ranks", "2", "--millions", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 ranks" in lines[2]
    words = (
        "DDP 1.0 250.0 0.20 of torch DDP (0.10 without communication); adds 0.11 of what it adds"
    )
    assert lines[3].split() == [*words.split(), "(target", "0.90)"]
    assert lines[-1] == "DeepSpeed is not installed, so it is not beside them."


def test_growth_is_a_table_and_a_figure(monkeypatch, capsys, tmp_path):
    asked = []

    def measure(names, workload, ranks):
        asked.append((workload.num_params, ranks))
        return {name: bench.Times([workload.num_params * ranks * 1e-9], [1.0]) for name in names}

    monkeypatch.setattr(bench, "measure", measure)
    figure = tmp_path / "growth.png"
    assert cli.main(["bench", "--growth", "--rounds", "1", "--figure", str(figure)]) == 0
    assert len(asked) == len(command.GROWTH_MILLIONS) + len(command.GROWTH_RANKS) - 1
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(asked) + 1


def test_targets_are_lines_beside_what_was_measured(monkeypatch, capsys):
    measured = [targets.Row("a launch", 0.2, 0.3), targets.Row("a step", 1.5, 1.1, "times")]
    monkeypatch.setattr(targets, "rows", lambda solutions, workload: iter(measured))
    assert cli.main(["bench", "--targets"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["a", "launch", "0.20", "s", "target", "0.3"]
    assert lines[1] == ["a", "step", "1.50", "times", "target", "1.1", "above"]
    assert lines[2] == ["1", "above", "their", "targets"]


@pytest.mark.slow
@pytest.mark.extra  # each measurement once, as `ddpz bench --targets` makes it
def test_what_a_target_measures_runs(monkeypatch, tmp_path, root):
    """Small: one spawn, a few calls, one exercise, one tiny step of each contestant."""
    for name, value in (("LAUNCHES", 1), ("SPAWNS", 1), ("CALLS", 4), ("RANKS", 2)):
        monkeypatch.setattr(targets, name, value)
    (master,) = (root / "solutions").glob("08_*.ipynb")
    shutil.copy(master, tmp_path)
    rows = list(targets.rows(tmp_path, TINY))
    assert all(row.measured > 0 for row in rows)
    said = [row.what for row in rows]
    assert "check 08.state_bytes" in said and "a step of ZeRO-3, of FSDP2" in said
    assert {f"a step of {n}, of {p}" for n, p in bench.PEERS.items()} <= set(said)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "must be positive"),
        (["--rounds", "0"], "must be positive"),
        (["--figure", "x.png"], "give both"),
        (["--growth", "--figure", "no/such/folder/x.png"], "there is no folder"),
    ],
)
def test_bad_options_are_one_line(words, message, capsys):
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
