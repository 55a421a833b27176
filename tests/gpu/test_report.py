"""`ddpz gpu`: the report of what was measured, the rehearsal without a GPU, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from ddpz_lite import gpu as measuring
from ddpz_lite.cli import gpu
from ddpz_lite.cli.gpu import Part, Report
from ddpz_lite.gpu import Figure
from ddpz_lite.launcher import RankFailed

# ---- the report, of made-up measurements

STEP = Figure("A step on 1 rank", "ZeRO-2", {"ms": 50.25, "ratio": 1.004}, 1.01)
SLOW = Figure("A step on 1 rank", "ZeRO-3", {"ms": 60.0, "ratio": 1.2}, 1.01)
HELD = Figure("Memory", "DDP", {"GB": None, "formula, GB": 1.6, "off by, %": None}, 2.0)
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
        raise RankFailed("rank 1 failed: no such collective\nTraceback of rank 1")

    part = gpu.measured("peers", "DDP beside torch DDP", fail)
    assert (part.outcome, part.summary) == ("failed", "rank 1 failed: no such collective")
    assert "Traceback of rank 1" in part.output
    part = gpu.measured("plain", "steps", lambda: [STEP, SLOW])
    assert (part.outcome, part.summary) == ("passed", "above its target: ZeRO-3")


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
        return [{n: measuring._Trained([], b) for n in measuring.bench.OURS} for b in held]

    monkeypatch.setattr(measuring, "launch", launch)
    ddp, *others = measuring.memory(measuring.TINY.gpt, None, 2)
    assert ddp.values["formula, GB"] == 2048 / 1e9 and ddp.met is False
    assert ddp.values["off by, %"] == pytest.approx(3, abs=0.1)
    assert [figure.values["formula, GB"] * 1e9 for figure in others] == [1536, 1280, 1024]


@pytest.mark.slow
def test_make_gpu_rehearses_the_whole_path_without_a_gpu(root, tmp_path, make_notebook):
    """Every kind of part, of the peers the first; of the notebooks two small ones of this test."""
    make = ["make", "gpu", "DRY=1", f"PYTHON={sys.executable}", f"ARGS=--out {tmp_path}"]
    done = subprocess.run(make, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "dry.json").read_text())
    assert {part["kind"] for part in report["parts"]} == set(gpu.KINDS)
    assert not (tmp_path / "report.json").exists()
