"""`ddpz bench`: every contestant takes the same steps, and the table says what was measured."""

import math
import shutil

import pytest

from bench import growth, targets
from bench.__main__ import main as bench
from ddpz_lite.course import cli
from ddpz_lite.course.bench import steps

pytestmark = pytest.mark.rest

TINY = steps.Workload(steps.about(5e4, context=8), batch=2, rounds=2, warmup=1)


@pytest.mark.parametrize("millions", [1, 3, 11, 30, 100])
def test_a_size_asked_for_is_about_what_one_gets(millions):
    workload = steps.Workload(steps.about(1e6 * millions), batch=1, rounds=1)
    assert workload.num_params == pytest.approx(1e6 * millions, rel=0.35)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.extra)])
def test_all_contestants_run_interleaved(world_size):
    names = [*steps.OURS, steps.ALONE, *steps.PEERS.values()]
    measured = steps.measure(names, TINY, world_size, timeout=100)
    assert list(measured) == names
    for times in measured.values():
        for values in (times.seconds, times.cpu_seconds):
            assert len(values) == 2 and min(values) > 0


def test_a_ratio_is_taken_within_a_round():
    walls = {"a": [1.0, 20.0, 3.0], "b": [2.0, 40.0, 1.0]}
    times = {name: steps.Times(seconds, [9.0] * 3) for name, seconds in walls.items()}
    assert steps.ratios(times, "a", "b") == [0.5, 0.5, 3.0]
    assert steps.median(steps.ratios(times, "a", "b")) == 0.5


def test_what_a_strategy_adds_is_taken_by_first_quartiles():
    walls = {"a": [3.0, 2.0, 9.0, 2.0, 2.0], "b": [6.0, 5.0, 5.0, 5.0, 8.0], steps.ALONE: [1.0] * 5}
    times = {name: steps.Times(seconds, [9.0] * 5) for name, seconds in walls.items()}
    assert steps.added(times, "a", "b") == 0.25
    assert math.isnan(steps.added(times, "a", steps.ALONE))


def test_the_table(monkeypatch, capsys):
    walls = {"DDP": 0.001, "torch DDP": 0.005, steps.ALONE: 0.0005}

    def measure(names, *_):
        return {name: steps.Times([walls.get(name, 0.01)] * 3, [0.25] * 3) for name in names}

    monkeypatch.setattr(steps, "measure", measure)
    monkeypatch.setattr(steps, "deepspeed_here", lambda: False)
    assert cli.main(["bench", "--peers", "--ranks", "2", "--millions", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 ranks" in lines[2]
    words = (
        "DDP 1.0 250.0 0.20 of torch DDP (0.10 without communication); adds 0.11 of what it adds"
    )
    assert lines[3].split() == [*words.split(), "(target", "0.90)"]
    assert lines[-1] == "DeepSpeed is not installed, so it was not measured."


def test_growth_is_a_table_and_a_figure_for_each_thing_asked(monkeypatch, capsys, tmp_path):
    for of, (_, names) in growth.MEASURES.items():
        rows = [(size, *(size * 2.5 for _ in names[1:])) for size in (2, 4, 8)]
        monkeypatch.setitem(growth.MEASURES, of, (lambda rows=rows: iter(rows), names))
    bench(["growth", "ranks", "records", "--figures", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        *("ranks", "2", "4", "8", "figure:"),
        *("records", "2", "4", "8", "figure:"),
    ]
    for of in ("ranks", "records"):
        assert (tmp_path / f"growth-{of}.png").read_bytes().startswith(b"\x89PNG")


def of_one_row(of, rows) -> tuple[float, ...]:
    (row,) = rows
    assert len(row) == len(growth.MEASURES[of][1]) and min(row) > 0
    return row


def test_what_grows_is_measured_at_each_size():
    assert of_one_row("parameters", growth.parameters([0.1]))[0] < 0.5
    assert of_one_row("records", growth.records([20]))[0] == 20


@pytest.mark.extra  # fresh processes, each with its own import of torch
def test_ranks_and_submissions_are_measured_at_each_size():
    assert of_one_row("ranks", growth.ranks([1]))[0] == 1
    assert of_one_row("submissions", growth.submissions([2]))[0] == 2


def test_targets_are_lines_beside_what_was_measured(monkeypatch, capsys):
    measured = [targets.Row("a launch", 0.2, 0.3), targets.Row("a step", 1.5, 1.1, "times")]
    monkeypatch.setitem(targets.GROUPS, "start", lambda: iter(measured))
    bench(["targets", "start"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["a", "launch", "0.20", "s", "target", "0.3"]
    assert lines[1] == ["a", "step", "1.50", "times", "target", "1.1", "above"]
    assert lines[2] == ["1", "above", "their", "targets"]


@pytest.mark.extra  # each measurement once, as `make bench-targets` makes it
@pytest.mark.timeout(600)
def test_what_a_target_measures_runs(monkeypatch, tmp_path, root):
    """Small: one spawn, a few calls, one exercise, one lesson, one student, one tiny step."""
    small = {"LAUNCHES": 1, "SPAWNS": 1, "CALLS": 4, "RANKS": 2, "MANY": 3, "SUBMISSIONS": 1}
    for name, value in small.items():
        monkeypatch.setattr(targets, name, value)
    for folder, name in (("solutions", "01_*"), ("lessons", "01b_*")):
        (tmp_path / folder).mkdir()
        for path in (root / folder).glob(f"{name}.ipynb"):
            shutil.copy(path, tmp_path / folder)
    for folder in ("book", "tests"):
        (tmp_path / folder).symlink_to(root / folder)
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    monkeypatch.setattr(targets, "WORKLOAD", TINY)
    rows = list(targets.rows(list(targets.GROUPS)))
    assert all(row.measured > 0 for row in rows)
    whats = " ".join(row.what for row in rows)
    for words in ("a check, the median of 3 tasks", "1 submissions", "the site's largest page"):
        assert words in whats
    assert "what ZeRO-3 adds to a step, of what FSDP2 adds" in whats


@pytest.mark.parametrize("option", ["--ranks", "--rounds"])
def test_bad_options_are_one_line(option, capsys):
    assert cli.main(["bench", option, "0"]) == 2
    error = capsys.readouterr().err
    assert "must be positive" in error and len(error.splitlines()) == 1
