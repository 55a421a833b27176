"""The stored table of options: torch has the names, DeepSpeed's keys are its own, all is dated.

What the options do is run in tests/site/test_options.py.
"""

from pathlib import Path

import pytest

from ddpz_lite.course.show import settings

ROWS = settings.stored()["options"]
CODE = ("deepspeed.zero.Init", "engine.coalesce_grad_reduction")  # and not keys of its settings
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


def test_the_version_of_torch_is_the_one_that_is_locked():
    locked = (Path(__file__).resolve().parents[2] / "requirements.lock").read_text()
    version = settings.stored()["frameworks"]["FSDP2"]["version"].removeprefix("torch ")
    assert f"torch=={version}." in locked


def test_names_of_deepspeed_are_keys_that_it_reads():
    for name in (name for row in ROWS for name in row["DeepSpeed"] if name not in CODE):
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
