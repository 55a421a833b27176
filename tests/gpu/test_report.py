"""`ddpz gpu`: the report of what was measured, the rehearsal without a GPU, and what is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from ddpz_lite.course import cli
from ddpz_lite.course.bench import gpu as measuring
from ddpz_lite.course.bench.gpu import Figure
from ddpz_lite.course.cli import gpu
from ddpz_lite.course.cli.gpu import Part, Report
from ddpz_lite.launcher import RankFailed

pytestmark = pytest.mark.rest

# ---- the report, of made-up measurements

STEP = Figure("A step on 1 rank", "ZeRO-2", {"ms": 50.25, "ratio": 1.004}, 1.01)
SLOW = Figure("A step on 1 rank", "ZeRO-3", {"ms": 60.0, "ratio": 1.2}, 1.01)
HELD = Figure("Memory", "DDP", {"MB": None, "formula, MB": 1.6, "off by, %": None}, 2.0)
FREE = Figure("GPT in bf16", "DDP", {"ms": 200.0, "MFU, %": 41.5})
PARTS = [
    Part("tests", "tests marked gpu", "passed", "7 passed", 9.0, "a[1] PASSED\na[2] PASSED"),
    Part("plain", "steps", "passed", "above its target: ZeRO-3", 3, figures=[STEP, SLOW]),
    Part("memory", "memory", "passed", "", 2, figures=[HELD]),
    Part("bf16", "GPT in bf16", "passed", "", 2, figures=[FREE]),
]


def test_a_figure_is_met_by_its_last_value_or_not_judged():
    assert [figure.met for figure in (STEP, SLOW, HELD, FREE)] == [True, False, None, None]


def test_the_page_has_a_table_for_each_measurement_and_what_commands_printed():
    page = gpu.markdown(Report(False, {"GPUs": "1: a | b"}, PARTS))
    assert page.startswith("# GPU report\n") and "| GPUs | 1: a \\| b |" in page
    assert "| tests marked gpu | passed | 9.0 | 7 passed |" in page
    assert page.count("## A step on 1 rank") == 1
    assert "| ZeRO-2 | 50.25 | 1.004 | at most 1.01: met |" in page
    assert "| ZeRO-3 | 60 | 1.2 | at most 1.01: missed |" in page
    missing = "not measured without a GPU"
    assert f"| DDP | {missing} | 1.6 | {missing} | at most 2 |" in page
    assert "| DDP | 200 | 41.5 |  |" in page
    assert "```\na[1] PASSED\na[2] PASSED\n```" in page


def test_a_dry_run_judges_no_figure():
    page = gpu.markdown(Report(True, {}, PARTS))
    assert page.startswith("# Dry run of the GPU report\n")
    assert ": met" not in page and ": missed" not in page


def test_a_report_is_right_unless_something_failed_or_could_not_run():
    assert Report(False, {}, [*PARTS, Part("lessons", "lessons", "left out")]).right
    for outcome in ("failed", "not run"):
        assert not Report(False, {}, [*PARTS, Part("lessons", "lessons", outcome)]).right


# ---- the command


def test_a_rank_that_fails_ends_its_part_alone():
    def fail():
        raise RankFailed("rank 1 failed: no such collective\nits frames", 1, "error")

    part = gpu.measured("peers", "DDP beside torch DDP", fail, False)
    assert (part.outcome, part.summary) == ("failed", "rank 1 failed: no such collective")
    assert "its frames" in part.output
    for dry, summary in ((False, "above its target: ZeRO-3"), (True, "")):
        part = gpu.measured("plain", "steps", lambda: [STEP, SLOW], dry)
        assert (part.outcome, part.summary) == ("passed", summary)


def test_the_ranks_are_one_and_two_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = [(kind, name) for kind, name, _ in measuring.measurements(measuring.TINY, 4)]
    assert [kind for kind, _ in found] == ["plain", *["peers"] * 8, *["memory"] * 4, "bf16"]
    assert ("peers", "ZeRO-3 beside FSDP2, 4 ranks over NCCL") in found
    assert ("peers", "ZeRO-3 beside FSDP2, 8 ranks over gloo") in found
    assert found[-1] == ("bf16", "GPT in bf16, 4 ranks over NCCL")


def test_memory_is_the_rank_farthest_from_the_formula(monkeypatch):
    """128 parameters, 16 bytes of each in fp32: a rank that holds 3% more counts."""
    monkeypatch.setattr(measuring, "_num_params", lambda config: 128)

    def launch(fn, ranks, **more):
        held = [2048, round(2048 * 1.03)]
        return [{n: measuring._Trained([], b) for n in measuring.steps.OURS} for b in held]

    monkeypatch.setattr(measuring, "launch", launch)
    ddp, *others = measuring.memory(measuring.TINY.gpt, None, 2)
    assert ddp.values["formula, MB"] == 2048 / 1e6 and ddp.met is False
    assert ddp.values["off by, %"] == pytest.approx(3, abs=0.1)
    assert [figure.values["formula, MB"] * 1e6 for figure in others] == [1536, 1280, 1024]


def test_make_gpu_is_rehearsed_without_a_gpu(root, tmp_path):
    make = ["make", "gpu", "DRY=1", f"PYTHON={sys.executable}"]
    words = f"ARGS=--only plain lessons solutions --out {tmp_path}"
    done = subprocess.run([*make, words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "report.json").exists()
    report = json.loads((tmp_path / "dry.json").read_text())
    parts = {part["kind"]: part for part in report["parts"]}
    assert set(parts) == set(gpu.KINDS) and report["machine"]["torch"].startswith("2.")
    assert all(part["outcome"] in ("passed", "left out") for part in parts.values())
    assert parts["plain"]["outcome"] == "passed" and len(parts["plain"]["figures"]) == 4
    assert "00_start_here\n" in parts["lessons"]["output"]
    assert (tmp_path / "dry.md").read_text().count("| ZeRO-3 |") == 1


@pytest.mark.extra  # a pytest inside pytest: seconds to import torch once more
def test_the_tests_marked_gpu_are_found_and_their_skips_named():
    part = gpu.command("tests", "tests marked gpu", gpu.PYTEST, gpu.FOR_TESTS)
    assert part.outcome in ("passed", "left out") and "tests/gpu/test_cuda.py" in part.output
    if not torch.cuda.is_available():
        assert part.outcome == "left out" and "needs an NVIDIA GPU" in part.output


def test_what_is_left_of_the_rehearsal_runs():
    """The last pair of peers, the last memory, and bf16: on 2 ranks, 2 and 1 without a GPU."""
    kinds = {kind: measure for kind, _, measure in measuring.measurements(measuring.TINY, 0)}
    (pair,) = kinds["peers"]()
    assert pair.what == "ZeRO-3 / FSDP2" and min(pair.values.values()) > 0
    for figures in (kinds["memory"](), kinds["bf16"]()):
        assert [figure.what for figure in figures] == list(measuring.steps.OURS)
        if not torch.cuda.is_available():
            assert all(list(figure.values.values())[-1] is None for figure in figures)


def test_notebooks_are_executed_by_number_and_one_that_fails_is_named(
    make_notebook, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    home = "import os, ddpz_lite\nassert os.path.isdir(os.environ['DDPZ_HOME'])"
    for name, source in (("00_home", home), ("01_wrong", "1 / 0"), ("02_not_chosen", "")):
        make_notebook(name, source, folder=tmp_path / "lessons")
    assert gpu.notebooks("lessons", None, dry=True).outcome == "left out"
    assert gpu.notebooks("lessons", ["05"], dry=False).outcome == "left out"
    part = gpu.notebooks("lessons", ["00", "01"], dry=True)
    assert part.outcome == "failed" and part.summary.startswith("1 of 2 ran"), part.output
    assert "ZeroDivisionError" in part.output and "02_not_chosen" not in part.output


# ---- what is missing


def test_packages_that_are_missing_or_too_old_are_named(monkeypatch):
    there = {"torch": "2.10.0", "numpy": "2.1", "psutil": "6", "tqdm": "4.66.1"}

    def version(name):
        if name not in there:
            raise gpu.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(gpu.metadata, "version", version)
    assert [each.split(">=")[0] for each in gpu.lacking()] == [
        "cloudpickle",
        "safetensors",
        "torch",
    ]
    there |= {"cloudpickle": "3.1", "safetensors": "1.0", "torch": "2.11.0a0+cu130"}
    assert gpu.lacking() == [] and len(gpu.lacking(gpu.FOR_TESTS)) == len(gpu.FOR_TESTS)
    part = gpu.command("tests", "tests marked gpu", gpu.PYTEST, gpu.FOR_TESTS)
    assert part.outcome == "not run" and "python -m pip install 'jupyter-client>=" in part.summary
    assert len(gpu.lacking(gpu.FOR_NOTEBOOKS)) == len(gpu.FOR_NOTEBOOKS)


def test_a_python_without_the_packages_is_told_which_in_one_line(root):
    command = [sys.executable, "-S", "-m", "ddpz_lite", "gpu"]  # -S: nothing that was installed
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert re.match(r"ddpz gpu: missing: cloudpickle.*torch>=\d.*Fix: .*install", done.stderr)


def test_what_is_no_python_is_told_by_make(root):
    done = subprocess.run(
        ["make", "gpu", "PYTHON=/no/such/python"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode and "/no/such/python is no Python 3.11 or newer. Fix:" in done.stdout


def test_without_a_gpu_the_rehearsal_is_offered(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["gpu"]) == 2
    error = capsys.readouterr().err
    assert "sees no NVIDIA GPU" in error and "make gpu DRY=1" in error
    assert cli.main(["gpu", "--dry", "--only", "speed"]) == 2
    assert "--only has no part speed. There are: tests, plain" in capsys.readouterr().err


def test_what_is_marked_gpu_lies_where_make_gpu_looks(root):
    mark = "pytest.mark." + "gpu"
    found = {
        path.parent.name for path in (root / "tests").rglob("*.py") if mark in path.read_text()
    }
    assert found == {"gpu"} and "tests/gpu" in gpu.PYTEST
