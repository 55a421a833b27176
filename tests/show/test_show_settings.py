"""The stored table of options: torch has the names, DeepSpeed's keys are its own, all is dated."""

import json
from pathlib import Path

import pytest

from ddpz_lite.course.show import settings

ROWS = settings.stored()["options"]
NAMES = sorted({name for row in ROWS for name in row["FSDP2"]})


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_it(name):
    assert settings.here(name) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch.distributed.fsdp:ZeRO", "has no ZeRO"),
        ("torch.distributed.fsdp:fully_shard(stage)", "has no stage"),
        ("torch.distributed.fsdp:MixedPrecisionPolicy(enabled)", "has no enabled"),
    ],
)
def test_torch_does_not_have_it(name, says):
    assert says in settings.here(name)


def test_the_lesson_shows_the_stored_table_and_its_versions():
    root = Path(__file__).resolve().parents[2]
    notebook = json.loads((root / "lessons" / "12b_offload_int8_options.ipynb").read_text())
    [shown] = [
        "".join(output["data"]["text/plain"])
        for cell in notebook["cells"]
        if "settings.options_table()" in "".join(cell["source"])
        for output in cell["outputs"]
        if "data" in output
    ]
    frameworks = settings.stored()["frameworks"]
    head = ["what", *(f"{name}, {facts['version']}" for name, facts in frameworks.items())]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in shown.splitlines()]
    assert rows[0] == head and [row[0] for row in rows[1:]] == [row["what"] for row in ROWS]
    for cells, row in zip(rows[1:], ROWS, strict=True):
        for cell, name in zip(cells[1:], frameworks, strict=True):
            assert [one.strip("`") for one in cell.split("`, `") if one] == [
                settings._short(one) for one in row[name]
            ]
    locked = (root / "requirements.lock").read_text()
    assert f"torch=={frameworks['FSDP2']['version'].removeprefix('torch ')}." in locked


def test_names_of_deepspeed_are_keys_that_it_reads():
    for name in (
        name for row in ROWS for name in row["DeepSpeed"] if name != "deepspeed.zero.Init"
    ):
        outer, _, inner = name.partition(".")
        config = {outer: {inner: 1}} if inner else {outer: 1}
        assert set(settings.fate(config).values()) == {"read"}, name


def test_what_deepspeed_does_not_know_is_ignored_outside_and_an_error_inside():
    config = {
        "mixed_precision": {"enabled": True},
        "bf16": {"enabled": True, "enable": True},
        "zero_optimisation": {"stage": 3},
        "optimizer": {"type": "Adam"},
    }
    assert settings.fate(config) == {
        "mixed_precision": "ignored",
        "mixed_precision.enabled": "ignored",
        "bf16": "read",
        "bf16.enabled": "read",
        "bf16.enable": "an error",
        "zero_optimisation": "ignored",
        "zero_optimisation.stage": "ignored",
        "optimizer": "read",
    }


def test_the_table_is_shown_in_full_or_in_part(capsys):
    settings.options_table()
    assert len(capsys.readouterr().out.splitlines()) == len(ROWS) + 1
    settings.options_table("offload")
    printed = capsys.readouterr().out
    assert (
        "CPUOffloadPolicy" in printed
        and "--optimizer-cpu-offload" in printed
        and "prefetch" not in printed
    )
    with pytest.raises(ValueError, match="no option has 'latency'"):
        settings.options_table("latency")
